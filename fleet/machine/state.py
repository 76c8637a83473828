"""What a run is like now, as data: ``MachineState``.

What belongs together in it is one object, with the small functions that need no more than that. The other functions of this package take
the whole and change it; nothing else does. ``validate`` says when it contradicts itself; the simulator asks after each event, a live
coordinator now and then, see ``audit.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
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
from fleet.protocol.decisions import Action, AnyPayload, Lacking
from fleet.protocol.facts import DataFiles, DataRead
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
class Stop:
    """The run is to end in order.

    Attributes:
        why, reason: for code, and in words.
        until_s: until when ranks are waited for.
        kept_s: until when a store that fails is.
        generation, sent_s: the view that was told last, and when.
        answer_s: until when those that were called out may say what they hold.
        asked: ranks that were asked to keep it.
        could_not: those of them that could not.
        tries: how often ranks were asked.
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
class EndOrder:
    """A loop has ended the run.

    Attributes:
        state: behind which no step follows.
        by, reason: whose loop, and why.
        generation, sent_s: the view that was told last, and when.
    """

    state: StateId
    by: Member
    reason: str
    generation: int = -1
    sent_s: float = 0.0


@dataclass(slots=True)
class Ending:
    """What is known of the end.

    Attributes:
        digest: of the last state.
        why, reason: why the run ends once the code behind the loop has run.
        left: members whose train function has returned.
        since_s: when they went on behind the loop.
        stopping: once the run is told to stop; see ``stopping.py``.
        order: once a loop has ended the run.
        record: the last one of the journal, once it is written.
        released_s: when each rank was told last that the run is over.
    """

    digest: str = ""
    why: EndWhy = EndWhy.ALL_STEPS
    reason: str = ALL
    left: set[Member] = field(default_factory=set)
    since_s: float = 0.0
    stopping: Stop | None = None
    order: EndOrder | None = None
    record: RunEnded | None = None
    released_s: dict[Member, float] = field(default_factory=dict)

    def conclude(self, why: EndWhy, reason: str, now_s: float) -> None:
        """The code behind the loop runs; if nothing comes between, the run ends for this reason."""
        self.why, self.reason, self.since_s = why, reason, now_s

    def roll_back(self, start: StateId, history: int) -> None:
        """Another history begins at ``start``. Where a loop has ended the run there it is over there still; else it may yet come there."""
        if self.order is not None:
            at_the_end = start.step == self.order.state.step
            self.order = replace(self.order, state=StateId(history, start.step), generation=-1) if at_the_end else None


@dataclass(slots=True)
class HangEvidence:
    """Numbers the hangs of a run.

    Attributes:
        number: of the last one.
        last_s: when that was.
    """

    number: int = 0
    last_s: float = float("-inf")

    def wanted(self, now_s: float) -> bool:
        """Whether this is a hang of its own, and no consequence of the last one."""
        if now_s - self.last_s < INCIDENT_S:
            return False
        self.last_s = now_s
        self.number += 1
        return True


@dataclass(slots=True)
class Liveness:
    """Whether nodes are heard, and whether ranks move.

    Attributes:
        grace_until_s: until when ranks may report to a coordinator that has restarted.
        away: nodes that all wait for since they are silent; see ``partitions.py``.
        alone: nobody at all is heard.
        stuck_at: what was committed when nobody moved the last time.
        hangs: their numbers.
    """

    grace_until_s: float | None = None
    away: frozenset[str] = frozenset()
    alone: bool = False
    stuck_at: StateId | None = None
    hangs: HangEvidence = field(default_factory=HangEvidence)


@dataclass(slots=True)
class Uptime:
    """For how long the run has its machines, and what they cost.

    Attributes:
        started_s: when it began.
        budget: what may be spent, and is.
        down_s: for how long it had no machines since then.
        ticked_s: when the last tick came.
    """

    started_s: float
    budget: BudgetWatch
    down_s: float = 0.0
    ticked_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.ticked_s = self.started_s

    def held_s(self, now_s: float) -> float:
        """For how long it has had its machines."""
        return now_s - self.started_s - self.down_s


@dataclass(frozen=True, slots=True)
class RunPolicies:
    """Those that are asked about the run as a whole.

    Attributes:
        recovery: who is in the next view, and whether the run goes on at all.
        placement: where shards and copies lie.
    """

    recovery: RecoveryPolicy
    placement: PlacementPolicy


@dataclass(slots=True)
class Attendance:
    """The members of the present view, and how far they are.

    Attributes:
        members: all of them.
        missing: those that have not yet said that they are in it.
        finished: those that have committed the last step.
    """

    members: frozenset[Member] = frozenset()
    missing: set[Member] = field(default_factory=set)
    finished: set[Member] = field(default_factory=set)

    def all_finished(self) -> bool:
        """Whether all of them have committed the last step."""
        return 0 < len(self.members) == len(self.finished)


