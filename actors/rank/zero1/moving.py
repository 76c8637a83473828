"""Chunks of a sharded state move to other ranks beside the running steps. :mod:`fleet.protocol.recut` decides what moves when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from actors.rank.membership.process_group import Group
from actors.rank.tags import Tag
from actors.rank.zero1.chunked import OptimizerChunks
from actors.rank.zero1.pieces import StatePiece, swap_pieces
from fleet.protocol.chunks import Chunk, StateCut
from fleet.protocol.recut import Recut


class MovingChunks:
    """One rank's part of a move, in the group of one view.

    Slices leave a rank in a thread of its own. It reads the state, which stays as it is until :meth:`arrive` has waited for the thread.

    Attributes:
        asked: by chunk of the new cut, the ranks that this rank asks for it, in order.
    """

    def __init__(self, group: Group, chunks: OptimizerChunks, recut: Recut, device: torch.device, asked: Sequence[tuple[int, ...]]) -> None:
        self._group, self._chunks, self._recut, self._device, self.asked = group, chunks, recut, device, asked
        self._thread = ThreadPoolExecutor(1, "fleet-moves")
        self._work: Future[list[StatePiece]] | None = None

    @property
    def wanted(self) -> StateCut:
        """The cut with which the ranks go on when all slices are in place."""
        return self._recut.wanted

    @property
    def over(self) -> bool:
        """All slices are in place."""
        return self._recut.over

    @property
    def under_way(self) -> bool:
        """Slices are on their way to this rank, or from it."""
        return self._work is not None and not self._work.done()

    @property
    def claimed(self) -> tuple[Chunk, ...]:
        """The slices that are in place on this rank."""
        return self._recut.claimed(self._group.rank)

    def begin(self) -> None:
        """All ranks have taken a step: the next slices leave the ranks that hold them."""
        if self._recut.begin():
            self._work = self._thread.submit(self._carry)

    def _carry(self) -> list[StatePiece]:
        me, outgoing = self._group.rank, dict[int, list[StatePiece]]()
        for peer in self._group.peers:
            if spans := [(flat, one.lo, one.hi) for flat, one in self._recut.under_way(peer, me)]:
                outgoing[peer] = self._chunks.cut(spans)
        sources = {one.source for _, one in self._recut.under_way(me)}
        return swap_pieces(self._group, outgoing, sources, self._device, Tag.SLICES)

    def arrive(self, mean: Sequence[torch.Tensor], room: Callable[[int, int, int], torch.Tensor], *, late: bool) -> None:
        """Put the slices in place that are under way; then send the sums of all slices to their new places. Raises GroupBroken.

        Args:
            mean: the flat buffers of this step's mean. ``room``: memory for a stretch of it.
            late: some rank has to wait for its slices.
        """
        if self._work is not None:
            pieces, self._work = self._work.result(), None
            self._chunks.extend([(flat, one.lo, one.hi) for flat, one in self._recut.under_way(self._group.rank)], pieces)
            self._recut.end(late=late)
        self._send_sums(mean, room)

    def _send_sums(self, mean: Sequence[torch.Tensor], room: Callable[[int, int, int], torch.Tensor]) -> None:
        group, recut = self._group, self._recut
        sends = [(mean[flat][one.lo : one.hi], peer) for peer in group.peers for flat, one in recut.in_place(peer, group.rank)]
        receives = [(room(flat, one.lo, one.hi), one.source) for flat, one in recut.in_place(group.rank)]
        group.start(sends, receives, Tag.MOVED).wait()

    def stop(self) -> None:
        """The group is gone, and so the thread ends. Slices that were under way do not count."""
        if self._work is not None:
            wait([self._work])
            self._work = None
        self._thread.shutdown(wait=False)
