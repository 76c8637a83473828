"""Detectors name the slow rank and what is slow in it, and nobody when nobody is."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from benchmarks.scorers import SCORERS, individual_score, relative_score, robust_zs
from fleet.protocol.types import Member
from policies.straggler import scores
from policies.straggler.detectors import KINDS, DetectorVerdict, Sensitivity, StepTimes
from policies.straggler.windows import WindowedDetector

SHARE = {"compute": 0.25, "network": 0.3, "data": 0.05}
STEPS, BEGIN = 120, 60


def world(ranks: int = 4, seed: int = 0, noise: float = 0.02, steps: int = STEPS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {kind: share * np.exp(rng.normal(0.0, noise, (ranks, steps))) for kind, share in SHARE.items()}


def times(seconds: dict[str, np.ndarray], begin: int, end: int, generation: int = 1, fresh: tuple[int, ...] = ()) -> StepTimes:
    ranks = len(seconds["compute"])
    members = tuple(Member(slot, int(slot in fresh)) for slot in range(ranks))
    columns = {f"{kind}_s": seconds[kind][:, begin:end] for kind in KINDS}
    return StepTimes(generation=generation, first_step=begin, members=members, shards=np.full(ranks, 4.0), **columns)


def seen(seconds: dict[str, np.ndarray], detector: WindowedDetector | None = None, portion: int = 5) -> list[tuple[int, DetectorVerdict]]:
    """Each verdict with the step at which it was given."""
    detector = detector or WindowedDetector()
    found = []
    for begin in range(0, seconds["compute"].shape[1], portion):
        found += [(begin + portion, verdict) for verdict in detector.observe(times(seconds, begin, begin + portion))]
    return found


@pytest.mark.parametrize("shares", [(0.0,), (0.5,), (0.9,), (1.0,), (0.9, 0.5, 0.0)])
@pytest.mark.parametrize("count", [1, 2, 3, 14, 61])
def test_quantiles_are_those_of_numpy(shares: tuple[float, ...], count: int) -> None:
    values = np.random.default_rng(count).normal(size=(4, count))
    for share, found in zip(shares, scores.quantiles(values, *shares), strict=True):
        assert found == pytest.approx(np.quantile(values, share, axis=-1), abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
def test_the_slow_rank_is_named_with_what_is_slow(kind: str, ranks: int) -> None:
    seconds = world(ranks)
    seconds[kind][1, BEGIN:] *= 1.5
    found = seen(seconds)
    assert {(verdict.member.slot, verdict.kind) for _, verdict in found} == {(1, kind)}
    at, first = found[0]
    assert BEGIN < at <= BEGIN + 20 and first.since_step >= BEGIN - 14
    last = found[-1][1]
    assert last.score == pytest.approx(1 / 1.5, rel=0.1) and last.confidence > 0.99
    assert last.evidence["individual_score"] < 0.75 < last.evidence["others_individual_score"]
    assert kind in last.reason


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_nobody_is_guilty_when_all_are_slow_alike(ranks: int) -> None:
    seconds = world(ranks)
    seconds["compute"][:, BEGIN:] *= 2.0
    assert seen(seconds) == []


def test_the_individual_score_alone_blames_everybody_for_it() -> None:
    seconds = world()
    seconds["compute"][:, BEGIN:] *= 2.0
    found = seen(seconds, WindowedDetector(scorer=SCORERS["individual"]))
    assert {verdict.member.slot for _, verdict in found} == {0, 1, 2, 3}


@pytest.mark.parametrize("name", ["relative", "robust_z"])
def test_other_scorers_find_it_too(name: str) -> None:
    seconds = world(8)
    seconds["compute"][5, BEGIN:] *= 1.5
    assert (5, "compute") in {(verdict.member.slot, verdict.kind) for _, verdict in seen(seconds, WindowedDetector(scorer=SCORERS[name]))}


def test_two_stragglers_do_not_hide_behind_each_other() -> None:
    seconds = world()
    seconds["compute"][:2, BEGIN:] *= 2.0
    assert {verdict.member.slot for _, verdict in seen(seconds)} == {0, 1}


def test_slowness_that_comes_and_goes_is_found() -> None:
    seconds = world()
    seconds["compute"][2, BEGIN:] *= np.where(np.arange(STEPS - BEGIN) % 8 < 5, 2.0, 1.0)
    assert {(verdict.member.slot, verdict.kind) for _, verdict in seen(seconds)} == {(2, "compute")}


def test_pauses_of_a_garbage_collector_are_no_verdict() -> None:
    seconds = world(seed=3)
    seconds["compute"][1, ::9] *= 4.0
    assert seen(seconds) == []


def test_a_verdict_ends_when_the_rank_is_well_again() -> None:
    seconds = world(steps=200)
    seconds["compute"][1, BEGIN:120] *= 1.5
    ends = [at for at, _ in seen(seconds)]
    assert max(ends) >= 120 and max(ends) <= 160


def test_waiting_for_a_slow_rank_is_not_taken_for_a_slow_link() -> None:
    seconds = world(2)
    seconds["compute"][0, BEGIN:] *= 4.0
    seconds["network"][1, BEGIN:] += 0.04 * 3 * 4 * SHARE["compute"]
    assert {(verdict.member.slot, verdict.kind) for _, verdict in seen(seconds)} == {(0, "compute")}


def test_what_costs_no_time_is_nobodys_fault() -> None:
    seconds = world()
    seconds["data"] /= 100
    seconds["data"][1, BEGIN:] *= 3.0
    assert seen(seconds) == []


def test_a_new_incarnation_starts_without_a_past() -> None:
    seconds, detector = world(), WindowedDetector()
    seconds["compute"][1, 40:80] *= 2.0
    assert any(detector.observe(times(seconds, begin, begin + 5)) for begin in range(0, 80, 5))
    assert detector.observe(times(seconds, 80, 85, generation=2, fresh=(1,))) == ()
    assert all(detector.observe(times(seconds, begin, begin + 5, generation=2, fresh=(1,))) == () for begin in range(85, 120, 5))


def test_one_that_stays_keeps_its_verdict_over_a_view_change() -> None:
    seconds, detector = world(), WindowedDetector()
    seconds["compute"][1, 40:] *= 2.0
    for begin in range(0, 80, 5):
        detector.observe(times(seconds, begin, begin + 5))
    (verdict,) = detector.observe(times(seconds, 80, 85, generation=2, fresh=(3,)))
    assert verdict.member == Member(1, 0) and verdict.kind == "compute"


def test_warm_up_is_not_looked_at() -> None:
    seconds = world()
    for values in seconds.values():
        values[2, :5] *= 50.0
    assert seen(seconds) == []


def test_what_was_not_measured_accuses_nobody() -> None:
    seconds = world()
    seconds["compute"][1, BEGIN:] = np.nan
    seconds["network"][:] = np.nan
    assert seen(seconds) == []


def test_one_rank_alone_has_nobody_to_be_slower_than() -> None:
    seconds = world(1)
    seconds["compute"][0, BEGIN:] *= 3.0
    assert seen(seconds) == []


@settings(max_examples=8)
@given(st.sampled_from((1, 2, 3, 4, 6, 10, 30)))
def test_portions_do_not_matter(portion: int) -> None:
    seconds = world()
    seconds["compute"][1, BEGIN:] *= 1.7
    one, other = WindowedDetector(), WindowedDetector()
    for begin in range(0, STEPS, portion):
        verdicts = one.observe(times(seconds, begin, begin + portion))
    assert verdicts == other.observe(times(seconds, 0, STEPS)) != ()


@settings(max_examples=10)
@given(st.permutations(range(6)), st.floats(1e-4, 1e4))
def test_neither_the_order_of_ranks_nor_the_unit_matters(order: list[int], unit: float) -> None:
    seconds = world(6)
    seconds["compute"][2, BEGIN:] *= 2.0
    moved = {kind: unit * values[order] for kind, values in seconds.items()}
    assert {order[verdict.member.slot] for _, verdict in seen(moved, portion=30)} == {2}


def test_times_of_another_shape_are_refused() -> None:
    good = times(world(), 0, 5)
    with pytest.raises(ValueError, match="network_s has shape"):
        replace(good, network_s=good.network_s[:2])


VALUES = arrays.arrays(float, st.integers(2, 12), elements=st.floats(-5, 5))


@given(VALUES)
def test_the_median_of_others_is_that(values: np.ndarray) -> None:
    expected = [np.median(np.delete(values, row)) for row in range(len(values))]
    assert np.allclose(scores.median_of_others(values), expected)


@given(arrays.arrays(float, st.tuples(st.integers(1, 5), st.integers(1, 20)), elements=st.floats(-5, 5)), st.integers(1, 5))
def test_locations_lie_within_their_row_and_missing_times_do_not_count(log_s: np.ndarray, missing: int) -> None:
    medians, midmeans = scores.locations(log_s, least=1)
    assert np.allclose(medians, np.median(log_s, axis=1))
    assert (midmeans >= log_s.min(axis=1) - 1e-9).all() and (midmeans <= log_s.max(axis=1) + 1e-9).all()
    padded = np.concatenate([np.full((len(log_s), missing), np.nan), log_s], axis=1)
    assert np.allclose(scores.locations(padded, least=1), (medians, midmeans))
    assert np.isnan(scores.locations(log_s, least=log_s.shape[1] + 1)).all()


def test_scores_are_the_published_formulas() -> None:
    assert relative_score(np.log([2.0]), np.log([1.5]))[0] == pytest.approx(0.75)
    assert individual_score(np.log([1.0]), np.log([4.0]))[0] == pytest.approx(0.25)
    assert robust_zs(np.array([1.0, 2.0, 3.0, 4.0, 100.0]))[-1] == pytest.approx(0.6745 * 97)


def test_nothing_is_beyond_the_noise_while_it_is_not_known() -> None:
    nothing = scores.usual(np.full((2, 30), np.nan), spread=0.03, most=0.06, floor=0.01)
    assert nothing.noise == math.inf and (nothing.apart == 0).all() and (nothing.doubt == 0.03).all()


def test_what_is_usual_is_believed_as_far_as_it_is_known() -> None:
    rng = np.random.default_rng(1)
    own, sd, steps = np.array([0.04, -0.04, 0.3, 0.0]), 0.05, 80
    past = own[:, None] + rng.normal(0, sd, (4, steps))
    past[3, 5:] = np.nan
    found = scores.usual(past, spread=0.03, most=0.06, floor=0.01)
    assert found.noise == pytest.approx(sd, rel=0.15) and 1 <= found.memory < 1.7
    assert found.apart[:2] == pytest.approx(own[:2], abs=0.015) and abs(found.apart[0]) < 0.04
    assert found.apart[2] == 0.06, "a rank that has always been slow stands out"
    assert found.apart[3] == 0 and found.doubt[3] == pytest.approx(0.03) and (found.doubt[:3] < 0.015).all()
    assert scores.usual(past / 100, spread=0.03, most=0.06, floor=0.01).noise == 0.01


def test_steps_that_know_of_each_other_count_for_less() -> None:
    rng = np.random.default_rng(2)
    waves = np.cumsum(rng.normal(0, 1, (6, 400)), axis=1)
    waves -= np.array([np.convolve(row, np.full(40, 1 / 40), "same") for row in waves])
    alone, few = rng.normal(0, 1, (6, 400)), rng.normal(0, 1, (6, 4))
    assert scores.memory(alone, 1.0) == pytest.approx(1, abs=0.35)
    assert scores.memory(waves, float(waves.std())) == scores.MOST_MEMORY
    assert scores.memory(few, 1.0) == pytest.approx(scores.PRIOR_MEMORY, abs=0.6)


@given(arrays.arrays(float, st.tuples(st.integers(1, 5), st.integers(1, 60)), elements=st.one_of(st.floats(-3, 3), st.just(math.nan))))
def test_whatever_was_seen_says_something_that_can_be_reckoned_with(past: np.ndarray) -> None:
    found = scores.usual(past, spread=0.03, most=0.06, floor=0.01)
    assert (np.abs(found.apart) <= 0.06).all() and (found.doubt > 0).all() and (found.doubt <= 0.03 + 1e-12).all()
    assert found.noise >= 0.01 and 1 <= found.memory <= scores.MOST_MEMORY


def test_peers_that_feel_a_slow_link_are_reckoned_with() -> None:
    """Each of three peers of a link that takes 1.3 times as long meets it in one of three transfers."""
    limits = Sensitivity(network_slowdown=1.3, network_least=1.05)
    assert limits.least("network", 4) == pytest.approx(1.3 / 1.1)
    assert limits.least("network", 1000) == pytest.approx(1.3, abs=1e-3)
    assert limits.least("network", 2) == 1.3 and limits.least("compute", 4) == limits.compute_slowdown
    assert Sensitivity(network_slowdown=1.3, network_least=1.25).least("network", 3) == 1.25
    assert Sensitivity(network_slowdown=1.1, network_least=1.25).least("network", 3) == 1.1, "what somebody has set holds"


@pytest.mark.parametrize("ranks", [3, 4, 8, 16])
def test_a_rank_that_is_slower_by_little_is_found_when_steps_waver_by_less(ranks: int) -> None:
    seconds = world(ranks, noise=0.01)
    seconds["compute"][1, BEGIN:] *= 1.13
    found = seen(seconds)
    assert {(verdict.member.slot, verdict.kind) for _, verdict in found} == {(1, "compute")} and found[0][0] <= BEGIN + 20


@pytest.mark.parametrize("seed", range(5))
def test_nobody_is_guilty_of_steps_that_waver(seed: int) -> None:
    assert seen(world(8, seed, noise=0.3, steps=200)) == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_pause_makes_nobody_slow(ranks: int) -> None:
    seconds = world(ranks)
    seconds["compute"][1, BEGIN : BEGIN + 4] *= 2.0
    assert seen(seconds) == []


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_in_a_small_world_a_rank_is_compared_with_itself_too(ranks: int) -> None:
    """Of two ranks the difference wavers 1.4 times as much as each."""
    shares = []
    for seed in range(20):
        seconds = world(ranks, seed, noise=0.13)
        seconds["data"][1, BEGIN:] *= 1.35
        found = seen(seconds)
        assert {(verdict.member.slot, verdict.kind) for _, verdict in found} <= {(1, "data")}
        shares.append(bool(found) and found[0][0] <= BEGIN + 20)
    assert np.mean(shares) >= 0.7


@pytest.mark.parametrize("kind", KINDS)
def test_when_all_become_slow_nobody_is_guilty_however_well_each_is_known(kind: str) -> None:
    seconds = world(3, noise=0.1)
    seconds[kind][:, BEGIN:] *= 2.0
    assert seen(seconds) == []
