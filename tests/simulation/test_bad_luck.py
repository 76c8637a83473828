"""Every case of bad luck that Fleet promises to survive, or to end in order, on the simulated world."""

from __future__ import annotations

import dataclasses
from typing import Any

from fleet.protocol.records import CheckpointRecord, DecisionMade, HistoryBegun, ProcessLost, ProcessUp, Record, ViewPublished
from fleet.settings.run import Budgets
from fleet.simulation.plan import PATIENT, Plan, Trouble, small, with_troubles
from fleet.simulation.world import Outcome
from tests.simulation.runs import simulate

STEPS = 30


def run(*troubles: Trouble, world: int = 4, nodes: int = 2, spares: int = 0, budgets: Budgets = PATIENT, **changes: Any) -> Outcome:
    """A run of 30 steps through ``troubles``, in which every invariant held and, if ``exact``, all of them came."""
    exact = changes.pop("exact", True)
    plan = Plan(
        seed=changes.pop("seed", 1), settings=small(world, spares, nodes, budgets), steps=STEPS, capacity=changes.pop("capacity", 4)
    )
    outcome = simulate(dataclasses.replace(with_troubles(plan, troubles), **changes), keep_trace=True)
    assert not outcome.broken, outcome.report()
    assert outcome.world.faults.fired >= len(troubles) or not exact
    return outcome


def completed(*troubles: Trouble, **changes: Any) -> Outcome:
    outcome = run(*troubles, **changes)
    assert outcome.status == "completed", outcome.reason
    return outcome


def of(kind: type[Record], outcome: Outcome) -> list[Any]:
    return [record for record in outcome.world.journal if isinstance(record, kind)]


def sizes(outcome: Outcome) -> list[int]:
    return [len(record.view.members) for record in of(ViewPublished, outcome)]


def noted(outcome: Outcome, text: str) -> bool:
    return any(text in line for line in outcome.trace)


def test_without_troubles() -> None:
    outcome = completed()
    assert sizes(outcome) == [4]
    assert not of(ProcessLost, outcome)


def test_a_killed_rank_is_replaced_beside_running_steps() -> None:
    outcome = completed(Trouble(kind="kill", point="compute", step=5, slot=1), build_s=(0.01, 0.05), restart_s=(0.1, 0.2), shard_s=0.05)
    assert sizes(outcome) == [4, 3, 4]
    assert [record.graceful for record in of(ViewPublished, outcome)] == [False, False, True]
    assert any(record.action == "enter" for record in of(DecisionMade, outcome))


def test_a_spare_is_promoted_at_once() -> None:
    """At the first step boundary: the survivors go on without it."""
    outcome = completed(Trouble(kind="kill", point="compute", step=5, slot=1), spares=1)
    _, alone, grown = of(ViewPublished, outcome)[:3]
    assert [len(alone.view.members), len(grown.view.members)] == [3, 4] and grown.graceful
    assert grown.at_s - alone.at_s < 1.0


def test_a_nan_everywhere_ends_the_run_with_its_step() -> None:
    outcome = run(Trouble(kind="nan", point="compute", step=7, times=10))
    assert outcome.status == "failed"
    assert "step 7" in outcome.reason
    assert "not finite" in outcome.reason


def test_a_rank_that_raises_once_is_replaced() -> None:
    outcome = completed(Trouble(kind="raise", point="compute", step=7, slot=2))
    assert any("raised" in str(record.cause) for record in of(ProcessLost, outcome))


def test_a_rank_dies_during_reforming() -> None:
    outcome = completed(Trouble(kind="kill", point="compute", step=5, slot=1), Trouble(kind="kill", point="forming", step=5, slot=2))
    assert sizes(outcome)[:3] == [4, 3, 2]


def test_two_ranks_in_the_same_step() -> None:
    outcome = completed(Trouble(kind="kill", point="reducing", step=5, slot=1, slots=(1, 2)))
    assert len({record.at_s for record in of(ProcessLost, outcome)}) == 1


def test_two_ranks_lost_in_one_poll() -> None:
    outcome = completed(Trouble(kind="kill", at_s=1.8, slots=(0, 3)))
    assert len(of(ProcessUp, outcome)) >= 4


LATER_S = 1.4
"""By then the first view has formed."""


