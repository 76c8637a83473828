from __future__ import annotations

import math

import pytest

from fleet.errors import ConfigError
from fleet.laws.checkpointing import daly_work_s, exact_work_s, young_work_s
from fleet.laws.tiers import multilevel_work_s
from policies.interval import CheckpointInterval, LevelRates, updated_rate_per_s


def test_waits_until_the_interval_is_over_and_then_saves() -> None:
    policy = CheckpointInterval(law="exact")
    interval = exact_work_s(0.5, 600.0) + 0.5
    wait = policy.due(100.0, 99.0, 0.5, 2.0, 1 / 600)
    assert (wait.action, wait.valid_until_s) == ("wait", 99.0 + interval)
    known = {"interval_s": interval, "blocked_s": 0.5, "latency_s": 2.0, "rate_per_s": 1 / 600, "events": 0.0, "exposure_s": 0.0}
    assert wait.fields == pytest.approx(known)
    assert policy.due(wait.valid_until_s, 99.0, 0.5, 2.0, 1 / 600).action == "save"
    assert policy.due(math.nextafter(wait.valid_until_s, 0), 99.0, 0.5, 2.0, 1 / 600).action == "wait"


@pytest.mark.parametrize(("law", "work_s"), [("young", young_work_s), ("daly", daly_work_s), ("exact", exact_work_s)])
def test_each_law_gives_its_interval(law: str, work_s: object) -> None:
    decision = CheckpointInterval(law=law).due(0.0, 0.0, 5.0, 0.0, 1 / 900)
    assert decision.fields["interval_s"] == pytest.approx(work_s(5.0, 900.0) + 5.0)  # type: ignore[operator]
    assert law in decision.reason


def test_fixed_keeps_its_interval_but_not_below_the_latency() -> None:
    policy = CheckpointInterval(law="fixed", interval_s=7200.0)
    assert policy.due(0.0, 0.0, 0.0, 0.0, 0.0).fields["interval_s"] == 7200.0
    assert policy.due(0.0, 0.0, 1.0, 9000.0, 0.0).fields["interval_s"] == 9000.0


def test_never_below_the_time_until_durable() -> None:
    decision = CheckpointInterval().due(0.0, 0.0, 0.01, 40.0, 1 / 15)
    assert decision.fields["interval_s"] == 40.0
    assert "durable" in decision.reason


@pytest.mark.parametrize("unknown", [0.0, -1.0, math.nan])
def test_takes_one_soon_while_the_cost_is_unknown(unknown: float) -> None:
    policy = CheckpointInterval(first_s=4.0)
    assert policy.due(3.9, 0.0, unknown, unknown, 0.0).action == "wait"
    assert policy.due(4.0, 0.0, unknown, unknown, 0.0).action == "save"


def test_without_faults_that_need_it_the_interval_is_the_longest() -> None:
    assert CheckpointInterval(max_s=600.0).due(0.0, 0.0, 0.1, 1.0, 0.0).fields["interval_s"] == 600.0
    assert CheckpointInterval(max_s=600.0).due(0.0, 0.0, 0.1, 1.0, 1e-12).fields["interval_s"] == 600.0


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"law": "weekly"}, "checkpoint.policy"),
        ({"law": "fixed"}, "checkpoint.interval_s"),
        ({"law": "young", "interval_s": 5.0}, "checkpoint.interval_s"),
        ({"law": "fixed", "interval_s": 0.0}, "checkpoint.interval_s"),
    ],
)
def test_refuses_what_cannot_work(settings: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        CheckpointInterval(**settings)  # type: ignore[arg-type]
    assert error.value.field == field


def test_only_losing_every_rank_needs_a_checkpoint() -> None:
    rate, repair = 1 / 15, 5.0
    alone, ranks = (LevelRates(faults_per_s=rate, world=world, refill_s=repair)(0, 0.0)[0] for world in (1, 4))
    assert alone == pytest.approx(rate / (1 + rate * repair))
    assert ranks < rate / 100
    assert LevelRates(faults_per_s=0.0, world=4, refill_s=5.0, whole_per_s=1e-4)(0, 0.0)[0] == 1e-4


def test_each_level_has_the_interval_of_the_optimum_for_all_levels() -> None:
    blocked_s, rates_per_s = (0.02, 4.0), (1 / 900, 1 / 86_400)
    policy = CheckpointInterval(law="young", max_s=1e6)
    chosen = [policy.due(0.0, 0.0, c, 0.0, rate).fields["interval_s"] - c for c, rate in zip(blocked_s, rates_per_s, strict=True)]
    assert chosen == pytest.approx(multilevel_work_s(blocked_s, rates_per_s))


def test_an_interval_is_shorter_once_faults_have_needed_it_and_longer_after_quiet_times() -> None:
    def interval_s(events: int, exposure_s: float) -> float:
        return CheckpointInterval().due(0.0, 0.0, 0.5, 1.0, 1 / 3600, events=events, exposure_s=exposure_s).fields["interval_s"]

    expected = interval_s(0, 0.0)
    assert interval_s(0, 7200.0) == pytest.approx(expected * math.sqrt(3), rel=0.05), "a prior worth one fault, and two times its MTBF"
    assert interval_s(20, 7200.0) < expected / 2
    assert "20 of them in 7200 s" in CheckpointInterval().due(0.0, 0.0, 0.5, 1.0, 1 / 3600, events=20, exposure_s=7200.0).reason


def test_observation_moves_the_rate() -> None:
    assert updated_rate_per_s(0.01, 0, 0.0) == pytest.approx(0.01)
    assert updated_rate_per_s(0.01, 0, 100.0) == pytest.approx(0.005)
    assert updated_rate_per_s(0.01, 500, 10_000.0) == pytest.approx(0.05, rel=0.02)
    assert updated_rate_per_s(0.0, 3, 100.0) == 0.03
    assert updated_rate_per_s(0.0, 0, 0.0) == 0.0
