"""Which places a run asks its cluster's autoscaler for, and which nodes it does without. Pure.

Ray asks by itself for what a placement group has no node for, and that is all that it knows of: a node that was announced to go, or whose
agent is gone while Ray still holds it for alive, has its places. Those are asked for here, ahead of Ray. What was asked for and came is
kept until the ranks' own placement group takes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fleet.protocol.decisions import AskAction

IDLE_S = 10.0
"""A node on which a run has no place for so long is not needed: its last ranks have moved, and nothing moves back by itself."""


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """One node, as a run sees it.

    Attributes:
        name: Ray's id.
        held: places of the run's ranks there.
        kept: places there that the run has asked for and got, for ranks that are still elsewhere.
        free: places that nobody has.
        goes: it is lost, or was announced to be taken away.
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
    """Wanted: ``places`` asked for, on none of the nodes ``avoid``; no agents on ``to_release``; ``reports`` in the journal."""

    places: int
    avoid: tuple[str, ...] = ()
    to_release: tuple[str, ...] = ()
    reports: tuple[NodeReport, ...] = ()


def to_ask(nodes: Sequence[NodeSeen], unplaced: int) -> int:
    """Places to ask for: those that go with their nodes, less the room that is elsewhere once the ``unplaced``, for which Ray asks, have
    theirs."""
    going = sum(node.held for node in nodes if node.goes)
    free = sum(node.free for node in nodes if not node.goes)
    return max(0, min(going, going + unplaced - free))


def lacking(nodes: Sequence[NodeSeen], unplaced: int) -> int:
    """Ranks for which there is no place now, or soon."""
    going = sum(node.held for node in nodes if node.goes)
    there = sum(node.free + node.kept for node in nodes if not node.goes)
    return max(0, going + unplaced - there)


@dataclass(slots=True)
class NodeRequests:
    """What a run has asked for so far: ``ranks`` have lacked a place since ``since_s``, when it knew the nodes ``known``.

    ``idle_s``: since when it has no place on a node on which it has an agent.
    """

    since_s: float | None = None
    ranks: int = 0
    known: frozenset[str] = frozenset()
    idle_s: dict[str, float] = field(default_factory=dict)

    def look(self, nodes: Sequence[NodeSeen], unplaced: int, now_s: float) -> NodeDemand:
        """What is to be asked for when the nodes are like this and ``unplaced`` ranks have none."""
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
        """None while ranks look for a place, or none has one yet: they may find it there."""
        placed = not short and any(node.held for node in nodes)
        unused = [node.name for node in nodes if placed and node.agent and not (node.goes or node.held or node.kept)]
        self.idle_s = {name: self.idle_s.get(name, now_s) for name in unused}
        return tuple(sorted(name for name, since_s in self.idle_s.items() if now_s - since_s >= IDLE_S))
