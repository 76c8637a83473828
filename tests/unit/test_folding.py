"""Old parts of a journal are folded: nobody can tell by report, ledger, bill, story, resume or history, and it stays small for weeks."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import lzma
import random
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fleet.app.cli.main import app
from fleet.errors import JournalError, ProtocolError
from fleet.host.folds import FOLDING, alike, fold_journal
from fleet.host.journal import read_journal
from fleet.ledger.folding import KEPT_POINTS, folded, survey
from fleet.ledger.goodput import Ledger
from fleet.ledger.lineage import DataHistory
from fleet.ledger.report import build_report
from fleet.ledger.story import why
from fleet.ledger.timeline import Timeline
from fleet.protocol import records as r
from fleet.protocol.journal import decode_line, encode_line
from fleet.protocol.types import Member, StateId
from fleet.settings.run import RunSettings
from fleet.simulation.plan import random_plan
from tests.golden.journals import Story
from tests.simulation.runs import make_machine

LONG = Path(__file__).parents[1] / "golden" / "long.jsonl.xz"
"""9,000 steps of two ranks and a spare on a local cluster, with losses, an eviction, slow ranks and 18 durable checkpoints."""
PRICES = {"usd_per_rank_hour": 2.0, "watts_per_rank": 700.0, "usd_per_kwh": 0.1, "pue": 1.2, "g_co2_per_kwh": 300.0}
RECORD_S = 0.25
"""A rank's time comes about so often."""
USAGE_S = 10.0
STEP = ("cxxwwvwvkwvwcK", (20, 3, 1, 2, 1, 1, 1, 1, 1, 1, 1, 1, 66, 0))
"""Letters of a step as a rank records them, and thousandths of it."""


@pytest.fixture(scope="module")
def long() -> list[r.Record]:
    """A real run's journal, with prices."""
    records = [decode_line(line) for line in lzma.decompress(LONG.read_bytes()).splitlines(keepends=True)]
    assert isinstance(records[0], r.RunStarted)
    config = json.loads(records[0].config)
    config["settings"]["cost"] |= PRICES
    return [dataclasses.replace(records[0], config=json.dumps(config)), *records[1:]]


def written(path: Path, records: Sequence[r.Record]) -> Path:
    path.write_bytes(b"".join(map(encode_line, records)))
    return path


def size(records: Sequence[r.Record]) -> int:
    return sum(len(encode_line(record)) for record in records)


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Where two reports say different things."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            yield from differences(one.get(key), other.get(key), f"{path}.{key}")
    elif not alike(one, other):
        yield f"{path}: {str(one)[:80]} and {str(other)[:80]}"


def bare(records: Sequence[r.Record]) -> list[r.Record]:
    return [record for record in records if not isinstance(record, r.Spans)]


def check_same(old: Sequence[r.Record], new: Sequence[r.Record], but: Sequence[str] = ()) -> None:
    found = [each for each in differences(build_report(old).to_dict(), build_report(new).to_dict()) if not each.startswith(tuple(but))]
    assert found == []
    timelines = [Timeline(), Timeline()]
    for timeline, records in zip(timelines, (old, new), strict=True):
        Ledger(timeline).apply_all(records)
    assert timelines[0].rows == timelines[1].rows
    lost = [str(record.member) for record in old if isinstance(record, r.ProcessLost)]
    assert lost
    for name in lost:
        assert str(why(bare(old), name)) == str(why(bare(new), name))
    histories = [DataHistory().apply_all(bare(records)) for records in (old, new)]
    assert histories[0].stretches() == histories[1].stretches()


def test_nobody_can_tell_that_a_real_journal_was_folded(long: list[r.Record], tmp_path: Path) -> None:
    path = written(tmp_path / "journal.jsonl", long)
    done = fold_journal(path)
    new = list(read_journal(path))
    assert done.after_bytes == path.stat().st_size < 0.75 * done.before_bytes
    check_same(long, new)
    assert build_report(new).summary.bill is not None
    assert not path.with_name(path.name + FOLDING).exists()


def test_a_coordinator_that_resumes_comes_to_the_same_state(long: list[r.Record]) -> None:
    until = next(number for number, record in enumerate(long) if isinstance(record, r.RunEnded))
    records = long[:until]
    states = []
    for journal in (records, list(folded(records, survey(bare(records))))):
        machine = make_machine(RunSettings(world=2, spares=1, shards=4), random_plan(0), 0.0)
        machine.replay(bare(journal), 1e6)
        states.append(machine.state)
    one, other = states
    same = "committed", "assembly.history", "assembly.generation", "assembly.since_s", "phase", "trained.data", "view", "attendance.missing"
    for name in (*same, "uptime.started_s", "uptime.down_s"):
        assert attrgetter(name)(one) == attrgetter(name)(other), name
    assert [rank.member for rank in one.roster.in_order()] == [rank.member for rank in other.roster.in_order()]
    ends = [{record.member: (record.start_us + sum(record.durations_us)) for record in each if isinstance(record, r.Spans)} for each in
            (records, list(folded(records, survey(bare(records)))))]  # fmt: skip
    assert ends[0] == ends[1]


