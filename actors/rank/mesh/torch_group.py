"""The process group that PyTorch's modules see, where ranks compute a shard together: it stays, and its inside is exchanged in each view.

``parallelize_module`` and DTensor keep a group for good, by object and by name, and a group of PyTorch's own cannot lose a member. So a
:class:`TensorGroup` passes each collective on to the :class:`Group <actors.rank.membership.process_group.Group>` of the present view.

It has no inside while the script builds its model, in the rehearsal, and between views. Then it answers each collective by itself, as if
the other ranks had sent the same. All shapes are right then, and the values are of no use. The same happens once the inside is
broken: the loop body goes on to the end of its shard, which does not count.

PyTorch's default group says which rank this is among those of its group, and refuses every collective: it is no group of the whole run.

All knowledge of PyTorch's internals is in :func:`mesh_of`; ``tests/contract/test_tensor_facts.py`` checks it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from actors.rank.membership.process_group import Group, GroupBroken
from actors.rank.mesh import collectives
from actors.rank.mesh.collectives import Add, Scratch
from fleet.errors import ConfigError, FleetError
from fleet.protocol.topology import DIMENSIONS

DEFAULT, TENSOR = "fleet", "fleet_tensor"
"""Names of backends."""
ADDS: dict[Any, Add] = {
    dist.ReduceOp.SUM: torch.Tensor.add_,
    dist.ReduceOp.AVG: torch.Tensor.add_,
    dist.ReduceOp.PRODUCT: torch.Tensor.mul_,
    dist.ReduceOp.MAX: lambda left, right: torch.maximum(left, right, out=left),
    dist.ReduceOp.MIN: lambda left, right: torch.minimum(left, right, out=left),
    dist.ReduceOp.BAND: operator.iand,
    dist.ReduceOp.BOR: operator.ior,
}
Parts = Sequence[torch.Tensor]
_Work: Any = dist._Work
_ProcessGroup: Any = dist.ProcessGroup  # its stub has overloads that its own caller does not use


class Done(_Work):  # type: ignore[misc]
    """A collective that is over."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class _Numbered(_ProcessGroup):  # type: ignore[misc]
    """A process group that knows its size, this rank's number in it, and its name."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._own, self._members, self._name, self._description = rank, size, "", ""

    def size(self) -> int:
        return self._members

    def rank(self) -> int:
        return self._own

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def getSize(self) -> int:  # noqa: N802 - PyTorch's names, here and below
        return self._members

    def getRank(self) -> int:  # noqa: N802
        return self._own

    def getBackendName(self) -> str:  # noqa: N802
        return DEFAULT

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description


class TensorGroup(_Numbered):
    """A group whose inside is exchanged. Each collective is over when its call returns.

    Attributes:
        lost: why the values since :meth:`begin` are of no use; empty while they are of use.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._inside: Group | None = None
        self._scratch = Scratch()
        self.lost = ""

    def meet(self, inside: Group | None) -> None:
        """Collectives go to ``inside`` from now on; None: this rank answers by itself."""
        self._inside, self.lost = inside, ""

    def _carry(self, pass_on: Callable[[Group], Any], by_itself: Callable[[], Any]) -> Any:
        """The result of ``pass_on`` with the other ranks; of ``by_itself`` where there are none."""
        if self._inside is not None and not self.lost:
            try:
                return pass_on(self._inside)
            except GroupBroken as error:
                self.lost, self._scratch = str(error), Scratch()  # an operation that is lost may still write to the old one
        return by_itself()

    # ---- collectives, by PyTorch's names -------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Parts, opts: Any = None) -> Done:
        for tensor in tensors:
            self._reduce(tensor, _op(opts))
        return Done(list(tensors))

    def allreduce_coalesced(self, tensors: Parts, opts: Any = None) -> Done:
        return self.allreduce(tensors, opts)

    def _reduce(self, tensor: torch.Tensor, op: Any) -> None:
        add, scratch = _add_of(op), self._scratch
        self._carry(lambda group: collectives.all_reduce(group, tensor, add, scratch), lambda: None)
        if op == dist.ReduceOp.AVG and self._inside is not None and not self.lost:
            tensor.div_(self._members)

    def allgather(self, outputs: Sequence[Parts], inputs: Parts, opts: Any = None) -> Done:
        for into, mine in zip(outputs, inputs, strict=True):
            self._gather(into, mine)
        return Done(list(outputs))

    def _gather(self, into: Parts, mine: torch.Tensor) -> None:
        places = [place if place.is_contiguous() else torch.empty_like(mine) for place in into]

        def by_itself() -> None:
            for place in places:
                place.copy_(mine)

        self._carry(lambda group: collectives.all_gather(group, mine, places), by_itself)
        for place, found in zip(into, places, strict=True):
            if place is not found:
                place.copy_(found)

    def _allgather_base(self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> Done:
        self._gather(list(output.view(self._members, *mine.shape)), mine)
        return Done(output)

    all_gather_single = _allgather_base

    def all_gather_single_coalesced(self, outputs: Parts, inputs: Parts, opts: Any = None) -> Done:
        for output, mine in zip(outputs, inputs, strict=True):
            self._allgather_base(output, mine)
        return Done(list(outputs))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: Parts, inputs: Sequence[Parts], opts: Any = None) -> Done:
        for output, parts in zip(outputs, inputs, strict=True):
            self._scatter(output, list(parts), _op(opts))
        return Done(list(outputs))

    def _scatter(self, output: torch.Tensor, parts: Parts, op: Any) -> None:
        add, scratch = _add_of(op), self._scratch
        self._carry(lambda group: collectives.reduce_scatter(group, parts, output, add, scratch), lambda: output.copy_(parts[self._own]))
        if op == dist.ReduceOp.AVG:
            output.div_(self._members)

    def _reduce_scatter_base(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> Done:
        self._scatter(output, list(whole.view(self._members, *output.shape)), _op(opts))
        return Done(output)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_single_coalesced(self, outputs: Parts, inputs: Parts, opts: Any = None) -> Done:
        for output, whole in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, whole, opts)
        return Done(list(outputs))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self, output: torch.Tensor, mine: torch.Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> Done:  # fmt: skip
        parts, into = _split(mine.contiguous(), sent, self._members), _split(output, received, self._members)
        self._all_to_all(parts, into)
        return Done(output)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Parts, inputs: Parts, opts: Any = None) -> Done:
        self._all_to_all([part.contiguous() for part in inputs], outputs)
        return Done(list(outputs))

    def _all_to_all(self, parts: Parts, into: Parts) -> None:
        def by_itself() -> None:
            for place, part in zip(into, parts, strict=True):
                same = min(place.numel(), part.numel())
                place.zero_()
                place.view(-1)[:same].copy_(part.view(-1)[:same])

        self._carry(lambda group: collectives.all_to_all(group, parts, into), by_itself)

    def broadcast(self, tensors: Parts, opts: Any = None) -> Done:
        source = opts.rootRank if opts is not None else 0
        for tensor in tensors:
            whole = tensor.contiguous()
            self._carry(functools.partial(_broadcast, whole, source), lambda: None)
            if whole is not tensor:
                tensor.copy_(whole)
        return Done(list(tensors))

    def barrier(self, opts: Any = None) -> Done:
        self._gather([torch.zeros(1, device="cpu") for _ in range(self._members)], torch.zeros(1, device="cpu"))
        return Done(None)


