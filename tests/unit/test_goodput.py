"""The ledger on journals written by hand: each category, each cost, each refusal."""

from __future__ import annotations

import pytest

from fleet.errors import LedgerError
from fleet.ledger.goodput import Ledger
from fleet.ledger.summary import STEP_NAMES, Incident, LedgerSummary
from fleet.protocol import records as r
from fleet.protocol.types import Member
from tests.golden.journals import Story, one_loss

STEPS = "c60 x40 K "


def fold(story: Story, now_s: float | None = None) -> LedgerSummary:
    return Ledger().apply_all(story.records).summary(now_s)


def spent(categories: object) -> dict[str, float]:
    """Categories that hold any time, in milliseconds."""
    assert isinstance(categories, dict)
    return {name: pytest.approx(1000 * value) for name, value in categories.items() if value}


def check_closes(summary: LedgerSummary) -> None:
    assert summary.closes
    assert sum(summary.categories.values()) + summary.pending_s == pytest.approx(summary.rank_s, abs=1e-6)
    assert all(value >= 0 for value in summary.categories.values())


def incident(summary: LedgerSummary, name: str) -> Incident:
    return next(item for item in summary.incidents if item.id == name)


def test_a_run_without_faults_is_all_steps_but_for_its_start_and_end() -> None:
    story = Story(world=2, spares=1)
    story.view(1, [(0, 0), (1, 0)], 1000)
    for slot in (0, 1):
        story.spans(slot, 0, "i900", generation=-1, at=100)
        story.spans(slot, 0, "f100 " + "d5 c60 x25 w10 K " * 10 + "v7 k3 e20")
    story.spans(2, 0, "i500 s1400", generation=-1, at=200)
    story.committed(10, 2100)
    story.ended(2150)
    summary = fold(story)
    check_closes(summary)
    assert spent(summary.slots[0]) == {
        "provision": 100, "init": 900, "reform": 100, "compute": 600, "exposed_comm": 250, "straggler_wait": 100, "data_wait": 50,
        "verify": 7, "checkpoint_stall": 3, "finish": 40,
    }  # fmt: skip
    assert spent(summary.slots[2]) == {"provision": 200, "init": 500, "idle_spare": 1400, "finish": 50}
    assert summary.goodput == pytest.approx(2.0 / (2 * 2.15))
    assert summary.scheduling_goodput == pytest.approx(2.0 / (3 * 2.15))
    assert summary.ettr == pytest.approx(1.0 / 2.15)
    assert (summary.steps, summary.commits_total, summary.holes, summary.pending_s) == (10, 10, 0, 0.0)
    assert summary.law.parts_s == pytest.approx((0.060, 0.025, 0.010, 0.005, 0.0))
    assert summary.median_step_s == pytest.approx(0.1)
    assert summary.incidents == ()


def test_a_record_whose_last_attempt_came_to_nothing_tells_of_its_steps_all_the_same() -> None:
    """The steps before the attempt that was given up count in the means of steps, and in ETTR."""
    story = Story(world=1)
    story.view(1, [(0, 0)], 0)
    story.spans(0, 0, "c60 x40 K c60 x40 K c50 A")
    story.committed(2, 200)
    story.ended(250)
    summary = fold(story)
    assert (summary.law.compute_s, summary.law.exposed_s, summary.median_step_s) == pytest.approx((0.060, 0.040, 0.1))
    assert summary.ettr == pytest.approx(0.2 / 0.25) and summary.ranks == pytest.approx(1)


def test_the_time_between_a_stop_and_its_resume_is_nobodys() -> None:
    """2000 s of steps and 600 s in which nobody held a machine: the run lost nothing, and shows that it was stopped."""
    story = Story(world=1)
    story.view(1, [(0, 0)], 0)
    story.spans(0, 0, "c1000 K " * 1000)
    story.committed(1000, 1_000_000)
    story.durable(1000, 1_000_000)
    story.resumed(1_600_000)
    story.history(1, 1000, 1_600_000)
    story.view(2, [(0, 1)], 1_600_000, 1000, history=1)
    story.spans(0, 1, "c1000 K " * 1000, generation=2, history=1, step=1000, at=1_600_000)
    story.committed(2000, 2_600_000, 1)
    story.ended(2_600_000)
    summary = fold(story)
    check_closes(summary)
    assert (summary.goodput, summary.scheduling_goodput, summary.ettr, summary.training_goodput) == pytest.approx((1, 1, 1, 1))
    assert spent(summary.categories) == {"compute": 2_000_000}
    assert (summary.wall_s, summary.down_s, summary.held_s, summary.rank_s, summary.training_s) == (2_600, 600, 2_000, 2_000, 2_000)
    outage = incident(summary, "outage-1")
    assert (outage.cost_s, outage.down_s, outage.causes) == (0, 600, ("resume",))
    assert (outage.stall_s, summary.rolled_back_total, summary.losses_total) == (0, 0, 0)


