"""The end of a run, on real processes: what is kept, who comes behind the loop, and what is done once although ranks are killed there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from fleet.protocol.instructions import EndRun
from fleet.protocol.records import CheckpointRecord, Measurement, ProcessLost, Record, RunEnded
from fleet.settings.run import CheckpointSettings, RunSettings
from storage.checkpoint.store import CheckpointStore
from tests.support import trains
from tests.support.plain import PlainFleet

STEPS = 12


def run(folder: Path, train: Callable[[Any], None], *, world: int = 2, spares: int = 0, **options: str) -> tuple[EndRun, list[Record]]:
    """To the end. No checkpoint is due before the run's last step."""
    seldom = CheckpointSettings(policy="fixed", interval_s=3600.0)
    given = {"flags": str(folder), "steps": str(STEPS), **options}
    settings = RunSettings(world=world, spares=spares, shards=4, seed=5, checkpoint=seldom, options=given)
    with PlainFleet(train, settings, folder) as fleet:
        outcome = fleet.wait()
        return outcome, fleet.records()


def kept(folder: Path) -> list[int]:
    """The steps of all durable checkpoints."""
    store = CheckpointStore(f"file://{folder}")
    return [store.manifest(name).state.step for name in store.list()]


def test_code_behind_the_loop_runs_with_the_final_state_and_on_no_spare(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, trains.saves_behind_the_loop, world=2, spares=2)
    assert outcome.status == "completed", outcome
    mine = {path.name: torch.load(path, weights_only=True) for path in tmp_path.glob("own-*.pt")}
    assert len(mine) == 2, "two ranks trained, and two stood by"
    saved, safe = torch.load(tmp_path / "model.pt", weights_only=True), load_file(tmp_path / "model.safetensors")
    for state in (*mine.values(), safe):
        assert state.keys() == saved.keys()
        assert all(torch.equal(state[name], saved[name]) for name in saved)
    _, tensors = CheckpointStore(f"file://{tmp_path}").load(CheckpointStore(f"file://{tmp_path}").list()[-1])
    assert any(torch.equal(tensor, saved["0.weight"]) for tensor in tensors.values()), "the checkpoint holds the same weights"


def test_a_completed_run_has_its_last_step_durable(tmp_path: Path) -> None:
    outcome, records = run(tmp_path, trains.saves_behind_the_loop)
    assert outcome.status == "completed"
    assert kept(tmp_path) == [STEPS]
    durable = [record.state.step for record in records if isinstance(record, CheckpointRecord) and record.phase == "durable"]
    assert STEPS in durable


def test_who_dies_in_the_middle_of_what_is_done_once_is_followed_by_another(tmp_path: Path) -> None:
    outcome, records = run(tmp_path, trains.dies_while_it_saves, world=3, times="2")
    assert outcome.status == "completed", outcome
    assert sum(isinstance(record, ProcessLost) for record in records) == 2
    reported = [path.read_text() for path in tmp_path.glob("told-*")]
    assert len(reported) == 1 and reported[0].startswith("by slot")
    assert torch.load(tmp_path / "model.pt", weights_only=True)
    assert kept(tmp_path) == [STEPS]


def test_all_ranks_lost_behind_the_loop_come_there_again(tmp_path: Path) -> None:
    outcome, records = run(tmp_path, trains.all_die_behind_the_loop)
    assert outcome.status == "completed", outcome
    assert sum(isinstance(record, ProcessLost) for record in records) == 2
    assert torch.load(tmp_path / "model.pt", weights_only=True)


def test_what_is_done_once_is_told_to_all(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, trains.does_things_once, world=3)
    assert outcome.status == "completed", outcome
    done = (tmp_path / "done").read_text().splitlines()
    assert done == ["before", "step 3", "step 7", "step 11", "behind"]
    reported = {path.name: path.read_text() for path in tmp_path.glob("told-*")}
    assert reported["told-0"] == reported["told-2"] == repr(done)


def test_figures_reach_all_ranks_and_the_best_model_is_saved(tmp_path: Path) -> None:
    outcome, records = run(tmp_path, trains.evaluates)
    assert outcome.status == "completed", outcome
    seen = {path.read_text() for path in tmp_path.glob("seen-*")}
    assert seen == {"2 5.0 True True\n5 3.0 True False\n8 4.0 False False\n11 2.0 True False\n"}, "the same on both ranks"
    assert [record.value for record in records if isinstance(record, Measurement) and record.name == "val_loss"] == [5.0, 3.0, 4.0, 2.0]
    assert torch.load(tmp_path / "best.pt", weights_only=True)


def test_an_evaluation_leaves_modes_and_random_numbers_as_on_the_other_ranks(tmp_path: Path) -> None:
    """The model drops units at random: a rank that stays in the mode of the evaluation computes other gradients."""
    ends = []
    for world in (1, 2):
        (tmp_path / str(world)).mkdir()
        outcome, records = run(tmp_path / str(world), trains.evaluates_in_another_mode, world=world)
        assert outcome.status == "completed", outcome
        drawn = [record.value for record in records if isinstance(record, Measurement) and record.name == "drawn"]
        assert len(set(drawn)) == 4, "another one at each step"
        ends.append((drawn, [record.digest for record in records if isinstance(record, RunEnded)]))
    assert ends[0] == ends[1]


def test_a_train_function_without_steps_is_told_what_is_missing(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, trains.takes_no_step)
    assert outcome.status == "failed"
    assert "has returned and took no step" in outcome.reason and "run.steps" in outcome.reason


def test_a_loop_that_is_left_early_ends_its_run_there(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, trains.breaks_off)
    assert outcome.status == "completed"
    assert "ended it behind step 4: it was left by break" in outcome.reason


def test_what_is_done_once_in_a_step_stands_behind_its_commit(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, trains.evaluates_before_the_commit)
    assert outcome.status == "failed"
    assert "run.evaluate() stands within the step. Put it after step.commit(), or before step.batches()" in outcome.reason
