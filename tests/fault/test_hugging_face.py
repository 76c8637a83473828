"""Fleet's ``Trainer`` of Hugging Face on real processes: through losses, stops and resumes it comes to what the real one comes to."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from fleet.protocol.instructions import EndRun
from fleet.protocol.records import ProcessLost, ViewPublished
from fleet.settings.run import RunSettings
from storage.checkpoint.parts import newest_checkpoint
from tests.support import hugging_face as programs
from tests.support.plain import PlainFleet
from tests.zoo import harness

SHARDS, ENDS = 4, 18
"""The step after which patience is at its end."""


def chosen(folder: Path, world: int, **options: str) -> RunSettings:
    return harness.settings("trainer", folder, world, SHARDS, out=str(folder / "out"), **options)


def finished(settings: RunSettings, folder: Path, **begin: Any) -> tuple[EndRun, str, list[Any]]:
    """(how it ended, the digest of its final state, the journal)."""
    with PlainFleet(programs.stops_early, settings, folder, **begin) as fleet:
        outcome = fleet.wait(400.0)
        assert outcome.status == "completed", outcome
        assert fleet.step == ENDS
        return outcome, fleet.coordinator.machine.state.ending.record.digest, fleet.records()


def right(folder: Path, digest: str, tmp_path: Path) -> None:
    """It has the bits of one rank alone, and the best model of the real Trainer but for rounding."""
    with harness.one_thread():
        real = programs.with_patience(programs.Real, tmp_path / "real")
        real.train()
    assert real.state.global_step == ENDS
    single = harness.by_one_rank(programs.stops_early, SHARDS, tmp_path, {"out": str(tmp_path / "alone")})
    assert digest == single.digest
    saved = load_file(folder / "out" / "saved" / "model.safetensors")
    for name, value in real.model.state_dict().items():
        assert torch.allclose(saved[name], value, rtol=1e-9, atol=1e-9), name
    best = Path(real.state.best_model_checkpoint).name
    assert (folder / "out" / best / "trainer_state.json").exists()


def joined(records: list[Any], world: int) -> None:
    assert any(isinstance(record, ProcessLost) for record in records)
    last = [record for record in records if isinstance(record, ViewPublished)][-1].view
    assert len(last.members) == world and any(member.incarnation for member in last.members)


def test_it_stops_early_with_the_best_model_through_a_kill(tmp_path: Path) -> None:
    outcome, digest, records = finished(chosen(tmp_path / "run", 2, kill="7"), tmp_path / "run")
    assert f"after step {ENDS}" in outcome.reason
    joined(records, 2)
    right(tmp_path / "run", digest, tmp_path)


def test_patience_goes_on_where_the_run_was_stopped(tmp_path: Path) -> None:
    """It is stopped before its patience is at its end, goes on with other ranks, of which one is killed."""
    first, then = tmp_path / "first", tmp_path / "then"
    with PlainFleet(programs.stops_early, chosen(first, 2, kill="5", stop="15"), first) as fleet:
        fleet.wait_for(lambda: fleet.step >= 15, 240.0)
        fleet.loop.call_soon_threadsafe(fleet.coordinator.stop_run, "enough")
        assert fleet.wait(240.0).status == "stopped"
    begin = newest_checkpoint(f"file://{first}")
    assert begin is not None and begin[1].step >= 15
    shutil.copytree(first / "checkpoints", then / "checkpoints")
    shutil.copytree(first / "out", then / "out")
    _, digest, _ = finished(chosen(then, 3), then, begin=begin)
    right(then, digest, tmp_path)
