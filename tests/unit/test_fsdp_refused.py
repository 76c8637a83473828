"""What cannot be sharded is refused by name before the first step, and what to do instead is said."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from actors.rank.fsdp.room import check
from actors.rank.fsdp.taken import Unit, mesh_of_one, take_over
from actors.rank.state.room import GIB, free_bytes
from actors.rank.state.tracked import TrackedState
from actors.rank.step.train_step import TrainStep
from actors.rank.telemetry.recorder import Recorder
from chaos.settings import ChaosSettings
from fleet.app import plans
from fleet.errors import ConfigError
from fleet.settings.run import RunSettings

CPU = torch.device("cpu")


# ---- the model ---------------------------------------------------------------------------------------------------------------------------


def _takes_a_mesh_of_two(rank: int, store: Path, said: multiprocessing.SimpleQueue[str]) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    try:
        take_over({"model": model}, {})
    except ConfigError as error:
        said.put(str(error))
    dist.destroy_process_group()


def test_a_mesh_of_several_ranks(tmp_path: Path) -> None:
    """As a script of plain PyTorch makes it: the world that it was made for may be another one soon."""
    forked = multiprocessing.get_context("forkserver")
    said = forked.SimpleQueue()
    ranks = [forked.Process(target=_takes_a_mesh_of_two, args=(rank, tmp_path / "store", said)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(60)
    assert [each.exitcode for each in ranks] == [0, 0]
    for _ in ranks:
        words = said.get()
        assert "model" in words and "its mesh has 2 ranks, which Fleet cannot change" in words and "mesh=run.mesh" in words


def test_a_module_that_was_sharded_before() -> None:
    """PyTorch does, at the user's line, and names the module."""
    model = nn.Linear(4, 7)
    fully_shard(model, mesh=mesh_of_one(CPU))
    with pytest.raises(AssertionError, match=r"(?s)only be applied to a module once.*in_features=4, out_features=7"):
        fully_shard(model, mesh=mesh_of_one(CPU))


def test_an_optimizer_that_is_not_element_wise(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh_of_one(CPU))
    optimizer = torch.optim.LBFGS(model.parameters())
    units = take_over({"model": model}, {"optimizer": optimizer})
    state = TrackedState(model=model, optimizer=optimizer)
    state.units = units
    settings = RunSettings(optimizer_sharding="fsdp")
    with pytest.raises(ConfigError, match=r"LBFGS.*element by element.*Use one of SGD, Adam"):
        TrainStep(state, settings, Recorder(tmp_path / "ring", 0), None)


# ---- room for it -------------------------------------------------------------------------------------------------------------------------


def unit(name: str, gib: float) -> Unit:
    """Of so much memory, none of which is taken."""
    return Unit(name, (), (nn.Parameter(torch.empty(int(gib * GIB) // 4, device="meta")),), keeps=False)


def test_a_unit_that_no_rank_can_hold_beside_another() -> None:
    units = [unit("model", 1), unit("model.head", 6), unit("model.block", 2)]
    assert check(units, free=9 * GIB) and not check(units, free=8 * GIB), "the third has no room"
    with pytest.raises(ConfigError) as refused:
        check([unit("model", 6)] * 2, free=12 * GIB - 1)
    assert "12 GiB in all" in str(refused.value)
    with pytest.raises(ConfigError) as refused:
        check(units, free=7 * GIB)
    for words in ("model.head", "its parameters are 6 GiB", "8 GiB in all", "room for 7 GiB", "Call fully_shard on parts of it"):
        assert words in str(refused.value)


def kernel(folder: Path, limit: str) -> tuple[Path, Path]:
    """What the kernel says: 8 GiB are available, and the inner of two groups may take ``limit`` and has taken 1 GiB."""
    proc, groups = folder / "proc", folder / "groups"
    (proc / "self").mkdir(parents=True)
    (groups / "fleet/rank").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemAvailable: {8 << 20} kB\n")
    (proc / "self/cgroup").write_text("0::/fleet/rank\n")
    for group, most in (("fleet", "max"), ("fleet/rank", limit)):
        (groups / group / "memory.max").write_text(f"{most}\n")
        (groups / group / "memory.current").write_text(f"{GIB}\n")
        (groups / group / "memory.stat").write_text(f"anon 5\ninactive_file {GIB // 2}\n")
    return proc, groups


@pytest.mark.parametrize(("limit", "left"), [("max", 8.0), (str(3 * GIB), 2.5), (str(20 * GIB), 8.0)])
def test_what_is_free_is_the_least_of_the_hosts_and_of_the_groups(limit: str, left: float, tmp_path: Path) -> None:
    assert free_bytes(CPU, *kernel(tmp_path, limit)) == left * GIB


def test_this_process_has_some_memory_left() -> None:
    assert free_bytes(CPU) > 0


# ---- copies ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "copies"), [(1, 2), (2, 2), (3, 3)])
@pytest.mark.parametrize("sharding", ["zero1", "fsdp"])
def test_more_copies_than_other_ranks(sharding: str, world: int, copies: int) -> None:
    settings = RunSettings(world=world, optimizer_sharding=sharding, optimizer_copies=copies)
    with pytest.raises(ConfigError) as refused:
        plans.check(settings, ChaosSettings())
    way_out = f"Use --config optimizer_copies={max(1, world - 1)} or fewer, or a --world of {copies + 1} or more."
    assert f"optimizer_copies = {copies}" in str(refused.value) and way_out in str(refused.value)


@pytest.mark.parametrize("changes", [{"world": 1, "optimizer_copies": 1}, {"world": 2, "max_world": 3, "optimizer_copies": 2}])
def test_as_many_copies_as_there_can_be(changes: dict[str, int]) -> None:
    plans.check(RunSettings(optimizer_sharding="fsdp", **changes), ChaosSettings())
    plans.check(RunSettings(world=2, optimizer_copies=3), ChaosSettings())
