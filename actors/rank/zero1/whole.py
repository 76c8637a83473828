"""A sharded optimizer's state in its unsharded form, for digests and checkpoints. No rank ever has it whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from actors.rank.membership.process_group import Group
from actors.rank.mesh.parts import in_whole, whole
from actors.rank.state.optimizers import is_cut
from actors.rank.state.saving import StatePart, WholeTensors
from actors.rank.state.tracked import Flat, Slice, TrackedState
from actors.rank.zero1.chunked import ChunkedOptimizer, OptimizerChunks, is_stretch, joined
from actors.rank.zero1.pieces import PARAMETER, exchange_pieces
from fleet.protocol.chunks import rectangles


def whole_state(group: Group, chunks: OptimizerChunks, tracked: ChunkedOptimizer, device: torch.device) -> dict[str, Any]:
    """An optimizer's state dict. All ranks of the group read its entries, in the same order: a read fetches the entry from its owners."""
    return {"param_groups": tracked.packed_groups, "state": _Walk(group, chunks, tracked, device)}


def named(state: TrackedState, chunks: OptimizerChunks) -> dict[str, ChunkedOptimizer]:
    """The optimizers of ``chunks``, by their names in the tracked state."""
    return {name: tracked for name, one in state.objects.items() for tracked in chunks.tracked if tracked is one}


class ShardedTensors(WholeTensors):
    """A rank's part of a checkpoint: its own chunks of a sharded optimizer's state, as rectangles, and some of all other tensors.

    The parts together are the state of an unsharded run. An unsharded run, or any number of ranks, can load it.
    """

    def __init__(self, state: TrackedState, chunks: OptimizerChunks, state_part: StatePart) -> None:
        super().__init__(state, state_part)
        self._named, self._chunks = named(state, chunks), chunks
        self._places: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []

    def flat(self) -> Flat:
        """This rank's tensors alone, and the skeleton of all."""
        chunks = self._chunks
        stand_ins = {name: _stand_ins(chunks, one) for name, one in self._named.items()}
        modules = self._modules()
        spread = {name: {"param_groups": one.packed_groups, "state": stand_ins[name]} for name, one in self._named.items()}
        skeleton, tensors, volatile, divided, _ = self.state.flat({**modules, **spread})
        held = [index for index, tensor in enumerate(tensors) if not tensor.is_meta]
        places = {number: divided[index] for number, index in enumerate(held) if index in divided}
        assigned = self.state_part.slices([tensors[index] for index in held], places)
        self._places = [(held[number], offsets, shape) for number, _, offsets, shape in assigned]
        parts = [part for _, part, _, _ in assigned]
        names = list(self._absent(modules, stand_ins).values())
        for index, (number, name) in zip([index for index, tensor in enumerate(tensors) if tensor.is_meta], names, strict=True):
            for offsets, part in _own(chunks, number, name, first=self.state_part.first):
                self._places.append((index, offsets, tuple(tensors[index].shape)))
                parts.append(part)
        changing = frozenset(at for at, (index, *_) in enumerate(self._places) if index in volatile)
        return Flat(skeleton, parts, changing)

    def _modules(self) -> dict[str, dict[str, Any]]:
        """The state dict of each module with parameters in chunks. A tensor without memory stands for each of these."""
        found, absent = dict[str, dict[str, Any]](), dict[int, torch.Tensor]()
        for name, live in self.state.spread().items():
            for key, value in live.items():
                if (number := self._chunks.number_of(value)) is not None:
                    absent.setdefault(number, torch.empty(value.shape, dtype=value.dtype, device="meta"))
                    live[key] = absent[number]
            found[name] = live
        return found

    def _absent(
        self, modules: Mapping[str, Mapping[str, Any]], stand_ins: Mapping[str, Mapping[int, Mapping[str, Any]]]
    ) -> dict[int, tuple[int, str]]:  # fmt: skip
        """By ``id`` of a tensor without memory: (parameter, name of its value) for which it stands, in the order of the skeleton."""
        found: dict[int, tuple[int, str]] = {}
        for name in self.state.objects:
            for key, value in modules.get(name, {}).items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    number = self._chunks.number_of(self.state.objects[name].get_parameter(key))
                    assert number is not None
                    found.setdefault(id(value), (number, PARAMETER))
            numbers = self._chunks.numbered(self._named[name]) if name in self._named else {}
            for index, values in stand_ins.get(name, {}).items():
                found |= {id(value): (numbers[index], at) for at, value in values.items() if isinstance(value, torch.Tensor)}
        return found

    def items(self, tensors: Sequence[torch.Tensor]) -> list[Slice]:
        places = zip(self._places, tensors, strict=True)
        return [(index, tensor, offsets, shape) for (index, offsets, shape), tensor in places]