@dataclass(slots=True)
class Assembly:
    """How a view comes to an end, and the next one about.

    Attributes:
        history, generation: the greatest that were given out.
        since_s: when the run last had a working view.
        deadline_s: until when a view has to be left, or formed.
        sent_s: when the last word about that was sent.
        fresh_until_s: so long a fresh process is waited for, where nobody has the initial state any more.
        in_person: the training loop itself has to answer when it is told to leave.
        incomplete: members of the view ``incomplete_in`` that found some of a sharded state with none of them; () once a view runs.
        lacking: what the newest view's placement lacks of what was asked for.
    """

    history: int
    since_s: float
    generation: int = 0
    deadline_s: float = field(init=False)
    sent_s: float = field(init=False)
    fresh_until_s: float = field(init=False)
    in_person: bool = False
    incomplete: frozenset[Member] = frozenset()
    incomplete_in: int = 0
    lacking: Lacking = field(default_factory=Lacking)

    def __post_init__(self) -> None:
        self.deadline_s = self.sent_s = self.fresh_until_s = self.since_s

    def learn(self, generation: int, state: StateId | None) -> None:
        """A rank's word may be newer than the journal: numbers that were used once are never used again."""
        self.generation = max(self.generation, generation)
        self.history = max(self.history, state.history if state is not None else -1)


@dataclass(slots=True)
class Growth:
    """How a view is changed beside the running steps, or made smaller; see ``proposals.py``.

    Attributes:
        proposed_s: when the last view was proposed.
        proposal: the view that members form beside the running steps, and enter at a step boundary.
        not_before_s: when ranks that stand by may be taken in again.
        resized: the world was set to another size, and the view may be too large for it.
    """

    proposed_s: float
    proposal: View | None = None
    not_before_s: float = field(init=False)
    resized: bool = False

    def __post_init__(self) -> None:
        self.not_before_s = self.proposed_s


@dataclass(slots=True)
class Trained:
    """The model that is trained, and its data, as ranks have said.

    Attributes:
        figures: what they have computed of the shards of steps.
        build: how the run was built, as far as is known.
        compared: that is how this session was built; see ``building.py``.
        data: what is trained on.
        files: (digest of the data, number of the first of some files) that are written down -> with their digests.
    """

    figures: ShardFigures
    build: Build | None = None
    compared: bool = False
    data: DataRead | None = None
    files: dict[tuple[str, int], bool] = field(default_factory=dict)

    def note_build(self, build: Build) -> bool:
        """This session is built so. Whether that is news."""
        news, self.build, self.compared = build != self.build, build, True
        return news

    def note_data(self, read: DataRead) -> bool:
        """Whether it is news: once for each history, as its steps may be read otherwise than those that it took back."""
        if news := _comparable(read) != _comparable(self.data):
            self.data = read
        return news

    def note_files(self, read: DataFiles) -> bool:
        """Whether they are news: once, and again when their digests are known."""
        key, digested = (read.data_sha256, read.first), all(file.digest for file in read.files)
        if news := key not in self.files or (digested and not self.files[key]):
            self.files[key] = digested
        return news


def _comparable(read: DataRead | None) -> DataRead | None:
    """What of it is news when it changes."""
    return replace(read, member=Member(0, 0), at_s=0.0, step=0) if read is not None else None


@dataclass(slots=True)
class Output:
    """What events have led to.

    Attributes:
        event: number of the present event.
        instructions: what it has led to so far, in order.
        last_decision: action and reason of the newest decision.
    """

    event: int = 0
    instructions: list[Instruction] = field(default_factory=list)
    last_decision: tuple[str, str] | None = None

    def begin(self) -> None:
        """The next event is handled."""
        self.event, self.instructions = self.event + 1, []


class Contradiction(AssertionError):
    """``MachineState`` says two things that cannot both be true: a bug of this package."""


