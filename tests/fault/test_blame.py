"""Who is to blame: a mistake of the loop ends the run at once and marks no node; two ranks that differ accuse nobody."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleet.ledger.health import histories
from fleet.protocol.instructions import EndRun
from fleet.protocol.records import DecisionMade, HistoryBegun, ProcessLost
from fleet.settings.run import CheckpointSettings
from tests.fault.test_bad_luck import fault_free, of, settings, survived, train_through
from tests.fault.test_corruption import weight_flips_in_slot_1
from tests.support import trains

__all__ = ["fault_free"]
OFTEN = CheckpointSettings(policy="fixed", interval_s=0.1)


def ended_by(train: Callable[[Any], None], world: int, folder: Path) -> tuple[EndRun, list[Any]]:
    """The run failed, no rank was lost by it, and no node has a mark."""
    chosen = settings(folder, world=world, checkpoint=OFTEN, options={"steps": "2000"})  # a replacement may take its time
    outcome, records, _ = train_through(train, chosen, folder)
    assert outcome.status == "failed", outcome
    marks = histories(records, {f"node{index}": f"node{index}" for index in range(2)})
    assert not [incident for history in marks for incident in history.incidents]
    return outcome, records


@pytest.mark.parametrize("world", [1, 2, 4])
def test_an_optimizer_stepped_in_the_loop_ends_the_run_at_that_line(tmp_path: Path, world: int) -> None:
    outcome, records = ended_by(trains.steps_the_optimizer, world, tmp_path)
    assert "optimizer.step() was called in the loop body, at trains.py:" in outcome.reason
    last = [line for line in outcome.detail.splitlines() if line.startswith("  File")][-1]
    assert f'{trains.__name__.rpartition(".")[2]}.py"' in last, "the traceback ends at the user's line"
    assert not of(ProcessLost, records)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_weights_written_by_the_loop_end_the_run_and_are_named(tmp_path: Path, world: int) -> None:
    outcome, records = ended_by(trains.writes_weights, world, tmp_path)
    assert "model.0.weight" in outcome.reason
    assert "loop body" in outcome.reason
    assert not of(ProcessLost, records)


@pytest.mark.parametrize("world", [2, 3])
def test_an_unseeded_draw_ends_the_run_and_no_rank_is_accused(tmp_path: Path, world: int) -> None:
    outcome, records = ended_by(trains.draws_unseeded, world, tmp_path)
    assert "not the hardware" in outcome.reason
    assert "unseeded" in outcome.reason
    assert not [lost for lost in of(ProcessLost, records) if "silent corruption" in str(lost.cause)]


def test_what_one_rank_alone_changes_is_the_loop_when_its_replacement_does_it_too(tmp_path: Path) -> None:
    outcome, records = ended_by(trains.writes_weights_in_slot_1, 3, tmp_path)
    assert "not the hardware" in outcome.reason
    assert len([lost for lost in of(ProcessLost, records) if "silent corruption" in str(lost.cause)]) == 1


def test_a_learning_rate_set_by_hand_is_no_mistake(tmp_path: Path) -> None:
    outcome, records, _ = train_through(trains.sets_the_learning_rate, settings(tmp_path), tmp_path)
    assert outcome.status == "completed", outcome
    assert not of(ProcessLost, records)


def test_of_two_ranks_one_is_struck_and_nobody_is_accused(tmp_path: Path, fault_free: str) -> None:
    """Nobody can say which of the two is wrong: they go back to what both held alike, and end with the right bits."""
    outcome, records, digest = train_through(weight_flips_in_slot_1, settings(tmp_path, world=2, checkpoint=OFTEN), tmp_path)
    survived(outcome, records, digest, fault_free)
    assert not [lost for lost in of(ProcessLost, records) if "silent corruption" in str(lost.cause)]
    assert of(HistoryBegun, records)
    assert next(record.action for record in of(DecisionMade, records) if record.policy == "corruption") == "retry"
