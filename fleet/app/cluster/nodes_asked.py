"""Places that a run asks its cluster's autoscaler for: a placement group beside the ranks' own, in which no rank is ever placed.

``ray.autoscaler.sdk.request_resources`` keeps one request for a whole cluster: each call replaces those of all other runs and users, and
outlives its caller. A placement group belongs to its job: Ray removes it when the job ends, however it ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fleet.app.cluster import ray_internals
from fleet.errors import ConfigError

NODE_ID = "ray.io/node-id"
WAY_OUT = "Leave it out, or join a cluster that was started with autoscaler version 2."


class PlaceGroup:
    """A request for places, made anew when their number changes. A process has one; its job must be connected."""

    def __init__(self, slot: Mapping[str, float], selector: Mapping[str, str]) -> None:
        self._slot, self._selector = dict(slot), dict(selector)
        self._asked: tuple[int, tuple[str, ...]] = (0, ())
        self._group: Any = None

    def ask(self, places: int, avoid: Sequence[str] = ()) -> None:
        """Ask for ``places``, on none of the nodes ``avoid``. 0 takes the request back and frees its places."""
        if (wanted := (places, tuple(avoid))) == self._asked:
            return
        from ray.util import placement_group, remove_placement_group

        self._asked = wanted
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        if places:
            labels = self._selector | ({NODE_ID: f"!in({','.join(avoid)})"} if avoid and NODE_ID not in self._selector else {})
            options: dict[str, Any] = {"strategy": "SPREAD", "name": ray_internals.ASKED, "bundle_label_selector": _each(labels, places)}
            self._group = placement_group([self._slot] * places, **options)

    def wait(self, limit_s: float) -> bool:
        """Whether all places come within ``limit_s``."""
        return bool(self._group is None or self._group.wait(limit_s))


def _each(labels: Mapping[str, str], places: int) -> list[dict[str, str]] | None:
    return [dict(labels)] * places if labels else None


def check(address: str) -> None:
    """Raises ConfigError when the cluster, to which this process is connected, has no autoscaler."""
    if not ray_internals.has_autoscaler():
        raise ConfigError("ask_for_nodes", True, f"no autoscaler reports to the cluster at {address}", WAY_OUT)


def await_room(slots: int, slot: Mapping[str, float], selector: Mapping[str, str], limit_s: float) -> PlaceGroup | None:
    """Ask for nodes until there is room for ``slots`` ranks, for up to ``limit_s``. Returns the group that holds the room; None: no room.

    The caller gives it up once the run has a process on each node. Before that, the autoscaler may take away an idle node.
    """
    group = PlaceGroup(slot, selector)
    group.ask(slots)
    if group.wait(limit_s):
        return group
    group.ask(0)
    return None
