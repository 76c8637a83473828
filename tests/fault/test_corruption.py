"""A rank that lies. What it holds or computes is wrong by one bit; the others find it, go on without it, and end with the right bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.rank.rank_injector import RankInjector
from fleet.ledger.goodput import Ledger
from fleet.protocol.instructions import EndRun
from fleet.protocol.operations import HEAL, START, Operation
from fleet.protocol.records import Committed, DecisionMade, HistoryBegun, ProcessLost
from fleet.settings.run import CheckpointSettings, VerifySettings
from tests.fault.test_bad_luck import after, fault_free, of, settings, survived, train_through
from tests.support import trains
from tests.support.plain import PlainFleet

__all__ = ["fault_free"]


def flip(tensor: torch.Tensor, bit: int = 3) -> None:
    """The lowest bits of the first element: no loss and no norm shows that. By ``data``, as autograd counts all other writes."""
    memory = tensor.data.reshape(-1).view(torch.uint8)
    memory[0] ^= 1 << bit


def weight_flips_in_slot_1(run: Any) -> None:
    def inject(run: Any, step: Any) -> None:
        if run.slot == 1 and step.number == 10 and trains.once(run, "flip"):
            flip(next(run._train_step.state.objects["model"].parameters()))

    trains._loop(run, in_shard=inject)


def test_a_flipped_weight_costs_its_rank_and_no_bit(tmp_path: Path, fault_free: str) -> None:
    outcome, records, digest = train_through(weight_flips_in_slot_1, settings(tmp_path), tmp_path)
    survived(outcome, records, digest, fault_free)
    [lost] = of(ProcessLost, records)
    assert lost.member.slot == 1
    assert "silent corruption: weights at step 10" in str(lost.cause)
    assert not of(HistoryBegun, records)


def inject(fleet: PlainFleet, slot: int, what: str, duration_s: float = 0.0, phase: str = START) -> None:
    """As chaos does, through the agent of the slot's node."""
    process = next(process for member, process, _ in fleet.census() if member.slot == slot)
    answer = fleet.call(fleet.coordinator.operate(Operation("f", what, phase, process, seed=5, duration_s=duration_s)))
    assert not answer.refused


def train_injected(
    tmp_path: Path, what: str, duration_s: float = 0.0, then: Callable[[PlainFleet], None] = lambda fleet: None
) -> tuple[EndRun, list[Any], str]:
    """A run in which slot 1 is struck after step 8; see ``train_through``."""

    def misfortune(fleet: PlainFleet) -> None:
        after(8)(fleet)
        inject(fleet, 1, what, duration_s)
        then(fleet)

    return train_through(trains.plain, settings(tmp_path), tmp_path, misfortune)


def test_the_process_that_is_meant_is_struck_or_none(tmp_path: Path) -> None:
    with PlainFleet(trains.plain, settings(tmp_path), tmp_path) as fleet:
        after(2)(fleet)
        process = next(process for member, process, _ in fleet.census() if member.slot == 1)
        other = dataclasses.replace(process, start_ticks=process.start_ticks + 1)
        assert "not connected" in fleet.call(fleet.coordinator.operate(Operation("f", "flip_weight", START, other))).refused
        assert fleet.wait().status == "completed"


@pytest.mark.parametrize("what", ["flip_weight", "flip_optimizer"])
def test_chaos_flips_a_bit_of_what_a_rank_holds(tmp_path: Path, fault_free: str, what: str) -> None:
    outcome, records, digest = train_injected(tmp_path, what)
    survived(outcome, records, digest, fault_free)
    [lost] = of(ProcessLost, records)
    assert lost.member.slot == 1
    assert "silent corruption" in str(lost.cause)


def test_a_gradient_that_is_no_number_is_computed_again(tmp_path: Path, fault_free: str) -> None:
    outcome, records, digest = train_injected(tmp_path, "nan")
    survived(outcome, records, digest, fault_free)
    assert not of(ProcessLost, records)


def slot_1_is_hit_once(run: Any) -> None:
    """High up in a number: its loss and gradients are finite, and a million times too large, in one attempt at step 25."""

    def loss(run: Any, step: Any, error: torch.Tensor) -> torch.Tensor:
        return error * 1e6 if run.slot == 1 and step.number == 25 and trains.once(run, "hit") else error

    trains._loop(run, loss=loss)


def step_25_is_as_it_is(run: Any) -> None:
    """A batch that is a million times off, whoever computes it."""
    trains._loop(run, loss=lambda run, step, error: error * 1e6 if step.number == 25 else error)


def doubted(records: list[Any]) -> list[DecisionMade]:
    return [record for record in of(DecisionMade, records) if record.policy == "corruption"]


def test_a_loss_that_jumps_by_a_flipped_bit_is_computed_again(tmp_path: Path, fault_free: str) -> None:
    outcome, records, digest = train_through(slot_1_is_hit_once, settings(tmp_path), tmp_path)
    survived(outcome, records, digest, fault_free)
    [once_more] = doubted(records)
    assert once_more.action == "recompute"
    assert "its loss is" in once_more.reason
    assert once_more.fields["slot"] == 1


