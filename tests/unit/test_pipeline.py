"""A model that is cut into stages: which layers a rank keeps, and which models are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from actors.rank.mesh.pipe import HEAD, Pipeline, StageLink, _head_of, _room_of, begins_of
from actors.rank.mesh.stages import of_all_stages
from actors.rank.state.tracked import StageCut, TrackedState
from fleet.errors import ConfigError
from tests.unit.test_reduction import with_groups


def pipeline(layers: list[nn.Module], stage: int, stages: int, begins: list[int] | None = None) -> Pipeline:
    link = StageLink(stage, stages)
    return Pipeline(layers, lambda output, batch: output, lambda batch: batch, link, begins or begins_of(len(layers), stages))


def test_a_rank_keeps_the_layers_of_its_stage_and_the_others_lose_their_memory() -> None:
    layers: list[nn.Module] = [nn.Linear(2, 2) for _ in range(5)]
    assert pipeline(layers, 1, 2).span == range(2, 5)
    assert [next(layer.parameters()).is_meta for layer in layers] == [True, True, False, False, False]


@pytest.mark.parametrize(("layers", "stages", "expected"), [(4, 2, [0, 2]), (5, 2, [0, 2]), (7, 3, [0, 2, 4]), (3, 3, [0, 1, 2])])
def test_stages_differ_by_one_layer_at_most(layers: int, stages: int, expected: list[int]) -> None:
    assert begins_of(layers, stages) == expected


def tied(first: int, second: int) -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Linear(2, 2, bias=False) for _ in range(4)]
    layers[second].weight = layers[first].weight
    return layers


def test_a_parameter_that_two_stages_have_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="layer 3: weight.*layer 0: weight"):
        pipeline(tied(0, 3), 0, 2)
    assert pipeline(tied(0, 1), 0, 2).span == range(2), "one stage has both"
    assert pipeline(tied(0, 3), 0, 1).span == range(4)


@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (1, 2, 3, 4, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_head_tells_the_shapes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    head = _head_of((torch.zeros(shape, dtype=dtype), torch.zeros(2)))
    assert len(head) == HEAD
    assert [(tuple(one.shape), one.dtype) for one in _room_of(head)] == [(shape, dtype), ((2,), torch.float32)]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))


def cut(stage: int, steps: int = 2) -> tuple[Two, TrackedState]:
    torch.manual_seed(1)
    model = Two()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    layers = list(model.layers)
    layers[1 - stage].to("meta")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        for number, one in enumerate(model.parameters()):
            one.grad = torch.full_like(one, number + 1.0)
        optimizer.step()
    state = TrackedState(model=model, optimizer=optimizer)
    state.cut(StageCut(layers, frozenset(map(id, layers[1 - stage].parameters()))))
    return model, state


def test_both_stages_describe_one_state_and_each_has_its_own_tensors() -> None:
    (_, first), (_, second) = cut(0), cut(1)
    one, other = first.flat(), second.flat()
    assert one.skeleton == other.skeleton
    assert one.elsewhere.isdisjoint(other.elsewhere)
    assert one.divided.keys() == other.elsewhere
    assert all(one.tensors[index].numel() == 0 for index in one.elsewhere)


def test_a_stage_takes_its_part_of_the_whole_state_and_of_its_columns() -> None:
    (_, first), (model, second) = cut(0), cut(1)
    one, other = first.flat(), second.flat()
    whole = [other.tensors[at] if at in one.elsewhere else tensor for at, tensor in enumerate(one.tensors)]
    for given in (whole, other.tensors):
        model, taken = cut(1, steps=5)
        taken.load(other.skeleton, [tensor.clone() for tensor in given])
        found = taken.flat()
        assert all(torch.equal(mine, right) for mine, right in zip(found.tensors, other.tensors, strict=True))
        assert found.elsewhere == other.elsewhere
        assert [one.is_meta for one in model.parameters()] == [True, True, False, False]


def test_the_tensors_of_all_stages_are_brought_together() -> None:
    right = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)).state_dict()

    def rank(group: Any) -> dict[str, Any]:
        link = StageLink(group.rank, 2)
        link.meet(group)
        link.firsts = [0, 1]
        mine = {name: value if int(name[0]) == group.rank else value.to("meta") for name, value in right.items()}
        found = of_all_stages(link, {"model": mine})
        assert link.lost == ""
        return found["model"]

    for found in with_groups(2, rank):
        assert found.keys() == right.keys()
        assert all(torch.equal(found[name], right[name]) for name in right)


REFUSED: list[tuple[str, Callable[[], Any]]] = [
    ("tensors travel between stages", lambda: {"hidden": torch.zeros(2)}),
    ("at most 8", lambda: tuple(torch.zeros(1) for _ in range(9))),
]


@pytest.mark.parametrize(("words", "value"), REFUSED, ids=[words for words, _ in REFUSED])
def test_other_values_than_tensors_do_not_travel(words: str, value: Callable[[], Any]) -> None:
    from actors.rank.mesh.pipe import _tensors

    with pytest.raises(ConfigError, match=words):
        _tensors(value())