def test_a_rank_dies_while_it_receives() -> None:
    outcome = completed(
        Trouble(kind="kill", point="compute", at_s=LATER_S), Trouble(kind="kill", point="receiving", at_s=LATER_S), world=3, spares=1
    )
    assert sizes(outcome)[:4] == [3, 2, 3, 2]


def test_the_donor_dies_while_another_receives() -> None:
    """What the receiver holds is half written: it receives again, from another donor."""
    troubles = (
        Trouble(kind="kill", point="compute", at_s=LATER_S),
        Trouble(kind="freeze", point="receiving", at_s=LATER_S, duration_s=0.3),
        Trouble(kind="kill", point="donating", at_s=LATER_S),
    )
    outcomes = [completed(*troubles, world=3, spares=1, seed=seed, exact=False) for seed in range(10)]
    assert any(noted(outcome, "dirty=True") for outcome in outcomes)


def test_all_donors_die() -> None:
    """Whoever donates is killed, until only half-written states are left and a new history begins."""
    outcome = completed(
        Trouble(kind="kill", point="compute", step=10),
        Trouble(kind="kill", point="donating", at_s=LATER_S, times=2),
        Trouble(kind="freeze", point="receiving", at_s=LATER_S, duration_s=0.3, times=2),
        world=3, spares=1, restart_s=(2.0, 3.0), steps=60,
    )  # fmt: skip
    assert of(HistoryBegun, outcome)


def test_death_inside_the_optimizer_step() -> None:
    completed(Trouble(kind="kill", point="mutating", step=5, slot=1))


def test_death_between_reduction_and_commit() -> None:
    """Some have committed the step, others have not even seen its result: nobody computes it into the weights twice."""
    for seed in range(10):
        completed(Trouble(kind="kill", point="reduced", step=5, slot=2), seed=seed)


def test_the_coordinator_dies_during_a_view_change() -> None:
    for after in range(8):
        outcome = completed(
            Trouble(kind="kill", point="compute", step=5, slot=1),
            Trouble(kind="coordinator", point="forming", step=5, after=after, duration_s=0.5),
        )
        assert outcome.world.deaths.count == 1


def test_training_goes_on_while_the_coordinator_is_gone() -> None:
    outcome = completed(Trouble(kind="coordinator", at_s=1.6, duration_s=0.6), shard_s=0.03)
    assert sizes(outcome) == [4]
    assert not of(ProcessLost, outcome)


def test_a_stale_journal() -> None:
    for stale in range(1, 12):
        completed(
            Trouble(kind="kill", point="compute", step=5, slot=1),
            Trouble(kind="coordinator", point="committed", step=8, stale=stale, duration_s=0.3),
        )


def test_a_stopped_rank_wakes_after_its_replacement_is_in() -> None:
    """Its node is cut off, so that nobody can kill it; when it wakes, its slot has another process."""
    outcome = completed(
        Trouble(kind="freeze", at_s=1.6, slot=1, duration_s=8.0),
        Trouble(kind="partition", at_s=1.6, node=1, duration_s=7.0),
        Trouble(kind="forget", at_s=1.7, slot=1),
        world=2, capacity=2, shard_s=0.05, restart_s=(0.3, 0.5),
    )  # fmt: skip
    zombie = next(rank for rank in outcome.world.train.processes if rank.protocol.slot == 1)
    assert not zombie.alive
    assert zombie.protocol.fenced is not None or noted(outcome, "given up earlier")


def test_a_survivor_is_stopped_while_another_is_replaced() -> None:
    outcome = completed(
        Trouble(kind="kill", point="compute", step=5, slot=1), Trouble(kind="freeze", point="forming", step=5, slot=2, duration_s=9.0)
    )
    assert any("no heartbeat" in str(record.cause) for record in of(ProcessLost, outcome))


def test_a_short_stop_costs_no_rank() -> None:
    outcome = completed(Trouble(kind="freeze", at_s=1.6, slot=1, duration_s=0.5))
    assert sizes(outcome) == [4]


def test_only_the_rank_that_hangs_is_evicted() -> None:
    """Its process beats, and its peers make no progress either: they answer when they are called out, it does not."""
    outcome = completed(Trouble(kind="hang", point="compute", step=5, slot=2))
    (lost,) = of(ProcessLost, outcome)
    assert lost.member.slot == 2
    assert "did not leave" in str(lost.cause)


