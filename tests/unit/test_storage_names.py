"""Under which names a state's tensors are found by whoever loads it without Fleet."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from actors.rank.state.tracked import TrackedState
from storage.checkpoint.layout import Entry
from storage.checkpoint.names import TensorRef, named, plain, read_skeleton, refs


class Holds:
    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """The keys that DCP makes of a nested value."""
    if isinstance(value, dict):
        return {key: item for name, inner in value.items() for key, item in flat(inner, f"{path}.{name}" if path else str(name)).items()}
    return {path: value}


def names_of(**tracked: Any) -> dict[str, Any]:
    skeleton, tensors = TrackedState(**tracked).flatten()
    shapes = [tuple(tensor.shape) for tensor in tensors]
    entries = [Entry(index, 0, 0, -1, "float32", shape, (0,) * len(shape), shape) for index, shape in enumerate(shapes)]
    return flat(named(skeleton, entries))


def stepped(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    sum(parameter.square().sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(collections.OrderedDict(first=torch.nn.Linear(3, 4), last=torch.nn.Linear(4, 4)))


def moments(names: dict[str, Any]) -> set[str]:
    return {name for name in names if name.startswith("optimizer.state.")}


def test_names_are_those_of_get_state_dict() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    names = names_of(model=model, optimizer=optimizer)
    assert {name for name in names if name.startswith("model.")} == {f"model.{name}" for name in model.state_dict()}
    theirs = get_optimizer_state_dict(model, optimizer)
    assert moments(names) == set(flat({"optimizer": {"state": theirs["state"]}}))
    assert names["optimizer.param_groups"][0]["params"] == theirs["param_groups"][0]["params"]


def test_names_that_the_optimizer_was_given_are_used_in_any_order_and_group() -> None:
    model = mlp()
    found = dict(model.named_parameters())
    groups = [{"params": [(name, found[name]) for name in found if name.endswith(end)]} for end in ("bias", "weight")]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    stepped(model, optimizer)
    names = names_of(model=model, optimizer=optimizer)
    assert moments(names) == {f"optimizer.state.{name}.momentum_buffer" for name in found}
    tensors = TrackedState(model=model, optimizer=optimizer).flatten()[1]
    for name, parameter in found.items():
        ref = names[f"optimizer.state.{name}.momentum_buffer"]
        assert torch.equal(tensors[ref.index], optimizer.state[parameter]["momentum_buffer"])


def two_groups(model: torch.nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    return torch.optim.Adam([{"params": parameters[1::2]}, {"params": parameters[::2]}])


def reversed_order(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(reversed(list(model.parameters())))


def some_only(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(list(model.parameters())[:2])


@pytest.mark.parametrize("make", [two_groups, reversed_order, some_only])
def test_numbers_are_kept_where_names_are_not_certain(make: Any) -> None:
    model = mlp()
    optimizer = make(model)
    stepped(model, optimizer)
    assert all(name.split(".")[2].isdigit() for name in moments(names_of(model=model, optimizer=optimizer)))


def test_buffers_leave_an_unnamed_optimizer_with_numbers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    stepped(model, optimizer)
    assert all(name.split(".")[2].isdigit() for name in moments(names_of(model=model, optimizer=optimizer)))


def test_tied_weights_have_both_names_and_one_tensor() -> None:
    model = mlp()
    model.last.weight = model.last.bias = torch.nn.Parameter(torch.ones(4))  # type: ignore[union-attr]
    names = names_of(model=model)
    assert names["model.last.weight"] == names["model.last.bias"]


def test_what_fleet_keeps_beside_the_objects_is_not_among_them() -> None:
    state = TrackedState(model=mlp())
    without = names_of(model=mlp()).keys()
    state.marks = lambda: "0131"
    skeleton, tensors = state.flatten()
    assert (read_skeleton(skeleton) or {}).keys() == {"model"}
    entries = [Entry(index, 0, 0, -1, "float32", (1,), (0,), (1,)) for index, _ in enumerate(tensors)]
    assert flat(named(skeleton, entries)).keys() == without


def test_what_is_no_plain_data_is_left_out() -> None:
    where = torch.device("cpu")
    extra = Holds(epoch=3, where=where, shape=torch.Size([2]), kinds={1}, nested=[1, (2, where)])
    state = read_skeleton(TrackedState(extra=extra).flatten()[0])
    dropped: list[str] = []
    assert plain(state, dropped.append) == {"extra": {"epoch": 3, "shape": torch.Size([2]), "nested": [1, (2,)]}}
    assert sorted(dropped) == ["set", "torch.device", "torch.device"]


def test_arrays_of_numpy_are_left_out() -> None:
    dropped: list[str] = []
    skeleton, _ = TrackedState(extra=Holds(table=np.arange(3), rate=np.float64(2.0), device=torch.device("cpu"), epoch=1)).flatten()
    assert plain(read_skeleton(skeleton), dropped.append) == {"extra": {"epoch": 1}}
    assert sorted(dropped) == ["numpy.generic", "numpy.ndarray", "torch.device"]


@pytest.mark.parametrize("meta", ["", "plain1 ", 'plain1 {"a":["q",1]}', "plain1 [1,2]", "meta", "{}", "!!!", "AAAA"])
def test_what_is_no_skeleton_gives_numbers(meta: str) -> None:
    assert read_skeleton(meta) is None
    entries = [Entry(index, 0, 0, -1, "float32", (1,), (0,), (1,)) for index in (0, 1)]
    assert named(meta, entries) == {"tensors": {"00000": TensorRef(0), "00001": TensorRef(1)}}


def test_a_tensor_that_no_part_holds_gives_numbers_for_all() -> None:
    skeleton, _ = TrackedState(model=mlp()).flatten()
    entries = [Entry(0, 0, 0, -1, "float32", (1,), (0,), (1,))]
    assert refs(named(skeleton, entries)) == {0}
