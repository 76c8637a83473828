"""Which shards each rank computes: balanced, tiling, and with few partial sums."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import ConfigError
from fleet.protocol.shards import blocks, tree
from policies.placement import copies, ranges


def partials(split: tuple[tuple[int, int], ...], shards: int) -> int:
    return sum(len(blocks(start, stop, shards)) for start, stop in split)


def test_sixteen_over_three_takes_five_partial_sums() -> None:
    assert ranges(16, 3) == ((0, 6), (6, 12), (12, 16))
    assert partials(ranges(16, 3), 16) == 5


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_powers_of_two_need_one_partial_sum_a_rank(ranks: int) -> None:
    assert partials(ranges(16, ranks), 16) == ranks


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 12, 16])
def test_every_split_is_balanced_and_none_has_fewer_partial_sums(shards: int) -> None:
    for ranks in range(1, shards + 1):
        largest = -(-shards // ranks)
        split = ranges(shards, ranks)
        assert [a for a, _ in split] == [0, *[b for _, b in split[:-1]]] and split[-1][1] == shards
        assert all(1 <= b - a <= largest for a, b in split)
        cuts = (((0, *inner, shards)) for inner in itertools.combinations(range(1, shards), ranks - 1))
        balanced = (tuple(itertools.pairwise(cut)) for cut in cuts)
        fewest = min(partials(s, shards) for s in balanced if max(b - a for a, b in s) <= largest)
        assert partials(split, shards) == fewest


@pytest.mark.parametrize(("shards", "ranks"), [(10_000, 10_000), (16_384, 10_000), (65_536, 9_999), (4_096, 1_000)])
def test_large_worlds_are_balanced_too(shards: int, ranks: int) -> None:
    split = ranges(shards, ranks)
    assert len(split) == ranks and split[0][0] == 0 and split[-1][1] == shards
    assert all(one[1] == other[0] for one, other in itertools.pairwise(split))
    assert all(1 <= b - a <= -(-shards // ranks) for a, b in split)


def test_more_ranks_than_shards_are_refused() -> None:
    with pytest.raises(ConfigError, match="ranks = 17"):
        ranges(16, 17)


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 12, 16, 33])
def test_blocks_are_nodes_of_the_tree_and_tile_any_range(shards: int) -> None:
    assert len(tree(shards)) == 2 * shards - 1
    for start, stop in itertools.combinations(range(shards + 1), 2):
        found = blocks(start, stop, shards)
        assert set(found) <= tree(shards)
        assert [i for a, b in found for i in range(a, b)] == list(range(start, stop))


def test_copies_go_round_the_ring_and_never_stay_at_home() -> None:
    nodes = dict.fromkeys("abcd", "")
    assert copies(list("abcd"), nodes, 1) == (("b",), ("c",), ("d",), ("a",))
    assert copies(list("aabb"), dict.fromkeys("ab", ""), 1) == (("b",), ("b",), ("a",), ("a",))
    assert copies(list("aa"), dict.fromkeys("ab", ""), 2) == (("b",), ("b",)), "as few as there are"
    assert copies(["a"], {"a": ""}, 1) == ((),)
    assert copies(["new"], {"a": ""}, 1) == (("a",),), "a node that has no memory to offer has ranks to copy all the same"


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_copies_are_spread_evenly_over_other_domains(nodes: int, per_node: int, wanted: int, racks: int) -> None:
    domains = {f"n{i:02}": f"rack{i % racks}" for i in range(nodes)}
    homes = [node for node in domains for _ in range(per_node)]
    chosen = copies(homes, domains, wanted)
    for home, kept in zip(homes, chosen, strict=True):
        assert home not in kept and len(set(kept)) == len(kept) == min(wanted, nodes - 1)
        if racks > 1 and nodes >= racks > 1 and kept:
            assert domains[kept[0]] != domains[home]
    if racks == 1 and nodes > 1:
        load = Counter(node for kept in chosen for node in kept)
        assert max(load.values()) - min(load[node] for node in domains) <= max(2, per_node)
