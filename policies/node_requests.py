"""Places that a run asks its cluster's autoscaler for, and nodes that the run does not need. Pure.

Ray asks by itself for places that a placement group has no node for. It does not ask for places on a node with a notice that it goes. Nor
does it ask for places on a node whose agent is gone while Ray takes the node as alive. The run asks for these, ahead of Ray. It keeps the
places that came until the ranks' own placement group takes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fleet.protocol.decisions import AskAction

IDLE_S = 10.0
"""A run does not need a node on which it has had no place for so long. Its last ranks have moved, and no rank moves back by itself."""


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """One node, as a run sees it.

    Attributes:
        name: Ray's id.
        held: places of the run's ranks there.
        kept: places there that the run has asked for and got, for ranks that are still elsewhere.
        free: places that no process has.
        goes: it is lost, or a notice says that it will be taken away.
        agent: the run has an agent there, which Ray counts as work.
    """

    name: str
    held: int = 0
    kept: int = 0
    free: int = 0
    goes: bool = False
    agent: bool = False


@dataclass(frozen=True, slots=True)
class NodeReport:
    """For the journal: ``ranks`` lack a place from now on, or have one (``came``), or do without it (``withdraw``), ``waited_s`` later."""

    action: AskAction
    ranks: int
    waited_s: float | None = None


@dataclass(frozen=True, slots=True)
class NodeDemand:
    """The wanted change: ``places`` to ask for, not on the nodes ``avoid``; nodes ``to_release``, without agents; ``reports``: journal."""

    places: int
    avoid: tuple[str, ...] = ()
    to_release: tuple[str, ...] = ()
    reports: tuple[NodeReport, ...] = ()


def to_ask(nodes: Sequence[NodeSeen], unplaced: int) -> int:
    """Places to ask for: those that go with their nodes, less the room that other nodes have left beside the ``unplaced``.

    Ray itself asks for the ``unplaced``.
    """
    going = sum(node.held for node in nodes if node.goes)
    free = sum(node.free for node in nodes if not node.goes)
    return max(0, min(going, going + unplaced - free))


def lacking(nodes: Sequence[NodeSeen], unplaced: int) -> int:
    """Ranks without a place now, or soon."""
    going = sum(node.held for node in nodes if node.goes)
    there = sum(node.free + node.kept for node in nodes if not node.goes)
    return max(0, going + unplaced - there)


@dataclass(slots=True)
class NodeRequests:
    """The requests of a run so far: ``ranks`` have lacked a place since ``since_s``, when it knew the nodes ``known``.

    ``idle_s``: since when it has no place on a node with one of its agents.
    """

    since_s: float | None = None
    ranks: int = 0
    known: frozenset[str] = frozenset()
    idle_s: dict[str, float] = field(default_factory=dict)

    def look(self, nodes: Sequence[NodeSeen], unplaced: int, now_s: float) -> NodeDemand:
        """The demand for nodes in this state and ``unplaced`` ranks without a place."""
        places, short = to_ask(nodes, unplaced), lacking(nodes, unplaced)
        news = self._news(nodes, short, now_s)
        avoid = tuple(sorted(node.name for node in nodes if node.goes)) if places else ()
        return NodeDemand(places, avoid, self._idle(nodes, short, now_s), news)

    def _news(self, nodes: Sequence[NodeSeen], short: int, now_s: float) -> tuple[NodeReport, ...]:
        if self.since_s is None:
            self.known = frozenset(node.name for node in nodes)
        if self.since_s is None and short:
            self.since_s, self.ranks = now_s, short
            return (NodeReport("ask", short),)
        if short > self.ranks:
            self.ranks = short
            return (NodeReport("ask", short),)
        if short or self.since_s is None:
            return ()
        new = any(node.name not in self.known and not node.goes for node in nodes)
        reported = NodeReport("came" if new else "withdraw", self.ranks, now_s - self.since_s)
        self.since_s, self.ranks = None, 0
        return (reported,)

    def _idle(self, nodes: Sequence[NodeSeen], short: int, now_s: float) -> tuple[str, ...]:
        """Empty while ranks look for a place, or none has one yet: they may find it there."""
        placed = not short and any(node.held for node in nodes)
        unused = [node.name for node in nodes if placed and node.agent and not (node.goes or node.held or node.kept)]
        self.idle_s = {name: self.idle_s.get(name, now_s) for name in unused}
        return tuple(sorted(name for name, since_s in self.idle_s.items() if now_s - since_s >= IDLE_S))
