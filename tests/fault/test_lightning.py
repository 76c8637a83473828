"""Fleet's Trainer of Lightning on real processes: through losses, stops and resumes it comes to what the real one comes to."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from fleet.settings.run import RunSettings
from storage.checkpoint.parts import newest_checkpoint
from tests.fault.test_hugging_face import joined
from tests.support import lightning_programs as programs
from tests.support.plain import PlainFleet
from tests.zoo import harness

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore::UserWarning:lightning.*")

SHARDS = 4


def chosen(folder: Path, world: int, **options: str) -> RunSettings:
    return harness.settings("trainer", folder, world, SHARDS, out=str(folder / "out"), **options)


def finished(settings: RunSettings, folder: Path, **begin: Any) -> tuple[int, str, list[Any]]:
    """(the step at which it ended, the digest of its final state, the journal)."""
    with PlainFleet(programs.stops_early, settings, folder, **begin) as fleet:
        outcome = fleet.wait(400.0)
        assert outcome.status == "completed", outcome
        return fleet.step, fleet.coordinator.machine.state.ending.record.digest, fleet.records()


def right(step: int, folder: Path, digest: str, tmp_path: Path) -> None:
    """It has the bits of one rank alone, and the last and the best weights of the real Trainer but for rounding."""
    with harness.one_thread():
        real, module = programs.with_patience(Trainer, tmp_path / "real")
    assert step == real.global_step < 160
    alone = tmp_path / "alone"
    alone.mkdir()
    assert digest == harness.by_one_rank(programs.stops_early, SHARDS, alone, {"out": str(alone)}).digest
    best = Path(real.checkpoint_callback.best_model_path)
    assert (folder / "out" / "best").read_text() == best.name
    kept = torch.load(folder / "out" / "kept" / best.name, weights_only=False)["state_dict"]
    last = torch.load(folder / "out" / "last.pt", weights_only=True)
    for found, its in ((last, module.state_dict()), (kept, torch.load(best, weights_only=False)["state_dict"])):
        assert all(torch.allclose(found[name], value, rtol=1e-9, atol=1e-9) for name, value in its.items())


def test_it_stops_early_with_the_best_checkpoint_through_a_kill(tmp_path: Path) -> None:
    step, digest, records = finished(chosen(tmp_path / "run", 2, kill="7"), tmp_path / "run")
    joined(records, 2)
    right(step, tmp_path / "run", digest, tmp_path)


@pytest.mark.parametrize("sharding", ["none", "zero1"])
def test_several_optimizers_go_through_a_kill_between_two_steps_of_a_batch(sharding: str, tmp_path: Path) -> None:
    """Random noise and statistics of batches are those of one rank alone, and so is the step at which it stops."""
    settings = dataclasses.replace(chosen(tmp_path / "run", 2, kill="7", by="hand"), optimizer_sharding=sharding)
    step, digest, records = finished(settings, tmp_path / "run")
    joined(records, 2)
    alone = tmp_path / "alone"
    alone.mkdir()
    run = harness.by_one_rank(programs.stops_early, SHARDS, alone, {"out": str(alone), "by": "hand"})
    assert (step, digest) == (len(run.losses), run.digest)
    assert step % 2 == 0 and step < 320


def test_patience_goes_on_where_the_run_was_stopped(tmp_path: Path) -> None:
    first, then = tmp_path / "first", tmp_path / "then"
    with PlainFleet(programs.stops_early, chosen(first, 2, kill="5", stop="13"), first) as fleet:
        fleet.wait_for(lambda: fleet.step >= 13, 240.0)
        fleet.loop.call_soon_threadsafe(fleet.coordinator.stop_run, "enough")
        assert fleet.wait(240.0).status == "stopped"
    begin = newest_checkpoint(f"file://{first}")
    assert begin is not None
    shutil.copytree(first / "checkpoints", then / "checkpoints")
    shutil.copytree(first / "out", then / "out")
    step, digest, _ = finished(chosen(then, 3), then, begin=begin)
    right(step, then, digest, tmp_path)