@dataclass(slots=True)
class MachineState:
    """Everything that decides what ``FleetMachine`` does next. Times are on the run's clock.

    Attributes:
        settings: as they are now; some change while the run goes on.
        policies: those that no other part of the state has.
        phase: where the run is.
        view: the present one, and the last one between views.
        attendance: its members, and how far they are.
        committed: the newest state that every member of a view has reported.
        assembly: how the next view comes about.
        growth: how the present one changes beside the running steps.
        ending: what is known of the end.
        roster: the live rank of each slot, and their nodes.
        liveness: whether nodes are heard, and whether ranks move.
        losses: who was lost, and why.
        doubts: what ranks have said of differences between them.
        stragglers: who is slow, and what was done about it.
        progress: the time-outs that move.
        checkpoints: what is kept of the state, in the store and in memories.
        trained: what is trained, and on what.
        once: what is done once in the run.
        uptime: for how long the run has its machines, and what they cost.
        output: what the present event has led to so far.
    """

    settings: RunSettings
    policies: RunPolicies
    checkpoints: Tiers
    roster: Roster
    doubts: Doubts
    stragglers: Stragglers
    progress: ProgressLimit
    committed: StateId
    assembly: Assembly
    growth: Growth
    uptime: Uptime
    trained: Trained
    losses: Losses = field(default_factory=Losses)
    once: Once = field(default_factory=Once)
    liveness: Liveness = field(default_factory=Liveness)
    ending: Ending = field(default_factory=Ending)
    output: Output = field(default_factory=Output)
    phase: Phase = Phase.GATHER
    view: View | None = None
    attendance: Attendance = field(default_factory=Attendance)

    # ---- who -----------------------------------------------------------------------------------------------------------------------------

    def current(self, member: Member) -> Rank | None:
        """The live rank that ``member`` names, or None."""
        return self.roster.current(member)

    def enter(self, view: View | None) -> None:
        """``view`` is the present one from here on; its members have to say that they are in it. What was proposed is over."""
        members = view.members if view is not None else ()
        self.view, self.growth.proposal = view, None
        self.attendance = Attendance(frozenset(members), set(members))

    # ---- what is to be done --------------------------------------------------------------------------------------------------------------

    def say(self, *instructions: Instruction) -> None:
        """Have instructions performed."""
        self.output.instructions += instructions

    def write(self, record: Record) -> None:
        """Have a record journalled, before whatever is said after it."""
        self.note(record)
        self.say(Write(record))

    def note(self, record: Record) -> None:
        """What of any record counts, as it is written, or as it was before the coordinator restarted."""
        self.uptime.budget.note(record)
        self.checkpoints.sessions.note(record)

    def decide(self, policy: str, action: Action, reason: str, payload: AnyPayload | None, now_s: float) -> None:
        """Journal a decision, once: a policy that says the same again at the next tick adds nothing."""
        if (action, reason) != self.output.last_decision:
            self.output.last_decision = (action, reason)
            self.write(DecisionMade(policy, action, reason, payload, now_s))

    # ---- what must always be true --------------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Raise ``Contradiction`` with everything that cannot be true at once. Call it between events, not within one."""
        found = [*self._wrong_phase(), *self._wrong_view(), *self._wrong_ranks()]
        if found:
            raise Contradiction(f"in phase {self.phase}, generation {self.assembly.generation}: {'; '.join(found)}")

    def _wrong_phase(self) -> Iterator[str]:
        if (self.phase == Phase.END) != (self.ending.record is not None):
            yield f"the phase is {self.phase}, and the record of the end is {self.ending.record}"
        if self.phase in (Phase.FORM, Phase.RUN) and self.view is None:
            yield "there is no view"
        if self.growth.proposal is not None and self.phase == Phase.GATHER and self.liveness.grace_until_s is None:
            yield f"generation {self.growth.proposal.generation} is proposed to a view that is being left"
        if self.phase == Phase.RUN and self.attendance.missing and self.liveness.grace_until_s is None:
            yield f"the view runs, and {sorted(self.attendance.missing)} have not said that they are in it"

    def _wrong_view(self) -> Iterator[str]:
        newest = max((view.generation for view in (self.view, self.growth.proposal) if view is not None), default=0)
        if newest > self.assembly.generation:
            yield f"generation {newest} is in use, and {self.assembly.generation} is the greatest that was given out"
        if self.committed.history > max(self.assembly.history, 0):
            yield f"{self.committed} is committed, and history {self.assembly.history} is the greatest that was given out"
        members = frozenset(self.view.members) if self.view is not None else frozenset()
        if self.attendance.members != members:
            yield f"{sorted(self.attendance.members)} are said to be in the view, and {sorted(members)} are"
        for name, some in (("missing", self.attendance.missing), ("finished", self.attendance.finished)):
            if not some <= members:
                yield f"{name} has {sorted(some - members)}, who are not in the view"
        if self.phase in (Phase.FORM, Phase.RUN) and self.liveness.grace_until_s is None:
            dead = sorted(member for member in members if self.roster.current(member) is None)
            if dead:
                yield f"{dead} are in the view, and gone"

    def _wrong_ranks(self) -> Iterator[str]:
        running = self.attendance.members if self.phase == Phase.RUN and self.liveness.grace_until_s is None else frozenset()
        for slot, rank in self.roster.by_slot.items():
            if rank.member.slot != slot:
                yield f"slot {slot} holds {rank.member}"
            if rank.member.incarnation > self.roster.incarnations.get(slot, -1):
                yield f"{rank.member} lives, and was not granted"
            if rank.token in self.roster.dead_tokens:
                yield f"{rank.member} lives, and its process was given up"
            if (rank.sent_generation > rank.quiesced_generation) != (slot in self.roster.outstanding):
                yield f"{rank.member} was sent {rank.sent_generation}, quiesced in {rank.quiesced_generation}, and outstanding says else"
            if rank.phase == RankPhase.STARTING and rank.member in running:
                yield f"{rank.member} is in the running view, and builds its model"
        if gone := self.roster.outstanding - self.roster.by_slot.keys():
            yield f"slots {sorted(gone)} have to leave a view, and nobody lives there"
