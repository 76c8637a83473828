"""Buckets of gradients that travel while the backward of a rank's last shard still runs: the bits stay, whatever a loop body does."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from actors.rank.membership.process_group import Group
from actors.rank.step.gradients import GradientBuffers
from actors.rank.step.reduction import Reducer
from fleet.protocol.shards import cover
from tests.unit.test_reduction import with_groups

SHARDS, STEPS, WIDTH = 8, 5, 40
WORLDS = (1, 2, 3, 5)
ONE_GENERATOR = threading.Lock()
Backward = Callable[[nn.Module, int], None]


class Net(nn.Module):
    """The first layer is the last one too; ``beside`` takes no part; of two types, so that there are two flat buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.narrow = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.beside = nn.Linear(WIDTH, 3)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.inner:
            x = x + torch.tanh(layer(x))
        return self.last(x + self.narrow(x.bfloat16()).float())


def loss_of(model: nn.Module, shard: int, step: int = 0) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + shard))
    return model(x).square().mean()


def once(model: nn.Module, shard: int, step: int) -> None:
    loss_of(model, shard, step).backward()


def thrice(model: nn.Module, shard: int, step: int) -> None:
    """From the beginning: so it is learnt."""
    for part in range(3):
        loss_of(model, shard + 10 * part, step).backward()


def ranges_of(size: int) -> list[tuple[int, ...]]:
    return [tuple(range(lo, hi)) for lo, hi in itertools.pairwise([SHARDS * i // size for i in range(size + 1)])]


class Rank:
    """What an engine does around each shard, of one rank."""

    def __init__(self, group: Group, reducer: Reducer, watched: bool, dealt: Sequence[Sequence[int]]) -> None:
        with ONE_GENERATOR:
            torch.manual_seed(0)
            self.model = Net()
        self.group, self.reducer, self.mine = group, reducer, dealt[group.rank]
        self.gradients = GradientBuffers({"model": self.model}, SHARDS, watched=watched)
        self.dealt, self.overlapped = dealt, 0
        self.bind(group)

    def bind(self, group: Group) -> None:
        self.reducer.bind(group, [cover(shards, SHARDS) for shards in self.dealt])

    def compute(self, step: int, backward: Callable[..., None], shards: Sequence[int] | None = None) -> None:
        gradients = self.gradients
        mine = self.mine if shards is None else shards
        gradients.begin_step()
        for shard in mine:
            gradients.begin_shard()
            if shard == mine[-1]:
                gradients.overlap(self.reducer, shard)
                self.overlapped += gradients.ahead is not None
            backward(self.model, shard, step)
            gradients.end_shard(shard)

    def reduce(self) -> list[torch.Tensor]:
        self.gradients.reduce(self.reducer)
        found = [flat.clone() for flat in self.gradients.mean_flats]
        self.gradients.commit()
        return found


def trained(
    size: int, backward: Callable[..., None], watched: bool, bucket_bytes: int = 1 << 13, dealt: Sequence[Sequence[int]] | None = None,
    make: Callable[[Rank], Reducer] | None = None, expect: bool = True,
) -> list[tuple[list[list[torch.Tensor]], int]]:  # fmt: skip
    """By rank: the means of all steps, and how many of them were exchanged early."""

    def rank(group: Group) -> tuple[list[list[torch.Tensor]], int]:
        one = Rank(group, Reducer(SHARDS, "ordered", bucket_bytes), watched, dealt or ranges_of(group.size))
        means = []
        for step in range(STEPS):
            one.compute(step, backward)
            means.append(one.reduce())
            if expect:
                one.gradients.expect(one.reducer)
        return means, one.overlapped

    return with_groups(size, rank)  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def same(one: Sequence[Sequence[torch.Tensor]], other: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Bit for bit, but for what lies between parameters."""
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for x, y in zip(one, other, strict=True) for a, b in zip(x, y))


@pytest.mark.parametrize("backward", [once, thrice])
@pytest.mark.parametrize("expect", [True, False])
def test_worlds_agree_bit_for_bit_with_and_without(backward: Callable[..., None], expect: bool) -> None:
    [(expected, _)] = trained(1, backward, watched=False)
    for size in WORLDS:
        for watched in (False, True):
            for means, early in trained(size, backward, watched, expect=expect):
                assert same(means, expected)
                may = watched and backward is once and size > 1
                assert early >= STEPS - 2 if may else early == 0
