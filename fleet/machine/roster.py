"""The roster: the live rank of each slot, the nodes, and the ranks that were given up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from fleet.protocol.causes import AgentHungUp, AgentSilent, Engaged, NodeCause
from fleet.protocol.decisions import Decision
from fleet.protocol.events import Heartbeat
from fleet.protocol.topology import Gone
from fleet.protocol.types import Member, Process, StateId
from fleet.settings.run import HANGUP_S, Timeouts


class RankPhase(StrEnum):
    """A rank's phase: it builds its model; it could be in a view; it is in a view; it has committed the last step."""

    STARTING = "starting"
    STANDBY = "standby"
    JOINED = "joined"
    FINISHED = "finished"


STOOD_STILL_S = 1.0
"""Seconds between two ticks, or between two heartbeats of an agent, after which the process stood still. There are ten or more a second.
The process was stopped, or its machine was paused or starved."""
STOOD_STILL = 0.25
"""Share of ``timeouts.heartbeat_s``. A coordinator that stood still for less counts that time as silence of other processes."""


@dataclass(slots=True)
class Rank:
    """A live process in a slot.

    ``sent_generation`` is the greatest generation that the rank was invited to. ``quiesced_generation`` is the greatest that it reported as
    left. While the first is greater, the rank may step there. ``formed``: (generation, state) of its last ``Formed``. ``stepped``: the
    process has taken a step. ``engaged``: the work of its loop, if it has left its view. ``running_s``: since when its last view runs.
    ``ready_s``: since when it can be in a view. ``placed_in``: the last view in which all its chunks of a sharded state had come to it.
    Times are on the run's clock.
    """

    member: Member
    process: Process
    token: str
    store: str
    beat_s: float
    phase: RankPhase = RankPhase.STARTING
    state: StateId | None = None
    dirty: bool = False
    generation: int = -1
    sent_generation: int = -1
    quiesced_generation: int = -1
    progress_s: float = 0.0
    running_s: float = 0.0
    ready_s: float = 0.0
    reported: bool = True
    digest: str | None = None
    formed: tuple[int, StateId] | None = None
    stepped: bool = False
    engaged: Engaged = Engaged.WAITS
    placed_in: int = -1

    def may_be_in(self, generation: int) -> bool:
        """Whether a message of the rank from ``generation`` is not stale. A rank never comes back to a generation that it left."""
        return generation > self.quiesced_generation and generation >= self.generation


