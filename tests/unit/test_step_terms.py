"""What steps are made of, from what ranks record."""

from __future__ import annotations

import pytest

from fleet.ledger.step_terms import TERMS, StepRow, StepTerms, means, settled
from fleet.protocol.records import Spans, ViewPublished
from fleet.protocol.types import Member, StateId, View


def view(generation: int, ranks: int) -> ViewPublished:
    members = tuple(Member(slot, 0) for slot in range(ranks))
    ranges = tuple((4 * slot, 4 * slot + 4) for slot in range(ranks))
    shown = View(generation, members, ranges, 0, (), StateId(0, 0), "")
    return ViewPublished(shown, 0.0, "", False, ())


def spans(slot: int, codes: str, *durations_us: int, step: int = 0, start_us: int = 0) -> Spans:
    return Spans(Member(slot, 0), 1, 0, step, start_us, durations_us, codes)


def rows_of(*records: Spans | ViewPublished) -> list[StepRow]:
    folded = StepTerms()
    for record in records:
        folded.add(record)
    return folded.rows()


def test_what_follows_a_shards_samples_is_the_shards_and_the_rest_of_computing_is_the_steps_own() -> None:
    one = spans(0, "dcdccvwxcK", 10, 100, 10, 100, 7, 5, 30, 40, 9, 0)
    two = spans(1, "dcdccvwxcK", 20, 120, 10, 110, 7, 5, 10, 20, 9, 0)
    (row,) = rows_of(view(1, 2), one, two)
    us = {name: round(1e6 * seconds) for name, seconds in row.terms.items()}
    assert us == {"compute": 215, "update": 16, "data": 25, "exchange": 30, "wait": 20, "verify": 5}
    assert set(us) == set(TERMS) and row.ranks == 2 and row.step_s == pytest.approx(311e-6)


def test_a_step_goes_on_from_one_record_to_the_next() -> None:
    (row,) = rows_of(view(1, 1), spans(0, "d", 10), spans(0, "ccK", 100, 5, 0, start_us=10))
    assert (round(1e6 * row.terms["compute"]), round(1e6 * row.terms["update"]), row.end_s) == (100, 5, pytest.approx(115e-6))


def test_steps_in_which_a_peer_was_lost_or_that_not_all_ranks_have_told_are_left_out() -> None:
    lost = spans(0, "dcHdcKdcK", 1, 10, 0, 1, 10, 0, 1, 10, 0)
    assert [row.step for row in rows_of(view(1, 1), lost)] == [1]
    assert rows_of(view(1, 2), spans(0, "dcK", 1, 10, 0)) == []


def test_the_beginning_and_the_extremes_are_left_out() -> None:
    rows = [StepRow(n, float(n), 1, dict.fromkeys(TERMS, 1.0) | {"wait": float(n % 10)}) for n in range(100)]
    kept = settled(rows)
    assert min(row.end_s for row in kept) >= 20.0 and len(kept) == 64
    assert {row.terms["wait"] for row in kept} == set(map(float, range(1, 9))) and means(kept)["compute"] == 1.0
    assert settled([]) == []
