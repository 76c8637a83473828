"""Who is there: the live rank of each slot, and what is known of the dead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from fleet.protocol.causes import AgentHungUp, AgentSilent, NodeCause
from fleet.protocol.events import Heartbeat
from fleet.protocol.types import Member, Process, StateId
from fleet.settings.run import Timeouts


class RankPhase(StrEnum):
    """Where one rank is: it builds its model; it could be in a view; it is in one; it has committed the last step."""

    STARTING = "starting"
    STANDBY = "standby"
    SEATED = "seated"
    FINISHED = "finished"


STOOD_STILL_S = 1.0
"""Between two ticks, or two heartbeats of an agent, of which there are ten or more a second: the process itself was stopped, its machine
paused, or starved."""


@dataclass(slots=True)
class Rank:
    """A live process in a slot.

    ``sent_generation`` is the greatest generation that it was invited to, ``parked_generation`` the greatest that it said it has left:
    while the first is greater the rank may be stepping there. ``formed`` is (generation, state) when it last said that it is in a view and
    steps. Times are on the run's clock.
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
    parked_generation: int = -1
    progress_s: float = 0.0
    heard: bool = True
    step: int = -1
    shard: int = -1
    digest: str | None = None
    formed: tuple[int, StateId] | None = None

    def may_be_in(self, generation: int) -> bool:
        """Whether a word of it from ``generation`` is not stale: a rank that parked in a generation never comes back to it."""
        return generation > self.parked_generation and generation >= self.generation


@dataclass(slots=True)
class Roster:
    """The live rank of each slot, and what is known of the dead."""

    by_slot: dict[int, Rank] = field(default_factory=dict)
    nodes: dict[str, float] = field(default_factory=dict)
    kept_out: set[str] = field(default_factory=set)
    silent: dict[str, float] = field(default_factory=dict)
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
        """The rank is being invited to ``generation``; until it parks there it may be stepping in it."""
        rank = self.current(member)
        if rank is not None:
            rank.sent_generation = max(rank.sent_generation, generation)
            if rank.sent_generation > rank.parked_generation:
                self.outstanding.add(member.slot)

    def parked(self, rank: Rank, generation: int) -> None:
        rank.parked_generation = max(rank.parked_generation, generation)
        if rank.parked_generation >= rank.sent_generation:
            self.outstanding.discard(rank.member.slot)

    def in_order(self) -> list[Rank]:
        return [self.by_slot[slot] for slot in sorted(self.by_slot)]

    # ---- time ----------------------------------------------------------------------------------------------------------------------------

    def hear(self, event: Heartbeat, generation: int, now_s: float) -> list[Rank]:
        """Note what a node's agent sees. Returns ranks that were given up and yet live.

        ``generation`` is that of the present view: what its seated ranks hold comes from here. When one of them is in a long call, the
        others wait for it in their reduction, and are not hung either.
        """
        self.nodes[event.node] = now_s
        self.silent.pop(event.node, None)
        ghosts: list[Rank] = []
        by_slot, seated = self.by_slot, RankPhase.SEATED  # the attribute of an enum is looked up slowly
        for pulse in event.pulses:
            member = pulse.member
            rank = by_slot.get(member.slot)
            if rank is None or rank.member != member:
                ghosts += [self.condemned[member]] if member in self.condemned else []
                continue
            rank.heard = True
            rank.beat_s = now_s - pulse.beat_age_s
            rank.progress_s = now_s - pulse.progress_age_s if pulse.stepping else now_s
            if rank.generation == generation == pulse.generation and rank.phase is seated:
                rank.state = pulse.state
                if not pulse.stepping:
                    self.long_call_s = now_s
        return ghosts

    def excuse(self, gap_s: float, now_s: float) -> None:
        """What was to be heard within the last ``gap_s`` could not be heard: everyone has that much longer."""
        for known in (self.nodes, self.silent):
            known.update({node: min(now_s, at_s + gap_s) for node, at_s in known.items()})
        for rank in self.by_slot.values():
            rank.beat_s, rank.progress_s = min(now_s, rank.beat_s + gap_s), min(now_s, rank.progress_s + gap_s)

    def silent_nodes(self, limits: Timeouts, now_s: float) -> list[tuple[str, NodeCause, float]]:
        """(node, why, since when) of all nodes whose agent hung up and did not come back at once, or was silent for too long."""
        silent = self.silent.items()
        lost: list[tuple[str, NodeCause, float]] = [(node, AgentHungUp(), at_s) for node, at_s in silent if now_s - at_s >= limits.hangup_s]
        quiet = [
            (node, now_s - seen_s) for node, seen_s in self.nodes.items() if now_s - seen_s > limits.node_s and node not in self.silent
        ]
        return lost + [(node, AgentSilent(silence_s), now_s) for node, silence_s in quiet]

    def silent_ranks(self, limits: Timeouts, now_s: float) -> Iterator[tuple[Rank, float]]:
        """(rank, how long it was silent) of all that were for too long on nodes that are not given up."""
        starting = RankPhase.STARTING
        for rank in list(self.by_slot.values()):
            # A rank that starts up imports, and may hold its interpreter's lock for long.
            limit_s = limits.start_s if rank.phase is starting else limits.heartbeat_s
            if now_s - rank.beat_s > limit_s and rank.process.node in self.nodes:
                yield rank, now_s - rank.beat_s

    def stuck_rank(self, limit_s: float, now_s: float) -> Rank | None:
        """A seated rank that has not moved for longer than ``limit_s``."""
        since_s = now_s - limit_s
        if self.long_call_s >= since_s:
            return None
        seated = RankPhase.SEATED
        return next((rank for rank in self.by_slot.values() if rank.progress_s < since_s and rank.phase is seated), None)