class NoGroup(_Numbered):
    """PyTorch's default group: it knows this rank's number, and refuses every collective."""


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: NoGroup, *args: Any, **kwargs: Any) -> NoReturn:
        raise FleetError(
            f"torch.distributed: {name} in the default group, which has no connection: ranks come and go there. "
            'Give the group of the ranks that compute a shard together: group=run.mesh["tensor"].get_group()'
        )

    return refuse


for _name in (
    "allgather", "_allgather_base", "all_gather_single", "all_gather_single_coalesced", "allgather_into_tensor_coalesced", "allreduce",
    "allreduce_coalesced", "all_to_all_single", "alltoall_base", "alltoall", "barrier", "broadcast", "gather", "reduce", "reduce_scatter",
    "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter",
    "send", "recv", "recv_anysource", "monitored_barrier",
):  # fmt: skip
    setattr(NoGroup, _name, _refusing(_name))


def mesh_of(rank: int, size: int, device: torch.device, axis: str) -> tuple[TensorGroup, DeviceMesh]:
    """A group for this rank, the ``rank``-th of ``size``, and a mesh: ``fully_shard`` is for its dimension of this rank alone, ``axis`` is
    the other one.

    It makes PyTorch's default group, which a mesh needs. From now on ``distribute_tensor``, and so ``parallelize_module``, take this rank's
    part of the values that it holds itself. All ranks build the same, each at its own time.

    Raises:
        ConfigError: the script has made a default group.
    """
    if dist.is_initialized():
        reason = "the script has made PyTorch's default group, and ranks that compute together need another one"
        raise ConfigError("init_process_group", dist.get_backend(), reason, 'Leave it out, and use run.mesh["tensor"].')
    for name, kind in ((DEFAULT, NoGroup), (TENSOR, TensorGroup)):
        dist.Backend.register_backend(name, functools.partial(_made, kind), devices=["cpu", "cuda"])
    dist.init_process_group(DEFAULT, store=dist.HashStore(), rank=rank, world_size=size)
    group = dist.new_group(list(range(size)), backend=TENSOR)
    assert isinstance(group, TensorGroup)
    _adapt_once()
    alone, ranks = dist.new_group([rank], backend=DEFAULT), torch.arange(size, device="cpu").reshape(1, size)
    return group, DeviceMesh.from_group([alone, group], device.type, mesh=ranks, mesh_dim_names=(DIMENSIONS[-1], axis))


