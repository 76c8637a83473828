"""What PyTorch's ``fully_shard`` has marked is taken over: which parameters are gathered together, and when they are let go.

FSDP2 cuts each parameter for a mesh of ranks that never changes, and gathers it with collectives of a process group that cannot lose a
member. Neither outlives a lost rank. So its modules are read for what the user has asked for (which modules make a unit, whether a unit is
let go behind its forward), and become plain modules again, whose parameters :mod:`actors.rank.fsdp.layout` keeps in chunks.

All that is known here of FSDP2's inside is in :func:`_groups` and :func:`_release`; ``tests/contract/test_fsdp_facts.py`` holds it to that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy

from actors.rank.fsdp.serving import TYPES
from fleet.errors import ConfigError
from fleet.protocol.topology import DIMENSIONS

MESH = (
    "Give fully_shard mesh=run.mesh: Fleet cuts the model for the ranks that there are, and again when they change. "
    "Groups of ranks as replicas (HSDP) are --config replica_size=RANKS."
)
Place = tuple[nn.Module, str]
"""A module, and the name under which it has a parameter."""


@dataclass(frozen=True, slots=True)
class Precision:
    """In which types a unit computes: what ``MixedPrecisionPolicy`` says of it.

    Attributes:
        parameters: its parameters are cast to this type for the forward and the backward; None: they are computed with as they are.
        inputs: what is given to its forward is cast to this type.
        outputs: what its forward gives is cast to this type.
    """

    parameters: torch.dtype | None = None
    inputs: torch.dtype | None = None
    outputs: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered together.

    Attributes:
        name: of the first of its modules, as ``named_modules`` has it.
        modules: whose forward needs the parameters.
        parameters: plain ones, of the whole shape.
        keeps: they stay from the forward on until the backward is done with them: of the outermost unit, or when the user asks for it.
        precision: in which types it computes.
        places: by ``id`` of a parameter, where modules have it: in several places when it is tied.
    """

    name: str
    modules: tuple[nn.Module, ...]
    parameters: tuple[nn.Parameter, ...]
    keeps: bool
    precision: Precision = Precision()
    places: Mapping[int, tuple[Place, ...]] = field(default_factory=dict)


def numbers(units: Sequence[Unit]) -> dict[int, int]:
    """By ``id`` of a parameter, the number of its unit, from 1 on."""
    return {id(parameter): number for number, unit in enumerate(units, 1) for parameter in unit.parameters}


def mesh_of_one(device: torch.device, dimensions: tuple[str, ...] = DIMENSIONS[-1:]) -> DeviceMesh:
    """A mesh of this process alone. It makes PyTorch's default process group, of one rank, where there is none: a mesh needs it."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ranks = torch.tensor(dist.get_rank(), device="cpu").reshape((1,) * len(dimensions))  # also within torch.device("meta")
    return DeviceMesh(device.type, ranks, mesh_dim_names=dimensions)


def take_over(modules: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]) -> tuple[Unit, ...]:
    """The units of ``modules``, outer ones first, which are plain modules from now on, as the optimizers' parameters are plain ones.

    Raises:
        ConfigError: the mesh is of several ranks, a parameter is tied across units, or a policy is one that Fleet does not carry out.
    """
    units: list[Unit] = []
    swapped: dict[int, nn.Parameter] = {}
    seen: set[int] = set()
    tied: dict[int, str] = {}
    for root, module in modules.items():
        outermost = True
        for path, child in list(module.named_modules()):
            if not isinstance(child, FSDPModule) or id(child) in seen:
                continue
            name = ".".join(filter(None, (root, path)))
            state = child._get_fsdp_state()
            inside = tuple(getattr(state, "_modules", None) or (child,))
            seen |= {id(each) for each in inside}
            for group in _groups(state):
                _check_tied(name, group, tied)
                places = dict(_plain(name, group, swapped))
                precision = _precision(name, group.mp_policy, tuple(places), inside)
                keeps = outermost if state._auto_reshard_after_forward else group.post_forward_mesh_info is None
                units.append(Unit(name, inside, tuple(places), keeps, precision, {id(each): at for each, at in places.items()}))
            if not _groups(state) and (precision := _precision(name, state._mp_policy, (), inside)) != Precision():
                units.append(Unit(name, inside, (), keeps=True, precision=precision))  # all its parameters are in inner units
            outermost = False
            _release(state, inside)
    for optimizer in optimizers.values() if swapped else ():
        _swap(optimizer, swapped)
    return tuple(units)


def _groups(state: Any) -> list[Any]:
    """FSDP2's groups of parameters, none of which is empty."""
    found = getattr(state, "_fsdp_param_groups", None)
    if found is None:  # before PyTorch 2.12 a module had at most one
        found = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return [group for group in found if group.fsdp_params]


