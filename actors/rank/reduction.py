"""The fixed-order sum of gradients: the same bits at any world size.

Each rank adds its own shards up the tree of ``fleet.shards`` as they come (:class:`ShardSums`), which leaves one partial sum for each block
of its range. :class:`Reducer` then exchanges them: every rank owns one chunk of each bucket, receives the others' partial sums of it, adds
them in tree order with explicit elementwise adds, and gives the result back. While each rank holds one block, that is the traffic of a ring
all-reduce; each further block of a range adds one more chunk a peer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from actors.rank.process_group import Group, Work
from fleet.errors import ConfigError, ProtocolError
from fleet.shards import Block, blocks, tree

BUCKET_BYTES = 8 << 20
"""Measured with ``benchmarks.reduction``: smaller buckets pay for their messages, larger ones overlap too little."""

BUCKETS_IN_FLIGHT = 2
SIDE_TAG = 1 << 24
KINDS = ("ordered", "native")


class Flats(Protocol):
    """A set of flat buffers, one for each (dtype, device); their lengths are the same in all sets and on all ranks."""

    flats: Sequence[torch.Tensor]


Set = TypeVar("Set", bound=Flats)


class ShardSums(Generic[Set]):
    """Partial sums of one rank's shards, in buffers that are made once and used in turn.

    Args:
        shards: number of shards of the run.
        make: makes one more set of buffers.
    """

    def __init__(self, shards: int, make: Callable[[], Set]) -> None:
        self.shards = shards
        self._make, self._nodes = make, tree(shards)
        self._free: list[Set] = []
        self._stack: list[tuple[Block, Set]] = []
        self.start = self.stop = self._next = 0

    def begin(self, start: int, stop: int) -> None:
        """Start over with the shards ``start..stop``; what :meth:`take` gave and ``partials`` held before is free again."""
        self._free += [buffers for _, buffers in self._stack]
        self._stack.clear()
        self.start, self.stop, self._next = start, stop, start
        while len(self._free) < self.sets_needed(start, stop):
            self._free.append(self._make())

    def sets_needed(self, start: int, stop: int) -> int:
        """Greatest number of sets in use at once: the stack, and the shard at hand."""
        return 1 + max((len(blocks(start, at, self.shards)) for at in range(start, stop)), default=0)

    def take(self) -> Set:
        """A free set, contents undefined, for the next shard; give it back with :meth:`add` or :meth:`put_back`."""
        return self._free.pop()

    def put_back(self, buffers: Set) -> None:
        self._free.append(buffers)

    def add(self, shard: int, buffers: Set) -> None:
        """Add the gradient of ``shard``; shards come in ascending order. Raises ProtocolError otherwise."""
        if shard != self._next or shard >= self.stop:
            raise ProtocolError(f"shard {shard} was added where shard {self._next} of {self.start}..{self.stop} was due")
        self._next += 1
        self._stack.append(((shard, shard + 1), buffers))
        while len(self._stack) > 1 and (self._stack[-2][0][0], self._stack[-1][0][1]) in self._nodes:
            (right, addend), (left, into) = self._stack.pop(), self._stack.pop()
            for mine, other in zip(into.flats, addend.flats, strict=True):
                mine.add_(other)
            self._free.append(addend)
            self._stack.append(((left[0], right[1]), into))

    @property
    def complete(self) -> bool:
        """True when every shard of the range was added."""
        return self._next == self.stop

    @property
    def partials(self) -> list[Set]:
        """One set for each of ``blocks(start, stop, shards)``."""
        if not self.complete:
            raise ProtocolError(f"shards {self._next}..{self.stop} of {self.start}..{self.stop} were not added")
        return [buffers for _, buffers in self._stack]


def _cuts(lo: int, hi: int, parts: int) -> list[int]:
    return [lo + (hi - lo) * i // parts for i in range(parts + 1)]


def addition_plan(leaves: Sequence[Block], shards: int) -> list[tuple[int, int]]:
    """The order in which partial sums are added: pairs (left, right) of indices into ``leaves``; each sum takes the left one's place."""
    nodes, plan = tree(shards), []
    stack: list[tuple[Block, int]] = []
    for index, leaf in enumerate(leaves):
        stack.append((leaf, index))
        while len(stack) > 1 and (stack[-2][0][0], stack[-1][0][1]) in nodes:
            (right, addend), (left, into) = stack.pop(), stack.pop()
            plan.append((into, addend))
            stack.append(((left[0], right[1]), into))
    if [block for block, _ in stack] != [(0, shards)]:
        raise ProtocolError(f"the blocks {list(leaves)} do not make up the shards 0..{shards}")
    return plan


