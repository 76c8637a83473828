"""The straggler policy takes the way with the least expected loss, and no way at all when nothing is gained by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.placement import ranges, weighted_ranges
from policies.straggler.remedies import Durations, LeastLoss, Standing, ways_out

HALF = (1.0, 1.0, 2.0, 1.0)
BASE = Standing(
    shards=16, ranges=ranges(16, 4), slowdowns=HALF, kind="compute", nodes=("a", "a", "b", "b"), shard_s=0.1, fixed_s=0.1,
    elapsed_s=5.0, remaining_s=36_000.0, provision_s=3600.0,
)  # fmt: skip
POLICY = LeastLoss()


def test_without_a_spare_a_rank_at_half_speed_gets_fewer_shards() -> None:
    chosen = POLICY.decide(BASE, 100.0)
    assert chosen.decision.action == "rebalance" and chosen.ranges == weighted_ranges(16, (1, 1, 0.5, 1))
    fields = chosen.decision.fields
    assert fields["cost_rebalance"] < fields["cost_tolerate"] and fields["saved"] == fields["cost_tolerate"] - fields["cost_rebalance"]
    assert chosen.decision.valid_until_s == 110.0


def test_a_good_spare_replaces_it_and_a_slow_spare_does_not() -> None:
    good = POLICY.decide(replace(BASE, spares=(1.0,)), 0.0)
    assert good.decision.action == "replace" and good.slots == (2,)
    assert POLICY.decide(replace(BASE, spares=(2.5,)), 0.0).decision.action == "rebalance"


def test_a_spare_that_the_next_fault_needs_has_its_price() -> None:
    cheap, dear = (
        POLICY.decide(replace(BASE, spares=(1.0,), spare_rate_per_s=rate, provision_s=120.0), 0.0).decision.fields for rate in (0.0, 1.0)
    )
    assert dear["cost_replace"] == pytest.approx(cheap["cost_replace"] + 120.0)


def test_two_slow_ranks_of_one_node_may_cost_the_node() -> None:
    slow = replace(BASE, slowdowns=(1.0, 1.0, 8.0, 8.0), spares=(1.0, 1.0), replace_s=5.0, evict_s=1.0)
    chosen = POLICY.decide(slow, 0.0)
    assert chosen.decision.action == "evict" and chosen.slots == (2, 3)


def test_no_process_is_ended_for_a_machine_that_is_busy() -> None:
    busy = replace(BASE, spares=(1.0,), waiting=(2,))
    assert {way.action for way in ways_out(busy, 600.0)} == {"tolerate", "rebalance"}
    chosen = POLICY.decide(busy, 0.0)
    assert chosen.decision.action == "rebalance" and "one slow rank waits for cores" in chosen.decision.reason
    both = replace(busy, slowdowns=(1.0, 3.0, 9.0, 1.0))
    replaced = next(way for way in ways_out(both, 600.0) if way.action == "replace")
    assert replaced.slots == (1,), "the other one is slow by itself"


def test_no_node_is_evicted_when_it_is_the_only_one() -> None:
    ways = ways_out(replace(BASE, nodes=("a",) * 4), 600.0)
    assert {way.action for way in ways} == {"tolerate", "rebalance"}


def test_a_slow_link_is_not_helped_by_fewer_shards() -> None:
    ways = ways_out(replace(BASE, kind="network"), 600.0)
    assert {way.action for way in ways} == {"tolerate", "evict"}


@pytest.mark.parametrize("wrong", [{"slowdowns": (1.0,) * 4}, {"slowdowns": (1.01, 1.0, 1.0, 1.0)}, {"remaining_s": 0.1}])
def test_what_costs_next_to_nothing_is_tolerated(wrong: dict[str, object]) -> None:
    assert POLICY.decide(replace(BASE, **wrong), 0.0).decision.action == "tolerate"  # type: ignore[arg-type]


def test_shards_go_back_when_the_rank_is_well_again() -> None:
    well = replace(BASE, slowdowns=(1.0,) * 4, ranges=weighted_ranges(16, (1, 1, 0.5, 1)))
    chosen = POLICY.decide(well, 0.0)
    assert chosen.decision.action == "rebalance" and chosen.ranges == ranges(16, 4)


def test_the_answer_settles() -> None:
    chosen = POLICY.decide(BASE, 0.0)
    assert chosen.ranges is not None
    for slow in (1.9, 2.0, 2.1):
        again = POLICY.decide(replace(BASE, ranges=chosen.ranges, slowdowns=(1.0, 1.0, slow, 1.0)), 10.0)
        assert again.decision.action == "tolerate", slow


def test_view_changes_are_budgeted() -> None:
    chosen = POLICY.decide(replace(BASE, changes=6), 0.0)
    assert chosen.decision.action == "tolerate" and "used up" in chosen.decision.reason and chosen.ranges is None


def test_slowness_that_lasts_is_expected_to_last() -> None:
    prior = Durations(mean_s=600.0)
    assert prior.left_s(0.0) == 600.0 and prior.left_s(6000.0) == 6600.0
    short = Durations(mean_s=600.0, seen_s=(10.0,) * 99)
    assert short.left_s(0.0) == pytest.approx(15.9)


@given(st.lists(st.floats(1, 6), min_size=2, max_size=6), st.lists(st.floats(0.9, 4), max_size=3), st.floats(1, 1e5), st.floats(0, 1e4))
def test_the_choice_is_never_dearer_than_to_go_on(
    slowdowns: list[float], spares: list[float], remaining_s: float, elapsed_s: float
) -> None:
    ranks = len(slowdowns)
    standing = replace(
        BASE, ranges=ranges(16, ranks), slowdowns=tuple(slowdowns), nodes=tuple(f"n{rank // 2}" for rank in range(ranks)),
        spares=tuple(spares), remaining_s=remaining_s, elapsed_s=elapsed_s,
    )  # fmt: skip
    chosen = POLICY.decide(standing, 0.0)
    fields = chosen.decision.fields
    costs = {name: value for name, value in fields.items() if name.startswith("cost_")}
    assert all(cost >= 0 for cost in costs.values())
    assert fields[f"cost_{chosen.decision.action}"] <= fields["cost_tolerate"]
    if chosen.decision.action != "tolerate":
        assert fields[f"cost_{chosen.decision.action}"] == min(costs.values())
    assert (chosen.ranges is not None) == (chosen.decision.action == "rebalance")
    assert bool(chosen.slots) == (chosen.decision.action in ("replace", "evict")) and len(chosen.slots) < ranks + 1


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="slowdowns has 2 entries for 4 ranks"):
        replace(BASE, slowdowns=(1.0, 1.0))
