"""The present state of a run, as data: ``MachineState``.

Fields that belong together are one object, with the small functions that need that object alone. The other functions of this package take
the whole state and change it; no other code changes it. ``validate`` finds contradictions in it. The simulator calls it after each event, a
live coordinator now and then, see ``audit.py``.
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
"""Seconds after a hang in which a further one counts as the same hang."""


class Phase(StrEnum):
    """The phase of the run.

    GATHER: the members of the last view report their states. FORM: a view is published, and its members meet. RUN: they step. CONCLUDE:
    they run the code behind the loop. END is final.
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
        why, reason: the reason for code, and in words.
        until_s: until when the run waits for ranks.
        kept_s: until when it waits for a store that fails.
        generation, sent_s: the view that was told last, and when.
        answer_s: until when ranks that were called out may report their states.
        asked: ranks that were asked to write the state.
        could_not: asked ranks that could not.
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
        state: the run's last state.
        by, reason: the rank of that loop, and its reason.
        generation, sent_s: the view told last, and when.
    """

    state: StateId
    by: Member
    reason: str
    generation: int = -1
    sent_s: float = 0.0


@dataclass(slots=True)
class Ending:
    """The known facts of the run's end.

    Attributes:
        digest: the digest of the last state.
        why, reason: the reason of the end once the code behind the loop has run.
        left: members whose train function has returned.
        since_s: when members went on behind the loop.
        stopping: set once the run is told to stop; see ``stopping.py``.
        order: set once a loop has ended the run.
        record: the last record of the journal, once it is written.
        released_s: by rank, when it was last told that the run is over.
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
        """The code behind the loop runs. If no fault comes, the run ends for this reason."""
        self.why, self.reason, self.since_s = why, reason, now_s

    def roll_back(self, start: StateId, history: int) -> None:
        """Another history begins at ``start``. If a loop has ended the run at that step, it still ends there; else the order is dropped."""
        if self.order is not None:
            at_the_end = start.step == self.order.state.step
            self.order = replace(self.order, state=StateId(history, start.step), generation=-1) if at_the_end else None


@dataclass(slots=True)
class HangEvidence:
    """Numbers the hangs of a run.

    Attributes:
        number: number of the last hang.
        last_s: time of the last hang.
    """

    number: int = 0
    last_s: float = float("-inf")

    def wanted(self, now_s: float) -> bool:
        """Whether this is a new hang, and not a consequence of the last one."""
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
        away: silent nodes that all ranks wait for; see ``partitions.py``.
        alone: the coordinator hears no node at all.
        stuck_at: the committed state when no member moved the last time.
        hangs: the numbers of hangs.
    """

    grace_until_s: float | None = None
    away: frozenset[str] = frozenset()
    alone: bool = False
    stuck_at: StateId | None = None
    hangs: HangEvidence = field(default_factory=HangEvidence)


@dataclass(slots=True)
class Uptime:
    """How long the run has had its machines, and their cost.

    Attributes:
        started_s: when the run began.
        budget: the budget, and the warnings of it.
        down_s: seconds since then without machines.
        ticked_s: when the last tick came.
    """

    started_s: float
    budget: BudgetWatch
    down_s: float = 0.0
    ticked_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.ticked_s = self.started_s

    def held_s(self, now_s: float) -> float:
        """Seconds for which the run has had its machines."""
        return now_s - self.started_s - self.down_s


@dataclass(frozen=True, slots=True)
class RunPolicies:
    """Policies on the run as a whole.

    Attributes:
        recovery: chooses the members of the next view, and whether the run goes on at all.
        placement: chooses places of shards and copies.
    """

    recovery: RecoveryPolicy
    placement: PlacementPolicy


@dataclass(slots=True)
class Attendance:
    """The members of the present view, and their progress.

    Attributes:
        members: all members.
        missing: members that have not yet reported ``Formed``.
        finished: members that have committed the last step.
    """

    members: frozenset[Member] = frozenset()
    missing: set[Member] = field(default_factory=set)
    finished: set[Member] = field(default_factory=set)

    def all_finished(self) -> bool:
        """Whether all members have committed the last step."""
        return 0 < len(self.members) == len(self.finished)


@dataclass(slots=True)
class Assembly:
    """The change from one view to the next.

    Attributes:
        history, generation: the greatest numbers that were given out.
        since_s: when the run last had a working view.
        deadline_s: until when members have to leave a view, or to form it.
        sent_s: when the last message about that was sent.
        fresh_until_s: until when the run waits for a fresh process, if no rank has the initial state any more.
        in_person: the training loop itself has to answer when it is told to leave.
        incomplete: members of the view ``incomplete_in``, if they found that none of them holds some part of a sharded state; () once a
            view runs.
        lacking: the requirements that the newest view's placement does not meet.
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
        """Take in numbers of a rank's message, which may be newer than the journal: a used number is never used again."""
        self.generation = max(self.generation, generation)
        self.history = max(self.history, state.history if state is not None else -1)


