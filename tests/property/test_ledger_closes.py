"""Whatever happens to a run, and in whatever order its spans come in: the ledger closes, and says what the run itself knows."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.errors import LedgerError
from fleet.ledger.goodput import Ledger
from fleet.ledger.summary import STEP_NAMES, LedgerSummary
from fleet.protocol import records as r
from fleet.protocol.causes import ClusterEnded, ProcessEnded
from fleet.protocol.records import FLOPS
from fleet.protocol.types import Member, StateId, View

RECORDED = {code: name for code, name in r.CATEGORIES.items() if code not in "cxwdRDP"}


@dataclass
class Row:
    code: str
    duration_us: int
    generation: int
    history: int
    step: int


@dataclass
class Proc:
    """One process of a slot, and all it did."""

    member: Member
    start_us: int
    now_us: int
    rows: list[Row] = field(default_factory=list)


class RandomRun:
    """A run to which random things happen. It keeps its own account, by other means than the ledger's: it knows what was rolled back."""

    def __init__(self, rng: random.Random, world: int, spares: int, events: int) -> None:
        self.rng, self.world, self.slots = rng, world, world + spares
        self.now_us, self.generation, self.history, self.step, self.durable = 0, 0, 0, 0, 0
        self.out: list[tuple[int, int, r.Record]] = []
        self.procs: dict[int, Proc] = {}
        self.all: list[tuple[Proc, int]] = []
        self.in_view: list[int] = []
        self.provision_us = self.down_us = self.cold_us = 0
        self.done: list[tuple[int, int]] = []
        self.emit(r.RunStarted(r.VERSION, "random", 0.0, 0.0, world, spares, 16, "{}"))
        for slot in range(self.slots):
            self.begin(slot, 0, cold=True)
        self.form(())
        for _ in range(events):
            self.steps(rng.randint(0, 4))
            rng.choice([self.lose, self.lose, self.join, self.checkpoint, self.outage])()
        self.steps(2)
        self.end()

    # ---- what can happen

    def begin(self, slot: int, empty_since_us: int, *, cold: bool = False) -> None:
        """A process starts in an empty slot, some time after it became empty; ``cold``: with the run itself, and not for a lost one."""
        known = [proc.member.incarnation for proc, _ in self.all if proc.member.slot == slot]
        start_us = empty_since_us + self.rng.randint(0, 5_000)
        self.provision_us += start_us - empty_since_us
        self.cold_us += cold * (start_us - empty_since_us)
        proc = Proc(Member(slot, max(known, default=-1) + 1), start_us, start_us)
        self.procs[slot] = proc
        self.all.append((proc, 0))
        self.do(slot, "i", self.rng.randint(1, 9_000), -1)

    def form(self, causes: tuple[str, ...], graceful: bool = False) -> None:
        """Everyone who is there waits until a view is published, then forms it."""
        alive = sorted(self.procs)
        self.in_view = sorted(self.rng.sample(alive, min(len(alive), self.world)))
        self.now_us = max([self.now_us, *(proc.now_us for proc in self.procs.values())])
        for slot in alive:
            self.wait(slot, self.now_us)
        self.generation += 1
        members = tuple(self.procs[slot].member for slot in self.in_view)
        ranges = tuple((rank, rank + 1) for rank in range(len(members)))
        view = View(self.generation, members, ranges, 0, (), StateId(self.history, self.step), "h:1")
        self.emit(r.ViewPublished(view, self.now_us / 1e6, "random", graceful, causes))
        for slot in self.in_view:
            self.do(slot, "f", self.rng.randint(0, 900))
            self.do(slot, "r", self.rng.randint(0, 300))

    def steps(self, count: int) -> None:
        for _ in range(count):
            length_us = self.rng.randint(40, 2_000)
            self.now_us = max(self.now_us, *(self.procs[slot].now_us for slot in self.in_view)) + length_us
            for slot in self.in_view:
                self.attempt(slot, self.now_us, "K")
            self.step += 1
            self.emit(r.Committed(StateId(self.history, self.step), self.now_us / 1e6))

    def lose(self) -> None:
        """Some members, perhaps all, die in the middle of an attempt; the others notice a little later."""
        lost = self.rng.sample(self.in_view, self.rng.randint(1, len(self.in_view)))
        self.now_us = max(self.procs[slot].now_us for slot in self.in_view)
        died_us = self.now_us + self.rng.randint(1, 2_000)
        for slot in lost:
            member = self.procs[slot].member
            self.attempt(slot, died_us, "")
            self.emit(r.ProcessLost(member, ProcessEnded(-9), None, self.generation, -1, -1, "", at_s=died_us / 1e6), died_us)
        for slot in set(self.in_view) - set(lost):
            self.attempt(slot, died_us + self.rng.randint(0, 500), self.rng.choice("AH"))
        causes = tuple(str(self.procs[slot].member) for slot in lost)
        everyone = len(lost) == len(self.in_view)
        for slot in lost:
            self.begin(slot, died_us)
        self.now_us = died_us
        if everyone:
            self.roll_back(died_us)
        self.form(causes)

    def join(self) -> None:
        self.form((), graceful=True)

    def checkpoint(self) -> None:
        for slot in self.in_view:
            self.do(slot, "k", self.rng.randint(0, 400))
        self.durable = self.step
        self.emit(r.CheckpointRecord(f"c{self.step}", "durable", StateId(self.history, self.step), self.now_us / 1e6))

    def outage(self) -> None:
        """Everything ends at once, in order or with nobody there to write it down; another cluster goes on from the checkpoint."""
        self.now_us = max(proc.now_us for proc in self.procs.values())
        for slot in self.procs:
            self.wait(slot, self.now_us)
        self.all = [(proc, until or self.now_us) for proc, until in self.all]
        if self.rng.random() < 0.5:
            self.emit(r.RunEnded("stopped", "by hand", self.now_us / 1e6, "", ""))
        back_us = self.now_us + self.rng.randint(1, 50_000)
        self.down_us += back_us - self.now_us
        self.emit(r.Resumed(back_us / 1e6, back_us / 1e6, "resume"), back_us)
        for proc in self.procs.values():
            if self.rng.random() < 0.5:
                self.emit(r.ProcessLost(proc.member, ClusterEnded(), None, -1, -1, -1, "", at_s=back_us / 1e6), back_us)
        for slot in list(self.procs):
            self.begin(slot, back_us, cold=True)
        self.now_us = back_us
        self.roll_back(back_us)
        self.form(())

    def end(self) -> None:
        self.now_us = max(proc.now_us for proc in self.procs.values())
        end_us = self.now_us + self.rng.randint(0, 5_000)
        for slot in self.procs:
            self.do(slot, "e", self.rng.randint(0, 400))
        end_us = max(end_us, *(proc.now_us for proc in self.procs.values()))
        self.finish_us = sum(end_us - proc.now_us for proc in self.procs.values())
        self.emit(r.RunEnded("completed", "", end_us / 1e6, "", ""), end_us)
        self.end_us, self.wall_us = end_us, end_us - self.down_us
        for proc, until in self.all:
            self.report(proc, until)

    # ---- how it is written down

    def emit(self, record: r.Record, at_us: int | None = None) -> None:
        self.out.append((self.now_us if at_us is None else at_us, len(self.out), record))

    def do(self, slot: int, code: str, duration_us: int, generation: int | None = None) -> None:
        proc = self.procs[slot]
        proc.rows.append(Row(code, duration_us, self.generation if generation is None else generation, self.history, self.step))
        proc.now_us += duration_us

    def wait(self, slot: int, until_us: int) -> None:
        in_view = slot in self.in_view and any(row.code != "i" for row in self.procs[slot].rows)
        self.do(slot, "f" if in_view else "s", until_us - self.procs[slot].now_us)

    def attempt(self, slot: int, until_us: int, mark: str) -> None:
        proc = self.procs[slot]
        if until_us < proc.now_us:
            raise AssertionError(f"slot {slot} is at {proc.now_us} us already")
        left = until_us - proc.now_us
        for code in "dcxw"[self.rng.randint(0, 3) :]:
            part = self.rng.randint(0, left)
            self.do(slot, code, part)
            left -= part
        self.do(slot, "c", left)
        if mark:
            self.do(slot, mark, 0)
        if mark == "K":
            self.done.append((self.step + 1, self.step_us(proc)))

    @staticmethod
    def step_us(proc: Proc) -> int:
        """What counts of the attempt that the last row commits."""
        kept: list[Row] = []
        history = -1
        for row in proc.rows[:-1]:
            if row.code in "KA" or row.history != history:
                kept, history = [], row.history
            if row.code == "H":
                kept = [other for other in kept if other.code not in "xw"]
            elif row.code in r.STEP_CODES:
                kept.append(row)
        return sum(row.duration_us for row in kept)

    def roll_back(self, at_us: int) -> None:
        self.history += 1
        self.emit(r.HistoryBegun(self.history, StateId(self.history - 1, self.durable), at_us / 1e6, "nobody is left"), at_us)
        self.done = [(step, duration) for step, duration in self.done if step <= self.durable]
        self.step = self.durable

    def report(self, proc: Proc, until_us: int) -> None:
        """Cut a process's time into records that come in late, but in order, and before an outage when there is one."""
        start_us, chunk = proc.start_us, list[Row]()
        for row in [*proc.rows, None]:
            other = row is not None and chunk and (row.generation, row.history) != (chunk[0].generation, chunk[0].history)
            if chunk and (row is None or other or self.rng.random() < 0.2):
                end_us = start_us + sum(item.duration_us for item in chunk)
                self.send(proc, chunk, start_us, end_us, until_us)
                start_us, chunk = end_us, []
            if row is not None:
                chunk.append(row)

    def send(self, proc: Proc, chunk: list[Row], start_us: int, end_us: int, until_us: int) -> None:
        codes, durations = "".join(row.code for row in chunk), tuple(row.duration_us for row in chunk)
        first = chunk[0]
        spans = r.Spans(proc.member, first.generation, first.history, first.step, start_us, durations, codes)
        earliest = max(
            [end_us, *(at for at, _, record in self.out if isinstance(record, r.Spans) and record.member.slot == proc.member.slot)]
        )
        at_us = earliest + self.rng.choice([0, 0, 300, 4_000])
        self.emit(spans, min(at_us, until_us) if until_us else at_us)

    @property
    def journal(self) -> list[r.Record]:
        return [record for _, _, record in sorted(self.out, key=lambda item: item[:2])]

    def recorded_us(self, code: str) -> int:
        return sum(row.duration_us for proc, _ in self.all for row in proc.rows if row.code == code)