def test_a_loss_costs_what_it_took_to_notice_reform_replace_restore_and_repeat() -> None:
    summary = fold(one_loss())
    check_closes(summary)
    loss = incident(summary, "loss-1.0")
    assert {name: pytest.approx(1000 * value) for name, value in loss.cost.items()} == {
        "detect": 70, "reform": 80 + 20 + 70, "provision": 1000, "maintenance": 0, "group_wait": 0,
        "restore": 200, "rework": 50 + 50,
    }  # fmt: skip
    assert loss.cost_s == pytest.approx(1.54)
    assert loss.init_s == pytest.approx(0.8)
    assert loss.stall_s == pytest.approx(2.42 - 2.10 - 0.1)
    assert loss.excess_s == pytest.approx((6.32 - 2.10) - (50 - 10) * 0.1)
    assert (loss.members, loss.causes) == (("1.0",), ("killed by SIGKILL",))
    assert spent(summary.slots[1]) == {
        "init": 1800, "reform": 170, "compute": 2400, "exposed_comm": 1600, "rework": 50, "provision": 1000, "idle_spare": 100,
        "restore": 200, "finish": 20,
    }  # fmt: skip
    assert summary.steps == 60
    assert (summary.losses_total, summary.in_view_losses, summary.views_total, summary.view_size) == (1, 1, 3, 2)
    assert summary.ettr == pytest.approx((1.0 + 2.0 + 3.0 - 2.0 / 2 + 2.0 / 2) / 7.34, abs=1e-9)


def test_a_fault_carries_the_cost_of_its_losses() -> None:
    summary = fold(one_loss(fault="f1"))
    [item] = summary.incidents
    assert (item.id, item.component, item.kind, item.slot, item.members) == ("f1", "gpu", "kill_rank", 1, ("1.0",))
    assert item.phases == (("executed", pytest.approx(2.149), ""),)
    assert item.cost_s == pytest.approx(1.54)
    assert summary.faults_by_kind_phase == {("kill_rank", "executed"): 1}


def test_every_charged_second_is_in_the_categories() -> None:
    summary = fold(one_loss())
    for name in ("detect", "reform", "provision", "restore", "rework"):
        charged = sum(item.cost[name] for item in summary.incidents) + summary.uncharged[name]
        assert charged == pytest.approx(summary.categories[name])


def test_two_losses_behind_one_view_share_its_cost() -> None:
    story = Story(world=3)
    story.view(1, [(0, 0), (1, 0), (2, 0)], 0)
    story.spans(0, 0, STEPS + "c100 A f51")
    story.spans(1, 0, STEPS)
    story.spans(2, 0, STEPS)
    story.lost(1, 0, 100)
    story.lost(2, 0, 100)
    story.view(2, [(0, 0)], 240, 1, causes=("1.0", "2.0"))
    story.spans(0, 0, "c49 K", generation=2, step=1)
    story.ended(300)
    summary = fold(story)
    check_closes(summary)
    for name in ("loss-1.0", "loss-2.0"):
        assert incident(summary, name).cost["detect"] == pytest.approx(0.05)
        assert incident(summary, name).cost["reform"] == pytest.approx(0.0255)
        assert incident(summary, name).cost["provision"] == pytest.approx(0.2)


def test_an_attempt_that_no_loss_broke_is_rework() -> None:
    story = Story(world=1)
    story.view(1, [(0, 0)], 0)
    story.spans(0, 0, "c60 A c60 x40 K")
    story.ended(160)
    assert spent(fold(story).categories) == {"rework": 60, "compute": 60, "exposed_comm": 40}