def test_a_node_with_two_ranks_is_lost() -> None:
    outcome = completed(Trouble(kind="lose_node", at_s=1.6, node=1), capacity=4)
    assert len(of(ProcessLost, outcome)) == 2
    assert min(sizes(outcome)) == 2


def test_a_node_is_lost_for_which_there_is_no_room() -> None:
    outcome = completed(Trouble(kind="lose_node", at_s=1.6, node=1), capacity=2)
    assert sizes(outcome) == [4, 2]


def test_a_node_that_joins_later_is_used() -> None:
    outcome = completed(
        Trouble(kind="lose_node", at_s=1.6, node=1), Trouble(kind="join", at_s=2.5), capacity=2, shard_s=0.05, restart_s=(0.1, 0.2)
    )
    assert sizes(outcome)[:2] == [4, 2]
    assert sizes(outcome)[-1] == 4


def test_a_raylet_that_dies_before_its_ranks() -> None:
    """Its ranks train on for two seconds without an agent, while their slots are given to others."""
    completed(Trouble(kind="lose_node", at_s=1.6, node=1, duration_s=2.0), capacity=4, restart_s=(0.1, 0.2))


def test_two_processes_claim_one_slot() -> None:
    outcome = completed(Trouble(kind="forget", at_s=1.6, slot=2), shard_s=0.05, restart_s=(0.1, 0.2))
    assert any("superseded" in str(record.cause) for record in of(ProcessLost, outcome))


def test_everything_is_lost_and_the_last_checkpoint_begins_a_new_lineage() -> None:
    outcome = completed(Trouble(kind="kill", point="compute", step=20, slots=(0, 1, 2, 3)), save_every_s=0.4)
    (begun,) = of(HistoryBegun, outcome)
    newest = max(record.state for record in of(CheckpointRecord, outcome) if record.phase == "durable" and record.at_s < begun.at_s)
    assert begun.from_state == newest
    assert newest.step > 0
    assert any(record.view.checkpoint is not None for record in of(ViewPublished, outcome))


def test_everything_is_lost_before_the_first_checkpoint() -> None:
    outcome = completed(Trouble(kind="kill", point="compute", step=9, slots=(0, 1, 2, 3)), save_every_s=1000.0)
    assert of(HistoryBegun, outcome)[0].from_state.step == 0


def test_a_failing_store_costs_nothing_but_checkpoints() -> None:
    outcome = completed(Trouble(kind="store", at_s=0.1, duration_s=9.0), save_every_s=0.3, shard_s=0.2)
    assert sizes(outcome) == [4]
    assert any(record.phase == "failed" for record in of(CheckpointRecord, outcome))


def test_a_stop_is_orderly_and_leaves_a_checkpoint() -> None:
    outcome = run(Trouble(kind="stop", at_s=1.8), shard_s=0.05)
    assert outcome.status == "stopped"
    assert any(record.phase == "durable" for record in of(CheckpointRecord, outcome))


def test_a_shard_that_kills_whoever_computes_it_is_named() -> None:
    outcome = run(Trouble(kind="shard", point="compute", step=6, shard=3, times=100), budgets=Budgets())
    assert outcome.status == "failed"
    assert "shard 3 of step 6" in outcome.reason
    assert len(of(ProcessLost, outcome)) == Budgets().shard


def test_a_crash_loop_ends_with_what_how_often_and_the_last_error() -> None:
    outcome = run(Trouble(kind="kill", point="building", slot=1, times=100), budgets=Budgets(), statuses=("failed",), steps=10_000)
    assert outcome.status == "failed"
    assert "slot 1" in outcome.reason
    assert "last error" in outcome.reason
    assert str(Budgets().slot) in outcome.reason or str(Budgets().slot_fruitless) in outcome.reason


def test_injected_losses_cost_no_budget() -> None:
    troubles = [Trouble(kind="kill", at_s=1.5 + 0.7 * i, slot=i % 4, noticed=True) for i in range(8)]
    outcome = completed(*troubles, budgets=Budgets(slot=1, total=1), shard_s=0.1)
    assert all(record.fault is not None for record in of(ProcessLost, outcome))


def test_a_bad_network_changes_nothing_but_the_time() -> None:
    outcome = completed(loss=0.3, duplicates=0.3, fifo=False, delay_s=(0.001, 0.5), quiet_s=100.0)
    assert outcome.world.clock.now_s < 100.0