def _made(kind: type, store: Any, rank: int, size: int, timeout: Any) -> Any:
    return kind(rank, size)


@functools.cache
def _adapt_once() -> None:
    """DTensor then distributes values without messages within a :class:`TensorGroup`, and refuses random numbers that it cannot draw."""
    from torch.distributed.tensor import _dispatch, placement_types

    scatter, broadcast, has_generator = placement_types.mesh_scatter, placement_types.mesh_broadcast, _dispatch.is_rng_supported_mesh

    def own_part(output: torch.Tensor, parts: list[torch.Tensor], mesh: DeviceMesh, mesh_dim: int = 0, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(mesh.get_group(mesh_dim), TensorGroup):
            return scatter(output, parts, mesh, mesh_dim, *args, **kwargs)
        return None if output.is_meta else output.copy_(parts[mesh.get_local_rank(mesh_dim)])

    def own_values(tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int = 0, *args: Any, **kwargs: Any) -> Any:
        return None if isinstance(mesh.get_group(mesh_dim), TensorGroup) else broadcast(tensor, mesh, mesh_dim, *args, **kwargs)

    def with_generator(device_mesh: DeviceMesh) -> bool:
        if device_mesh.device_type == "cpu" and isinstance(device_mesh.get_group(0), TensorGroup):
            reason = "on a CPU PyTorch draws the same ones for each rank's part of a DTensor, such as the places that dropout leaves out"
            way_out = "Let the module before it give a local tensor (use_local_output=True), or leave dropout out there."
            raise ConfigError("model", "random numbers for a DTensor", reason, way_out)
        return has_generator(device_mesh)

    placement_types.mesh_scatter, placement_types.mesh_broadcast = own_part, own_values  # type: ignore[assignment]
    _dispatch.is_rng_supported_mesh = with_generator


def _broadcast(tensor: torch.Tensor, source: int, group: Group) -> None:
    collectives.broadcast(group, tensor, source)


def _op(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp.op if hasattr(opts.reduceOp, "op") else opts.reduceOp


def _add_of(op: Any) -> Add:
    found = ADDS.get(op)
    if found is None:
        raise FleetError(
            f"torch.distributed: a reduction by {op} within a tensor group: it adds in the order of the ranks, by sum or average"
        )
    return found


def _split(tensor: torch.Tensor, sizes: Sequence[int], count: int) -> list[torch.Tensor]:
    return list(tensor.split(list(sizes) if sizes else tensor.shape[0] // count))
