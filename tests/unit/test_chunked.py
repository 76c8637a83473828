"""An optimizer in chunks: the bits of the whole one, at any number of ranks, and what cannot have them is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from actors.rank.state.optimizers import values_an_element
from actors.rank.step.flats import ALL
from actors.rank.step.gradients import GradientBuffers
from actors.rank.zero1.chunked import ELEMENTWISE, OptimizerChunks, check
from actors.rank.zero1.pieces import pack, unpack
from fleet.errors import ConfigError
from fleet.protocol.chunks import WHOLE, bounds

CPU = torch.device("cpu")
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"amsgrad": True, "weight_decay": 0.1},
    "RMSprop": {"momentum": 0.5, "centered": True},
}
STEPS = 4


def build(dtype: torch.dtype) -> nn.Module:
    """Two blocks of one parameter, an odd one, a single number, and one whose memory is in another order."""
    torch.manual_seed(3)
    model = nn.Module()
    model.wide = nn.Parameter(torch.randn(70, 33))
    model.odd = nn.Parameter(torch.randn(37))
    model.one = nn.Parameter(torch.randn(()))
    model.turned = nn.Parameter(torch.randn(29, 41).t())
    return model.to(dtype)


class Ranks:
    """Each rank's own copy of the model, its optimizer in chunks, and gradients that are the same for all."""

    def __init__(self, kind: type[torch.optim.Optimizer], dtype: torch.dtype, count: int) -> None:
        self.models = [build(dtype) for _ in range(count)]
        self.buffers = [GradientBuffers({"model": model}, 4) for model in self.models]
        self.chunks = [self._chunked(kind, buffers) for buffers in self.buffers]
        self.place(count)

    @staticmethod
    def _chunked(kind: type[torch.optim.Optimizer], buffers: GradientBuffers) -> OptimizerChunks:
        optimizer = kind(buffers.parameters, **OPTIONS.get(kind.__name__, {}))  # type: ignore[call-arg]
        check(optimizer, 1)
        return OptimizerChunks([optimizer], buffers.parameters, buffers.layout.places, buffers.layout.extents)

    def place(self, count: int) -> None:
        """Each rank owns a chunk and guards the next one's; pieces travel packed."""
        held = [chunks.chunks for chunks in self.chunks]
        wanted = [tuple(dict.fromkeys([(count, rank), (count, (rank + 1) % count)])) for rank in range(count)]
        extents = list(enumerate(self.chunks[0].extents))
        moved = [
            [piece for flat, extent in extents for one in mine for piece in self._from_any(held, flat, *bounds(extent, one))]
            for mine in wanted
        ]
        for chunks, mine, pieces in zip(self.chunks, wanted, moved, strict=False):
            chunks.adopt(mine, pieces)

    def _from_any(self, held: list[Any], flat: int, lo: int, hi: int) -> list[Any]:
        found, extent = [], self.chunks[0].extents[flat]
        for source, mine in enumerate(held):
            for chunk in mine[:1]:
                start, stop = bounds(extent, chunk)
                if max(lo, start) < min(hi, stop) and not (chunk == WHOLE and source):
                    found += unpack(*pack(self.chunks[source].cut([(flat, max(lo, start), min(hi, stop))])), CPU)
        return found

    def step(self, number: int, count: int) -> None:
        for buffers, chunks in list(zip(self.buffers, self.chunks, strict=True))[:count]:
            flats = [torch.zeros(length, dtype=dtype) for (dtype, *_), length in buffers.layout.lengths.items()]
            for place, value in zip(buffers.layout.gradients, gradients(buffers.parameters, number), strict=True):
                place.view(flats).copy_(value)
            chunks.point(flats, ALL)
            chunks.tracked[0].optimizer.step()

    def assembled(self, count: int) -> list[torch.Tensor]:
        """The parameters, each element from the owner of its chunk; what guards have must be the same."""
        found = [torch.full_like(p, torch.nan) for p in self.models[0].parameters()]
        first = self.chunks[0]
        for chunks in self.chunks[:count]:
            for flat, extent in enumerate(first.extents):
                for one in chunks.chunks:
                    for number, lo, hi in chunks.parts(flat, *bounds(extent, one)):
                        start = chunks.places[number][1]
                        into = found[number].as_strided((found[number].numel(),), (1,))[lo - start : hi - start]
                        value = chunks.view(number, lo, hi)
                        assert torch.isnan(into).all() or torch.equal(into, value), "a guard's copy differs from its owner's"
                        into.copy_(value)
        return found


def gradients(parameters: list[nn.Parameter], number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) * 3 for p in parameters]