class _Walk(Mapping[int, Any]):
    def __init__(self, group: Group, chunks: OptimizerChunks, tracked: ChunkedOptimizer, device: torch.device) -> None:
        self._group, self._chunks, self._device = group, chunks, device
        self._numbers = chunks.numbered(tracked)
        known = torch.zeros(group.size, len(chunks.parameters), dtype=torch.uint8, device="cpu")
        known[group.rank, list(chunks.known)] = 1
        group.all_gather(known, known[group.rank].clone())
        self._known = known.any(0).tolist()

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[int]:
        return (key for key, number in self._numbers.items() if self._known[number])

    def __getitem__(self, key: int) -> dict[str, Any]:
        number = self._numbers[key]
        values = _gathered(self._group, self._chunks, number, self._device)
        return {name: whole(self._chunks.shaped(name, value, number)) for name, value in values.items() if name != PARAMETER}


class WholeModule(Mapping[str, Any]):
    """The state dict of a module with parameters in chunks. All ranks read its entries, in the same order."""

    def __init__(self, group: Group, chunks: OptimizerChunks, device: torch.device, live: Mapping[str, Any]) -> None:
        self._group, self._chunks, self._device, self._live = group, chunks, device, live

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[str]:
        return iter(self._live)

    def __getitem__(self, key: str) -> Any:
        value = self._live[key]
        if (number := self._chunks.number_of(value)) is None:
            return whole(value)
        values = _gathered(self._group, self._chunks, number, self._device)
        return whole(self._chunks.shaped(PARAMETER, values[PARAMETER], number))


def _gathered(group: Group, chunks: OptimizerChunks, number: int, device: torch.device) -> dict[str, Any]:
    """All values of one parameter, flat, from the owners of its chunks. All ranks call it together."""
    mine = chunks.own(number)
    pieces = mine + exchange_pieces(group, {peer: mine for peer in range(group.size) if peer != group.rank and mine}, device)
    start = chunks.places[number][1]
    return joined(pieces, start, start + chunks.parameters[number].numel())


def _stand_ins(chunks: OptimizerChunks, tracked: ChunkedOptimizer) -> dict[int, dict[str, Any]]:
    """The ``state`` of an optimizer's state dict, with tensors that have a shape and no memory."""
    found: dict[int, dict[str, Any]] = {}
    for key, number in chunks.numbered(tracked).items():
        probe, state = tracked.example(key)
        parameter = chunks.live[number]
        if state:
            found[key] = {name: _stand_in(name, value, probe, parameter) for name, value in state.items()}
    return found


def _stand_in(name: str, value: Any, probe: torch.Tensor, parameter: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    shape = parameter.shape if is_cut(name, value, probe) else value.shape
    return torch.empty(shape, dtype=parameter.dtype if value.dtype == probe.dtype else value.dtype, device="meta")


def _own(chunks: OptimizerChunks, number: int, name: str, *, first: bool) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """(offsets in the whole, tensor) of each rectangle of this rank's own chunks in one value of a parameter's state.

    ``first``: this rank's column writes what all columns have alike.
    """
    start, parameter, place = chunks.places[number][1], chunks.parameters[number], in_whole(chunks.live[number])
    begins = (0,) * parameter.ndim if place is None else place.offsets
    for piece in chunks.own(number):
        value = piece.values[name]
        if not is_stretch(name, value, piece):
            if piece.lo == start and first:
                yield (0,) * value.ndim, value
            continue
        if place is None and not first:
            return
        strides = chunks.strides[number]
        order = sorted(range(parameter.ndim), key=lambda axis: -strides[axis])
        back = [order.index(axis) for axis in range(parameter.ndim)]
        for one in rectangles([parameter.shape[axis] for axis in order], piece.lo - start, piece.hi - start):
            part = value[one.start - (piece.lo - start) : one.stop - (piece.lo - start)].view(one.sizes).permute(back)
            yield tuple(begins[axis] + one.offsets[back[axis]] for axis in range(parameter.ndim)), part
