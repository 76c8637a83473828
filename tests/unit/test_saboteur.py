"""A bit that flips in hardware asks nobody, and autograd does not see it: the step goes on, whenever it happens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors.rank.engine import Engine
from actors.rank.recorder import Recorder
from actors.rank.saboteur import Saboteur
from actors.rank.state import TrackedState
from fleet.protocol.fault_kinds import START, Operation
from fleet.settings.run import RunSettings
from tests.support.trains import Numbers, build


def bits(tensors: list[torch.Tensor]) -> list[bytes]:
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("seed", range(6))
def test_a_weight_that_flips_between_forward_and_backward_lets_the_step_go_on(seed: int, tmp_path: Path) -> None:
    model, optimizer, _ = build(norm="layer")
    engine = Engine(TrackedState(model=model, optimizer=optimizer), RunSettings(world=1, shards=1), Recorder(tmp_path / "rank", 0), None)
    engine.begin_shard()
    inputs, wanted = map(torch.stack, zip(*(Numbers()[index] for index in range(4)), strict=True))
    loss = (model(inputs) - wanted).square().mean()
    before = bits(engine.parameters)
    assert Saboteur(engine).operate(Operation("f", "flip_weight", START, seed=seed)) is None
    loss.backward()
    assert sum(old != new for old, new in zip(before, bits(engine.parameters), strict=True)) == 1
    assert all(parameter.grad is not None for parameter in model.parameters())
