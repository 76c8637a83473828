"""``fleet checkpoint``: list, verify, export, delete; what is wrong is named, with a way out."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from actors.rank.state.tracked import TrackedState
from actors.rank.state.weights import WeightFiles
from fleet.app.cli import main as cli
from fleet.app.plans import Executed, RunPlan, describe, resumed_plan, stored_at
from fleet.host.journal import JournalWriter
from fleet.protocol.instructions import CommitCheckpoint
from fleet.protocol.records import VERSION, RunStarted
from fleet.protocol.types import StateId
from fleet.settings.run import RunSettings
from storage.checkpoint import restore
from storage.checkpoint.export import export_weights
from storage.checkpoint.manifest import checkpoint_id
from storage.checkpoint.restore import Room
from storage.checkpoint.store import CheckpointStore, write_part
from tests.support.seaweed import SeaweedServer

SECRET = "wJalrXUtnFEMI-K7MDENG"


class Wrapped:
    """A state that holds what no weights-only load would take."""

    def state_dict(self) -> dict[str, object]:
        return {"epoch": 3, "schedule": np.arange(2), "betas": (0.9, 0.99), "names": ["a", "b"]}

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise AssertionError("nobody loads here")


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def save(url: str, step: int) -> str:
    model, optimizer = trained()
    skeleton, tensors = TrackedState(model=model, optimizer=optimizer, extra=Wrapped()).flatten()
    name = checkpoint_id(StateId(0, step), 1)
    part = write_part(url, name, 0, 1, list(enumerate(tensors)))
    CheckpointStore(url, run="some-run").commit(CommitCheckpoint(name, StateId(0, step), (part,), skeleton, 0.0, 0.0))
    return name


@dataclasses.dataclass
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["fleet", "checkpoint", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return Done(int(ended.value.code or 0), said.out, " ".join(said.err.split()))

    return call


def save_modules(url: str, **objects: object) -> str:
    skeleton, tensors = TrackedState(**objects).flatten()
    name = checkpoint_id(StateId(0, 5), 1)
    part = write_part(url, name, 0, 1, list(enumerate(tensors)))
    CheckpointStore(url, run="some-run").commit(CommitCheckpoint(name, StateId(0, 5), (part,), skeleton, 0.0, 0.0))
    return name


@pytest.fixture
def store(tmp_path: Path) -> str:
    save(str(tmp_path / "run"), 1)
    save(str(tmp_path / "run"), 2)
    return str(tmp_path / "run")


FIRST, SECOND = (checkpoint_id(StateId(0, step), 1) for step in (1, 2))


def damage(store: str, name: str) -> None:
    path = Path(store) / "checkpoints" / name / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])


def test_list(fleet: Callable[..., Done], store: str) -> None:
    rows = json.loads(fleet("list", store, "--json").out)
    assert [(row["id"], row["step"], row["run"], row["parts"]) for row in rows] == [(FIRST, 1, "some-run", 1), (SECOND, 2, "some-run", 1)]
    assert fleet("list", store).out.splitlines()[1].startswith(f"{SECOND}  step 2  1 parts")
    assert "no checkpoint in" in fleet("list", f"file://{store}/nothing").out


def test_verify(fleet: Callable[..., Done], store: str) -> None:
    assert fleet("verify", store).code == 0
    damage(store, SECOND)
    done = fleet("verify", store)
    assert (done.code, f"{FIRST}  sound" in done.out) == (1, True)
    assert f"checkpoint {SECOND}: __0_0.distcp has" in done.out
    assert fleet("verify", store, FIRST).code == 0


def test_an_export_is_loaded_by_plain_torch(fleet: Callable[..., Done], store: str, tmp_path: Path) -> None:
    done = fleet("export", store, "--output", "state.pt")
    assert done.code == 0
    assert "left out: objects of class numpy.ndarray" in done.out
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["extra"] == {"epoch": 3, "betas": (0.9, 0.99), "names": ["a", "b"]}
    model, optimizer = torch.nn.Linear(3, 4), None
    model.load_state_dict(state["model"])
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(state["optimizer"])
    known, known_optimizer = trained()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in known.state_dict().items())
    for number, values in known_optimizer.state_dict()["state"].items():
        assert all(torch.equal(optimizer.state_dict()["state"][number][name], value) for name, value in values.items())
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_an_export_takes_the_newest_sound_one(fleet: Callable[..., Done], store: str, tmp_path: Path) -> None:
    damage(store, SECOND)
    assert fleet("export", store).code == 0
    assert (tmp_path / f"{FIRST}.pt").is_file()
    done = fleet("export", store, SECOND)
    assert done.code == 2 and "__0_0.distcp has" in done.err and "Name none" in done.err
    assert not (tmp_path / f"{SECOND}.pt").exists()


def test_delete(fleet: Callable[..., Done], store: str) -> None:
    assert fleet("delete", store, FIRST).code == 0
    assert CheckpointStore(store).list() == (SECOND,)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("list", "no-such-run"), ("RUN = 'no-such-run'", "journal.jsonl")),
        (("verify", "run", "yesterday"), ("ID = 'yesterday'", "no committed checkpoint", SECOND)),
        (("verify", "file:///nothing-is-here"), ("WHERE = 'file:///nothing-is-here'", "there is no checkpoint", "URL of its store")),
        (("delete", "run", "../run"), ("ID = '../run'",)),
        (("export", "run", "--output", "nowhere/state.pt"), ("--output = 'nowhere/state.pt'", "Create it first")),
        (("list", "nonsense://bucket/run"), ("WHERE = 'nonsense://bucket/run'", "Protocol not known", "s3://")),
        (("list", f"s3://key:{SECRET}@/run"), ("WHERE = 's3://***@/run'", "names no bucket", "Create the bucket")),
    ],
)
def test_what_is_wrong_is_named(fleet: Callable[..., Done], store: str, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    done = fleet(*arguments)
    assert done.code == 2
    assert all(word in done.err for word in words), done.err
    assert SECRET not in done.err


def test_on_an_object_store(fleet: Callable[..., Done], s3: SeaweedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable, value in s3.environment.items():
        monkeypatch.setenv(variable, value)
    url = s3.url(tmp_path.name)
    name = save(url, 7)
    assert name in fleet("list", url).out
    assert fleet("verify", url).code == fleet("export", url, "--output", "state.pt").code == 0
    assert set(torch.load(tmp_path / "state.pt", weights_only=True)) == {"model", "optimizer", "extra"}
    assert fleet("delete", url, name).code == 0
    assert "bucket" in fleet("list", "s3://no-such-bucket/run").err


def test_a_run_is_found_by_its_journal_which_keeps_no_credentials(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def train(run):\n    pass\n")
    folder, url = tmp_path / "run-1", f"s3://key:{SECRET}@bucket/runs"
    plan = RunPlan(name="run-1", folder=folder, settings=RunSettings(storage=url), train=print, script=str(script))
    folder.mkdir()
    journal = JournalWriter(folder / "journal.jsonl")
    journal.append(RunStarted(VERSION, "run-1", 0.0, 0.0, 4, 0, 16, describe(plan)))
    journal.close()
    assert SECRET not in (folder / "journal.jsonl").read_text()
    assert stored_at(folder) == "s3://bucket/runs/run-1"
    assert resumed_plan(folder, Executed()).settings.storage == "s3://bucket/runs"
    assert resumed_plan(folder, Executed(), url).settings.storage == url


# ---- weights alone -----------------------------------------------------------------------------------------------------------------------


def test_weights_are_exported_without_the_optimizer(fleet: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no memory is made for its state."""
    model, optimizer = trained()
    model.double()
    save_modules(str(tmp_path / "run"), model=model, optimizer=optimizer)
    held: list[int] = []
    monkeypatch.setattr(restore, "Room", lambda entry: held.append(entry.index) or Room(entry))
    done = fleet("export", str(tmp_path / "run"), "--format", "safetensors", "--output", "weights")
    assert done.code == 0, done.err
    assert len(held) == 2
    assert 'from_pretrained("weights")' in done.out
    found = load_file(tmp_path / "weights" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {"weight": torch.float64, "bias": torch.float64}
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in found.items())
    with safe_open(tmp_path / "weights" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_of_several_modules_one_is_chosen_or_all_are_named(fleet: Callable[..., Done], tmp_path: Path) -> None:
    modules = {"encoder": torch.nn.Linear(3, 4), "decoder": torch.nn.Linear(4, 3)}
    save_modules(str(tmp_path / "run"), **modules)
    for more in ((), ("--module", "decoder")):
        assert fleet("export", str(tmp_path / "run"), "--format", "safetensors", "--output", f"out{len(more)}", *more).code == 0
    assert set(load_file(tmp_path / "out0" / "model.safetensors")) == {f"{name}.{key}" for name in modules for key in ("weight", "bias")}
    assert set(load_file(tmp_path / "out2" / "model.safetensors")) == {"weight", "bias"}
    done = fleet("export", str(tmp_path / "run"), "--format", "safetensors", "--output", "out3", "--module", "nobody")
    assert (done.code, "nobody is no module" in done.err) == (2, True)
    done = fleet("export", str(tmp_path / "run"), "--format", "safetensors", "--output", "out0")
    assert (done.code, "exists already" in done.err) == (2, True)


def test_large_weights_are_several_files_and_an_index_and_tied_ones_have_both_names(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 50, bias=False))
    model[2].weight = model[0].weight
    name = save_modules(str(tmp_path / "run"), model=model)
    files = export_weights(CheckpointStore(str(tmp_path / "run")), name, tmp_path / "out", file_bytes=1700)
    assert len(files) == 3
    weights = WeightFiles(tmp_path / "out")
    assert weights.names == model.state_dict().keys()
    model.load_state_dict({key: weights.tensor(key) for key in weights.names})
    assert torch.equal(weights.tensor("0.weight"), weights.tensor("2.weight"))