class _Bucket:
    """One stretch of one flat buffer, on its way through the exchange."""

    def __init__(self, flat: int, lo: int, hi: int, size: int) -> None:
        self.flat, self.cuts = flat, _cuts(lo, hi, size)
        self.incoming: list[torch.Tensor] = []
        self.arrival: Work | None = None

    def chunk(self, flats: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
        return flats[self.flat][self.cuts[rank] : self.cuts[rank + 1]]


class Reducer:
    """Sums over all shards of all ranks. One object for the run; :meth:`bind` it to each view's group.

    Args:
        shards: number of shards of the run.
        kind: ``ordered``, or ``native``: the library's all-reduce, whose bits depend on the world size.
        bucket_bytes: how much is exchanged at a time.
    """

    def __init__(self, shards: int, kind: str = "ordered", bucket_bytes: int = BUCKET_BYTES) -> None:
        if kind not in KINDS:
            raise ConfigError("reduction", kind, f"it is one of {', '.join(KINDS)}")
        self.shards, self.kind, self._bucket_bytes = shards, kind, bucket_bytes
        self._stages: dict[torch.device, torch.Tensor] = {}
        self._group: Group | None = None

    def bind(self, group: Group, ranges: Sequence[tuple[int, int]]) -> None:
        """Use ``group`` from now on; ``ranges[r]`` is the range of shards of view rank r."""
        self._group = group
        mine = [blocks(start, stop, self.shards) for start, stop in ranges]
        self._counts = [len(parts) for parts in mine]
        leaves = list(itertools.chain.from_iterable(mine))
        self._first = sum(self._counts[: group.rank])
        self._plan = addition_plan(leaves, self.shards)
        self._peers = [(group.rank + i) % group.size for i in range(1, group.size)]

    def reduce(self, sums: ShardSums[Set]) -> Set:
        """The mean over shards, on every rank, in a set of ``sums`` that stays valid until ``sums.begin``. Raises GroupBroken.

        Integers are summed, not divided. After a GroupBroken the partial sums are undefined: begin the step again.
        """
        partials = sums.partials
        group = self._group
        if group is None or len(partials) != self._counts[group.rank] or not partials:
            raise ProtocolError(f"{len(partials)} partial sums of shards {sums.start}..{sums.stop} do not fit the view")
        local = [partial.flats for partial in partials]
        if self.kind == "native":
            self._native(group, local)
        elif group.size == 1:
            self._add_up([_Bucket(i, 0, len(flat), 1) for i, flat in enumerate(local[0])], local)
        else:
            self._exchange(group, local)
        return partials[0]

    def _mean(self, total: torch.Tensor) -> None:
        if not (total.is_floating_point() or total.is_complex()):
            return
        if self.shards & (self.shards - 1):
            total.div_(self.shards)
        else:
            total.mul_(1 / self.shards)  # exact, so the same bits, and twice as fast

    def _native(self, group: Group, local: Sequence[Sequence[torch.Tensor]]) -> None:
        for into, *others in zip(*local, strict=True):
            for other in others:
                into.add_(other)
            group.all_reduce(into)
            self._mean(into)

    def _add_up(self, buckets: Sequence[_Bucket], local: Sequence[Sequence[torch.Tensor]]) -> None:
        for bucket in buckets:
            self._add([bucket.chunk(flats, 0) for flats in local], bucket.chunk(local[0], 0))

    def _add(self, leaves: list[torch.Tensor], out: torch.Tensor) -> None:
        """Add ``leaves`` in tree order; the last sum goes to ``out``, which may be one of them."""
        for left, right in self._plan[:-1]:
            leaves[left].add_(leaves[right])
        if self._plan:
            left, right = self._plan[-1]
            torch.add(leaves[left], leaves[right], out=out)
        self._mean(out)

    # ---- the exchange --------------------------------------------------------------------------------------------------------------------

    def _exchange(self, group: Group, local: Sequence[Sequence[torch.Tensor]]) -> None:
        """Partial sums of the next bucket travel while this one's are added and while its sums travel back."""
        buckets = self._buckets(local[0], group.size)
        returning: list[Work] = []
        for number in range(min(BUCKETS_IN_FLIGHT, len(buckets))):
            returning += self._scatter(group, number, buckets[number], local)
        for number, bucket in enumerate(buckets):
            assert bucket.arrival is not None
            bucket.arrival.wait()
            mine = bucket.chunk(local[0], group.rank)
            self._add(self._leaves(group, bucket, local), mine)
            receives = [] if group.receives_ahead else self._returns(bucket, local)
            returning.append(group.start([(mine, peer) for peer in self._peers], receives, 2 * number + 1))
            if number + BUCKETS_IN_FLIGHT < len(buckets):
                returning += self._scatter(group, number + BUCKETS_IN_FLIGHT, buckets[number + BUCKETS_IN_FLIGHT], local)
        for work in returning:
            work.wait()

    def _returns(self, bucket: _Bucket, local: Sequence[Sequence[torch.Tensor]]) -> list[tuple[torch.Tensor, int]]:
        """Where the peers' sums go: over the chunks of this rank's first partial sum, which by then have been sent."""
        return [(bucket.chunk(local[0], peer), peer) for peer in reversed(self._peers)]

    def _buckets(self, flats: Sequence[torch.Tensor], size: int) -> list[_Bucket]:
        """Cut all flat buffers into buckets of equal length, at most ``bucket_bytes``."""
        found = []
        for index, flat in enumerate(flats):
            count = -(-flat.numel() * flat.element_size() // self._bucket_bytes)
            found += [_Bucket(index, lo, hi, size) for lo, hi in itertools.pairwise(_cuts(0, flat.numel(), count))] if count else []
        return found

    def _scatter(self, group: Group, number: int, bucket: _Bucket, local: Sequence[Sequence[torch.Tensor]]) -> list[Work]:
        """Send every peer its chunk of this rank's partial sums, and receive this rank's chunk of theirs.

        A peer returns its sum once it has this rank's chunk. To receive it over that chunk may be asked for now: gloo sends nothing before
        it knows of the receive.
        """
        mine = bucket.chunk(local[0], group.rank)
        sources = [peer for peer in reversed(self._peers) for _ in range(self._counts[peer])]
        bucket.incoming = self._stage(mine, number % BUCKETS_IN_FLIGHT, len(sources), group.size)
        sends = [(bucket.chunk(flats, peer), peer) for peer in self._peers for flats in local]
        bucket.arrival = group.start(sends, list(zip(bucket.incoming, sources, strict=True)), 2 * number)
        return [group.start([], self._returns(bucket, local), 2 * number + 1)] if group.receives_ahead else []

    def _leaves(self, group: Group, bucket: _Bucket, local: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """This rank's chunk of all partial sums, in order of shards."""
        arrived = iter(bucket.incoming)
        found = {peer: [next(arrived) for _ in range(self._counts[peer])] for peer in reversed(self._peers)}
        found[group.rank] = [bucket.chunk(flats, group.rank) for flats in local]
        return [leaf for rank in range(group.size) for leaf in found[rank]]

    def _stage(self, like: torch.Tensor, half: int, count: int, size: int) -> list[torch.Tensor]:
        """``count`` buffers like ``like``, from memory that is kept for the run; each half serves one of the buckets in flight."""
        room = -(-(self._bucket_bytes // size + 64) // 64) * 64
        needed = BUCKETS_IN_FLIGHT * count * room
        stage = self._stages.get(like.device)
        if stage is None or stage.numel() < needed:
            stage = self._stages[like.device] = torch.zeros(needed, dtype=torch.uint8, device=like.device)
        starts = range(half * count * room, (half + 1) * count * room, room)
        length = like.numel() * like.element_size()
        return [stage[start : start + length].view(like.dtype) for start in starts]


class SideChannel:
    """A few numbers from every rank to every rank, travelling beside the gradients: flags, arrival times, losses.

    Args:
        width: how many numbers each rank gives.
    """

    def __init__(self, group: Group, width: int, dtype: torch.dtype = torch.float64) -> None:
        self._group = group
        self._mine = torch.zeros(width, dtype=dtype)
        self._all = torch.zeros(group.size, width, dtype=dtype)
        self._work: Work | None = None

    def start(self, values: Sequence[float]) -> None:
        self._mine.copy_(torch.tensor(values, dtype=self._mine.dtype))
        self._work = self._group.start_all_gather(self._all, self._mine, SIDE_TAG)

    def wait(self) -> torch.Tensor:
        """All ranks' numbers, ``[size, width]``; valid until the next :meth:`start`. Raises GroupBroken."""
        if self._work is None:
            raise ProtocolError("SideChannel.wait() before start()")
        self._work.wait()
        self._work = None
        return self._all

    def exchange(self, values: Sequence[float]) -> torch.Tensor:
        self.start(values)
        return self.wait()