@dataclass(slots=True)
class Growth:
    """The change of a view beside the running steps; see ``proposals.py``.

    Attributes:
        proposed_s: when the last view was proposed.
        proposal: the view that members form beside the running steps, and enter at a step boundary.
        not_before_s: when spares may join again.
    """

    proposed_s: float
    proposal: View | None = None
    not_before_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.not_before_s = self.proposed_s


@dataclass(slots=True)
class Trained:
    """The model and its data, from the ranks' reports.

    Attributes:
        figures: the ranks' values by shard.
        build: the build of the run, if it is known.
        compared: this session's build was compared with ``build``; see ``building.py``.
        data: the data set.
        files: journalled files: (digest of the data, number of the first file) -> whether their digests are known.
    """

    figures: ShardFigures
    build: Build | None = None
    compared: bool = False
    data: DataRead | None = None
    files: dict[tuple[str, int], bool] = field(default_factory=dict)

    def note_build(self, build: Build) -> bool:
        """Note this session's build. Gives whether it is new."""
        news, self.build, self.compared = build != self.build, build, True
        return news

    def note_data(self, read: DataRead) -> bool:
        """Note the data set. Gives whether it is new: once for each history, since the steps of a new history may read other data."""
        if news := _comparable(read) != _comparable(self.data):
            self.data = read
        return news

    def note_files(self, read: DataFiles) -> bool:
        """Note files. Gives whether they are new: once, and again when their digests are known."""
        key, digested = (read.data_sha256, read.first), all(file.digest for file in read.files)
        if news := key not in self.files or (digested and not self.files[key]):
            self.files[key] = digested
        return news


def _comparable(read: DataRead | None) -> DataRead | None:
    """The fields of ``read`` whose change counts as new."""
    return replace(read, member=Member(0, 0), at_s=0.0, step=0) if read is not None else None


@dataclass(slots=True)
class Output:
    """The results of events.

    Attributes:
        event: number of the present event.
        instructions: the instructions of the present event so far, in order.
        last_decision: action and reason of the newest decision.
    """

    event: int = 0
    instructions: list[Instruction] = field(default_factory=list)
    last_decision: tuple[str, str] | None = None

    def begin(self) -> None:
        """Begin the next event."""
        self.event, self.instructions = self.event + 1, []


class Contradiction(AssertionError):
    """Two facts in ``MachineState`` cannot both be true: a bug of this package."""


@dataclass(slots=True)
class MachineState:
    """The whole state, from which ``FleetMachine`` decides. Times are on the run's clock.

    Attributes:
        settings: the present settings; some change while the run goes on.
        policies: the policies that no other part of the state has.
        phase: the phase of the run.
        view: the present view; between views, the last one.
        attendance: the view's members, and their progress.
        committed: the newest state that every member of a view has reported.
        assembly: the change to the next view.
        growth: the change of the present view beside the running steps.
        ending: the known facts of the end.
        roster: the live rank of each slot, and their nodes.
        liveness: whether nodes are heard, and whether ranks move.
        losses: the lost ranks, and the causes.
        doubts: the ranks' testimonies of differences.
        stragglers: the slow ranks, and the actions against them.
        progress: the progress time-out.
        checkpoints: the checkpoints in the store, and the copies in memories.
        trained: the model and its data.
        once: the tasks that one rank does for all.
        uptime: how long the run has had its machines, and their cost.
        output: the results of the present event so far.
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

    # ---- members -------------------------------------------------------------------------------------------------------------------------

    def current(self, member: Member) -> Rank | None:
        """The live rank that ``member`` names, or None."""
        return self.roster.current(member)

    def enter(self, view: View | None) -> None:
        """Make ``view`` the present one. Its members have to report that they are in it. A proposal is dropped."""
        members = view.members if view is not None else ()
        self.view, self.growth.proposal = view, None
        self.attendance = Attendance(frozenset(members), set(members))

    # ---- output --------------------------------------------------------------------------------------------------------------------------

    def say(self, *instructions: Instruction) -> None:
        """Have instructions performed."""
        self.output.instructions += instructions

    def write(self, record: Record) -> None:
        """Have a record journalled, before the instructions that come after it."""
        self.note(record)
        self.say(Write(record))

    def note(self, record: Record) -> None:
        """Count a record for budget and sessions: when it is written, and again after a restart of the coordinator."""
        self.uptime.budget.note(record)
        self.checkpoints.sessions.note(record)

    def decide(self, policy: str, action: Action, reason: str, payload: AnyPayload | None, now_s: float) -> None:
        """Journal a decision, once: the same decision at the next tick adds no record."""
        if (action, reason) != self.output.last_decision:
            self.output.last_decision = (action, reason)
            self.write(DecisionMade(policy, action, reason, payload, now_s))

    # ---- consistency ---------------------------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Raise ``Contradiction`` with all facts that cannot be true together. Call it between events, not within one."""
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
                yield f"{name} has {sorted(some - members)}, which are not in the view"
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
            yield f"slots {sorted(gone)} have to leave a view, and have no live process"