runs = st.builds(
    RandomRun,
    st.randoms(use_true_random=False),
    st.integers(1, 4),
    st.integers(0, 2),
    st.integers(0, 6),
)


def total(summary: LedgerSummary, *names: str) -> float:
    return sum(summary.categories[name] for name in names)


@settings(max_examples=60)
@given(runs)
def test_the_ledger_closes_and_agrees_with_the_run(run: RandomRun) -> None:
    summary = Ledger().apply_all(run.journal).summary()
    assert summary.closes
    assert summary.pending_s == 0
    assert total(summary, *summary.categories) == pytest.approx(run.slots * run.wall_us / 1e6, abs=1e-6)
    assert all(value >= 0 for categories in (summary.categories, *summary.slots) for value in categories.values())
    assert all(sum(slot.values()) == pytest.approx(run.wall_us / 1e6, abs=1e-6) for slot in summary.slots)
    assert total(summary, *STEP_NAMES) == pytest.approx(sum(duration for _, duration in run.done) / 1e6, abs=1e-6)
    assert total(summary, "provision") == pytest.approx(run.provision_us / 1e6, abs=1e-6)
    assert summary.cold_provision_s == pytest.approx(run.cold_us / 1e6, abs=1e-6)
    assert summary.down_s == pytest.approx(run.down_us / 1e6, abs=1e-9)
    assert sum(item.down_s for item in summary.incidents) == pytest.approx(summary.down_s)
    assert summary.rank_s == pytest.approx(run.slots * run.wall_us / 1e6)
    assert summary.goodput == pytest.approx(total(summary, *STEP_NAMES) / (run.world * run.wall_us / 1e6))
    assert total(summary, "other") == 0
    for code, name in RECORDED.items():
        extra_us = run.finish_us if name == "finish" else 0
        assert total(summary, name) == pytest.approx((run.recorded_us(code) + extra_us) / 1e6, abs=1e-6)
    assert summary.steps == run.step


