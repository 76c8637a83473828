"""Where ``run.save`` writes, and what: one file, whole or not at all, the same bytes for the same tensors."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from actors.rank.home import Home
from actors.rank.state.saving import model_state
from actors.rank.state.tracked import TrackedState
from fleet.errors import FleetError
from storage.backends.files import open_files
from storage.checkpoint.export import export_model


def tied() -> nn.Module:
    """Two names for one tensor, and one that is no contiguous piece of memory."""
    model = nn.ModuleDict({"token": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False), "other": nn.Linear(3, 4)})
    model["head"].weight = model["token"].weight
    model["other"].weight.data = torch.arange(12.0).reshape(3, 4).T
    return model


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_a_model_comes_back_and_the_same_tensors_give_the_same_bytes(tmp_path: Path, name: str) -> None:
    model = tied()
    first, second = tmp_path / "a" / name, tmp_path / "b" / f"x{name}"
    for path in (first, second):
        assert export_model(str(path), model.state_dict()) == str(path)
    assert first.read_bytes() == second.read_bytes()
    found = load_file(first) if name.endswith("safetensors") else torch.load(first, weights_only=True)
    again = tied()
    again.load_state_dict(found)
    assert all(torch.equal(one, found[key]) for key, one in model.state_dict().items())
    (tmp_path / "any").touch()
    assert stat.S_IMODE(first.stat().st_mode) == stat.S_IMODE((tmp_path / "any").stat().st_mode)


def test_several_modules_are_named(tmp_path: Path) -> None:
    state = model_state(TrackedState(encoder=nn.Linear(2, 2), decoder=nn.Linear(2, 1)), None)
    export_model(str(tmp_path / "both.safetensors"), state)
    export_model(str(tmp_path / "both.pt"), state)
    assert set(load_file(tmp_path / "both.safetensors")) == {"encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias"}
    assert set(torch.load(tmp_path / "both.pt", weights_only=True)) == {"encoder", "decoder"}


def test_what_cannot_be_written_leaves_nothing_and_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    export_model(str(target), {"weight": torch.ones(2)})
    before = target.read_bytes()
    with pytest.raises(AttributeError):
        export_model(str(target), {"weight": "no tensor"})
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert target.read_bytes() == before


def test_a_model_goes_to_any_store() -> None:
    export_model("memory://bucket/run/model.pt", {"weight": torch.ones(2)})
    with open_files("memory://bucket/run").reading("model.pt") as reader:
        assert reader is not None
    assert open_files("memory://bucket/run").size("model.pt")


@pytest.mark.parametrize(
    ("tracked", "model", "reason"),
    [(None, None, "no module is tracked"), (TrackedState(), None, "no module is tracked"), (None, 3, "int is no module")],
)
def test_nothing_to_save_is_said(tracked: TrackedState | None, model: Any, reason: str) -> None:
    with pytest.raises(FleetError, match=reason):
        model_state(tracked, model)


@pytest.mark.parametrize(
    ("path", "run", "twin"),
    [
        ("model.pt", "/w/model.pt", "/w/model.pt"),
        ("out/model.pt", "/w/out/model.pt", "/w/out/model.pt"),
        ("/w/model.pt", "/w/model.pt", "/w/model.pt"),
        ("/data/model.pt", "/data/model.pt", "/w/data/model.pt"),
        ("s3://bucket/a/model.pt", "s3://bucket/a/model.pt", "/w/s3/bucket/a/model.pt"),
    ],
)
def test_a_twin_saves_under_its_own_folder(path: str, run: str, twin: str) -> None:
    work = Path("/w")
    assert Home(work, work=work).target(path) == run
    assert Home(work, is_twin=True, work=work).target(path) == twin