def test_what_was_computed_for_a_broken_view_counts_in_the_next() -> None:
    """Rank 0 computes for 60 ms and waits 40 in vain; rank 1 dies after 70. The step is committed in the next view."""
    story = Story(world=2)
    story.view(1, [(0, 0), (1, 0)], 0)
    story.spans(0, 0, STEPS + "c60 w40 H f20")
    story.spans(1, 0, STEPS + "c70")
    story.lost(1, 0, 170)
    story.view(2, [(0, 0)], 215, 1, causes=("1.0",))
    story.spans(0, 0, "c30 w10 x5 K", generation=2, step=1)
    story.ended(265)
    summary = fold(story)
    check_closes(summary)
    cost = incident(summary, "loss-1.0").cost
    assert cost["detect"] == pytest.approx(0.03)
    assert cost["rework"] == pytest.approx(0.08)
    assert cost["reform"] == pytest.approx(0.02)


def test_a_hang_is_noticed_from_the_moment_it_began() -> None:
    story = Story(world=2)
    story.view(1, [(0, 0), (1, 0)], 0)
    story.fault("h1", "hang", "executed", 130, slot=1)
    for slot in (0, 1):
        story.spans(slot, 0, STEPS + "c60 x940" + (" A" if slot == 0 else ""))
    story.lost(1, 0, 1100, fault="h1", cause="made no progress")
    story.view(2, [(0, 0)], 1100, 1, causes=("1.0",))
    story.ended(1100)
    summary = fold(story)
    check_closes(summary)
    assert incident(summary, "h1").cost["detect"] == pytest.approx(2 * 0.970)
    assert incident(summary, "h1").cost["rework"] == pytest.approx(2 * 0.030)


def rolled_back(before_view: bool = True) -> Story:
    """Two ranks; step 3 is durable, both are lost after step 5, and history goes on from step 3."""
    story = Story(world=2)
    story.view(1, [(0, 0), (1, 0)], 0)
    for slot in (0, 1):
        story.spans(slot, 0, STEPS * 4)
    for step in range(1, 6):
        story.committed(step, 100 * step)
    story.durable(3, 420)
    for slot in (0, 1):
        if before_view:
            story.spans(slot, 0, STEPS + "c20", step=4)
        story.lost(slot, 0, 520)
    story.history(1, 3, 700)
    story.view(2, [(0, 1), (1, 1)], 700, 3, history=1, causes=("0.0", "1.0"))
    for slot in (0, 1):
        if not before_view:
            story.spans(slot, 0, STEPS + "c20", step=4)
        story.spans(slot, 1, "i100 r80 " + STEPS * 5, generation=2, history=1, step=3, at=720)
    for step in range(3, 9):
        story.committed(step, 900 + 100 * (step - 3), 1)
    story.ended(1400)
    return story


@pytest.mark.parametrize("before_view", [True, False])
def test_a_rollback_moves_steps_to_rework_and_charges_the_losses(before_view: bool) -> None:
    summary = fold(rolled_back(before_view))
    check_closes(summary)
    assert spent(summary.categories) == {
        "compute": 2 * 8 * 60, "exposed_comm": 2 * 8 * 40, "rework": 2 * 220, "provision": 400, "init": 200, "restore": 160,
    }  # fmt: skip
    assert sum(item.cost["rework"] for item in summary.incidents) == pytest.approx(0.44)
    taken_back = 2 if before_view else 1
    assert spent(summary.reclassified) == {"compute": taken_back * 2 * 60, "exposed_comm": taken_back * 2 * 40}
    assert (summary.steps, summary.commits_total, summary.rolled_back_total, summary.history) == (8, 10, 2, 1)
    assert summary.ettr == pytest.approx(0.8 / 1.4)


def test_counters_never_fall_along_a_rollback() -> None:
    ledger = Ledger()
    last: dict[str, float] = {}
    for record in rolled_back().records:
        ledger.apply(record)
        summary = ledger.summary()
        now = {**summary.settled, **{f"-{name}": value for name, value in summary.reclassified.items()}}
        assert all(now[name] >= value for name, value in last.items())
        last = now
    assert last["-compute"] > 0


