"""The first weights of a model from safetensors files. A rank reads only the parts that it keeps.

A model that was built on the ``meta`` device has shapes and no memory. Where ranks keep chunks of the parameters, each rank reads the
stretches of its own chunks. Before there are chunks it reads each unit when it gathers it. So no rank ever has the whole model. In other
layouts a rank reads all.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from actors.rank.mesh.parts import is_divided, local, part_of
from fleet.errors import ConfigError

Read = Callable[[int, int], torch.Tensor]
"""(from, to) -> these elements of a parameter, in the order of its memory, on the host."""

INDEX = "model.safetensors.index.json"
WRITE = 'run.save("model.safetensors"), `fleet checkpoint export --format safetensors` and save_pretrained write one.'
BUILD = 'Build it outside of torch.device("meta"), where it is made from the model\'s configuration.'


class WeightFiles:
    """Tensors by name, in one safetensors file or in several with an index.

    Args:
        where: a ``.safetensors`` file, the index of several (``.index.json``), or a folder with ``model.safetensors`` or such an index.

    Raises ConfigError when there is no such file, or it is damaged.
    """

    def __init__(self, where: str | os.PathLike[str]) -> None:
        if hasattr(where, "state_dict"):
            reason = "it is no path, and weights= is for a file that the model begins with"
            raise ConfigError("weights", type(where).__name__, reason, "Track the object under another name.")
        self.where = os.fspath(where)
        self._held = {name: held for path in self._paths() for held in [self._open(path)] for name in held.keys()}  # noqa: SIM118

    def _paths(self) -> list[Path]:
        if "://" in self.where:
            raise ConfigError("weights", self.where, "it is a URL, and stretches are read from files", "Copy it to each node first.")
        path = Path(self.where)
        if path.is_dir():
            path = next((each for each in (path / INDEX, path / "model.safetensors") if each.exists()), path / "model.safetensors")
        if not path.exists():
            raise ConfigError("weights", self.where, f"there is no file {path} on this node", WRITE)
        if path.suffix != ".json":
            return [path]
        files: dict[str, str] = json.loads(path.read_text())["weight_map"]
        return [path.parent / name for name in sorted(set(files.values()))]

    def _open(self, path: Path) -> Any:
        try:
            return safe_open(path, framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise ConfigError("weights", str(path), f"it cannot be read as safetensors: {error}", WRITE) from error

    @property
    def names(self) -> set[str]:
        return set(self._held)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._held[name].get_slice(name).get_shape())

    def tensor(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self._held[name].get_tensor(name)
        return found

    def stretch(self, name: str, lo: int, hi: int) -> torch.Tensor:
        """Elements ``lo..hi``, row by row. It reads only the rows of the file that have these elements."""
        shape = self.shape(name)
        if not shape:
            return self.tensor(name).reshape(1)[lo:hi]
        row = math.prod(shape[1:])
        first = lo // row
        rows: torch.Tensor = self._held[name].get_slice(name)[first : -(-hi // row)]
        return rows.reshape(-1)[lo - first * row : hi - first * row]


def load_weights(
    modules: Mapping[str, nn.Module],
    weights: WeightFiles | None,
    device: torch.device,
    *,
    chunked: bool,
    elsewhere: Collection[int] = (),
) -> dict[int, Read]:
    """Give the modules their weights, and memory on ``device`` where they have none.

    Args:
        chunked: ranks will keep chunks of the trained parameters. Those on ``meta`` stay there.
        elsewhere: ids of the tensors that other ranks have; they stay there, too.

    Returns:
        By ``id`` of each trained parameter, a function that reads it; empty unless ``chunked``.

    Raises:
        ConfigError: the weights are those of another model, or a tensor on ``meta`` is in no file. The error names it.
    """
    readers = _load(modules, weights, device, chunked, elsewhere) if weights is not None else {}
    for root, module in modules.items():
        for name, tensor in (*module.named_parameters(root), *module.named_buffers(root)):
            if tensor.is_meta and id(tensor) not in readers and id(tensor) not in elsewhere:
                _refuse(name, weights)
    return readers


def _load(
    modules: Mapping[str, nn.Module], weights: WeightFiles, device: torch.device, chunked: bool, elsewhere: Collection[int]
) -> dict[int, Read]:  # fmt: skip
    readers: dict[int, Read] = {}
    for name, tensor in _matched(modules, weights).items():
        if id(tensor) in elsewhere:
            continue
        if chunked and isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            readers[id(tensor)] = _reader(weights, name, tensor)
        if not (tensor.is_meta and id(tensor) in readers):
            _fill(name, tensor, weights.tensor(name), device)
    return readers


def _refuse(name: str, weights: WeightFiles | None) -> None:
    reason = "it is on the meta device, where it has no value"
    if weights is None:
        raise ConfigError("track", name, reason, f'Give run.track(..., weights="model.safetensors"): {WRITE}')
    raise ConfigError("track", name, f"{reason}, and it is no part of a state_dict, so no file has it", BUILD)


def _matched(modules: Mapping[str, nn.Module], weights: WeightFiles) -> dict[str, torch.Tensor]:
    """By name in the file, each tensor of the modules; for tied ones the first of their names that the file has."""
    held: dict[int, torch.Tensor] = {}
    names: dict[int, list[str]] = defaultdict(list)
    for root, module in modules.items():
        for name, tensor in module.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor):
                held[id(tensor)] = tensor
                names[id(tensor)].append(f"{root}.{name}" if len(modules) > 1 else name)
    strange = weights.names.difference(*names.values())
    if strange:
        raise ConfigError("weights", weights.where, f"it has {min(strange)}, which the model has not", "Give the weights of this model.")
    found = {}
    for key, tensor in held.items():
        name = next((name for name in names[key] if name in weights.names), "")
        if not name:
            raise ConfigError("weights", weights.where, f"it has no {names[key][0]}", "Give the weights of this model.")
        if weights.shape(name) != tuple(tensor.shape):
            reason = f"its {name} has the shape {weights.shape(name)}, and the model's {tuple(tensor.shape)}"
            raise ConfigError("weights", weights.where, reason, "Give the weights of this model.")
        found[name] = tensor
    return found


def _reader(weights: WeightFiles, name: str, parameter: nn.Parameter) -> Read:
    if parameter.is_contiguous() and not is_divided(parameter):
        return lambda lo, hi: weights.stretch(name, lo, hi).to(parameter.dtype)
    return functools.partial(_read_reordered, weights, name, parameter, local(parameter).stride())


def _read_reordered(weights: WeightFiles, name: str, parameter: nn.Parameter, stride: tuple[int, ...], lo: int, hi: int) -> torch.Tensor:
    """Read a parameter that is divided, or whose memory is in another order than the file's: all of it is read.

    ``stride``: of its memory, when it had some. While the parameter is with other ranks it has no order.
    """
    value, dtype = part_of(name, parameter, weights.tensor(name)), parameter.dtype
    memory = torch.empty_strided(value.shape, stride, dtype=dtype, device="cpu").copy_(value)
    return memory.as_strided((value.numel(),), (1,))[lo:hi]


def _fill(name: str, tensor: torch.Tensor, value: torch.Tensor, device: torch.device) -> None:
    if tensor.is_meta:
        _become(tensor, torch.empty_like(tensor, device=device))
    with torch.no_grad():
        local(tensor).copy_(part_of(name, tensor, value))


def hollow(modules: Mapping[str, nn.Module], device: torch.device) -> None:
    """Move parameters on ``meta`` to ``device``, without memory. No code may read them before they have some."""
    for parameter in (each for module in modules.values() for each in module.parameters() if each.is_meta):
        memory = torch.empty_like(parameter, device=device)
        local(memory).untyped_storage().resize_(0)
        _become(parameter, memory)


def _become(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Give ``tensor`` the memory of another tensor. It stays the same object, in its module and in the optimizer."""
    new = nn.Parameter(memory.detach(), tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory
    new.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, new)
