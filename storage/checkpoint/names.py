"""The names of a training state's tensors and values, as ``torch.distributed.checkpoint.state_dict`` gives them.

Ranks hand over a skeleton: the tracked objects' state dicts as text, with a number in place of each tensor. It leaves out devices, and
arrays of numpy: they are not plain data for a reader without them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.errors import ProtocolError
from fleet.protocol.plain import Format, Kind
from storage.checkpoint.layout import Entry

PLAIN = (str, int, float, bool, bytes, complex, type(None))


@dataclass(frozen=True, slots=True)
class TensorRef:
    """The place of tensor ``index``."""

    index: int


@dataclass(frozen=True, slots=True)
class Opaque:
    """Stands for a value that is not plain data. ``kind`` is the name of its class."""

    kind: str


def _of_torch(name: str) -> Any:
    """``torch.Size`` or a dtype; None for any other name."""
    import torch

    found = getattr(torch, name, None)
    return found if found is torch.Size or isinstance(found, torch.dtype) else None


def _stands_for(kind: str) -> Callable[..., Opaque]:
    return lambda *_: Opaque(kind)


_READ = Format(
    (
        Kind("size", (), list, lambda *sizes: _of_torch("Size")(sizes)),
        Kind("dtype", (), list, _of_torch),
        Kind("device", (), list, _stands_for("torch.device")),
        Kind("array", (), list, _stands_for("numpy.ndarray")),
        Kind("scalar", (), list, _stands_for("numpy.generic")),
    )
)
"""Kinds that ranks write, see ``actors.rank.plain_kinds``; this table is for reading only."""


def read_skeleton(meta: str) -> dict[str, Any] | None:
    """{tracked name: state dict with TensorRefs}, or None when ``meta`` is no skeleton.

    A name that begins with a zero character is Fleet's own (``actors.rank.state.tracked.MARKS``), and is left out.
    """
    try:
        state = _READ.read(meta, TensorRef)
    except ProtocolError:
        return None
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        return None
    return {name: tracked for name, tracked in state.items() if not name.startswith("\0")}


def named(meta: str, entries: Sequence[Entry]) -> dict[str, Any]:
    """The state as nested dicts and lists of TensorRefs and plain values, for DCP's flat keys.

    Optimizer states have the parameters' names as keys where those are certain (see :func:`parameter_names`), else numbers. A tensor
    without a place in the skeleton is ``tensors.NUMBER``; without a skeleton, all are.
    """
    shapes = {entry.index: entry.shape for entry in entries}
    state = read_skeleton(meta) or {}
    tree: dict[str, Any] = {}
    for name, tracked in state.items():
        names = parameter_names(tracked, state, shapes) if is_optimizer(tracked) else None
        tree[name] = plain(_renamed(tracked, names) if names else tracked)
    placed = refs(tree)
    if not placed <= shapes.keys():
        tree, placed = {}, set()
    left = {f"{index:05d}": TensorRef(index) for index in sorted(shapes.keys() - placed)}
    return tree | ({"tensors": left} if left else {})


def plain(value: Any, dropped: Callable[[str], None] = lambda kind: None) -> Any:
    """``value`` as dicts, lists, TensorRefs and plain values; keys stay. Other values are left out, and ``dropped`` gets their kind."""
    if isinstance(value, Mapping):
        kept = {key: plain(item, dropped) for key, item in value.items() if not isinstance(key, Opaque)}
        return {key: item for key, item in kept.items() if item is not Opaque}
    if type(value) in (list, tuple):
        return type(value)(item for item in (plain(item, dropped) for item in value) if item is not Opaque)
    if isinstance(value, (TensorRef, *PLAIN)) or type(value).__module__ == "torch":
        return value
    dropped(value.kind if isinstance(value, Opaque) else type(value).__name__)
    return Opaque


def refs(value: Any) -> set[int]:
    """Numbers of all tensors in a nested value."""
    if isinstance(value, TensorRef):
        return {value.index}
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return set().union(*map(refs, inside))


# ---- modules ---------------------------------------------------------------------------------------------------------------------------


def weights_of(meta: str, module: str = "") -> dict[str, TensorRef]:
    """Tensors of modules' state dicts, by name: of ``module``, of the only module, or of several with their names before it.

    Raises LookupError, with the names of all tracked objects, when there is no such module.
    """
    state = read_skeleton(meta) or {}
    found = {name: tensors for name, tracked in state.items() if (tensors := _tensors_of(tracked))}
    if module:
        found = {name: tensors for name, tensors in found.items() if name == module}
    if not found:
        raise LookupError(
            f"the checkpoint has {', '.join(sorted(state)) or 'nothing'}, and {module or 'none of it'} is no module of tensors"
        )
    if len(found) == 1:
        return next(iter(found.values()))
    return {f"{name}.{key}": ref for name, tensors in found.items() for key, ref in tensors.items()}


def _tensors_of(tracked: Any) -> dict[str, TensorRef]:
    """Tensors of a flat state dict with names; {} for any other object, and for an optimizer."""
    if not isinstance(tracked, Mapping) or is_optimizer(tracked):
        return {}
    return {name: value for name, value in tracked.items() if isinstance(name, str) and isinstance(value, TensorRef)}


# ---- optimizers --------------------------------------------------------------------------------------------------------------------------


def is_optimizer(tracked: Any) -> bool:
    """Whether a state dict looks like that of a ``torch.optim.Optimizer``."""
    if not isinstance(tracked, Mapping) or not isinstance(tracked.get("state"), Mapping):
        return False
    groups = tracked.get("param_groups")
    return isinstance(groups, list) and all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups)


def parameter_names(optimizer: Any, state: Mapping[str, Any], shapes: Mapping[int, tuple[int, ...]]) -> dict[Any, str] | None:
    """Parameter number -> name, or None when it is not certain.

    It is certain in two cases. The optimizer was made from ``named_parameters()``. Or the state fits ``Optimizer(module.parameters())``.
    Then the optimizer has one group. Exactly one tracked module has as many distinct tensors as the optimizer has parameters, so
    that it has no buffers. Each parameter's state has that parameter's shape.
    """
    groups = optimizer["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    given = [name for group in groups for name in group.get("param_names") or ()]
    if given:
        return dict(zip(numbers, given, strict=True)) if len(given) == len(set(given)) == len(numbers) else None
    if len(groups) != 1:
        return None
    modules = [names for tracked in state.values() if (names := _module_tensors(tracked)) and len(names) == len(numbers)]
    fitting = [names for names in modules if _fits(optimizer["state"], numbers, list(names), shapes)]
    return dict(zip(numbers, fitting[0].values(), strict=True)) if len(fitting) == 1 else None


def _module_tensors(tracked: Any) -> dict[int, str]:
    """Tensor -> its first name, for a state dict with only tensors; {} for any other object."""
    if not isinstance(tracked, Mapping) or not all(isinstance(value, TensorRef) for value in tracked.values()):
        return {}
    names: dict[int, str] = {}
    for name, ref in tracked.items():
        names.setdefault(ref.index, name)
    return names


def _fits(state: Mapping[Any, Any], numbers: Sequence[Any], tensors: Sequence[int], shapes: Mapping[int, tuple[int, ...]]) -> bool:
    """Whether every tensor in a parameter's state is a scalar, or has the shape of the matching tensor."""
    for number, tensor in zip(numbers, tensors, strict=True):
        held = [shapes.get(index, ()) for index in refs(state.get(number, {}))]
        if any(math.prod(shape) != 1 and shape != shapes.get(tensor) for shape in held):
            return False
    return True


def _renamed(optimizer: Mapping[str, Any], names: Mapping[Any, str]) -> dict[str, Any]:
    """The form of ``get_optimizer_state_dict``: names in place of numbers."""
    groups = [
        {**_without(group, "params", "param_names"), "params": [names[number] for number in group["params"]]}
        for group in optimizer["param_groups"]
    ]
    state = {names.get(number, str(number)): values for number, values in optimizer["state"].items()}
    return {**_without(optimizer, "state", "param_groups"), "state": state, "param_groups": groups}


def _without(mapping: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in keys}