def test_a_step_that_only_the_lost_rank_committed_is_rework() -> None:
    story = Story(world=2)
    story.view(1, [(0, 0), (1, 0)], 0)
    story.spans(0, 0, STEPS + "c60 x45 A")
    story.spans(1, 0, STEPS + STEPS)
    story.lost(1, 0, 201)
    story.view(2, [(0, 0)], 210, 1, causes=("1.0",))
    story.spans(0, 0, "f5 " + STEPS, generation=2, step=1)
    story.ended(310)
    summary = fold(story)
    check_closes(summary)
    assert spent(summary.slots[1]) == {"compute": 60, "exposed_comm": 40, "rework": 100, "other": 1, "provision": 109}
    assert summary.goodput == pytest.approx(0.3 / 0.62)


def test_a_graceful_view_takes_nothing_back() -> None:
    """Its state is where the run was when it was proposed; members go on until they enter it."""
    story = Story(world=1)
    story.view(1, [(0, 0)], 0)
    story.spans(0, 0, STEPS * 3)
    story.view(2, [(0, 0)], 300, 1, graceful=True)
    story.spans(0, 0, STEPS, generation=2, step=3)
    story.ended(400)
    summary = fold(story)
    assert spent(summary.categories) == {"compute": 240, "exposed_comm": 160}
    assert spent(summary.reclassified) == {}


def test_time_that_died_with_a_node_is_other() -> None:
    story = Story(world=1)
    story.view(1, [(0, 0)], 0)
    story.spans(0, 0, STEPS)
    story.records.append(r.Unobserved(Member(0, 0), 100_000, 150_000))
    story.lost(0, 0, 150)
    story.view(2, [(0, 1)], 300, 1, causes=("0.0",))
    story.spans(0, 1, STEPS, generation=2, step=1, at=300)
    story.ended(400)
    summary = fold(story)
    check_closes(summary)
    assert spent(summary.categories) == {"compute": 120, "exposed_comm": 80, "other": 50, "provision": 150}
    assert (summary.holes, summary.other_ratio) == (0, pytest.approx(0.125))


def test_a_hole_that_nobody_explains_is_other_and_counted() -> None:
    story = Story(world=1)
    story.view(1, [(0, 0)], 0)
    story.spans(0, 0, STEPS)
    story.lost(0, 0, 150)
    story.ended(400)
    summary = fold(story)
    check_closes(summary)
    assert spent(summary.categories) == {"compute": 60, "exposed_comm": 40, "other": 50, "provision": 250}
    assert (summary.holes, summary.hole_s) == (1, pytest.approx(0.05))


def test_an_outage_empties_slots_whose_loss_is_noticed_only_afterwards() -> None:
    story = Story(world=2)
    story.view(1, [(0, 0), (1, 0)], 0)
    for slot in (0, 1):
        story.spans(slot, 0, STEPS)
    story.committed(1, 110)
    story.resumed(10_110)
    story.lost(0, 0, 10_500, cause="not heard of since the coordinator restarted")
    story.view(2, [(0, 1), (1, 1)], 11_000, 1, causes=("0.0",))
    for slot in (0, 1):
        story.spans(slot, 1, "i100 " + STEPS, generation=2, step=1, at=11_000)
    story.ended(11_200)
    summary = fold(story)
    check_closes(summary)
    for slot in (0, 1):
        assert spent(summary.slots[slot]) == {"compute": 120, "exposed_comm": 80, "init": 100, "other": 10, "provision": 890}
    assert (summary.down_s, summary.cold_provision_s, summary.losses_total) == (10, pytest.approx(2 * 0.89), 0)
    assert incident(summary, "outage-1").cost["provision"] == pytest.approx(2 * 0.89)


def test_ranks_that_train_on_while_the_coordinator_restarts_lose_nothing() -> None:
    story = Story(world=1)
    story.view(1, [(0, 0)], 0)
    story.spans(0, 0, STEPS)
    story.resumed(5_000, gap=False)
    story.spans(0, 0, STEPS * 60, step=1)
    story.ended(6_100)
    summary = fold(story)
    assert summary.goodput == 1.0
    assert summary.incidents == ()


