"""Takes over the marks of PyTorch's ``fully_shard``: which parameters are gathered together, and when they are freed.

FSDP2 cuts each parameter for a mesh of ranks that never changes. It gathers it with collectives of a process group that cannot lose a
member. Neither survives a lost rank. So Fleet reads the user's choices from the modules: which modules make a unit, and whether a unit is
freed after its forward. The modules become plain ones again, whose parameters :mod:`actors.rank.fsdp.layout` keeps in chunks.

All knowledge of FSDP2's internals is in :func:`_groups`, :func:`_part` and :func:`_release`. ``tests/contract/test_fsdp_facts.py`` checks
it.
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
from actors.rank.mesh.parts import as_divided, local
from fleet.errors import ConfigError
from fleet.protocol.topology import DIMENSIONS

MESH = (
    "Give fully_shard mesh=run.mesh: Fleet cuts the model for the present ranks, and again when they change. "
    "Groups of ranks as replicas (HSDP) are --config replica_size=RANKS."
)
Place = tuple[nn.Module, str]
"""A module, and the name of a parameter in it."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The types in which a unit computes, from ``MixedPrecisionPolicy``.

    Attributes:
        parameters: its parameters are cast to this type for the forward and the backward; None: they are not cast.
        inputs: the inputs of its forward are cast to this type; None: they are not cast.
        outputs: the outputs of its forward are cast to this type; None: they are not cast.
    """

    parameters: torch.dtype | None = None
    inputs: torch.dtype | None = None
    outputs: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered together.

    Attributes:
        name: the name of its first module in ``named_modules``.
        modules: the modules whose forward needs the parameters.
        parameters: plain ones, of the whole shape.
        keeps: the parameters stay from the forward to the end of the backward: in the outermost unit, or when the user asks for it.
        precision: the types in which it computes.
        places: by ``id`` of a parameter, its places in modules: several when it is tied.
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
    """A mesh of this process alone. It makes PyTorch's default process group, of one rank, if there is none: a mesh needs it."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ranks = torch.tensor(dist.get_rank(), device="cpu").reshape((1,) * len(dimensions))  # also within torch.device("meta")
    return DeviceMesh(device.type, ranks, mesh_dim_names=dimensions)


def take_over(modules: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]) -> tuple[Unit, ...]:
    """The units of ``modules``, outer ones first. The modules become plain ones, and the optimizers get their plain parameters.

    Raises:
        ConfigError: the mesh is of several ranks, a parameter is tied across units, or Fleet does not support a policy.
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
    """Raises ConfigError for a parameter that another unit has too: each unit has a copy of it now, and the copies would diverge."""
    for each in group.fsdp_params:
        number, where = getattr(each, "_orig_param_uid", None), each._module_info.param_name  # PyTorch has it since 2.13
        if number is not None and (other := units.setdefault(number, name)) != name:
            reason = f"its parameter {where} is tied to one of {other}, and they are in different units"
            way_out = "Put both modules in one unit, fully_shard([first, second]), or leave both to the unit around them."
            raise ConfigError("fully_shard", name, reason, way_out)


def _precision(name: str, policy: MixedPrecisionPolicy, parameters: Sequence[nn.Parameter], modules: Sequence[nn.Module]) -> Precision:
    """How Fleet carries out a policy. Raises ConfigError for a policy that it does not support."""
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
    """Raises ConfigError for a recurrent layer: it has its own list of parameters, in which Fleet cannot replace them."""
    inner = [child for module in modules for child in module.modules()]
    if found := next((child for child in inner if isinstance(child, nn.RNNBase)), None):
        reason = f"its policy casts the parameters of a {type(found).__name__}, which Fleet does not carry out"
        raise ConfigError("fully_shard", name, reason, "Leave mp_policy out for this unit, and use torch.autocast in the loop body.")


def _plain(name: str, group: Any, swapped: dict[int, nn.Parameter]) -> Iterator[tuple[nn.Parameter, tuple[Place, ...]]]:
    """Put a group's whole parameters back into their modules. Gives each parameter with its places."""
    if group.mesh_info.mesh.size() != 1:
        raise ConfigError("fully_shard", name, f"its mesh has {_ranks_of(group.mesh_info.mesh)} ranks, which Fleet cannot change", MESH)
    if isinstance(group.offload_policy, CPUOffloadPolicy):
        raise ConfigError("fully_shard", name, "its parameters are to lie in host memory (CPUOffloadPolicy)", "Leave offload_policy out.")
    for each in group.fsdp_params:
        cut, where = each.sharded_param, each._module_info
        plain = nn.Parameter(_part(each), requires_grad=cut.requires_grad)
        swapped[id(cut)] = plain
        places = ((where.module, where.param_name), *zip(where.shared_modules, where.shared_param_names, strict=True))
        for module, key in places:
            setattr(module, key, plain)
        yield plain, places


def _part(found: Any) -> torch.Tensor:
    """The whole of a parameter; of one that ``parallelize_module`` has divided this rank's part, divided as before."""
    mine, divided = local(found.sharded_param).detach().clone(), found._unsharded_dtensor_spec
    return mine if divided is None else as_divided(mine, divided.mesh, divided.placements, divided.tensor_meta)


def _ranks_of(mesh: DeviceMesh) -> str:
    """The sizes of a mesh, such as ``2 x 4``."""
    return " x ".join(str(mesh.size(dimension)) for dimension in range(mesh.ndim))


def _release(state: Any, modules: tuple[nn.Module, ...]) -> None:
    """Remove FSDP2 from these modules."""
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
        module.__class__ = type(module).__mro__[2]  # the user's class: FSDP2 has put two of its own before it
        for inner in module.modules():
            inner.__dict__.pop("_is_fsdp_managed_module", None)  # torch.compile looks at these
            inner.__dict__.pop("_fsdp_use_orig_params", None)


def _swap(optimizer: torch.optim.Optimizer, swapped: Mapping[int, nn.Parameter]) -> None:
    if any(id(parameter) in swapped for parameter in optimizer.state):
        reason = "it has state already, for parameters that fully_shard has cut"
        raise ConfigError("optimizer", type(optimizer).__name__, reason, "Track it before its first step; --resume brings a state.")
    for group in optimizer.param_groups:
        group["params"] = [swapped.get(id(parameter), parameter) for parameter in group["params"]]