def unsharded(kind: type[torch.optim.Optimizer], dtype: torch.dtype) -> list[torch.Tensor]:
    model = build(dtype)
    parameters = list(model.parameters())
    optimizer = kind(parameters, **OPTIONS.get(kind.__name__, {}))  # type: ignore[call-arg]
    for number in range(STEPS):
        for parameter, gradient in zip(parameters, gradients(parameters, number), strict=True):
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ELEMENTWISE, ids=[kind.__name__ for kind in ELEMENTWISE])
def test_chunks_have_the_bits_of_the_whole_and_keep_them_when_they_move(kind: type[torch.optim.Optimizer], dtype: torch.dtype) -> None:
    ranks = Ranks(kind, dtype, 3)
    for number in range(STEPS):
        if number == 2:
            ranks.place(2)
        ranks.step(number, 3 if number < 2 else 2)
        if number == 1:
            share_parameters(ranks)
    for found, expected in zip(ranks.assembled(2), unsharded(kind, dtype), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("given", [{}, {"momentum": 0.5}, {"amsgrad": True}, {"momentum": 0.5, "centered": True}], ids=str)
@pytest.mark.parametrize("kind", ELEMENTWISE, ids=[kind.__name__ for kind in ELEMENTWISE])
def test_how_many_values_an_optimizer_keeps_of_each_element(kind: type[torch.optim.Optimizer], given: dict[str, Any]) -> None:
    parameter = nn.Parameter(torch.ones(7))
    try:
        optimizer = kind([parameter], **({"lr": 0.1} | given))  # type: ignore[call-arg]
    except TypeError:
        return  # it has no such option
    parameter.grad = torch.ones(7)
    optimizer.step()
    kept = sum(isinstance(value, torch.Tensor) and value.shape == (7,) for value in optimizer.state[parameter].values())
    assert values_an_element(optimizer, optimizer.param_groups[0]) == kept


def share_parameters(ranks: Ranks) -> None:
    """As a step publishes them."""
    whole = ranks.assembled(3)
    for model in ranks.models:
        for parameter, value in zip(model.parameters(), whole, strict=True):
            parameter.data.copy_(value)


def test_each_rank_keeps_its_part_of_the_state() -> None:
    ranks = Ranks(torch.optim.AdamW, torch.float32, 3)
    ranks.step(0, 3)
    alone = torch.optim.AdamW(build(torch.float32).parameters())
    for parameter, value in zip(alone.param_groups[0]["params"], gradients(alone.param_groups[0]["params"], 0), strict=True):
        parameter.grad = torch.empty_like(parameter).copy_(value)
    alone.step()
    whole = sum(value.nbytes for state in alone.state.values() for value in state.values())
    kept = [chunks.state_bytes for chunks in ranks.chunks]
    assert max(kept) <= whole
    assert sum(kept) == pytest.approx(2 * whole, rel=0.02), "once with the owner, once with the guard"


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
def test_a_whole_state_is_taken_over_in_its_own_types(kind: type[torch.optim.Optimizer]) -> None:
    """Its factors are float32 beside weights of 16 bits, and stay so."""
    optimizer = kind((whole := build(torch.bfloat16)).parameters())
    for parameter, gradient in zip(whole.parameters(), gradients(list(whole.parameters()), 0), strict=True):
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
    optimizer.step()
    chunks = Ranks(kind, torch.bfloat16, 1).chunks[0].tracked[0]
    chunks.load_state_dict(optimizer.state_dict())
    taken = {key: value.dtype for key, value in chunks.optimizer.state[chunks.optimizer.param_groups[0]["params"][0]].items()}
    assert taken == {key: value.dtype for key, value in optimizer.state[whole.wide].items()}
    assert torch.float32 in taken.values() and torch.bfloat16 in taken.values()


def linear(**options: Any) -> nn.Linear:
    return nn.Linear(3, 3, **options)


class Derived(torch.optim.AdamW):
    """It may do anything."""


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (torch.optim.LBFGS, "LBFGS"),
        (lambda p: torch.optim.Muon([p[0]], lr=0.1), "Muon"),
        (torch.optim.Adafactor, "Adafactor"),
        (Derived, "Derived"),
        (lambda p: torch.optim.Adam(p, differentiable=True), "differentiable"),
    ],
)
def test_what_is_not_element_by_element_is_refused_by_name(make: Callable[[Any], torch.optim.Optimizer], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        check(make(list(linear().parameters())), 1)
    assert "optimizer_sharding" in str(refused.value)


def test_parameters_that_cannot_be_cut_are_refused() -> None:
    gaps = nn.Parameter(torch.zeros(4, 4)[:, :2])
    with pytest.raises(ConfigError, match="gaps in memory"):
        check(torch.optim.SGD([gaps]), 1)
    half = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    check(torch.optim.SGD([half]), 1)
    with pytest.raises(ConfigError, match="threads_per_rank"):
        check(torch.optim.SGD([half]), 2)
