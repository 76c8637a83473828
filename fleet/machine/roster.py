"""Who is there: the live rank of each slot, and what is known of the dead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from fleet.protocol.causes import AgentHungUp, AgentSilent, Engaged, NodeCause
from fleet.protocol.decisions import Decision
from fleet.protocol.events import Heartbeat
from fleet.protocol.topology import Gone
from fleet.protocol.types import Member, Process, StateId
from fleet.settings.run import Timeouts


class RankPhase(StrEnum):
    """Where one rank is: it builds its model; it could be in a view; it is in one; it has committed the last step."""

    STARTING = "starting"
    STANDBY = "standby"
    JOINED = "joined"
    FINISHED = "finished"


STOOD_STILL_S = 1.0
"""Between two ticks, or two heartbeats of an agent, of which there are ten or more a second: the process itself was stopped, its machine
paused, or starved."""
STOOD_STILL = 0.25
"""Of ``timeouts.heartbeat_s``: so much of it a coordinator that stood still may count as the silence of others."""


@dataclass(slots=True)
class Rank:
    """A live process in a slot.

    ``sent_generation`` is the greatest generation that it was invited to, ``quiesced_generation`` the greatest that it said it has left:
    while the first is greater the rank may be stepping there. ``formed`` is (generation, state) when it last said that it is in a view and
    steps; ``stepped``: it has taken a step since it came. ``engaged``: what its loop does, if it has left its view. ``running_s``: since
    when the last view with it has run, and ``ready_s`` since when it can be in one. Times are on the run's clock.
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

    def may_be_in(self, generation: int) -> bool:
        """Whether a word of it from ``generation`` is not stale: a rank that quiesced in a generation never comes back to it."""
        return generation > self.quiesced_generation and generation >= self.generation