@settings(max_examples=20)
@given(runs)
def test_every_charge_is_someones_or_known_to_be_nobodys(run: RandomRun) -> None:
    summary = Ledger().apply_all(run.journal).summary()
    for name in ("detect", "rework", "restore", "reform"):
        charged = sum(item.cost[name] for item in summary.incidents) + summary.uncharged[name]
        assert charged == pytest.approx(summary.categories[name], abs=1e-6)


@settings(max_examples=15)
@given(runs)
def test_the_factors_multiply_to_the_ledgers_share_of_kept_steps(run: RandomRun) -> None:
    """Also with a queue before it, and an MFU behind it."""
    summary = replace(Ledger().apply_all(run.journal).summary(), queued_s=3.0)
    measured = {**summary.measurements, FLOPS: (1, 1e12)}
    for s in (summary, replace(summary, device="h100", measurements=measured)):
        found = s.factors
        assert found is not None and 0 <= found.scheduling <= 1 + 1e-9 and 0 <= found.runtime <= 1
        held_s = s.decided_s + (s.world + s.spares) * 3.0
        assert found.scheduling * found.runtime == pytest.approx(s.kept_s / held_s, abs=1e-9)
        used = s.kept_s / held_s if found.program is None else 1e12 * s.steps / held_s / 989e12
        assert found.product == pytest.approx(used)


