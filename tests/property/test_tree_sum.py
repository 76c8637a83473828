"""The mean over shards has the same bits at any world size and for any split of the shards."""

from __future__ import annotations

import itertools
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rank.membership.process_group import Group
from actors.rank.step.reduction import Reducer
from actors.rank.step.sums import ShardSums
from fleet.protocol.chunks import BLOCK
from fleet.protocol.shards import cover, middle

BOUND_S = 30.0
Parcel = tuple[torch.Tensor, threading.Event]
"""What is sent, and whether it was taken."""


class Buffers:
    def __init__(self, flats: list[torch.Tensor]) -> None:
        self.flats = flats


class Boxes:
    """One queue for each (sender, receiver, tag)."""

    def __init__(self) -> None:
        self._lock, self._queues = threading.Lock(), defaultdict(queue.Queue)

    def __getitem__(self, key: tuple[int, int, int]) -> queue.Queue[Parcel]:
        with self._lock:
            return self._queues[key]


class LaterWork:
    """Reads what was sent when it is received: whoever changes it before has not waited for what it should."""

    def __init__(self, receives: list[tuple[torch.Tensor, queue.Queue[Parcel]]], sent: list[Parcel]) -> None:
        self._receives, self._sent = receives, sent

    def arrived(self) -> None:
        for tensor, box in self._receives:
            sent, taken = box.get(timeout=BOUND_S)
            tensor.copy_(sent)
            taken.set()

    def taken(self) -> bool:
        return all(taken.wait(BOUND_S) for _, taken in self._sent)

    def wait(self) -> None:
        self.arrived()
        assert self.taken()


class ThreadGroup(Group):
    """All ranks in one process, each in a thread of its own."""

    def __init__(self, rank: int, size: int, boxes: Boxes) -> None:
        super().__init__(0, rank, size, torch.device("cpu"))
        self._boxes = boxes

    def start(self, sends: Any, receives: Any, tag: int = 0) -> Any:
        sends, receives = ([(tensor, peer) for tensor, peer in some if tensor.numel()] for some in (sends, receives))
        sent = [(tensor, threading.Event()) for tensor, _ in sends]
        for parcel, (_, peer) in zip(sent, sends, strict=True):
            self._boxes[self.rank, peer, tag].put(parcel)
        return LaterWork([(tensor, self._boxes[peer, self.rank, tag]) for tensor, peer in receives], sent)

    def sending(self, works: Any) -> Any:
        def sent() -> None:
            assert all(work.taken() for work in works)

        return sent

    def complete(self, works: Any) -> None:
        for work in works:
            work.arrived()
        self.sending(works)()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        everyone = torch.empty(self.size, *tensor.shape, dtype=tensor.dtype)
        self.all_gather(everyone, tensor.clone(), 99)
        tensor.copy_(everyone.sum(0))