def test_a_stopped_run_that_is_resumed_was_empty_meanwhile() -> None:
    story = Story(world=1)
    story.view(1, [(0, 0)], 0)
    story.spans(0, 0, STEPS)
    story.ended(110, status="stopped")
    stopped = fold(story)
    assert (stopped.status, stopped.goodput) == ("stopped", pytest.approx(10 / 11))
    story.resumed(1_000)
    story.view(2, [(0, 1)], 1_000, 1)
    story.spans(0, 1, STEPS, generation=2, step=1, at=1_010)
    story.ended(1_110)
    summary = fold(story)
    check_closes(summary)
    assert spent(summary.categories) == {"compute": 120, "exposed_comm": 80, "finish": 10, "provision": 10}
    assert (summary.down_s, summary.cold_provision_s) == (pytest.approx(0.89), pytest.approx(0.01))
    assert summary.goodput == pytest.approx(200 / 220)


def test_a_process_that_began_before_its_predecessor_was_declared_lost_leaves_no_vacancy() -> None:
    story = Story(world=1)
    story.view(1, [(0, 0)], 0)
    story.spans(0, 0, STEPS)
    story.lost(0, 0, 900, cause="silent node")
    story.spans(0, 1, "i500", generation=-1, at=400)
    story.ended(900)
    assert spent(fold(story).categories) == {"compute": 60, "exposed_comm": 40, "other": 300, "init": 500}


def test_spans_after_the_end_are_cut_at_it() -> None:
    story = Story(world=1)
    story.view(1, [(0, 0)], 0)
    story.spans(0, 0, STEPS)
    story.ended(150)
    assert spent(fold(story).categories) == {"compute": 60, "exposed_comm": 40, "finish": 50}
    story.spans(0, 0, "o30 e100", step=1)
    story.spans(0, 0, "e100", step=1)
    summary = fold(story)
    check_closes(summary)
    assert spent(summary.categories) == {"compute": 60, "exposed_comm": 40, "other": 30, "finish": 20}


def test_while_the_run_goes_on_what_is_not_decided_is_pending() -> None:
    story = Story(world=2)
    story.view(1, [(0, 0), (1, 0)], 0)
    story.spans(0, 0, STEPS + "c30")
    story.spans(1, 0, STEPS)
    story.lost(1, 0, 120)
    summary = fold(story, now_s=0.2)
    check_closes(summary)
    assert summary.pending_s == pytest.approx(0.030 + 0.070 + 0.020)
    assert spent(summary.categories) == {"compute": 120, "exposed_comm": 80, "provision": 80}
    assert spent(summary.settled) == {"compute": 120, "exposed_comm": 80}


def test_live_goodput_is_of_what_is_known() -> None:
    """Both ranks did nothing but steps as far as they have told; the spare has stood by; what they do since is not lost, it is pending."""
    story = Story(world=2, spares=1)
    story.view(1, [(0, 0), (1, 0)], 0)
    story.spans(0, 0, STEPS + "c30")
    story.spans(1, 0, STEPS)
    story.spans(2, 0, "s100", generation=-1)
    reported = fold(story, now_s=0.1)
    summary = fold(story, now_s=0.9)
    check_closes(summary)
    assert summary.pending_s == pytest.approx(3 * 0.8)
    assert (summary.goodput, summary.ettr, summary.training_goodput) == pytest.approx((1, 1, 1))
    assert summary.scheduling_goodput == pytest.approx(2 / 3) == pytest.approx(reported.goodput * 2 / 3)


def test_a_seat_that_is_empty_is_lost_at_once_and_not_pending() -> None:
    story = Story(world=2)
    story.view(1, [(0, 0), (1, 0)], 0)
    for slot in (0, 1):
        story.spans(slot, 0, STEPS)
    story.lost(1, 0, 100)
    story.view(2, [(0, 0)], 100, 1, causes=("1.0",))
    story.spans(0, 0, STEPS, generation=2, step=1)
    summary = fold(story, now_s=0.2)
    assert (summary.pending_s, summary.goodput, summary.ettr) == pytest.approx((0, 0.75, 1))


def started_slowly(*, ends: str = "completed") -> Story:
    """8 s until the first step, in 5 of which nobody is there; then 1 s of steps. The same once more, after a stop of an hour."""
    story = Story(world=2, spares=1)
    for begin, incarnation, generation in ((0, 0, 1), (3_610_000, 1, 2)):
        story.view(generation, [(0, incarnation), (1, incarnation)], begin + 7_900, 10 * incarnation)
        for slot in (0, 1):
            story.spans(slot, incarnation, "i2900", generation=-1, at=begin + 5_000)
            steps = "f60 r40 " + STEPS * 10 + "e900"
            story.spans(slot, incarnation, steps, generation=generation, step=10 * incarnation)
        story.spans(2, incarnation, "i2900 s2000", generation=-1, at=begin + 5_000)
        for step in range(1, 11):
            story.committed(10 * incarnation + step, begin + 8_000 + 100 * step)
        story.ended(begin + 9_900, status=ends if incarnation else "stopped")
        if not incarnation:
            story.resumed(3_610_000)
    return story


