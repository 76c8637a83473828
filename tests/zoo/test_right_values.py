"""Small loops whose right values are known: what is frozen, unused or weighted is as in plain PyTorch, however a batch is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zoo.harness import by_one_rank

DATA = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
WORDS = 128


def two_heads() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"trunk": nn.Linear(8, 32), "a": nn.Linear(32, 1), "b": nn.Linear(32, 1)})


def loss_of(model: nn.ModuleDict, head: str, x: Tensor) -> Tensor:
    return (model[head](torch.tanh(model["trunk"](x))).squeeze(1) - x.sum(1)).square().mean()


@pytest.mark.parametrize("shards", [1, 4])
def test_what_is_frozen_between_steps_does_not_move(shards: int, tmp_path: Path) -> None:
    """Each head is frozen in every second step, with an optimizer that has neither momentum nor decay."""
    moved: dict[str, list[float]] = {"trained": [], "frozen": []}

    def train(run: Any) -> None:
        model = two_heads()
        state = run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps(state, total=6):
            trained, frozen = "ab"[step.number % 2], "ba"[step.number % 2]
            model[trained].requires_grad_(True)
            model[frozen].requires_grad_(False)
            before = {name: model[name].weight.detach().clone() for name in "ab"}
            for x in step.batches(DATA, batch_size=64):
                step.backward(loss_of(model, trained, x))
            step.commit()
            assert model[frozen].weight.grad is None and model[trained].weight.grad is not None
            for kind, name in (("trained", trained), ("frozen", frozen)):
                moved[kind].append(float((model[name].weight.detach() - before[name]).abs().max()))

    by_one_rank(train, shards, tmp_path)
    assert moved["frozen"] == [0.0] * 6
    assert min(moved["trained"]) > 0


@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("shards", [1, 4])
def test_an_optimizer_counts_the_steps_in_which_a_parameter_was_used(shards: int, freezes: bool, tmp_path: Path) -> None:
    counted: list[int] = []

    def train(run: Any) -> None:
        model = two_heads()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        state = run.track(model=model, optimizer=optimizer)
        for step in run.steps(state, total=30):
            head = "aab"[step.number % 3]
            for name in "ab" if freezes else "":
                model[name].requires_grad_(name == head)
            for x in step.batches(DATA, batch_size=32):
                step.backward(loss_of(model, head, x))
            step.commit()
        counted.extend(int(optimizer.state[one]["step"]) for one in model.parameters())

    by_one_rank(train, shards, tmp_path)
    assert counted == [30, 30, 20, 20, 10, 10]


class Lines(torch.utils.data.Dataset[Tensor]):
    """32 lines of 2 to 199 words."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Tensor:
        draw = torch.Generator().manual_seed(index)
        return torch.randint(WORDS, (int(torch.randint(2, 200, (), generator=draw)),), generator=draw)


def gradient(shards: int, folder: Path, *, weighted: bool) -> Tensor:
    """Of a step with all lines, whose loss is a mean over words."""
    found: list[Tensor] = []

    def train(run: Any) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(WORDS, 32), nn.Linear(32, WORDS)).double()
        state = run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
        before = nn.utils.parameters_to_vector(model.parameters()).detach()
        for step in run.steps(state, total=1):
            for lines in step.batches(Lines(), batch_size=32, collate_fn=list):
                scores, targets = torch.cat([model(line[:-1]) for line in lines]), torch.cat([line[1:] for line in lines])
                loss = nn.functional.cross_entropy(scores, targets)
                step.backward(loss, weight=len(targets) if weighted else None)
            step.commit()
        found.append(before - nn.utils.parameters_to_vector(model.parameters()).detach())

    by_one_rank(train, shards, folder)
    return found[0]


@pytest.mark.parametrize("shards", [2, 4, 16, 32])
def test_a_mean_over_words_is_that_of_the_whole_batch_however_it_is_cut(shards: int, tmp_path: Path) -> None:
    """The control: without weights it is not."""
    right = gradient(1, tmp_path, weighted=False)
    off = {weighted: float((gradient(shards, tmp_path, weighted=weighted) - right).norm() / right.norm()) for weighted in (True, False)}
    assert off[True] < 1e-9
    assert off[False] > 0.01


def test_the_loss_of_one_shard_is_told_as_it_is_whatever_its_weight(tmp_path: Path) -> None:
    """A product with a weight, divided by it again, may be another number."""
    losses = [0.1 * number for number in range(1, 30)]

    def train(run: Any) -> None:
        model = nn.Linear(8, 1).double()
        state = run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
        for step in run.steps(state, total=len(losses)):
            for x in step.batches(DATA.double(), batch_size=4):
                step.backward(0.0 * model(x).sum() + losses[step.number], weight=7)
            step.commit()

    assert any(loss * 7 / 7 != loss for loss in losses)
    assert by_one_rank(train, 1, tmp_path).losses == losses
