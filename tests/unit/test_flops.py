"""FLOPs that are counted are those of the formulas, and counting changes no bit of a gradient."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from actors.rank.step.flops import FlopCount
from tests.support.flops import MODELS, counted, perceptron


@pytest.mark.parametrize("made", MODELS)
def test_what_is_counted_is_within_a_percent_of_the_formula(made: Callable[[], tuple[Callable[[], Tensor], object, float]]) -> None:
    loss, _, expected = made()
    assert counted(lambda: loss().backward()) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("made", MODELS)
def test_counting_changes_no_bit(made: Callable[[], tuple[Callable[[], Tensor], list[nn.Parameter], float]]) -> None:
    loss, parameters, _ = made()

    def gradients() -> list[Tensor]:
        torch.manual_seed(0)
        return list(torch.autograd.grad(loss(), parameters))

    plain, seen = gradients(), list[Tensor]()
    assert counted(lambda: seen.extend(gradients())) > 0
    assert all(torch.equal(one, other) for one, other in zip(plain, seen[-len(plain) :], strict=True))


@pytest.mark.parametrize("kind", [nn.SiLU, nn.Mish, nn.GELU, nn.Softplus])
def test_counting_leaves_activations_their_kernels(kind: type[nn.Module]) -> None:
    """Of some PyTorch has a formula, too, which rounds otherwise."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1), requires_grad=True)
    work = lambda: torch.autograd.grad((kind()(x @ x.T) ** 2).mean(), x)[0]  # noqa: E731
    plain, seen = work(), list[Tensor]()
    assert counted(lambda: seen.append(work())) > 0
    assert all(torch.equal(plain, each) for each in seen)


def test_the_gradient_of_a_gradient_is_counted_too() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), torch.ones(2, 4, requires_grad=True)

    def plainly() -> None:
        model(x).sum().backward()

    def twice() -> None:
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()

    assert counted(twice) > counted(plainly) > 0


def test_one_shard_of_the_second_step_is_counted_and_no_other() -> None:
    loss, _, _ = perceptron()
    count, found = FlopCount(), []
    for _ in range(3):
        count.step_begins()
        for _ in range(2):
            with count.shard() as counter:
                loss().backward()
            found.append(counter is not None)
            count.shard_ends()
    assert found == [False, False, True, False, False, False]
    assert count.of_step(16) == 16 * count.of_step(1) > 0


def test_a_step_that_was_given_up_is_counted_in_its_next_attempt() -> None:
    """Before its first shard, and in the middle of one: half a shard is no figure."""
    loss, _, _ = perceptron()
    count, whole = FlopCount(), counted(lambda: loss().backward())
    for _ in range(3):
        count.step_begins()
    with suppress(InterruptedError), count.shard():
        loss()
        raise InterruptedError
    assert count.of_step(1) == 0.0
    count.step_begins()
    with count.shard():
        loss().backward()
    count.shard_ends()
    assert count.of_step(1) == whole > 0.0


def test_what_is_declared_is_not_counted() -> None:
    count = FlopCount(1e12)
    assert count.of_step(16) == 1e12
    count.step_begins()
    count.step_begins()
    with count.shard() as counter:
        assert counter is None


def test_what_is_compiled_is_not_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    compiled = torch.compile(lambda x: x * 2 + 1, backend="eager")
    assert counted(lambda: compiled(torch.ones(2))) == 0.0
    assert "not counted" in caplog.text and "compiled" in caplog.text and "flops=" in caplog.text
    torch._dynamo.utils.counters.clear()
