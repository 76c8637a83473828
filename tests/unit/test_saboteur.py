"""A bit that flips in hardware asks nobody, and autograd does not see it: the step goes on, whenever it happens."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from actors.rank.saboteur import Saboteur, _flip
from actors.rank.state.tracked import TrackedState
from actors.rank.step.engine import Engine
from actors.rank.telemetry.recorder import Recorder
from fleet.protocol.operations import START, Operation
from fleet.settings.run import RunSettings
from tests.support.trains import Numbers, build


def bits(tensors: list[torch.Tensor]) -> list[bytes]:
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("seed", range(6))
def test_a_weight_that_flips_between_forward_and_backward_lets_the_step_go_on(seed: int, tmp_path: Path) -> None:
    model, optimizer, _ = build(norm="layer")
    engine = Engine(TrackedState(model=model, optimizer=optimizer), RunSettings(world=1, shards=1), Recorder(tmp_path / "rank", 0), None)
    engine.begin_shard(0)
    inputs, wanted = map(torch.stack, zip(*(Numbers()[index] for index in range(4)), strict=True))
    loss = (model(inputs) - wanted).square().mean()
    before = bits(engine.parameters)
    assert Saboteur(engine).operate(Operation("f", "flip_weight", START, seed=seed)) is None
    loss.backward()
    assert sum(old != new for old, new in zip(before, bits(engine.parameters), strict=True)) == 1
    assert all(parameter.grad is not None for parameter in model.parameters())


CLOSED = """
import os, sys, time
from actors.rank.saboteur import Saboteur, _flip
from fleet.protocol.operations import HEAL, START, Operation

class Engine:
    pass

def opens():
    try:
        os.close(os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        return error.errno
    return 0

saboteur = Saboteur(Engine())
for heal in (True, False):
    assert opens() == 0
    assert saboteur.operate(Operation("f", "no_descriptors", START, duration_s=60.0 if heal else 0.2)) is None
    assert opens() == 24, "EMFILE"
    if heal:
        saboteur.operate(Operation("f", "no_descriptors", HEAL))
    while opens():
        time.sleep(0.01)
print("open again")
"""


def test_a_process_that_can_open_nothing_can_again_when_it_is_healed_or_its_time_is_over() -> None:
    done = subprocess.run([sys.executable, "-c", CLOSED], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "open again\n", done.stderr[-2000:]


def test_who_is_in_no_group_of_its_own_takes_no_memory(tmp_path: Path) -> None:
    refused = Saboteur(None).operate(Operation("f", "out_of_memory", START))  # type: ignore[arg-type]
    assert refused is not None and "it would take the host's memory" in refused


def test_under_two_in_five_flips_are_of_a_single_bit() -> None:
    counts = []
    for seed in range(400):
        tensor = torch.zeros(3)
        _flip([tensor], random.Random(seed))
        counts.append(sum(byte.bit_count() for byte in tensor.numpy().tobytes()))
    assert set(counts) == {1, 2, 3, 4} and 0.3 < counts.count(1) / len(counts) < 0.4


class Spoiled:
    """Stands in for an engine: of which shards gradients are sent while they are computed is chosen."""

    def __init__(self, ahead: list[bool]) -> None:
        self.leave_through, self.holds_back, self._ahead = None, False, ahead
        self.parameters = [torch.nn.Parameter(torch.ones(4))]
        self.parameters[0].grad = torch.ones(4)
        self.taken: list[tuple[int, list[float]]] = []

    @property
    def sends_ahead(self) -> bool:
        return self._ahead[len(self.taken)]

    def end_shard(self, shard: int, loss: float) -> None:
        assert self.parameters[0].grad is not None
        self.taken.append((shard, self.parameters[0].grad.tolist()))


def test_a_gradient_is_spoiled_in_a_shard_of_which_none_has_left() -> None:
    """What has left already would not be wrong, and a fault that strikes nothing would be told."""
    engine = Spoiled([True, False, False])
    assert Saboteur(engine).operate(Operation("f", "flip_gradient", START, seed=3)) is None  # type: ignore[arg-type]
    assert engine.holds_back, "the next shard sends nothing ahead"
    for shard in range(3):
        engine.parameters[0].grad = torch.ones(4)
        engine.end_shard(shard, 0.0)
    assert [shard for shard, gradient in engine.taken if gradient != [1.0] * 4] == [1]
    assert not engine.holds_back
