"""Sums in two levels: at any placement and for any split of the shards the bits of one level, and never more between hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.protocol.chunks import BLOCK
from fleet.protocol.shards import Additions, Block, cover, join, middle
from fleet.protocol.two_level import ChunkPart, Leaf, TwoLevel, helps, hosts_of
from tests.property import test_tree_sum as tree_sum

LENGTH = 60
Values = dict[Block, np.ndarray]
"""Of one chunk: partial sums."""


def value(shard: int, owner: int) -> np.ndarray:
    return np.random.default_rng((shard, owner)).standard_normal(LENGTH).astype(np.float32) * np.float32(10.0 ** (shard % 5))


def straightforward(lo: int, hi: int, owner: int) -> np.ndarray:
    if hi - lo == 1:
        return value(lo, owner)
    cut = middle(lo, hi)
    return straightforward(lo, cut, owner) + straightforward(cut, hi, owner)


def chunks_across(plan: TwoLevel) -> int:
    """How many chunks cross between hosts in all, there and back."""
    return sum((len(plan.leaves) - len(ranks)) * (len(plan.crossing(host)) + 1) for host, ranks in enumerate(plan.hosts))


def flat_chunks_across(plan: TwoLevel) -> int:
    """The same where each rank sends to each owner what it has itself, and gets the sum from it."""
    return sum((len(plan.leaves) - len(ranks)) * sum(len(plan.leaves[rank]) + 1 for rank in ranks) for ranks in plan.hosts)


def added(values: Sequence[np.ndarray], additions: Additions) -> list[np.ndarray]:
    found = list(values)
    for left, right in additions:
        found[left] = found[left] + found[right]
    return found


@st.composite
def worlds(draw: st.DrawFn) -> tuple[tuple[str, ...], list[list[int]]]:
    """(where each rank is, its shards)."""
    assigned = draw(tree_sum.splits())
    return tuple(draw(st.lists(st.sampled_from("abc"), min_size=len(assigned), max_size=len(assigned)))), assigned


def plan_of(sites: tuple[str, ...], assigned: list[list[int]]) -> TwoLevel:
    shards = sum(map(len, assigned))
    return TwoLevel(hosts_of(sites), tuple(cover(set(mine), shards) for mine in assigned), shards)


class Simulated:
    """The plan, carried out on arrays. Counts what crosses between hosts, in elements."""

    def __init__(self, plan: TwoLevel) -> None:
        self.plan, self.across = plan, 0

    def cross(self, part: np.ndarray, sender: int, receiver: int) -> np.ndarray:
        self.across += part.size * (self.plan.host_of(sender) != self.plan.host_of(receiver))
        return part

    def piece(self, chunk: np.ndarray, part: ChunkPart) -> np.ndarray:
        return chunk[LENGTH * part.lo // part.of : LENGTH * part.hi // part.of]

    def leaf(self, leaf: Leaf, owner: int) -> np.ndarray:
        return straightforward(*self.plan.leaves[leaf.rank][leaf.number], owner)

    def combined(self, host: int, owner: int) -> list[np.ndarray]:
        """What the owner gets of a host, by block."""
        additions, at = self.plan.combined(host)
        found: list[list[np.ndarray]] = [[] for _ in at]
        for part in self.plan.parts(host, owner):
            values = [
                self.cross(self.piece(self.leaf(leaf, owner), part), leaf.rank, part.combiner) for leaf in self.plan.contributed(host)
            ]
            sums = added(values, additions)
            for pieces, index in zip(found, at, strict=True):
                pieces.append(self.cross(sums[index], part.combiner, owner))
        return [np.concatenate(pieces) for pieces in found]

    def owned(self, owner: int) -> np.ndarray:
        """The sum of the owner's chunk."""
        plan, host = self.plan, self.plan.host_of(owner)
        others = {other: self.combined(other, owner) for other in range(len(plan.hosts)) if other != host}
        leaves = plan.owned(host)
        values = [
            self.cross(self.leaf(leaf, owner), leaf.rank, owner) if leaf.rank >= 0 else others[leaf.host][leaf.number] for leaf in leaves
        ]
        additions, left = join([leaf.block for leaf in leaves], plan.shards)
        assert left == [0]
        return added(values, additions)[0]

    def back(self, owner: int, total: np.ndarray) -> Iterator[np.ndarray]:
        """What each rank has of it then."""
        plan = self.plan
        for rank in range(len(plan.leaves)):
            host = plan.host_of(rank)
            if host == plan.host_of(owner):
                yield total
                continue
            parts = plan.parts(host, owner)
            pieces = [self.piece(total, part) for part in parts]
            for part, one in zip(parts, pieces, strict=True):
                if part.combiner == rank:
                    self.cross(one, owner, rank)
            yield np.concatenate(pieces)


