"""Measures links between the nodes of a Ray cluster, with an actor of :class:`actors.links.LinkEnd` on each node meanwhile."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors import links
from actors.links import LinkEnd
from fleet.ledger.health import Link

START_S = 60.0
"""Limit for the start of the actors on all nodes."""
MEASURE_S = 60.0

Pair = tuple[str, str]


class LinkSurvey:
    """Context manager with an end on each node. A failure on a node is reported with its links, and raises no error.

    The calling process must be connected to the cluster. Fleet need not be installed on its nodes: Ray sends the code by value.

    Args:
        nodes: by name, Ray's id of the node and the address at which others reach it.
    """

    def __init__(self, nodes: Mapping[str, tuple[str, str]]) -> None:
        self._nodes = dict(nodes)
        self._ends: dict[str, Any] = {}
        self._ports: dict[str, int] = {}
        self.failed: dict[str, str] = {}
        """Why a node has no end, a sentence."""

    def __enter__(self) -> LinkSurvey:
        secret = secrets.token_bytes(32)
        cloudpickle.register_pickle_by_value(links)
        try:
            self._ends = {name: _start(*where, secret) for name, where in self._nodes.items()}
        finally:
            cloudpickle.unregister_pickle_by_value(links)
        for name, answer in self._all("port").items():
            if isinstance(answer, int):
                self._ports[name] = answer
            else:
                self.failed[name] = str(answer)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for end in self._ends.values():
            ray.kill(end)

    def variable(self, name: str) -> dict[str, str]:
        """By node with an end, a variable of its processes' environment."""
        return {node: value for node, value in self._all("variable", name).items() if node in self._ports}

    def _all(self, method: str, *arguments: Any) -> dict[str, Any]:
        asked = {name: getattr(end, method).remote(*arguments) for name, end in self._ends.items() if name not in self.failed}
        ray.wait(list(asked.values()), num_returns=max(1, len(asked)), timeout=START_S) if asked else None
        return {name: _got(reference, 1.0) for name, reference in asked.items()}

    def measure(self, rounds: Sequence[Sequence[Pair]], *, trips: int = 100, bulk_s: float = 0.5) -> list[Link]:
        """Measure pairs of nodes, all pairs of a round at once; see :func:`policies.links.rounds`."""
        found: list[Link] = []
        for pairs in rounds:
            asked = {pair: self._ask(pair, trips, bulk_s) for pair in pairs}
            for pair, answer in asked.items():
                figures = answer if isinstance(answer, str) else _got(answer, MEASURE_S)
                found.append(Link(*pair, error=figures) if isinstance(figures, str) else Link(*pair, *figures))
        return found

    def _ask(self, pair: Pair, trips: int, bulk_s: float) -> Any:
        """Ray's reference of the measurement, or why there is none."""
        for name in pair:
            if name in self.failed:
                return f"{name} takes no part: {self.failed[name]}"
        one, other = pair
        return self._ends[one].measure.remote(self._nodes[other][1], self._ports[other], trips, bulk_s)


def _start(node: str, address: str, secret: bytes) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(LinkEnd).options(num_cpus=0, max_restarts=0, scheduling_strategy=strategy).remote(address, secret)


def _got(reference: Any, limit_s: float) -> Any:
    """The answer, or a sentence on why there is none."""
    try:
        return ray.get(reference, timeout=limit_s)
    except GetTimeoutError:
        return "it did not answer in time"
    except (RayError, OSError) as error:
        return str(error).strip().splitlines()[-1]
