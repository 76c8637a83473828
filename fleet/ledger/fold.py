"""The goodput ledger: a pure fold of the journal. Every rank-second of every slot falls into exactly one category.

No category is a remainder. A rank's time is in its own ``Spans``. The ledger adds only the time that no rank can record, from the times of
losses and of replacements (``provision``, ``detect``, ``rework``). Time without a record is ``other``, and counts as a hole.

Two times are counted apart. A process may report after another took its place, when its node was cut off and came back. The slot does not
own that time any more. No slot owns the time in which the run was stopped and held no machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from fleet.errors import LedgerError
from fleet.ledger.costs import CostBook
from fleet.ledger.gathered import (
    NOWHERE,
    CheckpointsSeen,
    HappeningCounts,
    RunSaid,
    SamplesRead,
    StepsTaken,
    Undone,
    WorldSize,
)
from fleet.ledger.rates import Met
from fleet.ledger.slots import (
    CLOCK_NOISE_US,
    DETECT,
    MAX_COMMITS,
    NAMES,
    OTHER_INDEX,
    REWORK,
    Abandoned,
    Commit,
    SlotAccount,
    as_idle,
    clip,
    cut_front,
)
from fleet.ledger.stretches import Stretches
from fleet.ledger.summary import Rollback
from fleet.ledger.tallies import Tally
from fleet.ledger.timeline import Timeline
from fleet.protocol.causes import TakenAway
from fleet.protocol.decisions import DomainLost, Interval, SettingTo
from fleet.protocol.levels import PEERS, STORE
from fleet.protocol.records import (
    STANDBY,
    CheckpointRecord,
    Committed,
    DataRead,
    DecisionMade,
    FaultRecord,
    HistoryBegun,
    LossExplained,
    Measurement,
    ProcessLost,
    Record,
    Resumed,
    RunEnded,
    RunStarted,
    Spans,
    Unobserved,
    ViewPublished,
)
from fleet.protocol.types import Member

KEPT_BOUNDARIES = 8
"""The number of durable checkpoints to which the ledger can follow a rollback."""
BUDGET, WORLD = "cost.budget_usd", "world"
END_NOISE_US = 100_000
"""Spans may end so long after the run, as clocks of hosts differ a little. The run then ends with the last span."""
FINISH_INDEX = NAMES.index("finish")


def to_us(seconds: float) -> int:
    """Whole microseconds, the ledger's own unit."""
    return round(seconds * 1e6)