@settings(max_examples=150)
@given(worlds())
def test_the_plan_gives_the_bits_of_the_tree_and_counts_what_crosses(world: tuple[tuple[str, ...], list[list[int]]]) -> None:
    plan = plan_of(*world)
    simulated = Simulated(plan)
    for owner in range(len(plan.leaves)):
        expected = straightforward(0, plan.shards, owner)
        for found in simulated.back(owner, simulated.owned(owner)):
            assert found.tobytes() == expected.tobytes()
    assert simulated.across == LENGTH * chunks_across(plan)
    assert chunks_across(plan) <= flat_chunks_across(plan)
    assert (chunks_across(plan) < flat_chunks_across(plan)) == helps(plan.hosts)


@settings(max_examples=150)
@given(worlds())
def test_members_of_a_host_combine_as_much_each(world: tuple[tuple[str, ...], list[list[int]]]) -> None:
    """And all of each chunk that is owned elsewhere is combined once."""
    plan = plan_of(*world)
    for host, ranks in enumerate(plan.hosts):
        parts = list(plan.all_parts(host))
        loads = [sum((part.hi - part.lo) for part in parts if part.combiner == rank) for rank in ranks]
        assert set(loads) == {len(plan.leaves) - len(ranks)}
        for owner in range(len(plan.leaves)):
            spans = [(part.lo, part.hi) for part in parts if part.owner == owner]
            covered = [number for lo, hi in spans for number in range(lo, hi)]
            assert covered == (list(range(len(ranks))) if owner not in ranks else [])


@settings(max_examples=60)
@given(
    worlds(),
    st.lists(tree_sum.LENGTHS, min_size=1, max_size=2),
    st.sampled_from([500, 1 << 14, 1 << 20]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_ranks_exchange_the_bits_of_the_tree(
    world: tuple[tuple[str, ...], list[list[int]]], lengths: list[int], bucket_bytes: int, dtype: torch.dtype
) -> None:
    sites, assigned = world
    shards, dtypes = sum(map(len, assigned)), [dtype] * len(lengths)
    expected = [total / shards for total in tree_sum.straightforward(0, shards, lengths, dtypes)]
    for flats in tree_sum.in_threads(assigned, lengths, dtypes, bucket_bytes, sites=sites):
        assert tree_sum.same_bits(flats, expected)


class Counting(tree_sum.ThreadGroup):
    """Counts the bytes that leave their host."""

    def __init__(self, hosts: str, left: list[int], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._hosts, self._left = hosts, left

    def start(self, sends: Any, receives: Any, tag: int = 0) -> Any:
        self._left.append(sum(tensor.nbytes for tensor, peer in sends if self._hosts[peer] != self._hosts[self.rank]))
        return super().start(sends, receives, tag)


@pytest.mark.parametrize(
    ("hosts", "ratio"), [("aabb", 1 / 2), ("aaaabbbb", 1 / 4), ("abab", 3 / 4), ("aabc", 4 / 5), ("ab", 1), ("aaaa", 1)]
)
def test_what_leaves_hosts(hosts: str, ratio: float) -> None:
    """Where neighbours in the view are neighbours on a host, one sum in the place of each of its ranks'; else less is saved."""
    size, reductions = len(hosts), 4
    assigned = tree_sum.ranges([16 * rank // size for rank in range(size + 1)])
    plan = plan_of(tuple(hosts), assigned)
    crossed = []
    for sites in (tuple(hosts), ("",) * size):
        left: list[int] = []
        tree_sum.in_threads(assigned, [size * BLOCK], [torch.float32], 1 << 22, sites=sites, make=partial(Counting, hosts, left))
        crossed.append(sum(left))
    chunk_bytes = reductions * BLOCK * 4
    if size > 2:  # two swap
        assert crossed == [chunks_across(plan) * chunk_bytes, flat_chunks_across(plan) * chunk_bytes]
    assert crossed[0] == ratio * crossed[1]


def test_a_rank_that_says_nothing_of_its_place_shares_no_host() -> None:
    assert hosts_of(("", "a", "", "a")) == ((0,), (1, 3), (2,))
    assert helps(hosts_of(("", "a", "a"))) and not helps(hosts_of(("", "", "a"))) and not helps(hosts_of(("a", "a")))


def test_what_does_not_lie_side_by_side_is_not_added() -> None:
    assert join([(0, 1), (3, 4)], 4) == ([], [0, 1])
    assert join([(0, 1), (1, 2), (4, 6)], 8) == ([(0, 1)], [0, 2])
    assert join([(1, 2), (2, 3)], 4) == ([], [0, 1])