def test_a_loss_that_jumps_by_itself_is_computed_again_once_and_counts(tmp_path: Path, fault_free: str) -> None:
    outcome, records, digest = train_through(step_25_is_as_it_is, settings(tmp_path), tmp_path)
    assert outcome.status == "completed", outcome
    assert digest != fault_free
    again, counts = doubted(records)
    assert (again.action, counts.action) == ("recompute", "carry_on")
    assert "not the hardware" in counts.reason
    assert not of(ProcessLost, records)


def test_a_loop_that_hangs_and_is_healed_costs_time_only(tmp_path: Path, fault_free: str) -> None:
    def heal(fleet: PlainFleet) -> None:
        fleet.wait_for(lambda: fleet.coordinator.machine.state.roster.by_slot[0].progress_s < fleet.coordinator._driver.clock.now_s() - 0.5)
        inject(fleet, 1, "hang_loop", phase=HEAL)

    outcome, records, digest = train_injected(tmp_path, "hang_loop", 20.0, heal)
    survived(outcome, records, digest, fault_free)
    assert not of(ProcessLost, records)


def test_a_rank_whose_interpreter_is_locked_is_evicted(tmp_path: Path, fault_free: str) -> None:
    outcome, records, digest = train_injected(tmp_path, "hold_gil", 30.0)
    survived(outcome, records, digest, fault_free)
    [lost] = of(ProcessLost, records)
    assert "no heartbeat" in str(lost.cause)


def slot_1_computes_wrongly(run: Any) -> None:
    """From step 10 on one bit of one gradient is wrong in each shard that this process computes; its replacement is sound."""
    lies = False

    def loss(run: Any, step: Any, error: torch.Tensor) -> torch.Tensor:
        nonlocal lies
        lies = lies or (run.slot == 1 and step.number == 10 and trains.once(run, "lie"))
        if lies:
            RankInjector(run._train_step).operate(Operation("lie", "flip_gradient", START, seed=7))
        return error

    trains._loop(run, loss=loss)


def slot_1_adds_wrongly(run: Any) -> None:
    """From step 10 on one bit of each element is wrong in each sum that this process makes; its replacement is sound."""
    lies = False

    def loss(run: Any, step: Any, error: torch.Tensor) -> torch.Tensor:
        nonlocal lies
        if not lies and run.slot == 1 and step.number == 10 and trains.once(run, "lie"):
            lies, reducer, right = True, run._train_step.reducer, run._train_step.reducer.mean
            reducer.mean = lambda total: (right(total), total.view(torch.int32).bitwise_xor_(1))
        return error

    trains._loop(run, loss=loss)


VERIFIED = VerifySettings(compute=1.0)


def found_and_taken_back(train: Callable[[Any], None], what: str, tmp_path: Path, fault_free: str) -> tuple[list[Any], HistoryBegun]:
    """Slot 1 is evicted for ``what``, and the run ends with the right bits in the one history that was begun anew."""
    chosen = settings(tmp_path, verify=VERIFIED, checkpoint=CheckpointSettings(policy="fixed", interval_s=0.1))
    outcome, records, digest = train_through(train, chosen, tmp_path)
    survived(outcome, records, digest, fault_free)
    lost = of(ProcessLost, records)[0]
    assert lost.member.slot == 1
    assert f"silent corruption: {what}" in str(lost.cause)
    [begun] = of(HistoryBegun, records)
    return records, begun


def test_a_rank_that_adds_up_wrongly_is_found_and_what_is_in_doubt_is_taken_back(tmp_path: Path, fault_free: str) -> None:
    """What it gives is the same for all, so that no replica differs; rank 1 of the view also accuses others, and is not believed."""
    found_and_taken_back(slot_1_adds_wrongly, "the sum that rank", tmp_path, fault_free)


def test_a_rank_that_computes_wrongly_is_found_by_another_and_what_is_in_doubt_is_taken_back(tmp_path: Path, fault_free: str) -> None:
    records, begun = found_and_taken_back(slot_1_computes_wrongly, "gradients of shard", tmp_path, fault_free)
    assert begun.from_state.step <= 9
    summary = Ledger().apply_all(records).summary()
    # Exactly so many steps are taken back as the coordinator had heard of: it may not have heard of the last ones.
    received = max((record.state.step for record in of(Committed, records) if record.state.history == begun.from_state.history), default=0)
    assert summary.rolled_back_total == max(0, received - begun.from_state.step)
    assert received <= 10
    assert summary.categories["verify"] > 0


def test_verification_changes_no_bit(tmp_path: Path, fault_free: str) -> None:
    outcome, records, digest = train_through(trains.plain, settings(tmp_path, verify=VERIFIED), tmp_path)
    survived(outcome, records, digest, fault_free)
    assert not of(ProcessLost, records)


def test_of_two_ranks_that_compute_differently_none_is_named(tmp_path: Path) -> None:
    chosen = settings(tmp_path, world=2, verify=VERIFIED, checkpoint=CheckpointSettings(policy="fixed", interval_s=0.1))
    outcome, records, _ = train_through(slot_1_computes_wrongly, chosen, tmp_path)
    assert outcome.status == "failed"
    assert "gradients of shard" in outcome.reason
    assert "differ again" in outcome.reason
    assert not [lost for lost in of(ProcessLost, records) if "corruption" in str(lost.cause)]