def shard_flats(shard: int, lengths: list[int], dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(shard)
    return [(torch.randn(n, generator=generator) * 10.0 ** (shard % 5)).to(dtype) for n, dtype in zip(lengths, dtypes, strict=True)]


def straightforward(lo: int, hi: int, lengths: list[int], dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    if hi - lo == 1:
        return shard_flats(lo, lengths, dtypes)
    cut = middle(lo, hi)
    return [a + b for a, b in zip(straightforward(lo, cut, lengths, dtypes), straightforward(cut, hi, lengths, dtypes), strict=True)]


def reduced(group: Group, assigned: list[list[int]], lengths: list[int], dtypes: list[torch.dtype], bucket_bytes: int, kind: str) -> Any:
    """Twice, each time again with what the peers bring asked for ahead. In two levels where sites are hosts of several."""
    shards = sum(map(len, assigned))
    sums = ShardSums(shards, lambda: Buffers([torch.empty(n, dtype=d) for n, d in zip(lengths, dtypes, strict=True)]))
    reducer = Reducer(shards, kind, bucket_bytes, two_levels=True)
    reducer.bind(group, [cover(mine, shards) for mine in assigned])
    for _ in range(2):
        sums.keep(())
        for shard in assigned[group.rank]:
            buffers = sums.take()
            for into, flat in zip(buffers.flats, shard_flats(shard, lengths, dtypes), strict=True):
                into.copy_(flat)
            sums.add(shard, buffers)
        result = sums.take()
        reducer.reduce(sums, result)
        before, result = result, sums.take()
        reducer.expect(result.flats)
        reducer.reduce(sums, result)  # a reduction leaves the sums as they were
        assert same_bits(before.flats, result.flats)
        sums.put_back(before)
    return result.flats


def in_threads(
    assigned: list[list[int]],
    lengths: list[int],
    dtypes: list[torch.dtype],
    bucket_bytes: int,
    kind: str = "ordered",
    sites: tuple[str, ...] = (),
    make: Callable[[int, int, Boxes], Group] = ThreadGroup,
) -> Any:
    """By rank: the means, as flat buffers. ``sites`` says where each is."""
    boxes = Boxes()
    with ThreadPoolExecutor(len(assigned)) as pool:
        groups = [make(rank, len(assigned), boxes) for rank in range(len(assigned))]
        for group in groups:
            group.sites = sites or group.sites
        found = [pool.submit(reduced, group, assigned, lengths, dtypes, bucket_bytes, kind) for group in groups]
        return [future.result(BOUND_S) for future in found]


def ranges(cuts: list[int]) -> list[list[int]]:
    return [list(range(lo, hi)) for lo, hi in itertools.pairwise(cuts)]


LENGTHS = st.one_of(st.integers(1, 300), st.integers(1, 6 * BLOCK))
"""Elements: less than a block, so that one rank adds up all, or some blocks."""


@st.composite
def splits(draw: st.DrawFn) -> list[list[int]]:
    """Shards by rank: ranges, or dealt in any order, as after losses; newcomers bring none."""
    shards = draw(st.integers(1, 24))
    inner = draw(st.sets(st.integers(1, shards - 1), max_size=6)) if shards > 1 else set()
    order = draw(st.one_of(st.just(list(range(shards))), st.permutations(range(shards))))
    assigned = [[order[place] for place in mine] for mine in ranges([0, *sorted(inner), shards])]
    for _ in range(draw(st.integers(0, 2))):
        assigned.insert(draw(st.integers(0, len(assigned))), [])
    return assigned


def same_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, other, strict=True))


@settings(max_examples=40)
@given(splits(), st.lists(LENGTHS, min_size=1, max_size=3), st.sampled_from([64, 500, 1 << 14, 1 << 20]), st.data())
def test_any_split_gives_the_bits_of_the_straightforward_tree(
    assigned: list[list[int]], lengths: list[int], bucket_bytes: int, data: Any
) -> None:
    shards = sum(map(len, assigned))
    dtypes = [data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])) for _ in lengths]
    expected = [total / shards for total in straightforward(0, shards, lengths, dtypes)]
    for flats in in_threads(assigned, lengths, dtypes, bucket_bytes):
        assert same_bits(flats, expected)


def test_the_control_depends_on_the_world_size() -> None:
    """Without this, the test above could pass because its numbers do not round."""
    one = in_threads(ranges([0, 16]), [1000], [torch.float32], 1 << 20, "native")[0]
    three = in_threads(ranges([0, 6, 12, 16]), [1000], [torch.float32], 1 << 20, "native")[0]
    assert not same_bits(one, three)
    assert torch.allclose(one[0], three[0], rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("length", [77, 20_000])
@pytest.mark.parametrize("cuts", [[0, 16], [0, 8, 16], [0, 4, 8, 12, 16], list(range(17))])
def test_aligned_ranges_send_one_partial_sum(cuts: list[int], length: int) -> None:
    expected = [total / 16 for total in straightforward(0, 16, [length], [torch.float32])]
    for flats in in_threads(ranges(cuts), [length], [torch.float32], 128):
        assert same_bits(flats, expected)