@settings(max_examples=15)
@given(runs)
def test_at_every_record_it_closes_and_no_counter_falls(run: RandomRun) -> None:
    ledger = Ledger()
    last: dict[str, float] = {}
    for record in run.journal:
        ledger.apply(record)
        summary = ledger.summary()
        assert summary.closes
        assert all(value >= 0 for value in summary.categories.values())
        assert 0 <= summary.goodput <= 1 and 0 <= summary.ettr <= 1 and 0 <= summary.training_goodput <= 1
        counters = {**summary.settled, **{f"-{name}": value for name, value in summary.reclassified.items()}}
        counters |= {"held": summary.held_s, "down": summary.down_s}
        counters |= {"commits": summary.commits_total, "rolled back": summary.rolled_back_total, "losses": summary.losses_total}
        assert all(counters[name] >= value for name, value in last.items())
        last = counters


@settings(max_examples=30)
@given(runs, st.data())
def test_one_span_that_overlaps_the_next_is_refused(run: RandomRun, data: st.DataObject) -> None:
    journal = run.journal
    lost_us = {record.member: round(record.at_s * 1e6) for record in journal if isinstance(record, r.ProcessLost)}
    ends_us = {proc.member: min(until or run.end_us, lost_us.get(proc.member, run.end_us)) for proc, until in run.all}
    following: dict[Member, int] = {}  # when the member's next record starts
    candidates: list[int] = []
    for index in reversed(range(len(journal))):
        record = journal[index]
        if isinstance(record, r.Spans):
            end_us = ends_us[record.member]
            checked = following.get(record.member, end_us) < end_us  # what comes after the run or the member has ended is cut off unread
            if checked and any(code not in "KAH" for code in record.codes):
                candidates.append(index)
            following[record.member] = record.start_us
    if not candidates:
        return
    index = data.draw(st.sampled_from(candidates))
    spans = journal[index]
    assert isinstance(spans, r.Spans)
    place = next(i for i, code in enumerate(spans.codes) if code not in "KAH")
    durations = list(spans.durations_us)
    durations[place] += data.draw(st.sampled_from([1, 5_000]))
    journal[index] = replace(spans, durations_us=tuple(durations))
    with pytest.raises(LedgerError, match=f"{spans.member}: spans overlap"):
        Ledger().apply_all(journal).summary()