def _check_tied(name: str, group: Any, units: dict[int, str]) -> None:
    """Raises ConfigError for a parameter that another unit has too: each has a copy of it now, and they would drift apart."""
    for each in group.fsdp_params:
        number, where = getattr(each, "_orig_param_uid", None), each._module_info.param_name  # PyTorch has it since 2.13
        if number is not None and (other := units.setdefault(number, name)) != name:
            reason = f"its parameter {where} is tied to one of {other}, and they are in different units"
            way_out = "Put both modules in one unit, fully_shard([first, second]), or leave both to the unit around them."
            raise ConfigError("fully_shard", name, reason, way_out)


def _precision(name: str, policy: MixedPrecisionPolicy, parameters: Sequence[nn.Parameter], modules: Sequence[nn.Module]) -> Precision:
    """How Fleet carries out a policy. Raises ConfigError for one that it does not."""
    asked = policy.param_dtype
    if asked is not None and asked not in TYPES:
        raise ConfigError("fully_shard", name, f"its policy computes in {asked}", f"Choose param_dtype from {', '.join(map(str, TYPES))}.")
    summed = policy.reduce_dtype or asked
    for kept in {each.dtype for each in parameters if each.requires_grad}:
        if summed not in (None, kept):
            reason = f"its policy sums gradients in {summed}, and Fleet sums them in the type of the parameters, {kept}"
            raise ConfigError("fully_shard", name, reason, f"Give MixedPrecisionPolicy reduce_dtype={kept} too.")
    cast = asked if any(each.is_floating_point() and each.dtype != asked for each in parameters) else None
    if cast is not None:
        _check_castable(name, modules)
    return Precision(cast, asked if policy.cast_forward_inputs else None, policy.output_dtype)


def _check_castable(name: str, modules: Sequence[nn.Module]) -> None:
    """A recurrent layer has a list of its own of its parameters, in which they cannot be exchanged."""
    inner = [child for module in modules for child in module.modules()]
    if found := next((child for child in inner if isinstance(child, nn.RNNBase)), None):
        reason = f"its policy casts the parameters of a {type(found).__name__}, which Fleet does not carry out"
        raise ConfigError("fully_shard", name, reason, "Leave mp_policy out for this unit, and use torch.autocast in the loop body.")


def _plain(name: str, group: Any, swapped: dict[int, nn.Parameter]) -> Iterator[tuple[nn.Parameter, tuple[Place, ...]]]:
    """A group's parameters, put back where they were before they were cut, and these places."""
    if group.mesh_info.mesh.size() != 1:
        raise ConfigError("fully_shard", name, f"its mesh has {_ranks_of(group.mesh_info.mesh)} ranks, which Fleet cannot change", MESH)
    if isinstance(group.offload_policy, CPUOffloadPolicy):
        raise ConfigError("fully_shard", name, "its parameters are to lie in host memory (CPUOffloadPolicy)", "Leave offload_policy out.")
    for each in group.fsdp_params:
        cut, where = each.sharded_param, each._module_info
        plain = nn.Parameter(cut.to_local().detach().clone(), requires_grad=cut.requires_grad)
        swapped[id(cut)] = plain
        places = ((where.module, where.param_name), *zip(where.shared_modules, where.shared_param_names, strict=True))
        for module, key in places:
            setattr(module, key, plain)
        yield plain, places


def _ranks_of(mesh: DeviceMesh) -> str:
    """As ``2 x 4``."""
    return " x ".join(str(mesh.size(dimension)) for dimension in range(mesh.ndim))


def _release(state: Any, modules: tuple[nn.Module, ...]) -> None:
    """FSDP2 does nothing for these modules from now on."""
    for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
        handle.remove()
    for group in _groups(state):
        hooks = (group._module_to_pre_save_state_dict_hook_handle, group._module_to_pre_load_state_dict_hook_handle)
        for handle in (handle for each in hooks for handle in each.values()):
            handle.remove()
        for parameter in group.fsdp_params:
            parameter._post_load_hook_handle.remove()
            parameter.sharded_param = parameter._sharded_param_data = None  # PyTorch keeps its state for as long as the module lives
    for module in modules:
        module.__class__ = type(module).__mro__[2]  # the user's: FSDP2 has put its own two before it
        for inner in module.modules():
            inner.__dict__.pop("_is_fsdp_managed_module", None)  # torch.compile looks at these
            inner.__dict__.pop("_fsdp_use_orig_params", None)


def _swap(optimizer: torch.optim.Optimizer, swapped: Mapping[int, nn.Parameter]) -> None:
    if any(id(parameter) in swapped for parameter in optimizer.state):
        reason = "it has state already, for parameters that fully_shard has cut"
        raise ConfigError("optimizer", type(optimizer).__name__, reason, "Track it before its first step; --resume brings a state.")
    for group in optimizer.param_groups:
        group["params"] = [swapped.get(id(parameter), parameter) for parameter in group["params"]]
