"""Who trains on, who joins, and when bad luck has become a crash loop."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from fleet.protocol.types import Candidate, Loss, Member, Situation, StateId
from fleet.settings.run import Budgets
from policies.recovery import SETTLE_S, ReformPromoteRegrow

POLICY = ReformPromoteRegrow(Budgets(slot=4, total=8), start_s=60.0)


def candidate(slot: int, step: int | None = 5, dirty: bool = False, in_view: bool = True) -> Candidate:
    return Candidate(Member(slot, 0), f"n{slot}", None if step is None else StateId(0, step), dirty, in_view)


def situation(*candidates: Candidate, world: int = 4, min_ranks: int = 1, checkpoint: str | None = None) -> Situation:
    return Situation(candidates, world, min_ranks, 0.0, 0, checkpoint)


def slots(members: tuple[Member, ...]) -> list[int]:
    return [member.slot for member in members]


def loss(
    slot: int = 0, at_s: float = 10.0, node: str = "", step: int = -1, shard: int = -1, injected: bool = False, committed: int = -1
) -> Loss:
    return Loss(
        slot, node or f"n{slot}", at_s, step, shard, injected, f"error of slot {slot}", committed if committed >= 0 else round(at_s)
    )


def test_survivors_re_form_at_once() -> None:
    formation = POLICY.form(situation(candidate(0), candidate(2), candidate(3)), 0.0)
    assert formation.decision.action == "form"
    assert slots(formation.members) == [0, 2, 3]


SPARES = tuple(candidate(slot, None, in_view=False) for slot in (4, 5, 6))


def test_survivors_do_not_wait_for_a_spare_which_joins_at_the_next_step_boundary() -> None:
    there = situation(candidate(0), candidate(2), candidate(3), SPARES[0])
    assert slots(POLICY.form(there, 0.0).members) == [0, 2, 3]
    assert slots(POLICY.grow(there, SETTLE_S).members) == [0, 2, 3, 4]


def test_nobody_joins_before_the_survivors_could_take_the_step_that_broke() -> None:
    there = dataclasses.replace(situation(candidate(0), candidate(2), SPARES[0]), since_s=10.0)
    early = POLICY.grow(there, 10.0 + SETTLE_S / 2)
    assert (early.decision.action, early.members) == ("wait", ())
    assert POLICY.grow(there, early.decision.valid_until_s).decision.action == "grow"


def test_spares_are_promoted_in_the_same_view_where_it_does_not_go_on_without_them() -> None:
    too_few = situation(candidate(0), candidate(3), *SPARES, min_ranks=3)
    assert slots(POLICY.form(too_few, 0.0).members) == [0, 3, 4, 5], "min_ranks"
    most = situation(candidate(0), *SPARES)
    assert slots(POLICY.form(most, 0.0).members) == [0, 4, 5, 6], "more than half are new, and compute their share"
    stateless = situation(candidate(0, dirty=True), candidate(3, dirty=True), *SPARES)
    assert slots(POLICY.form(stateless, 1e9).members) == [0, 3, 4, 5], "nobody has a state that would make them wait"
    parts = dataclasses.replace(situation(candidate(0), candidate(2), candidate(3), SPARES[0]), replicated=False)
    assert slots(POLICY.form(parts, 0.0).members) == [0, 2, 3, 4], "each rank holds a part"


def test_spares_of_a_sharded_run_come_into_the_view_and_stay_there() -> None:
    whole = [candidate(slot) for slot in range(4)]
    there = dataclasses.replace(situation(*whole, *SPARES), replicated=False, spares=2)
    assert slots(POLICY.form(there, 0.0).members) == [0, 1, 2, 3], "the others go on first"
    assert slots(POLICY.grow(there, SETTLE_S).members) == [0, 1, 2, 3, 4, 5], "as many as the run has spares"
    inside = dataclasses.replace(situation(*whole, candidate(4)), replicated=False, spares=1, computing=4, compute=4)
    assert slots(POLICY.form(inside, 0.0).members) == [0, 1, 2, 3, 4], "it has a part of the state"
    assert POLICY.grow(inside, SETTLE_S).decision.reason == "the world is full"


def test_a_spare_computes_in_a_world_that_grows_and_a_rank_is_a_spare_in_one_that_shrinks() -> None:
    whole = [candidate(slot) for slot in range(5)]
    there = dataclasses.replace(situation(*whole, world=5), replicated=False, spares=1, computing=4, compute=5)
    grown = POLICY.grow(there, SETTLE_S)
    assert (grown.decision.action, slots(grown.members)) == ("grow", [0, 1, 2, 3, 4])
    assert grown.decision.reason == "5 ranks compute from now on, and 4 did"
    less = POLICY.grow(dataclasses.replace(there, world=4, computing=5, compute=4), SETTLE_S)
    assert (less.decision.action, slots(less.members)) == ("shrink", [0, 1, 2, 3, 4])
    assert POLICY.grow(dataclasses.replace(there, world=4, compute=4), SETTLE_S).decision.action == "wait"
    moving = dataclasses.replace(situation(*whole, world=3), replicated=False, spares=1, may_leave=0, computing=5, compute=5)
    assert POLICY.grow(moving, SETTLE_S).decision.action == "wait", "no rank leaves yet, and no view would differ from the present one"


def test_a_rank_whose_node_goes_does_not_stay_for_the_seat_of_a_spare() -> None:
    leaving = dataclasses.replace(candidate(1), goes_in_s=60.0)
    there = dataclasses.replace(situation(candidate(0), leaving, *map(candidate, (2, 3, 4))), replicated=False, spares=1, may_leave=1)
    formation = POLICY.grow(there, SETTLE_S)
    assert (formation.decision.action, slots(formation.members)) == ("shrink", [0, 2, 3, 4])


def test_a_spare_without_room_for_a_part_comes_only_where_a_rank_is_missing() -> None:
    roomless = dataclasses.replace(SPARES[0], keeps=False)
    there = dataclasses.replace(situation(*map(candidate, range(4)), roomless, SPARES[1]), replicated=False, spares=2)
    assert slots(POLICY.grow(there, SETTLE_S).members) == [0, 1, 2, 3, 5]
    missing = dataclasses.replace(situation(*map(candidate, range(3)), roomless), replicated=False, spares=2)
    assert slots(POLICY.grow(missing, SETTLE_S).members) == [0, 1, 2, 4]


def test_holders_of_the_newest_state_come_first() -> None:
    formation = POLICY.form(
        situation(candidate(0, None, in_view=False), candidate(1, 5), candidate(2, 6), candidate(3, 6, dirty=True), world=2), 0.0
    )
    assert slots(formation.members) == [1, 2]


def test_it_waits_below_min_ranks() -> None:
    decision = POLICY.form(situation(candidate(0), min_ranks=2), 1e9).decision
    assert decision.action == "wait"
    assert "min_ranks is 2" in decision.reason


def test_without_any_state_it_waits_for_the_full_world_but_not_for_ever() -> None:
    waiting = situation(candidate(0, None), candidate(1, dirty=True))
    early = POLICY.form(waiting, 59.0).decision
    assert early.action == "wait"
    assert early.valid_until_s == 60.0
    assert POLICY.form(waiting, 60.0).decision.action == "form"


def test_it_grows_only_by_those_who_wait_and_only_up_to_the_world() -> None:
    three = (candidate(0), candidate(1), candidate(2))
    waiting = (candidate(3, None, in_view=False), candidate(4, None, in_view=False))
    assert slots(POLICY.grow(situation(*three, *waiting), SETTLE_S).members) == [0, 1, 2, 3]
    assert POLICY.grow(situation(*three), 0.0).decision.reason == "no rank to add"
    assert POLICY.grow(situation(*three, *waiting, world=3), 0.0).decision.reason == "the world is full"


def test_within_all_budgets_the_run_goes_on() -> None:
    assert POLICY.judge([loss(0), loss(1), loss(2)], 20.0).action == "go_on"


def test_a_shard_that_kills_whoever_computes_it_is_named() -> None:
    decision = POLICY.judge([loss(slot, step=7, shard=3) for slot in range(2)], 20.0)
    assert decision.action == "give_up"
    assert "shard 3 of step 7 was lost 2 times" in decision.reason
    assert decision.reason.endswith("last error: error of slot 1")


def test_a_slot_that_dies_without_any_progress_is_given_up_early() -> None:
    decision = POLICY.judge([loss(1, at_s, committed=5) for at_s in (1.0, 2.0)], 20.0)
    assert "slot 1, with no step committed in between, was lost 2 times" in decision.reason


def test_a_slot_a_node_and_the_whole_run_have_budgets() -> None:
    by_slot = [loss(1, float(i)) for i in range(4)]
    by_node = [loss(i % 3, float(i), node="n9") for i in range(6)]
    by_total = [loss(i, float(i)) for i in range(8)]
    assert "slot 1 was lost 4 times" in POLICY.judge(by_slot, 20.0).reason
    assert "a rank of node n9 was lost 6 times" in POLICY.judge(by_node, 20.0).reason
    assert "a rank was lost 8 times" in POLICY.judge(by_total, 20.0).reason


def test_other_limits_follow_from_that_of_a_slot() -> None:
    assert (Budgets().slot, Budgets().node, Budgets().shard, Budgets().slot_fruitless) == (8, 12, 3, 4)


def test_what_chaos_did_and_what_is_long_past_does_not_count() -> None:
    assert POLICY.judge([loss(1, float(i), injected=True) for i in range(50)], 60.0).action == "go_on"
    assert POLICY.judge([loss(1, float(i)) for i in range(4)], 700.0).action == "go_on"


CANDIDATES = st.lists(
    st.builds(candidate, st.integers(0, 12), st.none() | st.integers(0, 9), st.booleans(), st.booleans()), unique_by=lambda one: one.member
)  # fmt: skip


@given(CANDIDATES, st.integers(1, 6), st.integers(1, 3))
def test_whatever_is_chosen_is_there_once_and_holds_the_newest_clean_state(found: list[Candidate], world: int, least: int) -> None:
    formation = POLICY.form(situation(*found, world=world, min_ranks=least), 1e9)
    clean = [one for one in found if one.state is not None and not one.dirty]
    chosen = set(formation.members)
    assert len(chosen) == len(formation.members) <= world
    assert chosen <= {one.member for one in found}
    assert (formation.decision.action == "form") == (min(len(found), world) >= least)
    if chosen and clean:
        newest = max(one.state for one in clean if one.state is not None)
        assert any(one.member in chosen and one.state == newest for one in clean)