class Long(Story):
    """A story of many steps, with a loss, a spare, a roll-back, and a durable checkpoint every 600 steps."""

    def __init__(self, steps: int) -> None:
        super().__init__(world=2, spares=1)
        self._draw, self.step, self.at, self.view_number, self.history = random.Random(1), 0, 1100.0, 1, 0
        self.alive = {0: 0, 1: 0}
        self.view(1, [(0, 0), (1, 0)], 1000)
        self.spans(2, 0, "i500 s600", generation=-1)
        for slot in (0, 1):
            self.spans(slot, 0, "i1000 f100", generation=1)
        self.go(steps // 3)
        self._lose_one(steps // 3)
        self._roll_back(steps // 3)
        self.ended(self.at + 5)

    def go(self, steps: int, each: int = 3) -> None:
        for _ in range(steps // each):
            costs = [(self._draw.randint(50, 70), self._draw.randint(5, 20)) for _ in range(each)]
            for slot, incarnation in self.alive.items():
                text = " ".join(f"d2 c{c} x{x} {'k5' if (self.step + i) % 300 == 0 else 'w5'} K" for i, (c, x) in enumerate(costs))
                self.spans(slot, incarnation, text, generation=self.view_number, history=self.history, step=self.step)
            self.spans(2, 0, f"s{sum(c + x + 7 for c, x in costs)}", generation=-1)
            for c, x in costs:
                self.at, self.step = self.at + c + x + 7, self.step + 1
                self.committed(self.step, self.at, self.history)
            self.records.append(r.Measurement(None, StateId(self.history, self.step), "loss", 1.0 / self.step, at_s=self.at / 1e3))
            self.records += [r.Usage(Member(*who), 1_000 + self.step, 0, 64 * self.step, at_s=self.at / 1e3) for who in self.alive.items()]
            if self.step % 600 < each:
                self.durable(self.step, self.at, self.history)

    def _lose_one(self, steps: int) -> None:
        self.lost(1, 0, self.at + 3)
        self.spans(0, 0, "c30 x10 H w5 f20", step=self.step)
        self.view_number, self.alive = 2, {0: 0}
        self.view(2, [(0, 0)], self.at + 70, step=self.step)
        self.at += 65
        self.go(300)
        self.view_number, self.alive = 3, {0: 0, 1: 1}
        self.view(3, [(0, 0), (1, 1)], self.at, step=self.step)
        self.spans(1, 1, "i200 r300 f10", generation=3, step=self.step, at=self.at)
        self.spans(0, 0, "f510", generation=3, step=self.step)
        self.at += 510
        self.go(steps)

    def _roll_back(self, steps: int) -> None:
        self.step -= self.step % 600
        self.history, self.view_number = 1, 4
        super().history(1, self.step, self.at)
        self.view(4, [(0, 0), (1, 1)], self.at, step=self.step, history=1)
        for slot, incarnation in self.alive.items():
            self.spans(slot, incarnation, "r100", generation=4, history=1, step=self.step)
        self.at += 100
        self.go(steps)


def test_nobody_can_tell_through_a_roll_back_but_by_the_points_of_a_curve() -> None:
    old = Long(12_000).records
    new = list(folded(old, survey(bare(old), 3_000)))
    assert size(new) < 0.5 * size(old)
    check_same(old, new, but=(".measurements.loss",))
    points = [record for record in new if isinstance(record, r.Measurement)]
    assert KEPT_POINTS <= len(points) < len([record for record in old if isinstance(record, r.Measurement)])
    again = list(folded(new, survey(bare(new), 3_000)))
    assert size(again) <= size(new)
    check_same(old, again, but=(".measurements.loss",))


def test_what_nothing_durable_stands_behind_stays() -> None:
    old = [record for record in Long(6_000).records if not isinstance(record, r.CheckpointRecord)]
    assert list(folded(old, survey(bare(old), 100))) == old
    assert survey([]).horizon is None


def test_a_run_of_commits_is_written_as_one_with_a_number() -> None:
    spans = r.Spans(Member(0, 0), 1, 0, 7, 100, (5, 3, *[0] * 5_000, 4, 0), "cx" + "K" * 5_000 + "wK")
    line = encode_line(spans)
    assert line == b'["Spans",[0,0],1,0,7,100,[5,3,0,4,0],"cxK5000wK"]\n'
    assert decode_line(line) == spans
    with pytest.raises(ProtocolError, match="at most"):
        decode_line(b'["Spans",[0,0],1,0,7,100,[0],"K99999999999"]\n')
    odd = r.Spans(Member(0, 0), 1, 0, 7, 100, (0, 0, 0, 9), "KKKK")
    assert decode_line(encode_line(odd)) == odd  # damage stays what it is: the ledger refuses it


def test_a_journal_that_is_written_or_damaged_stays_as_it_was(tmp_path: Path) -> None:
    path = written(tmp_path / "journal.jsonl", Long(300).records)
    before = path.read_bytes()
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(JournalError, match="is writing"):
            fold_journal(path)
    for damage in (b'["Committed"', b'["Meteor"]\n'):
        path.write_bytes(before + damage)
        with pytest.raises(JournalError):
            fold_journal(path)
        assert path.read_bytes() == before + damage
    assert [each.name for each in tmp_path.iterdir()] == ["journal.jsonl"]


def test_a_fold_that_changes_a_figure_is_not_kept(tmp_path: Path) -> None:
    """With too few steps left as they are, the median step would be another."""
    path = written(tmp_path / "journal.jsonl", Long(6_000).records)
    before = path.read_bytes()
    with pytest.raises(JournalError, match="would change if"):
        fold_journal(path, kept_steps=10)
    assert path.read_bytes() == before


def test_the_command_says_what_it_saves(long: list[r.Record], tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    written(tmp_path / "one" / "journal.jsonl", long)
    reported = CliRunner().invoke(app, ["runs", "fold", "one", "--storage", str(tmp_path)], catch_exceptions=False).output
    assert reported == "1.1 MB before, 0.8 MB after\n"


# ---- growth ------------------------------------------------------------------------------------------------------------------------------


def steady(hours: float, steps_per_s: float, world: int = 8) -> list[r.Record]:
    """A run without faults, with all that comes all the time: time of ranks, commits, two notes of five figures a second, checkpoints."""
    story = Story(world=world)
    story.view(1, [(slot, 0) for slot in range(world)], 0)
    length_us = round(1e6 / steps_per_s)
    durations = tuple(length_us * part // 100 for part in STEP[1])
    each = max(1, round(RECORD_S * steps_per_s))
    checkpoint_steps = round(600 * steps_per_s)
    for step in range(0, round(hours * 3_600 * steps_per_s), each):
        for slot in range(world):
            start_us = step * sum(durations)
            story.records.append(r.Spans(Member(slot, 0), 1, 0, step, start_us, durations * each, STEP[0] * each))
        at = (step + each) * sum(durations) / 1e3
        story.committed(step + each, at)
        if step % max(each, round(steps_per_s / 2)) < each:
            state = StateId(0, step + each)
            story.records += [r.Measurement(None, state, name, 0.123456789, at_s=at / 1e3) for name in ("loss", *r.PROGRAM)]
        if step % round(USAGE_S * steps_per_s) < each:
            story.records += [r.Usage(Member(slot, 0), 500_000_000, 0, 1_000 * step, at_s=at / 1e3) for slot in range(world)]
        if (step + each) % checkpoint_steps < each:
            story.durable(step + each, at)
    return story.records


@pytest.mark.parametrize(("steps_per_s", "most_mb_an_hour"), [(1.0, 6.0), (10.0, 36.0)])
def test_a_journal_grows_by_so_much_and_its_old_part_by_next_to_nothing(steps_per_s: float, most_mb_an_hour: float) -> None:
    hours = 0.5 if steps_per_s > 1 else 3.0
    old = steady(hours, steps_per_s)
    assert size(old) / hours < most_mb_an_hour * 1e6
    new = list(folded(old, survey(bare(old), 1_000)))
    assert size(new) < 0.5 * size(old)
    print(f"{steps_per_s:g} steps/s: {size(old) / hours / 1e6:.1f} MB/h; {size(old) / 1e6:.2f} MB are {size(new) / 1e6:.2f} MB when folded")


def test_what_is_folded_grows_with_the_logarithm_of_time_alone() -> None:
    """Twice as long, the timeline's buckets are twice as wide: as many records of ranks' time are left of the old part."""
    lengths = []
    for hours in (1.0, 2.0):
        old = steady(hours, 1.0, world=4)
        new = list(folded(old, survey(bare(old), 600)))
        lengths.append(sum(len(encode_line(record)) for record in new if isinstance(record, r.Spans)))
    assert lengths[1] < 1.5 * lengths[0]
