"""What a run is like now, as data: ``MachineState``.

The functions of this package take it and change it; nothing else does. ``validate`` says when it contradicts itself; the simulator asks
after each event, a live coordinator now and then, see ``audit.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from fleet.machine.budget import BudgetWatch
from fleet.machine.doubts import Doubts
from fleet.machine.figures import ShardFigures
from fleet.machine.losses import Losses
from fleet.machine.progress import ProgressLimit
from fleet.machine.roster import Rank, RankPhase, Roster
from fleet.machine.stragglers import Stragglers
from fleet.machine.tiers import Tiers
from fleet.protocol.causes import EndWhy
from fleet.protocol.decisions import Action, AnyPayload, Decision, Lacking
from fleet.protocol.facts import DataRead
from fleet.protocol.instructions import Instruction, Write
from fleet.protocol.once import Once
from fleet.protocol.ports import PlacementPolicy, RecoveryPolicy
from fleet.protocol.records import DecisionMade, Record, RunEnded
from fleet.protocol.types import Build, Member, StateId, View
from fleet.settings.run import RunSettings

ALL = "all steps are committed"
INCIDENT_S = 5.0
"""What follows from one hang within this time is the same hang."""


class Phase(StrEnum):
    """Where the run is.

    GATHER: all who were in it say where they stand. FORM: a view is published, and its members meet. RUN: they step. CONCLUDE: they
    run the code behind the loop. END is final.
    """

    GATHER = "gather"
    FORM = "form"
    RUN = "run"
    CONCLUDE = "conclude"
    END = "end"


@dataclass(slots=True)
class Ending:
    """What is known of the end. ``left``: members whose train function has returned; ``since_s``: when they went on behind the loop."""

    digest: str = ""
    why: EndWhy = EndWhy.ALL_STEPS
    reason: str = ALL
    left: set[Member] = field(default_factory=set)
    since_s: float = 0.0


@dataclass(slots=True)
class Stop:
    """The run is to end in order: why, in words, until when ranks are waited for, and until when a store that fails is.

    ``generation``: the view told last, at ``sent_s``. After that: until when those that were called out may say what they hold, which ranks
    were asked to keep it, and which could not.
    """

    why: EndWhy
    reason: str
    until_s: float = 0.0
    kept_s: float = 0.0
    generation: int = -1
    sent_s: float = 0.0
    answer_s: float | None = None
    asked: tuple[Member, ...] = ()
    could_not: set[Member] = field(default_factory=set)
    tries: int = 0


@dataclass(slots=True)
class HangEvidence:
    """Numbers the hangs of a run."""

    number: int = 0
    last_s: float = float("-inf")

    def wanted(self, now_s: float) -> bool:
        """Whether this is a hang of its own, and no consequence of the last one."""
        if now_s - self.last_s < INCIDENT_S:
            return False
        self.last_s = now_s
        self.number += 1
        return True


class Contradiction(AssertionError):
    """``MachineState`` says two things that cannot both be true: a bug of this package."""


@dataclass(slots=True)
class MachineState:
    """Everything that decides what ``FleetMachine`` does next. Times are on the run's clock.

    Attributes:
        view, proposal: the present view; the one that its members form beside the running steps, and enter at a step boundary.
        generation, history: the greatest that were given out.
        committed: the newest state that every member of a view has reported.
        missing: members of ``view`` that have not yet said that they are in it; ``finished`` those that have committed the last step.
        incomplete: members of the last view that found some of a sharded state with none of them; () once a view runs.
        since_s: when the run last had a working view.
        down_s: for how long the run had no machines since ``started_s``.
        deadline_s: until when a view has to be left, or formed; ``sent_s``: when the last word about that was sent.
        stuck_at: what was committed when nobody moved the last time.
        in_person: the training loop itself has to answer when it is told to leave.
        lacking: what the newest view's placement lacks of what was asked for.
        released_s: when each rank was told last that the run is over.
        stopping: once the run is told to stop; see ``stopping.py``.
        grace_until_s: until when ranks may report to a coordinator that has restarted.
        away: nodes that all wait for since they are silent; ``alone``: nobody at all is heard. See ``partitions.py``.
        data: what is trained on; ``files``: (its digest, number of the first of some files) that are written down -> with their digests.
        figures: what ranks have told of the shards of steps.
        build: how the run was built, as far as is known; ``compared``: it is that of this session, see ``building.py``.
        event: number of the present event.
        out: what it has led to so far.
    """

    settings: RunSettings
    recovery: RecoveryPolicy
    placement: PlacementPolicy
    lemons: Mapping[int, Decision]
    checkpoints: Tiers
    roster: Roster
    doubts: Doubts
    stragglers: Stragglers
    progress: ProgressLimit
    started_s: float
    committed: StateId
    history: int
    figures: ShardFigures
    losses: Losses = field(default_factory=Losses)
    evidence: HangEvidence = field(default_factory=HangEvidence)
    once: Once = field(default_factory=Once)
    budget: BudgetWatch = field(default_factory=BudgetWatch)
    ending: Ending = field(default_factory=Ending)
    phase: Phase = Phase.GATHER
    data: DataRead | None = None
    build: Build | None = None
    compared: bool = False
    files: dict[tuple[str, int], bool] = field(default_factory=dict)
    view: View | None = None
    proposal: View | None = None
    generation: int = 0
    missing: set[Member] = field(default_factory=set)
    finished: set[Member] = field(default_factory=set)
    incomplete: frozenset[Member] = frozenset()
    ended: RunEnded | None = None
    released_s: dict[Member, float] = field(default_factory=dict)
    stopping: Stop | None = None
    stuck_at: StateId | None = None
    in_person: bool = False
    resized: bool = False
    lacking: Lacking = field(default_factory=Lacking)
    grace_until_s: float | None = None
    since_s: float = 0.0
    ticked_s: float = 0.0
    deadline_s: float = 0.0
    down_s: float = 0.0
    sent_s: float = 0.0
    proposed_s: float = 0.0
    no_growth_until_s: float = 0.0
    away: frozenset[str] = frozenset()
    alone: bool = False
    fresh_until_s: float = 0.0
    last_decision: tuple[str, str] | None = None
    event: int = 0
    out: list[Instruction] = field(default_factory=list)
    _membership: tuple[int, frozenset[Member]] = (-1, frozenset())

    def __post_init__(self) -> None:
        self.since_s = self.ticked_s = self.deadline_s = self.sent_s = self.started_s
        self.proposed_s = self.no_growth_until_s = self.fresh_until_s = self.started_s

    # ---- who -----------------------------------------------------------------------------------------------------------------------------

    def current(self, member: Member) -> Rank | None:
        """The live rank that ``member`` names, or None."""
        return self.roster.current(member)

    def in_view(self, member: Member) -> bool:
        """Whether ``member`` is in the view. Asked for each word of each rank, so the members are kept as a set."""
        if self.view is None:
            return False
        if self._membership[0] != self.view.generation:
            self._membership = (self.view.generation, frozenset(self.view.members))
        return member in self._membership[1]

    def learn(self, generation: int, state: StateId | None) -> None:
        """A rank's word may be newer than the journal: numbers that were used once are never used again."""
        self.generation = max(self.generation, generation)
        self.history = max(self.history, state.history if state is not None else -1)

    # ---- what is to be done --------------------------------------------------------------------------------------------------------------

    def say(self, instruction: Instruction) -> None:
        """Have an instruction performed."""
        self.out.append(instruction)

    def write(self, record: Record) -> None:
        """Have a record journalled, before whatever is said after it."""
        self.budget.note(record)
        self.checkpoints.sessions.note(record)
        self.out.append(Write(record))

    def decide(self, policy: str, action: Action, reason: str, payload: AnyPayload | None, now_s: float) -> None:
        """Journal a decision, once: a policy that says the same again at the next tick adds nothing."""
        if (action, reason) != self.last_decision:
            self.last_decision = (action, reason)
            self.write(DecisionMade(policy, action, reason, payload, now_s))

    # ---- what must always be true --------------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Raise ``Contradiction`` with everything that cannot be true at once. Call it between events, not within one."""
        found = [*self._wrong_phase(), *self._wrong_view(), *self._wrong_ranks()]
        if found:
            raise Contradiction(f"in phase {self.phase}, generation {self.generation}: {'; '.join(found)}")

    def _wrong_phase(self) -> Iterator[str]:
        if (self.phase == Phase.END) != (self.ended is not None):
            yield f"the phase is {self.phase}, and the record of the end is {self.ended}"
        if self.phase in (Phase.FORM, Phase.RUN) and self.view is None:
            yield "there is no view"
        if self.proposal is not None and self.phase == Phase.GATHER and self.grace_until_s is None:
            yield f"generation {self.proposal.generation} is proposed to a view that is being left"
        if self.phase == Phase.RUN and self.missing and self.grace_until_s is None:
            yield f"the view runs, and {sorted(self.missing)} have not said that they are in it"

    def _wrong_view(self) -> Iterator[str]:
        newest = max((view.generation for view in (self.view, self.proposal) if view is not None), default=0)
        if newest > self.generation:
            yield f"generation {newest} is in use, and {self.generation} is the greatest that was given out"
        if self.committed.history > max(self.history, 0):
            yield f"{self.committed} is committed, and history {self.history} is the greatest that was given out"
        members = frozenset(self.view.members) if self.view is not None else frozenset()
        for name, some in (("missing", self.missing), ("finished", self.finished)):
            if not some <= members:
                yield f"{name} has {sorted(some - members)}, who are not in the view"
        if self.phase in (Phase.FORM, Phase.RUN) and self.grace_until_s is None:
            dead = sorted(member for member in members if self.roster.current(member) is None)
            if dead:
                yield f"{dead} are in the view, and gone"

    def _wrong_ranks(self) -> Iterator[str]:
        for slot, rank in self.roster.by_slot.items():
            if rank.member.slot != slot:
                yield f"slot {slot} holds {rank.member}"
            if rank.member.incarnation > self.roster.incarnations.get(slot, -1):
                yield f"{rank.member} lives, and was not granted"
            if rank.token in self.roster.dead_tokens:
                yield f"{rank.member} lives, and its process was given up"
            if (rank.sent_generation > rank.quiesced_generation) != (slot in self.roster.outstanding):
                yield f"{rank.member} was sent {rank.sent_generation}, quiesced in {rank.quiesced_generation}, and outstanding says else"
            if rank.phase == RankPhase.STARTING and self.in_view(rank.member) and self.phase == Phase.RUN and self.grace_until_s is None:
                yield f"{rank.member} is in the running view, and builds its model"
        if gone := self.roster.outstanding - self.roster.by_slot.keys():
            yield f"slots {sorted(gone)} have to leave a view, and nobody lives there"
