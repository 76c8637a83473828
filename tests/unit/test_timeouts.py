"""The progress time-out follows the steps, and insane orders are refused by name."""

from __future__ import annotations

import itertools
import math
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import ConfigError
from fleet.machine.progress import ProgressLimit
from fleet.protocol.instructions import Write
from fleet.protocol.records import DecisionMade
from fleet.settings.run import ORDER, RunSettings, Timeouts, check_order
from policies.timeouts import ProgressTimeout, quantile

STEPS = st.lists(st.floats(0.001, 1000), max_size=300)


def test_the_sane_order_passes() -> None:
    check_order({"heartbeat_s": 3, "progress_s": 60, "collective_s": 600, "run_s": math.inf})


@pytest.mark.parametrize(("short", "long"), list(itertools.pairwise(ORDER)))
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_each_insane_pair_is_named(short: str, long: str, factor: float) -> None:
    timeouts = {name: 10.0**place for place, name in enumerate(ORDER)}
    timeouts[short] = factor * timeouts[long]
    with pytest.raises(ConfigError, match=rf"timeouts.{long} = .*timeouts.{short} = ") as caught:
        check_order({name: timeouts[name] for name in (short, long)})
    assert f"{short} < {long}" in caught.value.way_out
    with pytest.raises(ConfigError, match=r"must be greater than timeouts\."):
        Timeouts(**timeouts, node_s=timeouts["heartbeat_s"] + 1)


def test_a_missing_timeout_is_not_compared_and_another_order_can_be_given() -> None:
    check_order({"heartbeat_s": 3, "run_s": 60})
    check_order({"progress_s": 60, "collective_s": 6}, ("collective_s", "progress_s"))
    with pytest.raises(ConfigError, match="collective_s"):
        check_order({"progress_s": 60, "collective_s": 6})


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_a_timeout_that_is_not_positive_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="greater than 0 s"):
        check_order({"progress_s": value})


@given(STEPS, st.floats(0.1, 1000))
def test_it_stays_between_floor_and_ceiling(steps_s: list[float], present_s: float) -> None:
    policy = ProgressTimeout(floor_s=2.0, ceiling_s=90.0)
    decision = policy.decide(steps_s, min(max(present_s, 2.0), 90.0))
    assert 2.0 <= decision.fields["progress_s"] <= 90.0


@given(st.lists(st.floats(0.5, 2.0), min_size=20, max_size=300), st.floats(5.0, 60.0))
def test_no_observed_step_is_a_hang_and_it_falls_slowly(steps_s: list[float], present_s: float) -> None:
    policy = ProgressTimeout(factor=5.0)
    after_s = policy.decide(steps_s, present_s).fields["progress_s"]
    assert after_s > max(steps_s[-policy.window :]) and after_s >= present_s * (1 - policy.shrink)


def test_it_rises_at_once_and_settles_when_steps_do_not_change() -> None:
    policy, present_s = ProgressTimeout(floor_s=1.0, ceiling_s=600.0, factor=5.0), 5.0
    decision = policy.decide([10.0] * 50, present_s)
    assert decision.action == "set" and decision.fields["progress_s"] == 50.0
    present_s = 50.0
    for _ in range(60):
        present_s = policy.decide([1.0] * 50, present_s).fields["progress_s"]
    assert policy.decide([1.0] * 50, present_s).action == "keep" and present_s == pytest.approx(5.0, rel=0.02)


def test_with_few_steps_the_ceiling_holds_and_what_is_no_step_is_left_out() -> None:
    decision = ProgressTimeout().decide([1.0] * 19 + [math.nan, -1.0, math.inf], 10.0)
    assert decision.fields["progress_s"] == 300.0 and "19 steps are known" in decision.reason


@given(st.lists(st.floats(0, 10), min_size=1, max_size=50), st.floats(0, 1))
def test_the_quantile_lies_within_the_values_and_ends_at_them(values: list[float], share: float) -> None:
    ordered = sorted(values)
    assert ordered[0] - 1e-9 <= quantile(ordered, share) <= ordered[-1] + 1e-9
    assert quantile(ordered, 0) == ordered[0] and quantile(ordered, 1) == ordered[-1]


@pytest.mark.parametrize("wrong", [{"floor_s": 0}, {"floor_s": 301}])
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=rf"progress\.{next(iter(wrong))} = "):
        ProgressTimeout(**wrong)  # type: ignore[arg-type]


def test_the_machine_keeps_what_was_decided_and_journals_it() -> None:
    progress = ProgressLimit(ProgressTimeout.of(RunSettings()), 60.0, 0.0)
    [first] = progress.tick(deque([0.1] * 100), 0.0)
    assert isinstance(first, Write) and isinstance(first.record, DecisionMade)
    assert progress.limit_s == first.record.fields["progress_s"] < 60.0
    assert not progress.tick([0.1] * 100, 1.0), "it is asked now and then only"
    again = ProgressLimit(None, 60.0, 0.0)
    again.replay(first.record)
    assert again.limit_s == progress.limit_s
    for number in range(100):
        progress.tick([0.1] * 100, 10.0 * (number + 1))
    assert progress.limit_s == pytest.approx(2 * Timeouts().form_s, rel=0.02)