def test_training_is_from_the_first_step_to_the_last_of_each_stretch() -> None:
    summary = fold(started_slowly())
    check_closes(summary)
    assert summary.training_s == pytest.approx(2.0)
    assert summary.training_goodput == pytest.approx(1.0)
    assert summary.cold_provision_s == pytest.approx(summary.categories["provision"]) == pytest.approx(6 * 5.0)
    assert (summary.down_s, summary.held_s) == (pytest.approx(3_600.1), pytest.approx(2 * 9.9))
    assert summary.goodput == pytest.approx(2 / 19.8)


def test_a_run_that_fails_was_in_training_until_then() -> None:
    assert fold(started_slowly(ends="failed")).training_s == pytest.approx(1.0 + 1.9)


def test_provision_after_a_loss_is_no_cold_start() -> None:
    summary = fold(one_loss())
    assert (summary.cold_provision_s, summary.categories["provision"]) == (0, pytest.approx(1.0))


def test_what_a_process_of_the_old_cluster_tells_after_a_stop_is_counted_apart() -> None:
    story = Story(world=1)
    story.view(1, [(0, 0)], 0)
    story.spans(0, 0, STEPS)
    story.resumed(1_000)
    story.spans(0, 0, STEPS * 20, step=1)
    story.records.append(r.Unobserved(Member(0, 0), 2_100_000, 2_200_000))
    story.view(2, [(0, 1)], 1_000, 1)
    story.spans(0, 1, "i10 " + STEPS, generation=2, step=1, at=990)
    story.ended(1_100)
    summary = fold(story)
    check_closes(summary)
    assert spent(summary.categories) == {"compute": 120, "exposed_comm": 80}
    assert summary.stale_s == pytest.approx(2.1)


def test_steps_are_remembered_one_by_one_only_after_the_last_durable_checkpoint() -> None:
    story = Story(world=1)
    story.view(1, [(0, 0)], 0)
    ledger = Ledger()
    for number in range(20):
        story.spans(0, 0, STEPS * 100, step=100 * number)
        story.durable(100 * (number + 1), 10_000 * (number + 1))
    ledger.apply_all(story.records)
    assert len(ledger.slots[0].commits) <= 8
    assert sum(commit.rank_steps for commit in ledger.slots[0].commits) == 2000


def test_without_checkpoints_memory_is_bounded_too() -> None:
    story = Story(world=1)
    story.view(1, [(0, 0)], 0)
    ledger = Ledger()
    for number in range(10):
        story.spans(0, 0, STEPS * 1000, step=1000 * number)
    ledger.apply_all(story.records)
    assert len(ledger.slots[0].commits) < 4100
    ledger.apply(r.HistoryBegun(1, r.StateId(0, 0), 1000.0, "from the start"))
    assert spent(ledger.summary().categories) == {"rework": 1_000_000}


def test_a_rollback_into_steps_that_were_merged_is_refused_by_name() -> None:
    story = Story(world=1)
    story.view(1, [(0, 0)], 0)
    story.spans(0, 0, STEPS * 10)
    story.durable(8, 1000)
    story.history(1, 5, 1100)
    with pytest.raises(LedgerError, match="slot 0: cannot roll back to step 5: steps 1 to 8"):
        fold(story)


