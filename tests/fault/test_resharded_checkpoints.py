"""A checkpoint of a model that is cut belongs to no world size: others go on from it, cut or whole, and PyTorch reads it without Fleet."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fleet.protocol.types import StateId
from fleet.settings.run import RunSettings
from storage.checkpoint.export import load_state
from storage.checkpoint.parts import newest_checkpoint
from storage.checkpoint.store import CheckpointStore
from tests.fault.test_bad_luck import settings, train_through
from tests.support import trains
from tests.support.plain import FORKED, PlainFleet
from tests.support.undisturbed import Undisturbed

HALF, ALL = 8, 16
WIDTH = 1021
Kept = tuple[str, tuple[str, StateId]]
"""(URL of a store, id and state of its newest checkpoint)."""


def chosen(folder: Path, sharding: str, world: int, steps: int) -> RunSettings:
    options = {"width": str(WIDTH), "units": "yes", "steps": str(steps), "pause_s": "0"}
    return settings(folder, world=world, optimizer_sharding=sharding, options=options)


def kept_by(sharding: str, world: int, folder: Path) -> Kept:
    """A run of half of the steps, and what it leaves in its store."""
    outcome, _, _ = train_through(trains.plain, chosen(folder, sharding, world, HALF), folder)
    assert outcome.status == "completed"
    url = f"file://{folder}"
    found = newest_checkpoint(url)
    assert found is not None
    assert found[1].step == HALF
    return url, found


@pytest.fixture(scope="module")
def truth(undisturbed: Undisturbed) -> str:
    """The digest of whole replicas that took all steps in one run."""
    return undisturbed(lambda folder: chosen(folder, "none", 2, ALL))


@pytest.fixture(scope="module")
def cut_at_four(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return kept_by("fsdp", 4, tmp_path_factory.mktemp("cut"))


@pytest.fixture(scope="module")
def whole_at_two(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return kept_by("none", 2, tmp_path_factory.mktemp("whole"))


def goes_on(kept: Kept, sharding: str, world: int, folder: Path) -> str:
    """The digest of a run that begins with the checkpoint and takes the rest of the steps."""
    url, begin = kept
    shutil.copytree(Path(url.removeprefix("file://"), "checkpoints"), folder / "checkpoints")
    with PlainFleet(trains.plain, chosen(folder, sharding, world, ALL), folder, begin=begin) as fleet:
        assert fleet.wait().status == "completed"
        return fleet.coordinator.machine.state.ending.record.digest


@pytest.mark.parametrize(("sharding", "world"), [("fsdp", 2), ("fsdp", 3), ("none", 2), ("zero1", 3)])
def test_others_go_on_from_what_four_ranks_have_written(
    sharding: str, world: int, cut_at_four: Kept, truth: str, tmp_path: Path
) -> None:  # fmt: skip
    assert goes_on(cut_at_four, sharding, world, tmp_path) == truth


def test_ranks_that_cut_go_on_from_what_whole_replicas_have_written(whole_at_two: Kept, truth: str, tmp_path: Path) -> None:
    assert goes_on(whole_at_two, "fsdp", 3, tmp_path) == truth


# ---- without Fleet -----------------------------------------------------------------------------------------------------------------------


def read_by_torch(checkpoint: str, rank: int, sizes: tuple[int, ...], rendezvous: str, out: str) -> None:
    """One rank of plain FSDP2 on a mesh of ``sizes``, which loads the checkpoint; the first writes what all have together."""
    world = torch.Size(sizes).numel()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])

    def cut(model: nn.Sequential) -> None:
        for part in (model[0], model[1], model):
            fully_shard(part, mesh=mesh)

    model, optimizer, _ = trains.build(WIDTH, "layer", cut)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    found = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {f"{name} {key}": value.full_tensor() for key, value in optimizer.state[parameter].items() if key != "step"}
    if rank == 0:
        torch.save(found, out)
    dist.destroy_process_group()


@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2)], ids=str)
def test_plain_fsdp_reads_it_at_another_world_size_and_mesh(sizes: tuple[int, ...], cut_at_four: Kept, tmp_path: Path) -> None:
    url, (name, _) = cut_at_four
    checkpoint = f"{url.removeprefix('file://')}/checkpoints/{name}"
    out = str(tmp_path / "found.pt")
    ranks = range(torch.Size(sizes).numel())
    arguments = [(checkpoint, rank, sizes, f"file://{tmp_path}/rendezvous", out) for rank in ranks]
    processes = [FORKED.Process(target=read_by_torch, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * len(processes)
    found, (known, _) = torch.load(out), load_state(CheckpointStore(url), name)
    for number, (key, value) in enumerate(known["model"].items()):
        assert torch.equal(found[key], value), key
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found[f"{key} {moment}"], known["optimizer"]["state"][number][moment]), (key, moment)