class LedgerFold:
    """Folds records, in the journal's order, into rank-seconds by category.

    Live and afterwards alike: :meth:`apply` each record, ask :meth:`summary` at any time.

    Args:
        timeline: gathers the categories of each slot over time, for pictures; None saves the time.
    """

    def __init__(self, timeline: Timeline | None = None) -> None:
        self.timeline = timeline
        self.started: RunStarted | None = None
        self.said: RunSaid | None = None
        self.ended: RunEnded | None = None
        self.slots: list[SlotAccount] = []
        self.book = CostBook()
        self.steps, self.undone = StepsTaken(), Undone()
        self.last_us = self.cold_us = self.stale_us = 0
        self.stretches = Stretches()
        self.met = Met()
        self.counts, self.checkpoints = HappeningCounts(), CheckpointsSeen()
        self.measurements: dict[str, tuple[int, float]] = {}
        self.samples, self.world = SamplesRead(), WorldSize()
        self.tally = Tally()
        self._closed: LedgerFold | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For a snapshot: all fields but the derived one."""
        return self.__dict__ | {"_closed": None}

    def apply(self, record: Record) -> None:
        """Add one record. Raises LedgerError when the rank-seconds overlap or leave a gap; names the member and the times."""
        if self.started is None and not isinstance(record, RunStarted):
            raise LedgerError(f"the first record is {type(record).__name__}, not RunStarted")
        self._closed = None
        HANDLERS.get(type(record), LedgerFold._seen)(self, record)
        if type(record) is not Spans or record.codes.endswith(STANDBY):
            self.tally.add(record)

    def apply_all(self, records: Iterable[Record]) -> Self:
        """Add every record; returns the ledger itself."""
        for record in records:
            self.apply(record)
        return self

    # ---- the run

    def _run_started(self, record: RunStarted) -> None:
        if self.started is not None:
            raise LedgerError(f"a second RunStarted at {record.at_s} s: the run {self.started.run} started at {self.started.at_s} s")
        self.started = record
        self.said = said = RunSaid(record)
        self.tally.started(said.kept)
        self.world.ranks = record.world
        self.met = Met(said.fault_rates)
        self.last_us = start_us = to_us(record.at_s)
        self.stretches = Stretches(start_us)
        self.slots = [SlotAccount(slot, start_us) for slot in range(record.world + record.spares)]
        if self.timeline is not None:
            self.timeline.start(len(self.slots), start_us)

    def _seen(self, record: Any) -> None:
        self.last_us = max(self.last_us, to_us(record.at_s))

    def _resumed(self, record: Resumed) -> None:
        """After a gap: every slot was empty since the last record, and the run held no machine."""
        at_us, ended = to_us(record.at_s), self.ended
        if ended is not None:
            self.last_us = to_us(ended.at_s)
            self.resolve_all()
            self.close_slots(self.last_us)
            self.ended = None
        if at_us < self.last_us:
            raise LedgerError(f"the run resumed at {record.at_s} s, before its last record at {self.last_us / 1e6} s")
        if record.gap:
            self._stopped(at_us, ended, record.cause)
        self.last_us = at_us

    def _stopped(self, back_us: int, ended: RunEnded | None, cause: str) -> None:
        """The run held no machine since the last record, and all processes were gone by then."""
        gone_us = min(back_us, max(self.last_us, *(slot.cursor_us for slot in self.slots)))
        for slot in self.slots:
            if slot.incarnation >= 0:
                self._hole(slot, gone_us if slot.lost_us is None else min(slot.lost_us, gone_us))
            self._vacant(slot, gone_us)
            slot.stop(gone_us, back_us)
        self.stretches.stopped(gone_us, back_us, ended)
        self.book.outage(gone_us, back_us, cause)

    def _run_ended(self, record: RunEnded) -> None:
        self.ended = record

    # ---- spans

    def _slot(self, member: Member) -> SlotAccount:
        if not 0 <= member.slot < len(self.slots):
            raise LedgerError(f"{member} is in no slot of this run, whose slots are 0 to {len(self.slots) - 1}")
        return self.slots[member.slot]

    def _spans(self, record: Spans) -> None:
        if self.ended is not None:
            record = clip(record, to_us(self.ended.at_s))
        slot = self._slot(record.member)
        if slot.is_past(record.member):
            self.stale_us += sum(record.durations_us)
            return
        record = self._in_life(record)
        if not record.codes:
            return
        record = self.book.apart.named(self._enter(slot, record))
        members, spares = self.book.shape.get(record.generation, (self.world.ranks, ()))
        if record.member in spares:
            record, members = as_idle(record), 0
        self.samples.cover.add(record)
        if self.timeline is not None:
            self.timeline.add(slot.slot, record)
        floor = min(self.undone.views.of(record.generation, NOWHERE), self.undone.histories.of(record.history, NOWHERE))
        folded = slot.fold(record, floor, members)
        if folded.first_commit_us is not None and folded.last_commit_us is not None:
            self.book.stepped(record.generation, folded.first_commit_us, folded.last_commit_us)
            self.stretches.stepped(folded.first_step_us, folded.last_commit_us)
            self.steps.gaps_us.extend(folded.gaps_us)
            self.steps.by_ranks += folded.commits
            self.steps.productive_us += folded.productive_us
        for charge in folded.charges:
            self.book.charge_span(charge)
        for abandoned in folded.abandoned:
            self._abandon(abandoned)
        if len(slot.commits) > MAX_COMMITS:
            slot.compact(sorted({*self.undone.boundaries, slot.commits[MAX_COMMITS // 2].last}))
        self.last_us = max(self.last_us, slot.cursor_us)

    def _in_life(self, record: Spans) -> Spans:
        """Without the process's time after it was declared lost: by then its slot was empty, or another process had it."""
        loss_us = self._loss_us(record.member)
        if loss_us is None:
            return record
        lived = clip(record, loss_us)
        self.stale_us += sum(record.durations_us) - sum(lived.durations_us)
        return lived

    def _enter(self, slot: SlotAccount, record: Spans) -> Spans:
        """Check that the record follows the slot's last one; a new incarnation fills the time before it."""
        member = record.member
        if member.incarnation == slot.incarnation:
            if record.start_us != slot.cursor_us:
                what = "overlap" if record.start_us < slot.cursor_us else "leave a gap"
                raise LedgerError(f"{member}: spans {what}: they ended at {slot.cursor_us} us, the next start at {record.start_us} us")
            return record
        self._replace(slot, record.start_us)
        slot.join(member.incarnation, self._loss_us(member))
        lap = slot.cursor_us - record.start_us
        if lap > CLOCK_NOISE_US and record.start_us >= self.stretches.back_us:
            raise LedgerError(
                f"{member}: spans overlap: slot {slot.slot} was taken until {slot.cursor_us} us, they start at {record.start_us} us"
            )
        return cut_front(record, lap) if lap > 0 else record

    def _loss_us(self, member: Member) -> int | None:
        loss = self.book.losses.get(str(member))
        return loss.at_us if loss is not None else None

    def _replace(self, slot: SlotAccount, start_us: int) -> None:
        """Fill a slot's time up to the first span of its next process."""
        for abandoned in slot.abandon():
            self._abandon(abandoned)
        death_us = start_us if slot.lost_us is None else min(slot.lost_us, start_us)
        if slot.incarnation >= 0:
            self._hole(slot, death_us)
        self._vacant(slot, start_us)

    def _vacant(self, slot: SlotAccount, end_us: int) -> None:
        """The slot was empty until ``end_us``."""
        category = slot.vacant
        duration = self._fill(slot, end_us, category)
        if not duration:
            return
        if slot.cold:
            self.cold_us += duration
        if slot.incarnation >= 0:
            self.book.charge(category, duration, (f"outage-{len(self.stretches.gaps)}" if slot.stopped else str(slot.member),))

    def _fill(self, slot: SlotAccount, end_us: int, category: int) -> int:
        """The slot's time up to ``end_us`` is of one category; returns the microseconds."""
        start_us, duration = slot.cursor_us, slot.fill(end_us, category)
        if self.timeline is not None:
            self.timeline.paint(slot.slot, start_us, duration, category)
        return duration

    def _hole(self, slot: SlotAccount, end_us: int) -> None:
        """Time without a record, from a process's last span to its death."""
        duration = self._fill(slot, end_us, OTHER_INDEX)
        if duration > CLOCK_NOISE_US:
            slot.holes += 1
            slot.hole_us += duration

    def _unobserved(self, record: Unobserved) -> None:
        """Lenient where spans are strict: the node with the exact times is gone."""
        slot = self._slot(record.member)
        if slot.is_past(record.member):
            self.stale_us += record.end_us - record.start_us
            return
        if record.member.incarnation > slot.incarnation:
            self._replace(slot, record.start_us)
            slot.join(record.member.incarnation, self._loss_us(record.member))
        limits = (self._loss_us(record.member), None if self.ended is None else to_us(self.ended.at_s))
        end_us = min([record.end_us, *(limit for limit in limits if limit is not None)])
        self._hole(slot, min(record.start_us, end_us))
        self._fill(slot, end_us, OTHER_INDEX)

    # ---- rework

    def _abandon(self, abandoned: Abandoned) -> None:
        """Delay the verdict until the next view: the loss that broke this view may not be on record yet."""
        causes = self.book.causes_after(abandoned.generation)
        if causes is None and not abandoned.rolled_back:
            self.undone.held.setdefault(abandoned.generation, []).append(abandoned)
        else:
            self._resolve(abandoned)

    def _resolve(self, abandoned: Abandoned) -> None:
        """Rework, but for the part after the loss that broke the generation: that part is detection."""
        broke_us = None if abandoned.rolled_back else self.book.broke_us(abandoned.generation)
        slot = self.slots[abandoned.slot]
        for start_us, duration, _ in abandoned.pieces:
            end_us = start_us + duration
            split_us = end_us if broke_us is None else min(max(broke_us, start_us), end_us)
            for index, begin_us, stop_us in ((REWORK, start_us, split_us), (DETECT, split_us, end_us)):
                if stop_us > begin_us:
                    slot.us[index] += stop_us - begin_us
                    self.book.charge_after(index, stop_us - begin_us, abandoned.generation)
                    if self.timeline is not None:
                        self.timeline.recolour(slot.slot, begin_us, stop_us - begin_us, index)

    def _resolve_before(self, generation: int) -> None:
        held = self.undone.held
        for earlier in [g for g in held if g < generation]:
            for abandoned in held.pop(earlier):
                self._resolve(abandoned)

    def resolve_all(self) -> None:
        for slot in self.slots:
            for abandoned in slot.abandon():
                self._abandon(abandoned)
        self._resolve_before(NOWHERE)
        self.book.close()

    def _roll_back(self, step: int) -> int:
        """Move all steps committed after ``step`` to rework; returns the microseconds."""
        self.undone.boundaries = [boundary for boundary in self.undone.boundaries if boundary <= step]
        moved_us = 0
        for slot in self.slots:
            if slot.commits and slot.commits[-1].last > step:
                for commit in slot.roll_back(step):
                    moved_us += self._take_back(slot, commit)
        return moved_us

    def _take_back(self, slot: SlotAccount, commit: Commit) -> int:
        for index, duration in enumerate(commit.step_us):
            self.undone.reclassified_us[index] += duration
        self.steps.by_ranks -= commit.rank_steps
        self.steps.productive_us -= commit.productive_us
        if self.timeline is not None:
            self.timeline.recolour(slot.slot, commit.start_us, commit.end_us - commit.start_us, REWORK)
        return sum(commit.step_us)

    # ---- the other records

    def _process_lost(self, record: ProcessLost) -> None:
        """A process that ended with its cluster is no loss of its own: the outage is the loss."""
        self._seen(record)
        slot = self._slot(record.member)
        if self.stretches.gaps and ((slot.stopped and slot.is_past(record.member)) or to_us(record.at_s) <= self.stretches.back_us):
            return
        self.book.lost(record, to_us(record.at_s))
        if record.generation >= 0:
            self._trained(record.at_s)
            self.met.lost(record)
        if record.member.incarnation == slot.incarnation:
            slot.lost_us, slot.away = to_us(record.at_s), isinstance(record.cause, TakenAway)
        if self.timeline is not None:
            self.timeline.mark(record.at_s, "loss", f"{record.member} lost: {record.cause}", record.member.slot)

    def _explained(self, record: LossExplained) -> None:
        self._seen(record)
        self.book.explained(record)

    def _view_published(self, record: ViewPublished) -> None:
        assert self.started is not None
        self._seen(record)
        self.book.published(record, self.world.ranks)
        self.counts.views += 1
        self.counts.members = len(record.view.computing)
        self.steps.history = max(self.steps.history, record.view.state.history)
        if self.timeline is not None:
            text = f"view {record.view.generation}: {self.counts.members} members, {record.reason}"
            self.timeline.mark(record.at_s, "view", text, None)
        if record.graceful:
            return
        self.undone.views.add(record.view.generation, record.view.state.step)
        self._resolve_before(record.view.generation)
        moved_us = self._roll_back(record.view.state.step) + self.undone.owed_us
        self.undone.owed_us = 0
        self.book.charge(REWORK, moved_us, self.book.causes_after(record.view.generation - 1) or ())

    def _history_begun(self, record: HistoryBegun) -> None:
        """Roll back to the history's first state. The view that follows names the losses that caused it."""
        self._seen(record)
        steps, undone, back_to = self.steps, self.undone, record.from_state.step
        undone.histories.add(record.history, back_to)
        self.samples.histories.append((record.history, back_to))
        undone.owed_us += self._roll_back(back_to)
        taken_back = max(0, steps.step - back_to)
        steps.rolled_back += taken_back
        undone.rollbacks.append(Rollback(record.at_s, back_to, taken_back))
        steps.history, steps.step = record.history, min(steps.step, back_to)

    def _committed(self, record: Committed) -> None:
        self._seen(record)
        self.book.committed(record.state, to_us(record.at_s))
        self._trained(record.at_s)
        steps = self.steps
        steps.commits += max(0, record.state.step - steps.step)
        steps.step = max(steps.step, record.state.step)
        steps.history = max(steps.history, record.state.history)

    def _trained(self, now_s: float) -> None:
        self.met.trained(self.stretches.trained_us(to_us(now_s), None) / 1e6)

    def _fault(self, record: FaultRecord) -> None:
        self.book.fault(record)
        self._trained(record.at_s)
        self.met.fault(record)
        self.counts.faults[record.fault.kind, record.phase] += 1
        if self.timeline is not None and record.phase not in ("planned", "aimed"):
            text = f"{record.fault.id} {record.phase}: {record.fault.kind} ({record.fault.component})"
            self.timeline.mark(record.at_s, f"fault-{record.phase}", text, record.fault.slot)

    def _checkpointed(self, record: CheckpointRecord) -> None:
        self._seen(record)
        self.checkpoints.counts[record.level, record.phase] += 1
        if record.phase != "durable" or record.level != STORE:
            return  # copies in memory are too frequent to keep each step, and the last is never far back
        self.checkpoints.newest, undone = record, self.undone
        if not undone.boundaries or record.state.step > undone.boundaries[-1]:
            undone.boundaries = [*undone.boundaries, record.state.step][-KEPT_BOUNDARIES:]
            for slot in self.slots:
                slot.compact(undone.boundaries)

    def _decided(self, record: DecisionMade) -> None:
        self._seen(record)
        payload = record.payload
        if isinstance(payload, Interval) and record.policy == "interval":
            self.checkpoints.interval_s = payload.interval_s
        elif isinstance(payload, Interval) and record.policy == f"interval of {PEERS}":
            self.checkpoints.copy_interval_s = payload.interval_s
        elif isinstance(payload, DomainLost):
            self.book.domain_lost(payload)
        elif isinstance(payload, SettingTo) and payload.key == BUDGET:
            assert self.said is not None
            self.said.budget_usd = payload.value
        elif isinstance(payload, SettingTo) and payload.key == WORLD:
            self._resized(int(payload.value), to_us(record.at_s))

    def _resized(self, world: int, at_us: int) -> None:
        """The run has another world size from now on."""
        held_us = at_us - self.stretches.start_us - self.stretches.down_us
        self.world.changes.append((world - self.world.ranks, held_us, self.stretches.trained_us(at_us, None)))
        self.world.ranks = world

    def _measured(self, record: Measurement) -> None:
        self._seen(record)
        self.measurements[record.name] = (record.state.step, record.value)

    def _read(self, record: DataRead) -> None:
        self._seen(record)
        self.samples.reads = [read for read in self.samples.reads if read.step < record.step] + [record]

    def close_slots(self, end_us: int) -> None:
        """Fill every slot up to the end: a released process finishes, any other slot is empty."""
        latest = max(self.slots, key=lambda slot: slot.cursor_us)
        if latest.cursor_us > end_us + END_NOISE_US:
            raise LedgerError(f"{latest.member}: spans until {latest.cursor_us} us, after the run ended at {end_us} us")
        end_us = max(end_us, latest.cursor_us)
        for slot in self.slots:
            if slot.incarnation >= 0 and slot.lost_us is not None:
                self._hole(slot, min(slot.lost_us, end_us))
            if slot.empty:
                self._vacant(slot, end_us)
            else:
                self._fill(slot, end_us, FINISH_INDEX)
            slot.lost_us = end_us if slot.lost_us is None else slot.lost_us


HANDLERS: Mapping[type, Callable[[LedgerFold, Any], None]] = {
    Spans: LedgerFold._spans,
    RunStarted: LedgerFold._run_started,
    Resumed: LedgerFold._resumed,
    ProcessLost: LedgerFold._process_lost,
    ViewPublished: LedgerFold._view_published,
    Committed: LedgerFold._committed,
    HistoryBegun: LedgerFold._history_begun,
    Unobserved: LedgerFold._unobserved,
    FaultRecord: LedgerFold._fault,
    CheckpointRecord: LedgerFold._checkpointed,
    DecisionMade: LedgerFold._decided,
    Measurement: LedgerFold._measured,
    DataRead: LedgerFold._read,
    RunEnded: LedgerFold._run_ended,
    LossExplained: LedgerFold._explained,
}
"""For a record of any other type, the ledger takes only its time."""
