"""Steps of a model that ``fully_shard`` has cut, over a real network: the bits of whole replicas, at any number of ranks."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from actors.rank.fsdp.engine import FsdpEngine
from actors.rank.fsdp.taken import Unit, mesh_of_one, take_over
from actors.rank.membership.process_group import Group
from actors.rank.state.tracked import TrackedState
from actors.rank.step.engine import Engine
from actors.rank.telemetry.recorder import Recorder
from fleet.settings.run import RunSettings
from tests.unit.test_reduction import with_groups
from tests.unit.test_sharded_engine import SHARDS, STEPS, seat, train

ONE_AT_A_TIME = threading.Lock()
CPU = torch.device("cpu")


def tracked() -> tuple[TrackedState, tuple[Unit, ...]]:
    """Three units, of prime widths, one of which has batch norm, whose statistics go to all ranks."""
    with ONE_AT_A_TIME, torch.random.fork_rng():
        torch.manual_seed(1)
        first = nn.Sequential(nn.Linear(16, 251), nn.BatchNorm1d(251), nn.Tanh())
        model = nn.Sequential(first, nn.Sequential(nn.Linear(251, 127), nn.Tanh()), nn.Linear(127, 1))
        for each in (*model[:2], model):
            fully_shard(each, mesh=mesh_of_one(CPU))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    units = take_over({"model": model}, {"optimizer": optimizer})
    state = TrackedState(model=model, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2))
    state.units = {id(each): number for number, unit in enumerate(units, 1) for each in unit.parameters}
    return state, units


def make(sharding: str, size: int, ring: Path) -> tuple[Engine, TrackedState]:
    settings = RunSettings(world=size, shards=SHARDS, optimizer_sharding=sharding)
    state, units = tracked()
    if sharding == "none":
        return Engine(state, settings, Recorder(ring, 0), 0.5), state
    return FsdpEngine(state, settings, Recorder(ring, 0), 0.5, units, "127.0.0.1"), state


def trained(sharding: str, size: int, folder: Path) -> list[tuple[str, int]]:
    """(digest, bytes of the parameters) of each rank."""

    def rank(group: Group) -> tuple[str, int]:
        engine, state = make(sharding, size, folder / f"{sharding}-{size}-{group.rank}")
        seat(engine, group)
        assert train(engine, state) == list(range(STEPS))
        found = engine.digest(STEPS), sum(each.nbytes for each in engine.weights)
        group.all_gather(torch.empty(group.size, 1), torch.zeros(1))  # a lender goes when nobody asks any more
        if isinstance(engine, FsdpEngine):
            engine.close()
        return found

    return with_groups(size, rank)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int]:
    return trained("none", 1, tmp_path_factory.mktemp("whole"))[0]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_bits_are_those_of_whole_replicas(size: int, tmp_path: Path, whole: tuple[str, int]) -> None:
    """And the ranks together have each chunk of each unit twice, but for what is left free between parameters."""
    digest, whole_bytes = whole
    found = trained("fsdp", size, tmp_path)
    assert {each for each, _ in found} == {digest}
    assert sum(parameter_bytes for _, parameter_bytes in found) <= min(size, 2) * whole_bytes * 1.02
