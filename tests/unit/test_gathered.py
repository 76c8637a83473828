"""When a unit is let go while its gradients are computed: not before all that reads it is done, whatever order backwards come in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actors.rank.fsdp.gathered import Gathered
from actors.rank.fsdp.taken import Unit


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.trunk(x))
        return self.left(x).square().sum(), self.right(x).square().sum()


def both_in_turn(model: nn.Module, x: Tensor) -> None:
    """The first backward comes to some of the parameters, the second to others, and some are in both."""
    left, right = model(x)
    left.backward(retain_graph=True)
    right.backward()


def one_and_then_all(model: nn.Module, x: Tensor) -> None:
    model(x)[1].backward()
    sum(model(x)).backward()


def a_forward_before_a_backward(model: nn.Module, x: Tensor) -> None:
    first, second = model(x), model(2 * x)
    sum(second).backward()
    sum(first).backward()


def computed_again(model: nn.Module, x: Tensor) -> None:
    for _ in range(2):
        sum(checkpoint(model, x, use_reentrant=False)).backward()  # type: ignore[arg-type]


def never_backward(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model(x)
    sum(model(x)).backward()


@pytest.mark.parametrize("loop", [both_in_turn, one_and_then_all, a_forward_before_a_backward, computed_again, never_backward])
@pytest.mark.parametrize("keeps", [False, True])
def test_gradients_are_those_of_the_plain_model(loop: Callable[[nn.Module, Tensor], None], keeps: bool) -> None:
    torch.manual_seed(0)
    plain, model = Heads(), Heads()
    model.load_state_dict(plain.state_dict())
    parameters, starts = list(model.parameters()), [0, 64, 128, 192, 256, 320]
    values = [each.detach().clone() for each in parameters]

    def fill(flat: int, memory: Tensor) -> None:
        for value, start in zip(values, starts, strict=True):
            memory[start : start + value.numel()] = value.flatten()

    places = [(parameter, 0, start) for parameter, start in zip(parameters, starts, strict=True)]
    unit = Gathered(Unit("model", (model,), tuple(parameters), keeps), [(0, 384)], places, fill)
    assert all(each.isnan().all() for each in parameters)
    x = torch.randn(3, 5)
    for each in (plain, model):
        loop(each, x)
    unit.free()
    for expected, found in zip(plain.parameters(), parameters, strict=True):
        assert found.grad is not None
        assert torch.equal(expected.grad, found.grad)  # type: ignore[arg-type]
    assert all(each.isnan().all() for each in parameters)
