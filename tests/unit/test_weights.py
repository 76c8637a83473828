"""First weights out of safetensors files: a stretch reads its rows, a rank its chunks, and what does not fit is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from actors.rank.fsdp.engine import FsdpEngine
from actors.rank.fsdp.taken import Unit, mesh_of_one, numbers, take_over
from actors.rank.membership.process_group import Group
from actors.rank.state.tracked import TrackedState
from actors.rank.state.weights import Read, Weights, bring, hollow
from fleet.errors import ConfigError
from tests.unit.test_fsdp_engine import CPU, ONE_AT_A_TIME, make, trained
from tests.unit.test_reduction import with_groups
from tests.unit.test_sharded_engine import STEPS, seat, train

SHAPES = {"none": (), "line": (257,), "rows": (31, 7), "cube": (5, 3, 4), "one row": (1, 64)}


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    found = {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in SHAPES.items()}
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(found, path)
    return path, found


@pytest.mark.parametrize("name", SHAPES)
def test_a_stretch_is_that_of_the_flat_tensor(name: str, tensors: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, known = tensors
    weights, flat = Weights(path), known[name].reshape(-1)
    cuts = sorted({0, 1, len(flat) // 3, len(flat) // 2 + 1, len(flat)})
    for lo, hi in ((lo, hi) for lo in cuts for hi in cuts if lo <= hi <= len(flat)):
        assert torch.equal(weights.stretch(name, lo, hi), flat[lo:hi]), (lo, hi)


def test_of_several_files_the_index_is_read(tensors: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    _, known = tensors
    for number, name in enumerate(known):
        save_file({name: known[name]}, tmp_path / f"part-{number}.safetensors")
    places = {name: f"part-{number}.safetensors" for number, name in enumerate(known)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    for where in (tmp_path, tmp_path / "model.safetensors.index.json"):
        weights = Weights(where)
        assert weights.names == known.keys()
        assert all(torch.equal(weights.tensor(name), value) for name, value in known.items())


# ---- ranks -------------------------------------------------------------------------------------------------------------------------------


def layers() -> nn.Sequential:
    """That of tests/unit/test_fsdp_engine.py."""
    first = nn.Sequential(nn.Linear(16, 251), nn.BatchNorm1d(251), nn.Tanh())
    return nn.Sequential(first, nn.Sequential(nn.Linear(251, 127), nn.Tanh()), nn.Linear(127, 1))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stored") / "model.safetensors"
    with torch.random.fork_rng():
        torch.manual_seed(1)
        save_file(layers().state_dict(), path)
    return path


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of whole replicas of the same model, built in memory."""
    return trained("none", 1, tmp_path_factory.mktemp("whole"))[0][0]


def counted(read: Read, count: list[int]) -> Read:
    def reads(lo: int, hi: int) -> torch.Tensor:
        count.append(hi - lo)
        return read(lo, hi)

    return reads


def built_on_meta(stored: Path, count: list[int]) -> Callable[[], tuple[TrackedState, tuple[Unit, ...]]]:
    def build() -> tuple[TrackedState, tuple[Unit, ...]]:
        with ONE_AT_A_TIME, torch.device("meta"):
            model = layers()
            for each in (*model[:2], model):
                fully_shard(each, mesh=mesh_of_one(CPU))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        units = take_over({"model": model}, {"optimizer": optimizer})
        readers = bring({"model": model}, Weights(stored), CPU, chunked=True)
        state = TrackedState(model=model, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2))
        state.units, state.readers = numbers(units), {key: counted(read, count) for key, read in readers.items()}
        hollow(state.modules, CPU)
        return state, units

    return build


