"""Requests of a run on an autoscaled cluster while it goes on: places for ranks whose node is lost, or is about to go."""

from __future__ import annotations

from typing import Any, Protocol

import ray

from fleet.app.cluster import ray_internals
from fleet.app.cluster.joined import JoinedCluster, chosen
from fleet.app.cluster.nodes_asked import PlaceGroup
from fleet.host.clock import Clock, MonotonicClock
from fleet.protocol.events import NodesWanted
from fleet.protocol.provider import NodePlace
from fleet.settings.per_rank import room
from policies.node_requests import NodeReport, NodeRequests, NodeSeen

CALL_S = 5.0


class Tended(Protocol):
    """The run that asks."""

    agents: dict[int, Any]
    places: dict[int, NodePlace]
    coordinator: Any

    def add_agent(self, index: int) -> None: ...

    def is_cut_off(self, name: str) -> bool: ...

    def release(self, index: int) -> None: ...


class NodeAsker:
    """Looks at the run's places with each call of ``look``, and asks for the missing ones until it is closed."""

    def __init__(self, run: Tended, cluster: JoinedCluster, clock: Clock | None = None) -> None:
        self._run, self._cluster, self._clock = run, cluster, clock or MonotonicClock()
        self._requests, self._group = NodeRequests(), PlaceGroup(cluster.slot, cluster.selector)

    def look(self) -> None:
        """Ask for missing places. Raises RayError, TimeoutError, OSError: the cluster does not answer; the next look asks again."""
        unplaced, seen = ray_internals.unplaced(), self._nodes()
        wanted = self._requests.look(seen, unplaced, self._clock.now_s())
        self._group.ask(wanted.places, wanted.avoid)
        for name in wanted.to_release:
            if (index := self._cluster.index_of(name)) is not None:
                self._run.release(index)
        for message in wanted.reports:
            event = NodesWanted(message.action, message.ranks, self._in_words(message), message.waited_s)
            ray.get(self._run.coordinator.report.remote(event), timeout=CALL_S)

    def kept(self) -> set[str]:
        """Nodes that came and wait for ranks; they get agents."""
        return {node for node in ray_internals.places_of_job(asked=True) if node}

    def close(self) -> None:
        """Ask for nothing any more."""
        self._group.ask(0)

    def _nodes(self) -> list[NodeSeen]:
        going = set(ray.get(self._run.coordinator.going_nodes.remote(), timeout=CALL_S))
        held, kept, free = ray_internals.places_of_job(), ray_internals.places_of_job(asked=True), ray_internals.free_by_node()
        with_agent = set(self._run.agents)
        found = []
        for node in chosen(self._cluster.selector):
            name = str(node["NodeID"])
            goes = name in going and not self._run.is_cut_off(name)
            agent = self._cluster.index_of(name) in with_agent
            found.append(NodeSeen(name, held[name], kept[name], room(free.get(name, {}), self._cluster.slot), goes, agent))
        return found

    def _in_words(self, message: NodeReport) -> str:
        if message.action == "ask":
            takes = ", ".join(f"{amount:g} {name}" for name, amount in self._cluster.slot.items())
            where = "".join(f", where {key}={condition}" for key, condition in self._cluster.selector.items())
            return f"nodes are asked for: {message.ranks} ranks lack a place; each takes {takes}{where}"
        ends = "nodes came" if message.action == "came" else "no node is needed any more"
        return f"{ends} for {message.ranks} ranks, {message.waited_s:.1f} s after they were asked for"
