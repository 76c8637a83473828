"""``fleet run`` as a user calls it: what is there when a run has ended, and what may be done with it."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fleet.app.plans import stored_at
from fleet.host.journal import read_journal
from fleet.host.processes import calling
from fleet.protocol.records import Committed, RunEnded, ViewPublished
from storage.checkpoint.store import CheckpointStore

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import contextlib
import os
import signal
from pathlib import Path

import torch
from torch import nn

import fleet


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        x = torch.sin(torch.arange(8.0) * (index + 1))
        return x, x.sum().reshape(1)


def train(run: fleet.Run) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in run.steps(run.track(model=model, optimizer=optimizer), total=20):
        if step.number == 7 and run.options and not run.is_twin:
            with contextlib.suppress(FileExistsError):
                Path("killed").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        for x, y in step.batches(Numbers(), batch_size=64):
            step.backward(nn.functional.mse_loss(model(x), y))
        step.commit()
    torch.save(model.state_dict(), "own.pt")
    run.save("out/model.safetensors")
    with open("who.txt", "a") as file:
        file.write(f"{run.slot} {run.is_twin} {run.folder}\\n")
"""


@dataclass(frozen=True)
class Project:
    """A user's folder. ``said`` is what the first run printed."""

    folder: Path
    said: str

    def fleet(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return fleet(self.folder, *arguments)

    @property
    def runs(self) -> Path:
        return self.folder / "runs"


def fleet(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        calling("fleet.app.cli.main", "main", *arguments),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A run of two ranks and a spare, one of which is killed, with its twin, in a folder where ``own.pt`` was there before."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "job.py").write_text(SCRIPT)
    (folder / "own.pt").write_text("of an older run")
    done = fleet(folder, "run", "job.py", "--world", "2", "--spares", "1", "--nodes", "1", "--name", "first", "--twin", "--set", "die=yes")
    assert done.returncode == 0, done.stdout + done.stderr
    return Project(folder, done.stdout + done.stderr)


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The model of the run's newest checkpoint, exported."""
    target = folder / "exported.pt"
    done = fleet(folder.parents[1], "checkpoint", "export", folder.name, "--output", str(target))
    assert done.returncode == 0, done.stderr
    found: dict[str, torch.Tensor] = torch.load(target, weights_only=True)["model"]
    return found


def test_what_is_saved_behind_the_loop_is_the_trained_model(project: Project) -> None:
    exported = final_weights(project.runs / "first")
    for saved in (torch.load(project.folder / "own.pt", weights_only=True), load_file(project.folder / "out" / "model.safetensors")):
        assert all(torch.equal(saved[name], exported[name]) for name in exported)
    came = len((project.folder / "who.txt").read_text().splitlines())
    assert (project.folder / "killed").exists() and 1 <= came <= 2, "no spare comes behind the loop"


def test_the_checkpoint_of_a_completed_run_is_that_of_its_last_step(project: Project) -> None:
    store = CheckpointStore(stored_at(project.runs / "first"))
    assert store.manifest(store.list()[-1]).state.step == 20
    done = project.fleet("checkpoint", "export", "first", "--output", str(project.folder / "said.pt"))
    assert "step 20" in done.stdout


def test_the_twin_writes_in_a_folder_of_its_own(project: Project) -> None:
    twin = project.runs / "first" / "twin"
    reported = [line.split() for line in (project.folder / "who.txt").read_text().splitlines()]
    assert {(line[1], line[2]) for line in reported} == {("False", str(project.runs / "first"))}
    reported = [line.split() for line in (twin / "work" / "who.txt").read_text().splitlines()]
    assert {(line[1], line[2]) for line in reported} == {("True", str(twin))}
    for name in ("own.pt", "out/model.safetensors"):
        assert (twin / "work" / name).read_bytes() == (project.folder / name).read_bytes()
        assert not (twin / "work" / name).is_symlink()


def test_a_completed_run_is_not_resumed(project: Project) -> None:
    journal = project.runs / "first" / "journal.jsonl"
    before = journal.read_bytes()
    done = project.fleet("run", "--resume", "first")
    assert done.returncode == 0, done.stderr
    assert "is completed" in done.stderr and "--steps N" in done.stderr
    assert journal.read_bytes() == before


def test_steps_go_on_beyond_the_end_as_a_new_run(project: Project) -> None:
    refused = project.fleet("run", "--resume", "first", "--steps", "20")
    assert refused.returncode == 2 and "has 20 steps already" in refused.stderr
    done = project.fleet("run", "--resume", "first", "--steps", "30", "--name", "second")
    assert done.returncode == 0, done.stderr
    kept = list(read_journal(project.runs / "second" / "journal.jsonl"))
    [view] = [record.view for record in kept if isinstance(record, ViewPublished)]
    assert view.state.step == 20 and view.checkpoint is not None
    assert max(record.state.step for record in kept if isinstance(record, Committed)) == 30
    assert [record.status for record in kept if isinstance(record, RunEnded)] == ["completed"]
    own = torch.load(project.folder / "own.pt", weights_only=True)
    again = final_weights(project.runs / "second")
    assert all(torch.equal(own[name], again[name]) for name in own)
    assert not all(torch.equal(own[name], value) for name, value in final_weights(project.runs / "first").items())


def test_a_run_without_any_checkpoint_exports_nothing_and_says_so(project: Project) -> None:
    store = CheckpointStore(stored_at(project.runs / "second"))
    for name in store.list():
        store.delete(name)
    done = project.fleet("checkpoint", "export", "second")
    assert done.returncode == 2 and "no sound checkpoint" in done.stderr