def test_a_rollback_to_an_older_checkpoint_is_exact() -> None:
    story = Story(world=1)
    story.view(1, [(0, 0)], 0)
    story.spans(0, 0, STEPS * 10)
    for step in (3, 6, 9):
        story.durable(step, 1000 + step)
    story.history(1, 3, 1100)
    assert spent(fold(story).reclassified) == {"compute": 7 * 60, "exposed_comm": 7 * 40}


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (r.Spans(Member(0, 0), 1, 0, 1, 99_999, (10,), "c"), r"0\.0: spans overlap: they ended at 100000 us, the next start at 99999 us"),
        (
            r.Spans(Member(0, 0), 1, 0, 1, 100_001, (10,), "c"),
            r"0\.0: spans leave a gap: they ended at 100000 us, the next start at 100001",
        ),
        (r.Spans(Member(0, 1), 1, 0, 1, 90_000, (10,), "c"), r"0\.1: spans overlap: slot 0 was taken until 100000 us"),
        (r.Spans(Member(7, 0), 1, 0, 1, 0, (10,), "c"), r"7\.0 is in no slot"),
        (r.Spans(Member(0, 0), 1, 0, 1, 100_000, (10,), "?"), r"0\.0: unknown span code '\?'"),
        (r.Spans(Member(0, 0), 1, 0, 1, 100_000, (-10,), "c"), r"0\.0: a span of -10 us"),
        (r.Spans(Member(0, 0), 1, 0, 1, 100_000, (10,), "K"), r"0\.0: the mark K at 100000 us has a length of 10 us"),
        (r.Spans(Member(0, 0), 1, 0, 1, 100_000, (10, 10), "c"), r"0\.0: 1 codes, 2 durations"),
        (r.RunStarted(1, "again", 1.0, 0.0, 1, 0, 1, "{}"), "a second RunStarted"),
    ],
)
def test_what_does_not_fit_is_refused_with_member_and_times(second: r.Record, message: str) -> None:
    story = Story(world=1)
    story.spans(0, 0, STEPS)
    ledger = Ledger().apply_all(story.records)
    with pytest.raises(LedgerError, match=message):
        ledger.apply(second)


def test_what_a_replaced_process_reports_is_counted_apart() -> None:
    """Its node was cut off, its slot given to another, and then the node came back with what it had not sent."""
    story = Story(world=1)
    story.spans(0, 0, STEPS)
    story.lost(0, 0, 100)
    story.spans(0, 1, STEPS, at=100)
    story.spans(0, 0, STEPS)
    story.records.append(r.Unobserved(Member(0, 0), 200_000, 230_000))
    story.ended(200)
    summary = fold(story)
    check_closes(summary)
    assert spent(summary.categories) == {"compute": 120, "exposed_comm": 80}
    assert summary.stale_s == pytest.approx(0.130)


def test_what_a_process_did_after_it_was_declared_lost_is_not_its_slots() -> None:
    """A whole node fell silent; when it wakes, its agent tells of the time until then before the replacement tells of its own."""
    story = Story(world=1)
    story.spans(0, 0, STEPS)
    story.lost(0, 0, 110)
    story.spans(0, 0, "c30")
    story.records.append(r.Unobserved(Member(0, 0), 130_000, 180_000))
    story.spans(0, 1, STEPS, at=120)
    story.ended(220)
    summary = fold(story)
    check_closes(summary)
    assert summary.stale_s == pytest.approx(0.020)
    assert spent(summary.categories)["provision"] == 10


def test_generations_must_rise() -> None:
    story = Story(world=1)
    story.view(5, [(0, 0)], 0)
    story.view(5, [(0, 0)], 1)
    with pytest.raises(LedgerError, match=r"view generation 5 at 0\.001 s follows generation 5"):
        fold(story)


def test_a_ledger_starts_with_run_started() -> None:
    with pytest.raises(LedgerError, match="first record is Committed"):
        Ledger().apply(r.Committed(r.StateId(0, 1), 1.0))
    with pytest.raises(LedgerError, match="no RunStarted"):
        Ledger().summary()


def test_two_processes_may_seem_to_overlap_by_clock_noise() -> None:
    story = Story(world=1)
    story.spans(0, 0, STEPS)
    story.lost(0, 0, 100)
    story.spans(0, 1, "i0.2 i99.8", at=99.5)
    story.ended(199.5)
    summary = fold(story)
    check_closes(summary)
    assert spent(summary.categories) == {"compute": 60, "exposed_comm": 40, "init": 99.5}


def test_goodput_counts_every_kind_of_step_time() -> None:
    story = Story(world=1)
    story.spans(0, 0, "d10 c20 x30 w40 K")
    story.ended(100)
    summary = fold(story)
    assert summary.goodput == 1.0
    assert sum(summary.categories[name] for name in STEP_NAMES) == pytest.approx(0.1)
