"""Optimizers with their state in chunks: each rank steps stretches of the parameters in place, and keeps state for these alone.

Element-wise optimizers give each element the same bits in a stretch as in the whole, if stretches begin where vector registers do
(``actors.rank.step.flats.ALIGNMENT``). Fleet refuses other optimizers by name.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from actors.rank.mesh.parts import like, local
from actors.rank.state import optimizers
from actors.rank.state.optimizers import ONE_A_PARAMETER, is_cut
from actors.rank.state.tracked import TrackedState
from actors.rank.zero1.pieces import PARAMETER, StatePiece
from fleet.errors import ConfigError, ProtocolError
from fleet.protocol.chunks import WHOLE, Chunk, bounds, runs

ELEMENTWISE = tuple(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")
)
"""Exactly these: a class derived from one of them may do other things."""

MOST_RUNS = 32
"""Limit of runs of chunks. A rank keeps its own chunk, those that it guards, and as many again for each view that broke at its
beginning."""

WAY_OUT = "Use one of " + ", ".join(kind.__name__ for kind in ELEMENTWISE) + '; or set optimizer_sharding = "none".'


Span = tuple[int, int, int]
"""(flat buffer or parameter, from, to)."""
NOTHING: Mapping[Span, dict[str, Any]] = MappingProxyType({})


class _Slice(NamedTuple):
    parameter: int
    lo: int
    hi: int
    tensor: torch.Tensor
    optimizer: torch.optim.Optimizer


def check(optimizer: torch.optim.Optimizer, threads: int) -> None:
    """Raises ConfigError for an optimizer that cannot be sharded without changing bits."""
    name = type(optimizer).__name__
    if type(optimizer) not in ELEMENTWISE:
        raise ConfigError("optimizer", name, "it is not known to work element by element, as a state that is cut needs", WAY_OUT)
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise ConfigError("optimizer", f"{name}(differentiable=True)", "its steps are part of a graph, which cannot be cut", WAY_OUT)
        for parameter in group["params"]:
            _check_parameter(local(parameter), tuple(parameter.shape), threads)


def check_tracked(state: TrackedState, threads: int) -> None:
    """Raises ConfigError for a tracked optimizer that cannot be sharded without changing bits."""
    for optimizer in state.optimizers.values():
        check(optimizer, threads)


def _check_parameter(parameter: torch.Tensor, shape: tuple[int, ...], threads: int) -> None:
    none = 'Or set optimizer_sharding = "none".'
    if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        raise ConfigError(
            "model", shape, "a parameter of this shape has gaps in memory, so it cannot be cut", f"Make it contiguous. {none}"
        )
    if parameter.is_complex():
        raise ConfigError("model", shape, "a parameter of this shape is complex", none)
    if threads > 1 and parameter.is_cpu and parameter.element_size() < 4:
        reason = f"a parameter of shape {shape} has 16 bits, where the bits of a step depend on how threads share it"
        raise ConfigError("threads_per_rank", threads, reason, f"Set it to 1. {none}")


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a tensor without gaps as one flat view, in the order of memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def like_parameter(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """``value``, of a parameter's shape, as a flat tensor in the order of the parameter's memory, which has these strides."""
    if value.stride() != strides:
        value = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)
    return in_memory_order(value)


class ChunkedOptimizer:
    """Replaces a tracked optimizer. Its ``state_dict`` has the options of the groups, which all ranks have in common.

    The user's optimizer and its groups, and so its schedulers, stay the same objects. The parameters of the groups become stretches of the
    model's parameters, views of the same memory.

    Args:
        load_whole: takes over a whole state of the optimizer, in its unsharded form.

    Attributes:
        wholes: by group, the parameters that the user gave it.
        probes: by group, see :func:`probe_of`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, load_whole: Callable[[ChunkedOptimizer, dict[str, Any]], None]) -> None:
        self.optimizer, self._load_whole = optimizer, load_whole
        self.wholes: list[list[torch.Tensor]] = [list(group["params"]) for group in optimizer.param_groups]
        self.probes: list[torch.Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        return {"param_groups": [{key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the options of the groups, or a whole state in the optimizer's unsharded form."""
        if "state" in state:
            self._load_whole(self, dict(state))
            return
        for group, options in zip(self.optimizer.param_groups, state["param_groups"], strict=True):
            group.update(options)

    @property
    def packed_groups(self) -> list[dict[str, Any]]:
        """``param_groups`` of the optimizer's state dict: parameters by their number."""
        numbers = itertools.count()
        groups = self.state_dict()["param_groups"]
        return [{**options, "params": [next(numbers) for _ in whole]} for options, whole in zip(groups, self.wholes, strict=True)]

    def example(self, key: int) -> tuple[torch.Tensor, Mapping[str, Any]]:
        """A parameter of the same group as parameter ``key`` of the state dict, and its state: all states of a group have the same
        fields."""
        ends = itertools.accumulate(map(len, self.wholes))
        probe = self.probes[next(number for number, end in enumerate(ends) if key < end)]
        return probe, self.optimizer.state.get(probe, {})


class OptimizerChunks:
    """Chunks of the state of all tracked optimizers. At first this rank has the whole.

    Args:
        parameters: all that require a gradient, in the order of the flat buffers. Of divided ones this rank's part is cut.
        places: by parameter, (flat buffer, element) at which it begins there.
        extents: by flat buffer, its length.

    Attributes:
        tracked: the replacement of each optimizer.
        live: the parameters, which may be divided; ``parameters``: their memory on this rank.
        owned: the chunks whose gradients this rank adds up, and which it writes to checkpoints; of the cut of its last view.
        stepped: gives the parameters that have had a gradient in a step, as bits.
        readable: this rank can read the first state of all chunks, see :meth:`first`.
        keeps_parameters: the parameters are kept in chunks, too.
    """

    readable, keeps_parameters = False, False

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Sequence[torch.nn.Parameter],
        places: Sequence[tuple[int, int]],
        extents: Sequence[int],
    ) -> None:
        self.tracked, self.extents = [ChunkedOptimizer(one, self._load_whole) for one in optimizers], list(extents)
        self.live, self.parameters, self.places = list(parameters), [local(one) for one in parameters], list(places)
        self.strides = [one.stride() for one in self.parameters]  # parameters that ranks keep in chunks lose their strides
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._slices: list[_Slice] = []
        self._loaded: list[tuple[ChunkedOptimizer, dict[str, Any]]] = []  # until all have a state
        self._spare: list[StatePiece] = []
        self.stepped: Callable[[], int] = lambda: -1
        self.chunks: tuple[Chunk, ...] = ()
        self.beside: tuple[Chunk, ...] = ()
        self.owned: tuple[Chunk, ...] = ()
        self._more: list[_Slice] = []  # beside the chunks, see extend()
        self._cut_whole()

    # ---- the whole -----------------------------------------------------------------------------------------------------------------------

    def _load_whole(self, tracked: ChunkedOptimizer, state: dict[str, Any]) -> None:
        self._loaded.append((tracked, state))
        if len(self._loaded) == len(self.tracked):
            self.settle()

    def settle(self) -> None:
        """A whole state is loaded: it becomes the one chunk of this rank."""
        for tracked, state in self._loaded:
            tracked.optimizer.state = defaultdict(dict)
            for group, whole in zip(tracked.optimizer.param_groups, tracked.wholes, strict=True):
                group["params"] = whole
            optimizers.load(tracked.optimizer, state)
        self._cut_whole()
        self._loaded = []

    def _cut_whole(self) -> None:
        """Turn the state of whole parameters into that of one chunk, which is the whole."""
        pieces = self._whole_pieces()
        self._probe()
        self.adopt((WHOLE,), pieces)

    def _probe(self) -> None:
        for tracked in self.tracked:
            tracked.probes = [probe_of(whole) for whole in tracked.wholes]

    def _whole_pieces(self) -> list[StatePiece]:
        pieces = []
        for parameter, state in (item for tracked in self.tracked for item in tracked.optimizer.state.items()):
            number = self._numbers[id(parameter)]
            start, mine = self.places[number][1], self.parameters[number]
            held = {key: local(value) for key, value in state.items()}
            values = {key: like_parameter(v, self.strides[number]) if is_cut(key, v, mine) else v for key, v in held.items()}
            pieces.append(StatePiece(number, start, start + mine.numel(), values))
        return pieces

    # ---- stretches ---------------------------------------------------------------------------------------------------------------------

    @property
    def stretches(self) -> list[torch.Tensor]:
        """The parameters' elements in this rank's chunks."""
        return [one.tensor for one in self._slices]

    @property
    def moments(self) -> list[torch.Tensor]:
        """The optimizers' state of all elements in this rank's chunks."""
        states = [one.optimizer.state.get(one.tensor, {}) for one in self._slices]
        return [value for one in states for value in one.values() if isinstance(value, torch.Tensor) and value.dim()]

    def memory_of(self, chunks: Iterable[Chunk]) -> list[list[torch.Tensor]]:
        """By chunk, the parameters and the optimizers' state of its elements, in an order that all its keepers have in common."""
        found = {(one.parameter, one.lo): one for one in self._slices}
        return [[each for part in self._parts_of([chunk]) for each in _memory_of(found[part[0], part[1]])] for chunk in chunks]

    def number_of(self, value: Any) -> int | None:
        """The number of a parameter that is kept in chunks; None for any other value."""
        return None

    @property
    def whole_bytes(self) -> int:
        """Bytes of the state of all chunks together, with all that a step adds."""
        groups = (
            (tracked.optimizer, *pair)
            for tracked in self.tracked
            for pair in zip(tracked.optimizer.param_groups, tracked.wholes, strict=True)
        )
        return sum(
            sum(self.parameters[self._numbers[id(one)]].nbytes for one in whole if id(one) in self._numbers)
            * (optimizers.values_an_element(optimizer, group) + self.keeps_parameters)
            for optimizer, group, whole in groups
        )

    @property
    def state_bytes(self) -> int:
        """Memory of the optimizer's state that this rank keeps, its copies of others' chunks included."""
        states = [state for tracked in self.tracked for state in tracked.optimizer.state.values()]
        values = [value for state in states for value in state.values()]
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))

    def numbered(self, tracked: ChunkedOptimizer) -> dict[int, int]:
        """By number in the optimizer's state dict, the parameter's number here. Only parameters that were stepped once have a state."""
        parameters = [parameter for whole in tracked.wholes for parameter in whole]
        numbers = ((key, self._numbers[id(p)]) for key, p in enumerate(parameters) if id(p) in self._numbers)
        return {key: number for key, number in numbers if self.stepped() >> number & 1}

    @property
    def known(self) -> set[int]:
        """The parameters with state on this rank."""
        return {one.parameter for one in self._all if one.optimizer.state.get(one.tensor)}

    def own(self, number: int) -> list[StatePiece]:
        """The state of a parameter's elements in the chunks that this rank owns."""
        flat, start = self.places[number]
        stop = start + self.parameters[number].numel()
        spans = [(flat, max(lo, start), min(hi, stop)) for lo, hi in (bounds(self.extents[flat], chunk) for chunk in self.owned)]
        return self.cut([span for span in spans if span[1] < span[2]])

    def shaped(self, name: str, value: Any, number: int) -> Any:
        """A flat value for a whole parameter, in the parameter's shape and divided as it is; other values as they are."""
        parameter = self.parameters[number]
        if not isinstance(value, torch.Tensor) or name in ONE_A_PARAMETER or value.shape != (parameter.numel(),):
            return value
        return like(self.live[number], value.as_strided(parameter.shape, self.strides[number]))

    def parts(self, flat: int, lo: int, hi: int) -> list[tuple[int, int, int]]:
        """(parameter, from, to) of all parameters' elements that lie in ``lo..hi`` of a flat buffer."""
        spans = ((number, start, start + self.parameters[number].numel()) for number, (at, start) in enumerate(self.places) if at == flat)
        return [(number, max(lo, start), min(hi, stop)) for number, start, stop in spans if max(lo, start) < min(hi, stop)]

    def view(self, number: int, lo: int, hi: int) -> torch.Tensor:
        """The memory of a parameter's elements, given in coordinates of the flat buffer."""
        start = self.places[number][1]
        return in_memory_order(self.parameters[number])[lo - start : hi - start]

    def first(self, chunks: Iterable[Chunk]) -> list[StatePiece]:
        """The state of ``chunks`` before the first step, where that can be read."""
        return []

    def adopt(self, chunks: tuple[Chunk, ...], pieces: Iterable[StatePiece], same: Mapping[Span, dict[str, Any]] = NOTHING) -> None:
        """Keep ``chunks``, whose state is in ``pieces``, and no others.

        Args:
            same: by (parameter, from, to), a state that can be used as it is.
        """
        by_parameter = _by_parameter(pieces)
        self._ground(self._spans_of(chunks), by_parameter)
        self.drop_beside()
        self._slices, self._more, self.chunks = [], [], chunks
        for tracked in self.tracked:
            seen = [tracked.optimizer.state.get(probe) for probe in tracked.probes]
            tracked.optimizer.state = defaultdict(dict)
            for number, group in enumerate(tracked.optimizer.param_groups):
                group["params"] = [tracked.probes[number]]
                if before := seen[number]:
                    tracked.optimizer.state[tracked.probes[number]] = before
            self._slices += self._take(tracked, self._parts_of(chunks), by_parameter, same)

    def _take(
        self,
        tracked: ChunkedOptimizer,
        parts: Sequence[Span],
        pieces: Mapping[int, list[StatePiece]],
        same: Mapping[Span, dict[str, Any]] = NOTHING,
    ) -> list[_Slice]:
        """Give one optimizer its stretches among ``parts``, by parameter, beside those that it has, with their state."""
        optimizer, taken = tracked.optimizer, list[_Slice]()
        for group, whole, probe in zip(optimizer.param_groups, tracked.wholes, tracked.probes, strict=True):
            numbers = {self._numbers[id(parameter)] for parameter in whole if id(parameter) in self._numbers}
            mine = [_Slice(*part, self.view(*part), optimizer) for part in parts if part[0] in numbers]
            for one in mine:
                values = same.get((one.parameter, one.lo, one.hi)) or _of_optimizer(joined(pieces.get(one.parameter, ()), one.lo, one.hi))
                if values:
                    optimizer.state[one.tensor] = values
            held = (found for number in numbers for piece in pieces.get(number, ()) if (found := _one_of(piece)))
            if not optimizer.state.get(probe) and (seen := next(held, None)):
                optimizer.state[probe] = seen
            group["params"] = [*group["params"][:-1], *(one.tensor for one in mine), probe]
            taken += mine
        return taken

    def extend(self, spans: Sequence[Span], pieces: Iterable[StatePiece]) -> None:
        """Keep these stretches, too, which this rank does not hold so far, beside the chunks. Their state is in ``pieces``."""
        by_parameter = _by_parameter(pieces)
        self._ground_more(spans, by_parameter)
        parts = [part for span in spans for part in self.parts(*span)]
        for tracked in self.tracked:
            self._more += self._take(tracked, parts, by_parameter)

    def recut(self, chunks: tuple[Chunk, ...]) -> None:
        """Keep ``chunks``, all of which this rank holds, and nothing else. The state of a stretch that stays as it is does not move."""
        pieces = self.cut(self._spans_of(chunks))
        before = ((one, one.optimizer.state.get(one.tensor)) for one in self._all)
        self.adopt(chunks, pieces, {(one.parameter, one.lo, one.hi): values for one, values in before if values})

    def drop_more(self) -> None:
        """Drop the stretches of :meth:`extend`."""
        gone = {id(one.tensor) for one in self._more}
        for one in self._more:
            one.optimizer.state.pop(one.tensor, None)
        for group in (group for tracked in self.tracked for group in tracked.optimizer.param_groups if gone):
            group["params"] = [tensor for tensor in group["params"] if id(tensor) not in gone]
        self._more = []

    @property
    def examples(self) -> list[StatePiece]:
        """The state of one element of each group, which a rank without chunks needs: its part of a checkpoint names all values."""
        return [StatePiece(number, 0, 1, dict(optimizer.state.get(probe, {}))) for number, (probe, optimizer) in enumerate(self._probes)]

    def follow(self, examples: Sequence[StatePiece]) -> None:
        """Take over another rank's :attr:`examples`."""
        for (probe, optimizer), one in zip(self._probes, examples, strict=True):
            if one.values:
                optimizer.state[probe] = dict(one.values)

    @property
    def _probes(self) -> list[tuple[torch.Tensor, torch.optim.Optimizer]]:
        return [(probe, tracked.optimizer) for tracked in self.tracked for probe in tracked.probes]

    def _ground(self, spans: Sequence[Span], pieces: Mapping[int, Sequence[StatePiece]]) -> None:
        """Make memory for the views of ``spans``, in the place of all other. This rank has all parameters whole, so there is none to
        make."""

    def _ground_more(self, spans: Sequence[Span], pieces: Mapping[int, Sequence[StatePiece]]) -> None:
        """Make memory for ``spans``, beside the other."""

    def _parts_of(self, chunks: Iterable[Chunk]) -> list[tuple[int, int, int]]:
        return [part for span in self._spans_of(chunks) for part in self.parts(*span)]

    def _spans_of(self, chunks: Iterable[Chunk]) -> list[Span]:
        held = list(chunks)
        return [(flat, *bounds(length, chunk)) for flat, length in enumerate(self.extents) for chunk in held]

    def keep_beside(self, chunks: tuple[Chunk, ...], pieces: Iterable[StatePiece]) -> None:
        """Keep pieces that came for a view that broke at its beginning: another rank may have entered it, and have dropped the old
        chunks."""
        new = tuple(chunk for chunk in chunks if chunk not in self.chunks + self.beside)
        if len(runs(self.chunks + self.beside + new)) <= MOST_RUNS:
            self._spare += pieces
            self.beside += new

    def drop_beside(self) -> None:
        """Drop the pieces kept beside, which are of an earlier state."""
        self._spare, self.beside = [], ()

    def drop(self) -> None:
        """Drop all chunks: they belong to no state to which the run can go back."""
        self.adopt((), ())

    def point(self, flats: Sequence[torch.Tensor], present: int, *, skipped: bool = False) -> list[torch.Tensor]:
        """Make the gradients of all stretches views of ``flats``. Returns them.

        Args:
            present: the parameters with a gradient, as bits; stretches of others have none.
            skipped: some rank's gradients are not finite, and the gradient scaler has to skip the step on all ranks.
        """
        for one in self._all:
            there = present >> one.parameter & 1
            one.tensor.grad = flats[self.places[one.parameter][0]][one.lo : one.hi] if there else None
        for probe in (probe for tracked in self.tracked for probe in tracked.probes):
            probe.grad = torch.full_like(probe, math.inf if skipped else 0.0)
        return [one.tensor.grad for one in self._all if one.tensor.grad is not None]

    def forget_gradients(self) -> None:
        """Drop the views of :meth:`point`, which would keep the memory of the mean until the next step."""
        for one in self._all:
            one.tensor.grad = None

    def cut(self, spans: Sequence[Span]) -> list[StatePiece]:
        """The state of stretches of flat buffers, as views. Raises ProtocolError when this rank does not hold it."""
        have = self._held() if spans else {}
        return [
            piece for span in spans for number, start, stop in self.parts(*span) for piece in stretch_of(have.get(number, ()), start, stop)
        ]

    @property
    def _all(self) -> list[_Slice]:
        return [*self._slices, *self._more]

    def _held(self) -> Mapping[int, Sequence[StatePiece]]:
        """By parameter, all pieces on this rank, as views."""
        have: dict[int, list[StatePiece]] = defaultdict(list)
        for one in self._all:
            have[one.parameter].append(StatePiece(one.parameter, one.lo, one.hi, one.optimizer.state.get(one.tensor, {})))
        for piece in self._spare:
            have[piece.parameter].append(piece)
        return have


def _by_parameter(pieces: Iterable[StatePiece]) -> dict[int, list[StatePiece]]:
    found: dict[int, list[StatePiece]] = defaultdict(list)
    for piece in pieces:
        found[piece.parameter].append(piece)
    return found


def probe_of(whole: Sequence[torch.Tensor]) -> torch.Tensor:
    """One element that takes each step of a group: its state has the fields of any parameter's state."""
    return torch.zeros(1, dtype=whole[0].dtype, device=whole[0].device) if whole else torch.zeros(1, dtype=torch.float32, device="cpu")


def _memory_of(one: _Slice) -> list[torch.Tensor]:
    state = one.optimizer.state.get(one.tensor, {})
    values = [value for _, value in sorted(state.items()) if isinstance(value, torch.Tensor) and value.numel()]
    return [one.tensor.detach(), *values]


def _of_optimizer(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != PARAMETER}


def _one_of(piece: StatePiece) -> dict[str, Any]:
    """A zero state of one element with the fields of the piece's state; empty where the piece has none."""
    found = _of_optimizer(piece.values)
    values = {key: value[:1] if is_stretch(key, value, piece) else value for key, value in found.items()}
    return {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else value for key, value in values.items()}


def _range(piece: StatePiece, lo: int, hi: int) -> StatePiece:
    """The part ``lo..hi`` of a piece, as views."""
    values = {key: value[lo - piece.lo : hi - piece.lo] if is_stretch(key, value, piece) else value for key, value in piece.values.items()}
    return StatePiece(piece.parameter, lo, hi, values)


def is_stretch(key: str, value: Any, piece: StatePiece) -> bool:
    """Whether this value of a piece has one element for each element of the piece."""
    return isinstance(value, torch.Tensor) and value.shape == (piece.hi - piece.lo,) and key not in ONE_A_PARAMETER


def stretch_of(pieces: Sequence[StatePiece], lo: int, hi: int) -> list[StatePiece]:
    """``lo..hi`` of one parameter out of pieces that may overlap."""
    found, at = [], lo
    for piece in sorted(pieces, key=lambda piece: (piece.lo, -piece.hi)):
        if piece.lo <= at < min(piece.hi, hi):
            found.append(_range(piece, at, min(piece.hi, hi)))
            at = found[-1].hi
    if at < hi:
        raise ProtocolError(f"this rank was to give elements {at} to {hi} of the optimizer's state, and does not hold them")
    return found


def joined(pieces: Sequence[StatePiece], lo: int, hi: int) -> dict[str, Any]:
    """The values of ``lo..hi`` in new memory; empty where there is no state yet."""
    if not pieces:
        return {}
    parts = stretch_of(pieces, lo, hi)
    joined: dict[str, Any] = {}
    for key, value in parts[0].values.items():
        if is_stretch(key, value, parts[0]):
            joined[key] = torch.cat([part.values[key] for part in parts])
        else:
            joined[key] = value.clone() if isinstance(value, torch.Tensor) else value
    return joined
