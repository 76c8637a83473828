"""A rank's own time in each step, from the rows of its ring."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from actors.rank.telemetry.recorder import Recorder, RingReader
from actors.rank.telemetry.spans import SpanBuilder
from actors.rank.telemetry.timing import MOST, OwnTime, StepTimer, summary, thinned
from fleet.protocol.records import COMM, COMPUTE, DATA, GARBAGE, REFORM, STRAGGLER, VERIFY
from fleet.protocol.types import Member


class Ring:
    """A recorder on a clock of its own, behind the first step of its process; each call passes some microseconds first."""

    def __init__(self, folder: Path) -> None:
        self.at_us = 0
        self.recorder = Recorder(folder / "ring", 0, lambda: self.at_us)
        self.reader = RingReader(folder / "ring")
        self.recorder.place(1, 0, -1)
        self.shard(compute_us=45_000_000)
        self.ends()

    def passes(self, us: int) -> Recorder:
        self.at_us += us
        return self.recorder

    def shard(self, data_us: int = 10, compute_us: int = 100) -> None:
        self.passes(0).switch(DATA)
        self.passes(data_us).switch(COMPUTE)
        self.passes(compute_us)

    def ends(self, *, waits_us: int = 500, comm_us: int = 50, applies_us: int = 20, own_us: int = 0) -> None:
        self.recorder.worked()
        self.passes(7).switch(STRAGGLER)
        self.passes(waits_us).switch(COMM)
        at_us = self.passes(comm_us).switch(COMPUTE)
        self.recorder.measured(own_us)
        assert at_us == self.at_us
        self.passes(applies_us).commit(self.at_us)


def timed(ring: Ring) -> list[OwnTime]:
    timer = StepTimer()
    timer.add(ring.reader.drain())
    return timer.take()


def test_own_time_is_apart_from_waiting(tmp_path: Path) -> None:
    ring = Ring(tmp_path)
    for _ in range(2):
        ring.shard()
        ring.shard(data_us=30, compute_us=300)
        ring.ends()
    first, second = timed(ring)
    assert (first.generation, first.step, first.shards) == (1, 0, 2)
    assert (first.compute_us, first.data_us, first.network_us, first.fixed_us) == (400, 40, 50, 27)
    assert second.step == 1 and second.compute_us == 400


def test_the_first_step_of_a_process_is_no_measure_of_steps(tmp_path: Path) -> None:
    """It loads and compiles. Time-outs and stragglers are judged by what comes after it."""
    ring = Ring(tmp_path)
    ring.shard()
    ring.ends()
    assert [(step.step, step.compute_us) for step in timed(ring)] == [(0, 100)]


def test_what_is_compared_with_other_ranks_is_no_ones_own_time_and_tears_no_step(tmp_path: Path) -> None:
    """Once it tore every step: the digests of replicas are compared in each, and no slow rank was ever found."""
    ring = Ring(tmp_path)
    ring.shard()
    ring.recorder.worked()
    ring.passes(5).switch(VERIFY)
    ring.passes(60).switch(STRAGGLER)
    ring.passes(500).switch(COMM)
    ring.passes(50).switch(COMPUTE)
    ring.passes(20).commit(ring.at_us)
    [step] = timed(ring)
    assert (step.compute_us, step.data_us, step.network_us, step.fixed_us) == (100, 10, 50, 25)


def test_no_rank_is_slow_because_it_collects_garbage(tmp_path: Path) -> None:
    """It is told apart wherever it was in a shard: in waiting for data, in computing, in the work behind the shards."""
    ring = Ring(tmp_path)
    for at in ("data", "compute", "commit"):
        ring.passes(0).switch(DATA)
        ring.passes(10 + 1000 * (at == "data"))
        ring.recorder.collected(1000 * (at == "data"))
        ring.recorder.switch(COMPUTE)
        ring.passes(100 + 1000 * (at == "compute"))
        ring.recorder.collected(1000 * (at == "compute"))
        ring.recorder.worked()
        ring.passes(7).switch(STRAGGLER)
        ring.passes(500).switch(COMM)
        ring.passes(50).switch(COMPUTE)
        ring.passes(20 + 1000 * (at == "commit"))
        ring.recorder.collected(1000 * (at == "commit"))
        ring.recorder.commit(ring.at_us)
    rows = ring.reader.drain()
    timer, builder = StepTimer(), SpanBuilder(Member(0, 0))
    timer.add(rows)
    assert {(step.compute_us, step.data_us, step.network_us, step.fixed_us) for step in timer.take()} == {(100, 10, 50, 27)}
    [record] = builder.add(rows)
    spent = Counter[str]()
    for code, us in zip(record.codes, record.durations_us, strict=True):
        spent[code] += us
    assert spent[GARBAGE] == 3000 and spent[COMM] == 150 + 50 and record.codes.count("K") == 4
    assert sum(spent.values()) == ring.at_us


def test_garbage_that_is_collected_outside_of_steps_is_in_no_category_of_a_step(tmp_path: Path) -> None:
    ring = Ring(tmp_path)
    ring.passes(0).switch(REFORM)
    ring.passes(50)
    ring.recorder.collected(40)
    ring.recorder.switch(DATA)
    assert GARBAGE not in {row.code for row in ring.reader.drain()}


def test_rows_may_come_in_any_portions(tmp_path: Path) -> None:
    ring = Ring(tmp_path)
    for _ in range(3):
        ring.shard()
        ring.ends()
    rows, whole, parts = ring.reader.drain(), StepTimer(), StepTimer()
    whole.add(rows)
    for row in rows:
        parts.add([row])
    assert whole.take() == parts.take()


def test_a_step_in_which_a_peer_was_lost_is_left_out(tmp_path: Path) -> None:
    ring = Ring(tmp_path)
    ring.shard()
    ring.recorder.hold()
    ring.passes(5).switch(REFORM)
    ring.passes(90).switch(COMPUTE)
    ring.recorder.place(2, 0, 0)
    ring.shard()
    ring.ends()
    ring.shard()
    ring.ends()
    [only] = timed(ring)
    assert (only.generation, only.step, only.shards) == (2, 1, 1)


def test_a_view_that_changes_between_steps_costs_none(tmp_path: Path) -> None:
    ring = Ring(tmp_path)
    ring.shard()
    ring.ends()
    ring.passes(3).switch(REFORM)
    ring.passes(90).switch(COMPUTE)
    ring.recorder.place(2, 0, 1)
    ring.shard()
    ring.ends()
    assert [(time.generation, time.step) for time in timed(ring)] == [(1, 0), (2, 1)]


def test_what_an_accelerator_says_counts_and_is_no_span(tmp_path: Path) -> None:
    ring = Ring(tmp_path)
    ring.shard()
    ring.ends(own_us=12_345)
    rows = ring.reader.drain()
    timer = StepTimer()
    timer.add(rows)
    assert timer.take()[0].compute_us == 12_345
    [spans] = SpanBuilder(Member(0, 0)).add(rows)
    assert "g" not in spans.codes and sum(spans.durations_us) == ring.at_us


def test_reports_are_bounded_and_leave_out_the_same_steps_everywhere() -> None:
    one, other = [OwnTime(1, step) for step in range(100)], [OwnTime(1, step) for step in range(3, 120)]
    left = [{time.step for time in thinned(steps)} for steps in (one, other)]
    assert all(len(steps) <= MOST for steps in left)
    assert len(left[0] & left[1]) >= 0.8 * min(map(len, left))
    assert summary(Member(0, 0), [OwnTime(1, 5, 2, 30, 4, 5, 6)]).compute_us == (30,)
