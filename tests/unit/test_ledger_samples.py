"""Samples are counted from the steps that ranks committed, whatever the order in which their records come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.app.report import build_report, render_table
from fleet.ledger.samples import StepCover, trained_on
from fleet.protocol.records import DataRead, HistoryBegun, Spans
from fleet.protocol.types import Member, StateId
from tests.golden.journals import one_loss

READ = DataRead(Member(0, 0), 1000, 100, at_s=0.0)


def commits(slot: int, first: int, count: int, history: int = 0, incarnation: int = 0) -> Spans:
    return Spans(Member(slot, incarnation), 1, history, first, 0, (5,) * count * 2, "cK" * count)


def cover(*records: Spans) -> StepCover:
    made = StepCover()
    for record in records:
        made.add(record)
    return made


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(0, 6)), max_size=20), st.integers(0, 30), st.integers(0, 40))
def test_the_cover_is_the_set_of_steps(added: list[tuple[int, int, int]], begin: int, end: int) -> None:
    found = cover(*(commits(slot, first, count) for slot, first, count in added))
    steps = {step for _, first, count in added for step in range(first, first + count)}
    assert found.missing(0, begin, end) == len(set(range(begin, end)) - steps)
    assert found.missing(1, begin, end) == max(0, end - begin)


def test_a_run_through_losses_skips_and_repeats_nothing() -> None:
    """Slot 1 dies after step 3 and comes back at step 6; slot 0 goes on."""
    reported = trained_on([READ], cover(commits(0, 0, 10), commits(1, 0, 3), commits(1, 6, 4, incarnation=1)), [(0, 0)], 10, 0)
    assert reported is not None
    assert (reported.seen, reported.epochs, reported.skipped, reported.repeated, reported.taken_back) == (1000, 1.0, 0, 0, 0)


def test_what_was_taken_back_is_no_repetition() -> None:
    """History 1 goes on from step 4 of history 0, which had got to 7."""
    reported = trained_on([READ], cover(commits(0, 0, 7), commits(0, 4, 8, history=1)), [(0, 0), (1, 4)], 12, 3)
    assert reported is not None
    assert (reported.seen, reported.skipped, reported.repeated, reported.taken_back) == (1200, 0, 0, 300)


def test_a_step_that_nobody_took_and_one_that_was_taken_twice_are_counted() -> None:
    reported = trained_on([READ], cover(commits(0, 0, 3), commits(0, 4, 3)), [(0, 0)], 7, 0)
    assert reported is not None and reported.skipped == 100
    reported = trained_on([READ], cover(commits(0, 0, 3)), [(0, 0)], 7, 0)
    assert reported is not None and reported.skipped == 0, "its ranks have not told yet"
    reported = trained_on([READ], cover(commits(0, 0, 5), commits(0, 3, 4)), [(0, 0)], 7, 0)
    assert reported is not None and reported.repeated == 200


def test_each_stretch_is_counted_by_its_own_data_set() -> None:
    """All steps were counted by the last one: a run of 1,000 samples that went on with 500 had seen all of them twice as often."""
    half = DataRead(Member(0, 0), 500, 50, "b", 20, 0, 10, at_s=0.0)
    reported = trained_on([READ, half], cover(commits(0, 0, 20)), [(0, 0)], 20, 0)
    assert reported is not None and (reported.seen, reported.epochs) == (1500, 2.0)


def test_samples_that_several_steps_share_are_counted_once() -> None:
    read = DataRead(Member(0, 0), 1000, 100, order="permuted x2", at_s=0.0)
    reported = trained_on([read], cover(commits(0, 0, 20)), [(0, 0)], 20, 0)
    assert reported is not None and (reported.seen, reported.epochs) == (1000, 1.0)


@pytest.mark.parametrize("read", [True, False])
def test_the_report_says_so_where_data_were_read(read: bool) -> None:
    first, *rest = one_loss().records
    report = build_report([first, *([READ] if read else []), *rest])
    assert ("skipped" in render_table(report)) == read
    steps = report.summary.steps
    reported = report.to_dict()["samples"]
    assert reported == ({"seen": 100 * steps, "epochs": steps / 10, "taken_back": 0, "skipped": 0, "repeated": 0} if read else None)


def test_the_histories_follow_from_the_journal() -> None:
    first, *rest = one_loss().records
    begun = HistoryBegun(1, StateId(0, 2), rest[-1].at_s if hasattr(rest[-1], "at_s") else 0.0, "all ranks were lost")
    report = build_report([first, READ, *[record for record in rest if type(record).__name__ != "RunEnded"], begun])
    reported = report.to_dict()["samples"]
    assert (reported["seen"], reported["skipped"]) == (200, 0)
