"""The terms of the Fleet Law of any run: they add up to its steps, they are the ledger's, and their shares are one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.laws.fleet_law import compute_share, fleet_step_s
from fleet.ledger.diagnosis import LAYER_OF, RULES, law_plain
from fleet.ledger.goodput import Ledger
from fleet.ledger.step_law import COMMUNICATION, COMPUTE, COORDINATION, OF_CATEGORY, OVERLAP, hidden_words
from fleet.ledger.summary import STEP_NAMES, LedgerSummary, SlotUsage
from fleet.protocol.records import CATEGORIES, Committed, Usage
from fleet.protocol.types import Member
from tests.golden.journals import Story
from tests.property.test_ledger_closes import RandomRun, runs

THREE = (COMPUTE, COMMUNICATION, COORDINATION)
hidden = st.one_of(st.none(), st.tuples(st.integers(1, 50), st.integers(0, 60_000), st.integers(0, 10**9), st.integers(0, 10**9)))
"""What ranks have measured of their exchanges: how many, hidden us, bytes beside, bytes ahead. None: nothing was measured."""


def summary_of(run: RandomRun, measured: tuple[int, int, int, int] | None) -> LedgerSummary:
    found = Ledger().apply_all(run.journal).summary()
    if measured is None:
        return found
    count, us, rest, ahead = measured
    used = SlotUsage(1, 0, 1, count, us / 1e6, rest + ahead, ahead)
    return replace(found, tallies=replace(found.tallies, usage={0: used}))


@settings(max_examples=60)
@given(runs, hidden)
def test_the_three_less_overlap_are_one(run: RandomRun, measured: tuple[int, int, int, int] | None) -> None:
    s = summary_of(run, measured)
    law = s.step_law
    assert law is not None
    for shares in (law.shares, s.run_shares):
        assert sum(shares[name] for name in THREE) - shares.get(OVERLAP, 0.0) == pytest.approx(1.0, abs=1e-9)
        assert all(value >= 0 for value in shares.values()) and (OVERLAP in shares) == (measured is not None)
    plain = law_plain(s)
    assert plain is not None and (plain["overlap_s"] is None) == (measured is None)
    assert ("not measured" in hidden_words(law)) == (measured is None)


@settings(max_examples=60)
@given(runs, hidden)
def test_the_terms_give_back_the_steps_of_the_ledger(run: RandomRun, measured: tuple[int, int, int, int] | None) -> None:
    """T_compute / N + T_comm + T_sync - T_overlap, by the law itself, is what the run knows of its own: the mean time of all steps of
    ranks that were not taken back."""
    s = summary_of(run, measured)
    law = s.step_law
    assert law is not None
    step_s = fleet_step_s(law.compute_s * law.ranks, law.ranks, law.comm_s, law.sync_s, law.hidden_s)
    assert step_s == pytest.approx(law.step_s, rel=1e-9)
    assert step_s == pytest.approx(sum(us for _, us in run.done) / 1e6 / len(run.done), rel=1e-9)
    assert compute_share(law.compute_s, law.comm_s, law.sync_s, law.hidden_s) == pytest.approx(law.shares[COMPUTE])
    assert 1 - 1e-9 <= law.ranks <= s.world + 1e-9


@settings(max_examples=60)
@given(runs, hidden)
def test_the_terms_are_the_ledgers_categories(run: RandomRun, measured: tuple[int, int, int, int] | None) -> None:
    s = summary_of(run, measured)
    law = s.step_law
    assert law is not None
    of_ledger = {name: s.categories[name] / s.kept_s for name in STEP_NAMES}
    parts = (law.compute_s, law.exposed_s, law.straggler_s, law.data_s, law.garbage_s)
    assert [part / law.step_s for part in parts] == pytest.approx([of_ledger[name] for name in STEP_NAMES], abs=1e-9)
    by_three = dict.fromkeys(THREE, 0.0)
    for name, value in s.categories.items():
        by_three[OF_CATEGORY[name]] += value / s.decided_s
    shares = s.run_shares
    assert shares[COMMUNICATION] - shares.get(OVERLAP, 0.0) == pytest.approx(by_three[COMMUNICATION], abs=1e-9)
    assert (shares[COMPUTE], shares[COORDINATION]) == (pytest.approx(by_three[COMPUTE]), pytest.approx(by_three[COORDINATION]))


@settings(max_examples=20)
@given(runs)
def test_a_finding_names_the_term_that_its_time_is_in(run: RandomRun) -> None:
    s = summary_of(run, None)
    for finding in filter(None, (rule(s) for rule in RULES)):
        assert finding.where == OF_CATEGORY[finding.metric] and finding.system == LAYER_OF[finding.metric]


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(2, 20), st.tuples(*[st.integers(0, 40)] * 3), st.integers(1, 40))
def test_without_anything_between_steps_the_law_is_the_time_from_commit_to_commit(
    world: int, steps: int, waits_ms: tuple[int, int, int], compute_ms: int
) -> None:
    """To the microsecond in which durations are kept. What stands between steps (a checkpoint, a comparison) is in no term."""
    comm, wait, data = waits_ms
    story = Story(world=world)
    story.view(1, [(slot, 0) for slot in range(world)], 0)
    for slot in range(world):
        story.spans(slot, 0, f"d{data} c{compute_ms} w{wait} x{comm} K " * steps)
    step_ms = compute_ms + comm + wait + data
    for step in range(1, steps + 1):
        story.committed(step, step * step_ms)
    story.ended(steps * step_ms)
    s = Ledger().apply_all(story.records).summary()
    law, commits = s.step_law, [record.at_s for record in story.records if isinstance(record, Committed)]
    assert law is not None and law.step_s == pytest.approx((commits[-1] - commits[0]) / (steps - 1), abs=1e-6)
    assert law.ranks == pytest.approx(world) and law.plain()["work_s"] == pytest.approx(world * compute_ms / 1e3)


def test_all_categories_are_in_the_three_and_have_a_layer() -> None:
    assert set(OF_CATEGORY) == set(CATEGORIES.values()) and set(OF_CATEGORY.values()) == set(THREE)
    assert set(LAYER_OF) == {*CATEGORIES.values(), "losses"} - {"compute"}


def test_what_hides_is_never_longer_than_what_it_hides_behind() -> None:
    """A peer had a lead of a second, as this rank stood still for a checkpoint: its step computed for 10 ms."""
    story = Story(world=1)
    story.view(1, [(0, 0)], 0)
    story.spans(0, 0, "c10 x10 K " * 5)
    story.committed(5, 100)
    story.records.append(Usage(Member(0, 0), 1, 0, 1, 5, 5_000_000, 1_000, 1_000, at_s=0.1))
    story.ended(100)
    law = Ledger().apply_all(story.records).summary().step_law
    assert law is not None and law.overlap_s == law.compute_s == pytest.approx(0.01)
    assert law.shares[OVERLAP] == pytest.approx(0.5) and law.hidden == pytest.approx(0.5) and law.ahead == 1.0


def test_an_overlap_that_was_measured_as_nothing_is_no_missing_one() -> None:
    story = Story(world=1)
    story.view(1, [(0, 0)], 0)
    story.spans(0, 0, "c10 x10 K " * 5)
    story.committed(5, 100)
    records = [*story.records, Usage(Member(0, 0), 1, 0, 1, 5, 0, 1_000, 0, at_s=0.1)]
    measured, silent = (Ledger().apply_all(each).summary(0.1).step_law for each in (records, story.records))
    assert measured is not None and measured.overlap_s == 0.0 and measured.shares[OVERLAP] == 0.0
    assert silent is not None and silent.overlap_s is None and OVERLAP not in silent.shares
