"""The parity that one rank keeps for its family, and what it keeps of its own chunk until the others have it in theirs.

See :mod:`fleet.protocol.parity` for who keeps whose. Parity is in host memory, by flat buffer. A step is taken flat buffer by flat buffer:
what was before is kept until all of the family have what has changed, so that of a member that is lost in the step both what it had, and
what it has changed so far, can be made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from actors.rank.fsdp.bits import bits_of, swap, xor
from actors.rank.fsdp.chunks import ChunkedModel
from actors.rank.membership.process_group import Group, GroupBroken, Work
from actors.rank.tags import Tag
from actors.rank.zero1.pieces import Piece
from fleet.protocol.chunks import Kin
from fleet.protocol.parity import Family, stripe

UNDER_WAY = 2
"""Flat buffers of whose step not all have said that they have it."""

Rows = dict[int, torch.Tensor]
"""By place in the family."""


class _Sent(NamedTuple):
    """On its way: the word of all others that they have what changed of ``flat``, and what was sent, whose memory stays theirs."""

    flat: int
    word: Work
    memory: list[torch.Tensor]


class Kept:
    """What one rank keeps in one view.

    Args:
        generation, size: of the view; ``rank`` is its rank there.
        members: of its family.
        step: of the state that the parity is of.

    Attributes:
        sums: by flat buffer, the exclusive or of the bits of one stripe of each other member.
        logs: by flat buffer, that of their mean gradients in the step at hand, from before it is decided until it is taken.
        before: by flat buffer whose step not all have taken in, the bits of this rank's stripes before it.
        means: and their mean gradients.
    """

    def __init__(self, generation: int, size: int, members: Family, rank: int, step: int, chunks: ChunkedModel) -> None:
        self.generation, self.members, self.place = generation, members, members.index(rank)
        self.step, self.taken, self.behind = step, 0, ""
        self._size, self._chunks = size, chunks
        self.others = [place for place in range(len(members)) if place != self.place]
        self.flats = [flat for flat, extent in enumerate(chunks.extents) if extent]
        self.sums: dict[int, torch.Tensor] = {}
        self.logs: dict[int, torch.Tensor] = {}
        self.before: dict[int, Rows] = {}
        self.means: dict[int, Rows] = {}
        self._sent: list[_Sent] = []

    @property
    def kin(self) -> Kin:
        return Kin(self.generation, self._size, self.members, self.place, self.step, self.taken)

    @property
    def bytes(self) -> int:
        return sum(each.nbytes for each in self.sums.values())

    def span(self, flat: int, owner: int, keeper: int) -> tuple[int, int]:
        """The stripe of ``owner`` that ``keeper`` has, both places in the family."""
        return self._chunks.span(flat, stripe(self._size, self.members, owner, keeper))

    def rows(self, flat: int, pieces: Iterable[Piece] | None = None) -> Rows:
        """The bits of this rank's stripes, by who keeps them; of ``pieces`` where they are given."""
        given = None if pieces is None else list(pieces)
        return {place: bits_of(self._chunks.alike(flat, *self.span(flat, self.place, place), given)) for place in self.others}

    # ---- a view begins -------------------------------------------------------------------------------------------------------------------

    def begin(self, group: Group, pieces: Sequence[Piece]) -> None:
        """Each gives the others its stripes, which are in ``pieces``. Raises GroupBroken."""
        for flat in self.flats:
            mine = [piece for piece in pieces if self._chunks.places[piece.parameter][0] == flat]
            self._take(flat, self._swap(group, self.rows(flat, mine)))

    def _swap(self, group: Group, rows: Rows) -> list[torch.Tensor]:
        return swap(group, {self.members[place]: row for place, row in rows.items()})

    def _take(self, flat: int, rows: Iterable[torch.Tensor]) -> None:
        for row in rows:
            self.sums[flat] = xor(self.sums.get(flat, row[:0]), row)

    # ---- before a step is decided --------------------------------------------------------------------------------------------------------

    def note_means(self, group: Group, flats: Sequence[torch.Tensor]) -> None:
        """All of the family give each other the means of their stripes. Raises GroupBroken: then the step is not decided."""
        self.logs = {}
        for flat in self.flats:
            mine = self.means_of(flat, flats)
            room = {place: self._room(flat, place, flats[flat].dtype) for place in self.others}
            sends = [(row, self.members[place]) for place, row in mine.items()]
            group.start(sends, [(row, self.members[place]) for place, row in room.items()], Tag.MEANS).wait()
            log = torch.zeros(0, dtype=torch.uint8, device="cpu")
            for row in room.values():
                log = xor(log, row)
            self.logs[flat] = log

    def means_of(self, flat: int, flats: Sequence[torch.Tensor]) -> Rows:
        """Of this rank's stripes, as bytes."""
        spans = {place: self.span(flat, self.place, place) for place in self.others}
        return {place: flats[flat][lo:hi].contiguous().cpu().view(torch.uint8) for place, (lo, hi) in spans.items()}

    def _room(self, flat: int, owner: int, dtype: torch.dtype) -> torch.Tensor:
        lo, hi = self.span(flat, owner, self.place)
        return torch.empty((hi - lo) * dtype.itemsize, dtype=torch.uint8, device="cpu")

    # ---- a step --------------------------------------------------------------------------------------------------------------------------

    def take_step(self, group: Group | None, flats: Sequence[torch.Tensor], step: Callable[[int], None]) -> None:
        """``step`` each flat buffer, and let the family know what it has changed. A group that breaks, or is gone, holds up nothing:
        what others have not taken in is kept (:attr:`behind`)."""
        self.behind = "" if group is not None else "its view was gone when the step was taken"
        for flat in self.flats:
            self.before[flat], self.means[flat] = self.rows(flat), self.means_of(flat, flats)
            step(flat)
            if not self.behind and group is not None and self.others:
                self._attempt(lambda flat=flat: self._tell(group, flat))  # type: ignore[misc]
            elif not self.others:
                self._forget(flat)
        if not self.behind:
            self._attempt(lambda: self._settle(0))
        if self.behind:
            self.means = {flat: {place: row.clone() for place, row in rows.items()} for flat, rows in self.means.items()}
            self._sent = []
        else:
            self.step, self.taken, self.logs = self.step + 1, 0, {}

    def _attempt(self, exchange: Callable[[], None]) -> None:
        try:
            exchange()
        except GroupBroken as error:
            self.behind = str(error)

    def _tell(self, group: Group, flat: int) -> None:
        """What was changed goes to who keeps it. What comes is taken in once all of it is here, and they are told."""
        after = self.rows(flat)
        changed = {place: xor(after[place], row) for place, row in self.before[flat].items()}
        self._take(flat, self._swap(group, changed))
        self.taken += 1
        told = [torch.ones(1, dtype=torch.uint8, device="cpu") for _ in self.others]
        heard = [torch.zeros(1, dtype=torch.uint8, device="cpu") for _ in self.others]
        peers = [self.members[place] for place in self.others]
        word = group.start(list(zip(told, peers, strict=True)), list(zip(heard, peers, strict=True)), Tag.TAKEN)
        self._sent.append(_Sent(flat, word, [*told, *heard]))
        self._settle(UNDER_WAY - 1)

    def _settle(self, under_way: int) -> None:
        """Wait until no more than so many are under way."""
        while len(self._sent) > under_way:
            self._sent[0].word.wait()
            self._forget(self._sent.pop(0).flat)

    def _forget(self, flat: int) -> None:
        self.before.pop(flat)
        self.means.pop(flat)
        self.logs.pop(flat, None)

    # ---- a member is lost ----------------------------------------------------------------------------------------------------------------

    def gift(self, place: int, taken: int | None) -> Mapping[int, tuple[torch.Tensor, torch.Tensor]]:
        """By flat buffer, the bits of this rank's stripe as the parity of the member at ``place`` has them, and its mean gradient where
        they are of the step before. ``taken``: see :class:`fleet.protocol.parity.Revival`."""
        none, found = torch.zeros(0, dtype=torch.uint8, device="cpu"), {}
        for number, flat in enumerate(self.flats):
            if taken is not None and number >= taken:
                found[flat] = self.before[flat][place], self.means[flat][place]
            else:
                found[flat] = bits_of(self._chunks.alike(flat, *self.span(flat, self.place, place))), none
        return found