@pytest.mark.parametrize("size", [1, 3, 4])
def test_each_rank_reads_what_it_keeps_and_the_bits_are_the_same(size: int, stored: Path, truth: str, tmp_path: Path) -> None:
    def rank(group: Group) -> tuple[str, int, int]:
        count: list[int] = []
        engine, state = make("fsdp", size, tmp_path / f"{group.rank}", built_on_meta(stored, count))
        assert isinstance(engine, FsdpEngine)
        assert (engine.weights, count) == ([], []), "something was read, or has memory, before this rank has its chunks"
        seat(engine, group)
        read, kept = sum(count), sum(each.numel() for each in engine.weights)
        assert train(engine, state) == list(range(STEPS))
        assert sum(count) == read, "weights were read again behind the first step"
        digest = engine.digest(STEPS)
        group.all_gather(torch.empty(group.size, 1), torch.zeros(1))
        engine.close()
        return digest, read, kept

    found = with_groups(size, rank)
    assert {digest for digest, _, _ in found} == {truth}
    assert all(0 < read <= kept for _, read, kept in found)


def test_a_rank_that_rehearses_reads_a_unit_as_it_is_gathered(stored: Path, tmp_path: Path) -> None:
    count: list[int] = []
    engine, state = make("fsdp", 1, tmp_path / "ring", built_on_meta(stored, count))
    assert isinstance(engine, FsdpEngine)
    engine.rehearse()
    engine.begin_shard(0)
    state.objects["model"](torch.ones(4, 16)).sum().backward()
    engine.end_shard(0, 1.0)
    engine.forget()
    engine.close()
    assert sum(count) > 0
    assert engine.weights == []


# ---- what is refused ---------------------------------------------------------------------------------------------------------------------


def on_meta(**sizes: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(sizes.get("inputs", 3), 2)


def whose_table_is_in_no_file() -> nn.Module:
    model = on_meta()
    model.register_buffer("table", torch.empty(3, device="meta"), persistent=False)
    return model


@pytest.mark.parametrize(
    ("model", "names", "named"),
    [
        (on_meta(), None, "model.weight"),
        (on_meta(), {"weight": (2, 3)}, "it has no bias"),
        (on_meta(), {"weight": (2, 3), "bias": (2,), "more": (1,)}, "more, which the model has not"),
        (on_meta(inputs=4), {"weight": (2, 3), "bias": (2,)}, r"weight has the shape \(2, 3\)"),
        (whose_table_is_in_no_file(), {"weight": (2, 3), "bias": (2,)}, "model.table"),
    ],
)
@pytest.mark.parametrize("chunked", [True, False])
def test_what_does_not_fit_is_named(
    model: nn.Module, names: dict[str, tuple[int, ...]] | None, named: str, chunked: bool, tmp_path: Path
) -> None:
    if names is not None:
        save_file({name: torch.zeros(shape) for name, shape in names.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=named):
        bring({"model": model}, Weights(tmp_path) if names is not None else None, CPU, chunked=chunked)


@pytest.mark.parametrize(
    ("where", "reason"),
    [("s3://bucket/model.safetensors", "is a URL"), ("nowhere.safetensors", "no file"), ("model.txt", "as safetensors")],
)
def test_a_file_that_cannot_be_read_is_named(where: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.txt").write_text("no weights")
    with pytest.raises(ConfigError, match=reason):
        Weights(where)


def test_tied_weights_are_found_under_either_name_and_types_are_those_of_the_model(tmp_path: Path) -> None:
    save_file({"1.weight": torch.ones(4, 4, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
    assert bring({"model": model}, Weights(tmp_path), CPU, chunked=False) == {}
    assert model[1].weight is model[0].weight
    assert torch.equal(model[0].weight, torch.ones(4, 4))
    assert model[0].weight.dtype == torch.float32


def test_several_modules_have_their_names_before_those_of_their_tensors(tmp_path: Path) -> None:
    save_file({"first.weight": torch.ones(2, 3), "second.weight": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    modules = {name: nn.Linear(3, 2, bias=False) for name in ("first", "second")}
    bring(modules, Weights(tmp_path), CPU, chunked=False)
    assert [float(module.weight.detach().mean()) for module in modules.values()] == [1.0, 0.0]
