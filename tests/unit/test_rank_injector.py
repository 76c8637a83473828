"""A bit that flips in hardware asks nobody, and autograd does not see it: the step goes on, whenever it happens."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from actors.rank.rank_injector import RankInjector, _flip
from actors.rank.state.tracked import TrackedState
from actors.rank.step.train_step import TrainStep
from actors.rank.telemetry.recorder import Recorder
from fleet.protocol.operations import START, Operation
from fleet.settings.run import RunSettings
from tests.support.trains import Numbers, build


def bits(tensors: list[torch.Tensor]) -> list[bytes]:
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("seed", range(6))
def test_a_weight_that_flips_between_forward_and_backward_lets_the_step_go_on(seed: int, tmp_path: Path) -> None:
    model, optimizer, _ = build(norm="layer")
    train = TrainStep(TrackedState(model=model, optimizer=optimizer), RunSettings(world=1, shards=1), Recorder(tmp_path / "rank", 0), None)
    train.begin_shard(0)
    inputs, wanted = map(torch.stack, zip(*(Numbers()[index] for index in range(4)), strict=True))
    loss = (model(inputs) - wanted).square().mean()
    before = bits(train.parameters)
    assert RankInjector(train).operate(Operation("f", "flip_weight", START, seed=seed)) is None
    loss.backward()
    assert sum(old != new for old, new in zip(before, bits(train.parameters), strict=True)) == 1
    assert all(parameter.grad is not None for parameter in model.parameters())


CLOSED = """
import os, sys, time
from actors.rank.rank_injector import RankInjector, _flip
from fleet.protocol.operations import HEAL, START, Operation

class Train:
    pass

def opens():
    try:
        os.close(os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        return error.errno
    return 0

rank_injector = RankInjector(Train())
for heal in (True, False):
    assert opens() == 0
    assert rank_injector.operate(Operation("f", "no_descriptors", START, duration_s=60.0 if heal else 0.2)) is None
    assert opens() == 24, "EMFILE"
    if heal:
        rank_injector.operate(Operation("f", "no_descriptors", HEAL))
    while opens():
        time.sleep(0.01)
print("open again")
"""


def test_a_process_that_can_open_nothing_can_again_when_it_is_healed_or_its_time_is_over() -> None:
    done = subprocess.run([sys.executable, "-c", CLOSED], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "open again\n", done.stderr[-2000:]


def test_who_is_in_no_group_of_its_own_takes_no_memory(tmp_path: Path) -> None:
    refused = RankInjector(None).operate(Operation("f", "out_of_memory", START))  # type: ignore[arg-type]
    assert refused is not None and "it would take the host's memory" in refused


def test_under_two_in_five_flips_are_of_a_single_bit() -> None:
    counts = []
    for seed in range(400):
        tensor = torch.zeros(3)
        _flip([tensor], random.Random(seed))
        counts.append(sum(byte.bit_count() for byte in tensor.numpy().tobytes()))
    assert set(counts) == {1, 2, 3, 4} and 0.3 < counts.count(1) / len(counts) < 0.4


@pytest.mark.parametrize("known", [False, True], ids=["plain", "sent ahead"])
def test_a_gradient_is_flipped_once_and_in_what_is_summed(known: bool, tmp_path: Path) -> None:
    """Of a shard whose gradients are on their way when the order comes nothing would be wrong, so that the next one is taken."""
    model, optimizer, _ = build(norm="layer")
    train = TrainStep(TrackedState(model=model, optimizer=optimizer), RunSettings(world=1, shards=4), Recorder(tmp_path / "rank", 0), None)
    sums: list[list[bytes]] = []
    for shard in range(4):
        train.begin_shard(shard)
        inputs, wanted = map(torch.stack, zip(*(Numbers()[index] for index in range(4)), strict=True))
        (model(inputs) - wanted).square().mean().backward()
        if shard == 1:
            train.gradients._ahead = SimpleNamespace(early=SimpleNamespace(ahead=lambda: (0, 0))) if known else None  # type: ignore[assignment]
            assert RankInjector(train).operate(Operation("f", "flip_gradient", START, seed=3)) is None
        right = bits([parameter.grad for parameter in train.parameters if parameter.grad is not None])
        end = train.gradients._end_ahead
        train.gradients._end_ahead = lambda ahead: None  # type: ignore[method-assign]
        train.end_shard(shard, 0.5)
        train.gradients._end_ahead, train.gradients._ahead = end, None  # type: ignore[method-assign]
        sums.append([right, bits([parameter.grad for parameter in train.parameters if parameter.grad is not None])])  # type: ignore[list-item]
    assert [shard for shard, (before, after) in enumerate(sums) if before != after] == [2 if known else 1]
