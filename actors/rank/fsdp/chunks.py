"""Chunks of the parameters, with the optimizer's state of the same elements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from actors.rank.mesh.parts import cut_like, local
from actors.rank.state.weights import Read
from actors.rank.zero1.chunked import ChunkedOptimizer, OptimizerChunks, Span, like_parameter, stretch_of
from actors.rank.zero1.pieces import PARAMETER, StatePiece
from fleet.protocol.chunks import WHOLE, Chunk


class _Memory(NamedTuple):
    """Elements of one flat buffer. ``more``: they lie beside the chunks, see :meth:`OptimizerChunks.extend`."""

    flat: int
    lo: int
    hi: int
    elements: torch.Tensor
    more: bool


class ChunkedModel(OptimizerChunks):
    """:class:`OptimizerChunks` that also keeps the parameters themselves, of its chunks alone.

    A piece of a chunk has the parameter's elements beside the optimizer's state, under :data:`actors.rank.zero1.pieces.PARAMETER`. So the
    chunks move, and are written and joined, as those of an optimizer. The memory of one chunk of a flat buffer is one stretch, which a rank
    can serve as it is.

    Args:
        readers: by parameter, a function that reads its first value, see :mod:`actors.rank.state.weights`. With them no memory is kept
            before there are chunks: all values can be read.
    """

    keeps_parameters = True
    _memory: dict[int, list[_Memory]]
    _unread = False

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Sequence[torch.nn.Parameter],
        places: Sequence[tuple[int, int]],
        extents: Sequence[int],
        readers: Sequence[Read] = (),
    ) -> None:
        self._readers, self._memory = readers, {}
        self._values: dict[int, torch.Tensor] = dict(enumerate(map(local, parameters)))
        super().__init__(optimizers, parameters, places, extents)
        self._values = {}

    # ---- values that can be read ---------------------------------------------------------------------------------------------------------

    def _cut_whole(self) -> None:
        if not self.readable or self._loaded:
            super()._cut_whole()
            return
        self._probe()
        self.adopt((), ())
        self.chunks, self._unread = (WHOLE,), True

    @property
    def readable(self) -> bool:  # type: ignore[override]
        return bool(self._readers)

    def first(self, chunks: Iterable[Chunk]) -> list[StatePiece]:
        return [self._read(*part) for part in self._parts_of(chunks)]

    def _read(self, number: int, lo: int, hi: int) -> StatePiece:
        at = self.places[number][1]
        return StatePiece(number, lo, hi, {PARAMETER: self._readers[number](lo - at, hi - at).to(self.parameters[number].device)})

    # ---- the whole -----------------------------------------------------------------------------------------------------------------------

    def load_parameter(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Keep the value of ``parameter`` in a whole state that is being loaded. See :meth:`settle`."""
        self._values[self._numbers[id(parameter)]] = local(cut_like("model", parameter, value))

    def _load_whole(self, tracked: ChunkedOptimizer, state: dict[str, Any]) -> None:
        """Keep an optimizer's part; the parameters may come before or after it."""
        self._loaded.append((tracked, state))

    def settle(self) -> None:
        if self._loaded:
            super().settle()
        self._values = {}

    def _whole_pieces(self) -> list[StatePiece]:
        state = {piece.parameter: piece.values for piece in super()._whole_pieces()}
        found = []
        for number, (parameter, (_, start)) in enumerate(zip(self.parameters, self.places, strict=True)):
            value = like_parameter(self._values[number].detach(), self.strides[number])
            found.append(StatePiece(number, start, start + parameter.numel(), {PARAMETER: value, **state.get(number, {})}))
        return found

    # ---- chunks --------------------------------------------------------------------------------------------------------------------------

    def _ground(self, spans: Sequence[Span], pieces: Mapping[int, Sequence[StatePiece]]) -> None:
        filled, self._unread = self._filled(spans, pieces, more=False), False
        self._memory = {}
        self._add(filled)

    def _ground_more(self, spans: Sequence[Span], pieces: Mapping[int, Sequence[StatePiece]]) -> None:
        self._add(self._filled(spans, pieces, more=True))

    def drop_more(self) -> None:
        super().drop_more()
        self._memory = {flat: [one for one in memory if not one.more] for flat, memory in self._memory.items()}

    def _add(self, memory: Iterable[_Memory]) -> None:
        for one in memory:
            self._memory.setdefault(one.flat, []).append(one)

    def _filled(self, spans: Sequence[Span], pieces: Mapping[int, Sequence[StatePiece]], *, more: bool) -> list[_Memory]:
        memory = [_Memory(flat, lo, hi, self._zeros(flat, hi - lo), more) for flat, lo, hi in spans if lo < hi]
        for flat, lo, hi, elements, _ in memory:
            for number, start, stop in self.parts(flat, lo, hi):
                for piece in stretch_of(pieces[number], start, stop):
                    elements[piece.lo - lo : piece.hi - lo] = piece.values[PARAMETER]
        return memory

    def _zeros(self, flat: int, length: int) -> torch.Tensor:
        kind = self._kinds[flat]
        return torch.zeros(length, dtype=kind.dtype, device=kind.device)

    @property
    def _kinds(self) -> dict[int, torch.Tensor]:
        """By flat buffer, a parameter of it."""
        return {flat: parameter for parameter, (flat, _) in zip(self.parameters, self.places, strict=True)}

    def elements(self, flat: int, lo: int, hi: int) -> torch.Tensor | None:
        """Elements ``lo..hi`` of a flat buffer, as a view; None when this rank does not have all of them."""
        if self._unread:
            read = self._zeros(flat, hi - lo)
            for number, start, stop in self.parts(flat, lo, hi):
                read[start - lo : stop - lo] = self._read(number, start, stop).values[PARAMETER]
            return read
        for one in self._memory.get(flat, ()):
            if one.lo <= lo and hi <= one.hi:
                return one.elements[lo - one.lo : hi - one.lo]
        return None

    def view(self, number: int, lo: int, hi: int) -> torch.Tensor:
        found = self.elements(self.places[number][0], lo, hi)
        assert found is not None, "this rank does not have these elements"
        return found

    def number_of(self, value: Any) -> int | None:
        return self._numbers.get(id(value))

    @property
    def weights(self) -> list[torch.Tensor]:
        """All elements that this rank has."""
        return [one.elements for memory in self._memory.values() for one in memory]

    def _held(self) -> Mapping[int, Sequence[StatePiece]]:
        found: dict[int, list[StatePiece]] = defaultdict(list)
        for number, pieces in super()._held().items():
            for piece in pieces:
                beside = {} if PARAMETER in piece.values else {PARAMETER: self.view(number, piece.lo, piece.hi)}
                found[number].append(piece._replace(values={**beside, **piece.values}))
        return found