@dataclass(slots=True)
class Roster:
    """The live rank of each slot, the nodes, and the ranks that were given up.

    Attributes:
        lemons: index of a node -> the decision to keep it out for its faults in earlier runs.
        by_slot: the live ranks.
        nodes: by node, when its agent was heard last.
        kept_out: nodes whose ranks stay out of every view.
        leaving: nodes that will be taken away, and when.
        released: nodes of ``leaving`` that have no ranks in a view any more.
        domains: by node, its domain path, if it is known.
        lost_nodes: nodes that were lost lately, with their places.
        silent: nodes whose agent has hung up, and when.
        late: nodes that may connect late, since the coordinator had heard no node.
        incarnations: by slot, the newest incarnation that was granted.
        dead_tokens: tokens of processes that were given up.
        condemned: ranks that were given up, and may live on.
        outstanding: slots of ranks that may still step in a view, and have to leave it.
        long_call_s: when a rank of the view was last known to be in a long call.
        came_s: when the newest process came.
        apart: ranks that keep no part of a sharded state while they stand by.
    """

    lemons: Mapping[int, Decision] = field(default_factory=dict)
    by_slot: dict[int, Rank] = field(default_factory=dict)
    nodes: dict[str, float] = field(default_factory=dict)
    kept_out: set[str] = field(default_factory=set)
    leaving: dict[str, float] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)
    domains: dict[str, str] = field(default_factory=dict)
    lost_nodes: dict[str, Gone] = field(default_factory=dict)
    silent: dict[str, float] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    incarnations: dict[int, int] = field(default_factory=dict)
    dead_tokens: set[str] = field(default_factory=set)
    condemned: dict[Member, Rank] = field(default_factory=dict)
    outstanding: set[int] = field(default_factory=set)
    long_call_s: float = 0.0
    came_s: float = 0.0
    apart: set[Member] = field(default_factory=set)

    def grant(self, slot: int, claimed: int | None) -> int:
        """The incarnation for a new process of ``slot``: the next one, or the claimed one that an earlier coordinator granted."""
        last = self.incarnations.get(slot, -1)
        self.incarnations[slot] = last + 1 if claimed is None else max(last, claimed)
        return self.incarnations[slot]

    def current(self, member: Member) -> Rank | None:
        """The live rank that ``member`` names, or None when it is gone or another incarnation has taken its place."""
        rank = self.by_slot.get(member.slot)
        return rank if rank is not None and rank.member == member else None

    def add(self, rank: Rank) -> None:
        self.by_slot[rank.member.slot] = rank
        self.came_s = rank.beat_s

    def remove(self, rank: Rank) -> None:
        """The process is dead, or counts as dead: it can never speak for its slot again."""
        del self.by_slot[rank.member.slot]
        self.outstanding.discard(rank.member.slot)
        self.dead_tokens.add(rank.token)
        self.condemned[rank.member] = rank
        self.apart.discard(rank.member)

    def sent(self, member: Member, generation: int) -> None:
        """The rank is invited to ``generation``. It may step there until it quiesces there."""
        rank = self.current(member)
        if rank is not None:
            rank.sent_generation = max(rank.sent_generation, generation)
            if rank.sent_generation > rank.quiesced_generation:
                self.outstanding.add(member.slot)

    def quiesced(self, rank: Rank, generation: int) -> None:
        rank.quiesced_generation = max(rank.quiesced_generation, generation)
        if rank.quiesced_generation >= rank.sent_generation:
            self.outstanding.discard(rank.member.slot)

    def stays(self, node: str, in_view: bool) -> bool:
        """Whether ranks of ``node`` may be in the next view. On a leaving node, ranks of the present view may, until they are released."""
        return node not in self.leaving or (in_view and node not in self.released)

    def unannounce(self, node: str) -> bool:
        """Forget that a node will be taken away. Gives whether that was known."""
        self.released.discard(node)
        return self.leaving.pop(node, None) is not None

    def gone(self, node: str) -> None:
        """Forget a node."""
        self.nodes.pop(node, None)
        self.domains.pop(node, None)
        self.silent.pop(node, None)
        self.late.discard(node)
        self.unannounce(node)

    def in_order(self) -> list[Rank]:
        return [self.by_slot[slot] for slot in sorted(self.by_slot)]

    # ---- time ----------------------------------------------------------------------------------------------------------------------------

    def receive(self, event: Heartbeat, generation: int, between_s: float, now_s: float) -> list[Rank]:
        """Take in an agent's heartbeat. Returns ranks that were given up and still live.

        ``generation`` is that of the present view: the states of its ranks come from here. If one of them is in a long call, the others
        wait for it in their reduction, and do not hang either. The same holds for ``between_s`` behind a commit, where a loop may run any
        code.
        """
        self.nodes[event.node] = now_s
        self.silent.pop(event.node, None)
        self.late.discard(event.node)
        stale: list[Rank] = []
        by_slot, joined = self.by_slot, RankPhase.JOINED  # the attribute of an enum is looked up slowly
        for pulse in event.pulses:
            member = pulse.member
            rank = by_slot.get(member.slot)
            if rank is None or rank.member != member:
                stale += [self.condemned[member]] if member in self.condemned else []
                continue
            rank.reported = True
            rank.beat_s = now_s - pulse.beat_age_s
            steps = pulse.stepping and not (pulse.between and pulse.progress_age_s < between_s)
            # a wait in an earlier view does not count: the present view has ended it
            rank.progress_s = max(rank.running_s, now_s - pulse.progress_age_s) if steps else now_s
            if rank.generation == generation == pulse.generation and rank.phase is joined:
                rank.state = pulse.state
                rank.stepped = rank.stepped or (rank.formed is not None and pulse.state != rank.formed[1])
                if not pulse.moving:
                    rank.placed_in = generation
                if not steps:
                    self.long_call_s = now_s
        return stale

    def excuse(self, gap_s: float, now_s: float) -> None:
        """The coordinator could not hear any messages for ``gap_s``: all nodes and ranks have that much longer."""
        for known in (self.nodes, self.silent):
            known.update({node: min(now_s, at_s + gap_s) for node, at_s in known.items()})
        for rank in self.by_slot.values():
            rank.beat_s, rank.progress_s = min(now_s, rank.beat_s + gap_s), min(now_s, rank.progress_s + gap_s)

    def unheard(self, limit_s: float, now_s: float) -> frozenset[str]:
        """Nodes whose agent did not hang up, and was silent for longer than ``limit_s``."""
        return frozenset(node for node, seen_s in self.nodes.items() if now_s - seen_s > limit_s and node not in self.silent)

    def receive_later(self, nodes: frozenset[str], now_s: float) -> None:
        """The silence of these nodes and of their ranks counts from now on. Until they are heard, an old connection of theirs may break."""
        self.nodes.update(dict.fromkeys(nodes, now_s))
        self.late |= nodes
        for rank in self.by_slot.values():
            if rank.process.node in nodes:
                rank.beat_s = rank.progress_s = now_s

    def back(self, node: str, now_s: float) -> None:
        """The agent of ``node`` has connected. Its earlier silence does not count against its ranks, which it has not reported yet."""
        silent_s = now_s - self.nodes.get(node, now_s)
        for rank in self.by_slot.values():
            if rank.process.node == node:
                rank.beat_s = min(now_s, rank.beat_s + silent_s)
        self.nodes[node] = now_s
        self.silent.pop(node, None)
        self.late.discard(node)

    def with_ranks(self) -> set[str]:
        """Nodes that have live ranks."""
        return {rank.process.node for rank in self.by_slot.values()}

    def silent_nodes(self, limits: Timeouts, waits: bool, now_s: float) -> list[tuple[str, NodeCause, float]]:
        """(node, cause, since when) of all nodes whose agent hung up and did not come back at once, or was silent for too long.

        ``waits``: for nodes with ranks, the limit of silence is ``stall_s``.
        """
        silent = self.silent.items()
        lost: list[tuple[str, NodeCause, float]] = [(node, AgentHungUp(), at_s) for node, at_s in silent if now_s - at_s >= HANGUP_S]
        quiet = self.unheard(limits.node_s, now_s)
        if waits:
            quiet = quiet - self.with_ranks() | self.unheard(limits.stall_s, now_s)
        return lost + [(node, AgentSilent(now_s - self.nodes[node]), now_s) for node in sorted(quiet)]

    def silent_ranks(self, limits: Timeouts, now_s: float, by_its_agent: bool = False) -> Iterator[tuple[Rank, float]]:
        """(rank, seconds of silence) of all ranks that were silent for too long, on nodes that are not given up.

        ``by_its_agent``: the silence counts up to the agent's last heartbeat, since a silent agent says nothing about the rank.
        """
        starting = RankPhase.STARTING
        for rank in list(self.by_slot.values()):
            # A rank that starts imports modules, and may hold its interpreter's lock for long.
            limit_s = limits.start_s if rank.phase is starting else limits.heartbeat_s
            until_s = self.nodes.get(rank.process.node, now_s) if by_its_agent else now_s
            if until_s - rank.beat_s > limit_s and rank.process.node in self.nodes:
                yield rank, until_s - rank.beat_s

    @property
    def first_step(self) -> bool:
        """Whether a rank of the view is at its first step, which may take much longer than later steps."""
        return any(rank.phase is RankPhase.JOINED and not rank.stepped for rank in self.by_slot.values())

    def stuck_rank(self, limit_s: float, now_s: float) -> Rank | None:
        """A rank of the view that has not moved for longer than ``limit_s``."""
        since_s = now_s - limit_s
        if self.long_call_s >= since_s:
            return None
        joined = RankPhase.JOINED
        return next((rank for rank in self.by_slot.values() if rank.progress_s < since_s and rank.phase is joined), None)