@dataclass(slots=True)
class Roster:
    """The live rank of each slot, and what is known of the dead.

    Attributes:
        lemons: index of a node -> why it stays out for what it did in earlier runs.
        by_slot: the live ranks.
        nodes: when the agent of each was heard last.
        kept_out: nodes whose ranks stay out of every view.
        leaving: nodes that will be taken away, and when.
        released: those of them that no view has ranks of any more.
        domains: the domain path of each node that has said it.
        lost_nodes: those that were lost of late, with the places they had.
        silent: nodes whose agent has hung up, and when.
        late: nodes that may call again, since the coordinator had heard nobody.
        incarnations: the newest that was granted, of each slot.
        dead_tokens: processes that were given up.
        condemned: ranks that were given up, and may live on.
        outstanding: slots of ranks that may still step in a view, and have to leave it.
        long_call_s: when a rank of the view was last known to be in a long call.
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

    def grant(self, slot: int, claimed: int | None) -> int:
        """The incarnation for a new process of ``slot``: the next one, or the one it claims if an older coordinator granted it."""
        last = self.incarnations.get(slot, -1)
        self.incarnations[slot] = last + 1 if claimed is None else max(last, claimed)
        return self.incarnations[slot]

    def current(self, member: Member) -> Rank | None:
        """The live rank that ``member`` names, or None when it is gone or another incarnation has taken its place."""
        rank = self.by_slot.get(member.slot)
        return rank if rank is not None and rank.member == member else None

    def add(self, rank: Rank) -> None:
        self.by_slot[rank.member.slot] = rank

    def remove(self, rank: Rank) -> None:
        """The process is dead, or as good as dead: it can never speak for its slot again."""
        del self.by_slot[rank.member.slot]
        self.outstanding.discard(rank.member.slot)
        self.dead_tokens.add(rank.token)
        self.condemned[rank.member] = rank

    def sent(self, member: Member, generation: int) -> None:
        """The rank is being invited to ``generation``; until it quiesces there it may be stepping in it."""
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
        """Whether ranks of ``node`` may be in the next view: those that are in the present one may until they are let go."""
        return node not in self.leaving or (in_view and node not in self.released)

    def unannounce(self, node: str) -> bool:
        """Forget that a node will be taken away. Whether that was known."""
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
        """Note what a node's agent sees. Returns ranks that were given up and yet live.

        ``generation`` is that of the present view: what its ranks hold comes from here. When one of them is in a long call, the
        others wait for it in their reduction, and are not hung either. So for ``between_s`` behind a commit, where a loop may do anything.
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
            # what it waited for in a view before this one was answered by this one
            rank.progress_s = max(rank.running_s, now_s - pulse.progress_age_s) if steps else now_s
            if rank.generation == generation == pulse.generation and rank.phase is joined:
                rank.state = pulse.state
                rank.stepped = rank.stepped or (rank.formed is not None and pulse.state != rank.formed[1])
                if not steps:
                    self.long_call_s = now_s
        return stale

    def excuse(self, gap_s: float, now_s: float) -> None:
        """What was to be heard within the last ``gap_s`` could not be heard: everyone has that much longer."""
        for known in (self.nodes, self.silent):
            known.update({node: min(now_s, at_s + gap_s) for node, at_s in known.items()})
        for rank in self.by_slot.values():
            rank.beat_s, rank.progress_s = min(now_s, rank.beat_s + gap_s), min(now_s, rank.progress_s + gap_s)

    def unheard(self, limit_s: float, now_s: float) -> frozenset[str]:
        """Nodes whose agent did not hang up, and was not heard for longer than ``limit_s``."""
        return frozenset(node for node, seen_s in self.nodes.items() if now_s - seen_s > limit_s and node not in self.silent)

    def receive_later(self, nodes: frozenset[str], now_s: float) -> None:
        """The silence of these nodes and of their ranks counts from now on. Until they are heard, an old line of theirs may be reset."""
        self.nodes.update(dict.fromkeys(nodes, now_s))
        self.late |= nodes
        for rank in self.by_slot.values():
            if rank.process.node in nodes:
                rank.beat_s = rank.progress_s = now_s

    def back(self, node: str, now_s: float) -> None:
        """Its agent has called: that nothing came from it before says nothing about its ranks, of which it has not told yet."""
        silent_s = now_s - self.nodes.get(node, now_s)
        for rank in self.by_slot.values():
            if rank.process.node == node:
                rank.beat_s = min(now_s, rank.beat_s + silent_s)
        self.nodes[node] = now_s
        self.silent.pop(node, None)
        self.late.discard(node)

    def with_ranks(self) -> set[str]:
        """Nodes that ranks live on."""
        return {rank.process.node for rank in self.by_slot.values()}

    def silent_nodes(self, limits: Timeouts, waits: bool, now_s: float) -> list[tuple[str, NodeCause, float]]:
        """(node, why, since when) of all nodes whose agent hung up and did not come back at once, or was silent for too long.

        ``waits``: that is ``stall_s`` for nodes with ranks.
        """
        silent = self.silent.items()
        lost: list[tuple[str, NodeCause, float]] = [(node, AgentHungUp(), at_s) for node, at_s in silent if now_s - at_s >= limits.hangup_s]
        quiet = self.unheard(limits.node_s, now_s)
        if waits:
            quiet = quiet - self.with_ranks() | self.unheard(limits.stall_s, now_s)
        return lost + [(node, AgentSilent(now_s - self.nodes[node]), now_s) for node in sorted(quiet)]

    def silent_ranks(self, limits: Timeouts, now_s: float, by_its_agent: bool = False) -> Iterator[tuple[Rank, float]]:
        """(rank, how long it was silent) of all that were for too long on nodes that are not given up.

        ``by_its_agent``: at its agent's last word; that nothing came from the agent since says nothing about the rank.
        """
        starting = RankPhase.STARTING
        for rank in list(self.by_slot.values()):
            # A rank that starts up imports, and may hold its interpreter's lock for long.
            limit_s = limits.start_s if rank.phase is starting else limits.heartbeat_s
            until_s = self.nodes.get(rank.process.node, now_s) if by_its_agent else now_s
            if until_s - rank.beat_s > limit_s and rank.process.node in self.nodes:
                yield rank, until_s - rank.beat_s

    @property
    def first_step(self) -> bool:
        """Whether a rank of the view is at its first step: how long later ones take says nothing about that."""
        return any(rank.phase is RankPhase.JOINED and not rank.stepped for rank in self.by_slot.values())

    def stuck_rank(self, limit_s: float, now_s: float) -> Rank | None:
        """A rank of the view that has not moved for longer than ``limit_s``."""
        since_s = now_s - limit_s
        if self.long_call_s >= since_s:
            return None
        joined = RankPhase.JOINED
        return next((rank for rank in self.by_slot.values() if rank.progress_s < since_s and rank.phase is joined), None)
