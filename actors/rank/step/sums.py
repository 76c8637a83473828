"""Partial sums of one rank's shards, added up the fixed tree of ``fleet.protocol.shards``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from fleet.errors import ProtocolError
from fleet.protocol.shards import Block, middle, tree


class Flats(Protocol):
    """A set of flat buffers, one for each (dtype, device); their lengths are the same in all sets and on all ranks."""

    @property
    def flats(self) -> Sequence[torch.Tensor]: ...


Set = TypeVar("Set", bound=Flats)


class Coming(NamedTuple, Generic[Set]):
    """Additions still to make: in turn, the right set of each of ``pairs`` into the left one. ``after``: the sums after that."""

    after: dict[Block, Set]
    pairs: list[tuple[Set, Set]]

    def add_up(self, flat: int, lo: int, hi: int) -> None:
        """Make the additions in one stretch of a flat buffer."""
        for into, addend in self.pairs:
            into.flats[flat][lo:hi].add_(addend.flats[flat][lo:hi])


class ShardSums(Generic[Set]):
    """Partial sums of the shards that one rank has computed, in buffers that are made once and used in turn.

    Args:
        shards: number of shards of the run.
        make: makes one more set of buffers.
    """

    def __init__(self, shards: int, make: Callable[[], Set]) -> None:
        self.shards = shards
        self._make, self._nodes = make, tree(shards)
        self._free: list[Set] = []
        self._sums: dict[Block, Set] = {}

    def take(self) -> Set:
        """A free set, contents undefined, for the next shard; give it back with :meth:`add` or :meth:`put_back`."""
        return self._free.pop() if self._free else self._make()

    def put_back(self, buffers: Set) -> None:
        self._free.append(buffers)

    def forget_free(self) -> None:
        """Free sets are not kept for the next shard."""
        self._free.clear()

    @property
    def held(self) -> frozenset[int]:
        """The shards whose gradients are in the sums."""
        return frozenset(shard for lo, hi in self._sums for shard in range(lo, hi))

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(sorted(self._sums))

    def target(self, shard: int) -> tuple[Set, bool]:
        """(buffers for the gradient of ``shard``, whether it is to be added to what they hold): then :meth:`add` them.

        Shards come in any order. Raises ProtocolError when this one is in the sums already.
        """
        if not 0 <= shard < self.shards or any(lo <= shard < hi for lo, hi in self._sums):
            raise ProtocolError(f"shard {shard} of {self.shards} was added, which {list(self.blocks)} hold already")
        left = (shard - 1, shard)
        if self._sibling((shard, shard + 1)) == left and left in self._sums:
            return self._sums[left], True  # to keep the gradient and add it later takes two passes over memory, this takes one
        return self.take(), False

    def add(self, shard: int, buffers: Set, joined: bool = False) -> None:
        """Add the gradient of ``shard``, in ``buffers``. ``joined``: they hold the sum with its left neighbour, as :meth:`target` said."""
        coming = self.coming(shard, buffers, joined)
        for index, flat in enumerate(buffers.flats):
            coming.add_up(index, 0, flat.numel())
        self.settle(coming)

    def coming(self, shard: int, buffers: Set, joined: bool = False) -> Coming[Set]:
        """The additions of :meth:`add`, to make stretch by stretch while the gradient of ``shard`` comes. Then call :meth:`settle`.

        Until then the sums are listed as before, though those in ``pairs`` may hold more already.
        """
        sums, pairs, block = dict(self._sums), list[tuple[Set, Set]](), (shard - joined, shard + 1)
        if joined:
            del sums[block[0], shard]
        while (sibling := self._sibling(block)) in sums:
            left, right = sorted((block, sibling))
            into, addend = (buffers, sums[sibling]) if left == block else (sums[sibling], buffers)
            pairs.append((into, addend))
            del sums[sibling]
            block, buffers = (left[0], right[1]), into
        sums[block] = buffers
        return Coming(sums, pairs)

    def settle(self, coming: Coming[Set]) -> None:
        """All additions of ``coming`` are made."""
        self._sums = coming.after
        self._free += [addend for _, addend in coming.pairs]

    def spoil(self, coming: Coming[Set], target: Set) -> None:
        """Some additions of ``coming`` were made, with wrong values: forget the sums that they change."""
        lost = [block for block, one in self._sums.items() if coming.after.get(block) is not one]
        self._free += [self._sums.pop(block) for block in lost]
        if not any(one is target for one in self._free):
            self._free.append(target)

    def _sibling(self, block: Block) -> Block:
        """The block that together with ``block`` makes up the next larger one; ``block`` itself if it has all shards."""
        lo, hi = 0, self.shards
        while (lo, hi) != block:
            cut = middle(lo, hi)
            left, right = (lo, cut), (cut, hi)
            if block in (left, right):
                return right if block == left else left
            lo, hi = left if block[1] <= cut else right
        return block

    def keep(self, blocks: Collection[Block]) -> None:
        """Forget all sums but those of ``blocks``."""
        for block in [block for block in self._sums if block not in blocks]:
            self._free.append(self._sums.pop(block))

    def partials(self, blocks: Sequence[Block]) -> list[Set]:
        """One set for each of ``blocks``. Raises ProtocolError unless these are the blocks of the sums."""
        if self.blocks != tuple(blocks):
            raise ProtocolError(f"the sums of {list(self.blocks)} are there where those of {list(blocks)} were due")
        return [self._sums[block] for block in blocks]
