"""The simulated world of `detect` is what it says it is, and its tally counts as it says."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import noise, slow_world
from benchmarks.detect import FAULTS, STEPS, Stretch, Tally, fleet
from benchmarks.slow_world import BEGIN, SEVERITIES, SlowRank
from fleet.protocol.types import Member
from policies.straggler.detectors import KINDS, Sensitivity

A, B = Member(0, 0), Member(1, 0)


@pytest.fixture(scope="module")
def series() -> slow_world.Noise:
    return slow_world.recorded(0)


def test_the_noise_is_recorded_and_says_where() -> None:
    about = noise.provenance()
    assert set(noise.load()) == set(noise.regimes()) == set(about["left_out"]) and about["machine"]["cpu"]
    assert all((rows > 0).all() and rows.shape[1] == noise.STEPS for rows in noise.load().values())


def test_training_and_reported_noise_do_not_overlap(series: slow_world.Noise) -> None:
    other = slow_world.recorded(1)
    assert all(series[name].factors.shape[1] + other[name].factors.shape[1] == noise.STEPS for name in series)


def test_work_takes_as_many_recorded_repetitions_as_it_lasts() -> None:
    """Repetitions of 5 ms that are fast and slow by turns: a step of 100 ms and more meets both, a shard of one repetition only one."""
    series = {name: slow_world.Series(np.tile([0.5, 1.5], (1, 20_000)), 0.005) for name in noise.load()}
    for brief in (False, True):
        made = [stretch for stretch in slow_world.stretches(3, 0, 40, series, brief) if len(stretch.portions[0].members) == 16]
        assert made
        for stretch in made:
            compute = np.log(np.hstack([portion.compute_s for portion in stretch.portions[4:]]))
            wavers = np.median(np.abs(compute - np.median(compute, axis=0)), axis=1).max()
            assert wavers > 0.3 if brief else wavers < 0.1


def test_a_seed_gives_the_same_world_again(series: slow_world.Noise) -> None:
    one, again = (list(slow_world.stretches(5, 2, 1, series)) for _ in range(2))
    other = next(slow_world.stretches(6, 1, 0, series))
    for stretch, same in zip(one, again, strict=True):
        assert stretch.truth == same.truth
        for portion, twin in zip(stretch.portions, same.portions, strict=True):
            assert all(np.array_equal(portion.seconds(kind), twin.seconds(kind)) for kind in KINDS)
    assert not np.array_equal(one[0].portions[0].seconds("compute").ravel()[:5], other.portions[0].seconds("compute").ravel()[:5])


def test_all_kinds_and_severities_are_injected_and_clean_is_clean(series: slow_world.Noise) -> None:
    count = len(FAULTS) * len(SEVERITIES)
    made = list(slow_world.stretches(5, count, 2, series))
    assert {(stretch.fault, stretch.severity) for stretch in made if stretch.truth} == {(f, s) for f in FAULTS for s in SEVERITIES}
    assert [bool(stretch.truth) for stretch in made] == [True] * count + [False] * 2
    assert all(sum(portion.network_s.shape[1] for portion in stretch.portions) == STEPS for stretch in made)
    assert all(len(stretch.portions[0].members) > 2 for stretch in made if stretch.fault == "network")


def test_right_needs_the_rank_the_kind_and_the_time() -> None:
    stretch = Stretch((), (SlowRank(A, "compute", "compute", 2.0),), "", "compute", 2.0)
    tally = Tally()
    tally.add(stretch, [(A, "compute", BEGIN + 9), (A, "network", BEGIN + 9), (B, "compute", BEGIN + 9), (A, "compute", BEGIN - 1)])
    tally.add(stretch, [(A, "compute", BEGIN + 30)])
    assert (tally.right, tally.wrong, tally.wrong_clean) == (2, 3, 0)
    assert tally.latencies(1.0) == [10] and tally.recall(1.25) == 0.5 and tally.precision() == 0.4
    tally.add(Stretch((), (), ""), [(B, "data", 3)])
    assert (tally.wrong, tally.wrong_clean, tally.clean_steps) == (4, 1, STEPS)


def test_four_times_slow_is_found_in_recorded_noise(series: slow_world.Noise) -> None:
    index = len(FAULTS) * SEVERITIES.index(4.0)
    stretch = list(slow_world.stretches(5, index + 1, 0, series))[index]
    tally = Tally()
    tally.add(stretch, fleet(Sensitivity())(stretch))
    assert tally.recall(4.0) == 1.0 and tally.wrong == 0
