"""Ranks that sum in two levels over gloo: the bits of one rank, also when a group breaks at either level, and while they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.rank.membership.process_group import Group, GroupBroken
from actors.rank.step.levels import Levels
from actors.rank.step.reduction import Reducer
from actors.rank.step.train_step import TrainStep
from actors.rank.telemetry.recorder import Recorder
from fleet.settings.run import RunSettings, VerifySettings
from tests.unit.test_overlap import STEPS, once, same, trained
from tests.unit.test_reduction import Buffers, mean_over, summed, threads, with_groups
from tests.unit.test_sharded_engine import tracked

__all__ = ["threads"]

LENGTH, SMALL, LARGE = 30_001, 1 << 12, 1 << 20
SITES = ["aabb", "abab", "aaab", "aabbc"]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("bucket_bytes", [SMALL, LARGE])
@pytest.mark.parametrize("sites", SITES)
def test_hosts_agree_bit_for_bit_over_gloo(sites: str, bucket_bytes: int) -> None:
    """Also when what is brought was asked for before the reduction."""
    expected = mean_over(1, LENGTH, bucket_bytes)[0]

    def rank(group: Group) -> bool:
        assert group.sites == tuple(sites), "all are told where each is"
        reducer, mean, right = Reducer(16, "ordered", bucket_bytes, two_levels=True), Buffers(LENGTH), []
        sums = summed(group, LENGTH, reducer)
        assert reducer._levels is not None
        for ahead in (False, True, True):
            if ahead:
                reducer.expect(mean.flats)
            reducer.reduce(sums, mean)
            right.append(torch.equal(mean.flats[0], expected))
        return all(right)

    assert with_groups(len(sites), rank, sites) == [True] * len(sites)


@pytest.mark.parametrize(("sites", "asked"), [("aabb", False), ("abcd", True), ("aaaa", True), ("", True)])
def test_one_level_where_two_do_not_help_or_are_not_asked_for(sites: str, asked: bool) -> None:
    def rank(group: Group) -> bool:
        reducer = Reducer(16, two_levels=asked)
        summed(group, 100, reducer)
        return reducer._levels is None

    assert with_groups(4, rank, sites) == [True] * 4


@pytest.mark.parametrize("sites", ["aabb", "abab", "aab"])
def test_what_travels_while_a_rank_computes_has_the_same_bits(sites: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    [(expected, _)] = trained(1, once, watched=False)
    for expect in (True, False):
        for means, early in trained(len(sites), once, True, expect=expect, sites=sites):
            assert same(means, expected)
            assert early >= STEPS - 2


def breaks(name: str, behind: bool, group: Group, patch: pytest.MonkeyPatch) -> None:
    """Rank 1 is gone when it comes to what ``name`` does, or ``behind`` that."""
    original = getattr(Levels, name)

    def broken(self: Levels, *arguments: Any) -> Any:
        if self._rank == 1 and not behind:
            group.interrupt("lost")
        found = original(self, *arguments)
        if self._rank == 1 and behind:
            group.interrupt("lost")
        return found

    patch.setattr(Levels, name, broken)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("name", "behind"), [("_combined", True), ("leaves", False), ("pass_on", False)])
def test_sums_outlive_a_group_that_breaks(name: str, behind: bool) -> None:
    """Rank 1 has combined the first bucket, has what it owns, or has what it should pass on.

    All others learn of it, what they have computed stays, and in the next group, where hosts are others, it comes out as it should.
    """
    expected = mean_over(1, LENGTH, SMALL)[0]
    kept: dict[int, Any] = {}

    def loses_one(group: Group) -> bool:
        reducer, mean = Reducer(16, "ordered", SMALL, two_levels=True), Buffers(LENGTH)
        sums = summed(group, LENGTH, reducer)
        if group.rank == 1:
            breaks(name, behind, group, patch)
        kept[group.rank] = reducer, sums
        group.all_gather(torch.empty(4, 1), torch.zeros(1))  # all are patched
        with pytest.raises(GroupBroken):
            reducer.reduce(sums, mean)
        return True

    def goes_on(group: Group) -> bool:
        reducer, sums = kept[group.rank]
        reducer.bind(group, [kept[rank][1].blocks for rank in range(group.size)])
        mean = Buffers(LENGTH)
        reducer.reduce(sums, mean)
        return torch.equal(mean.flats[0], expected)

    with pytest.MonkeyPatch.context() as patch:
        assert with_groups(4, loses_one, "aabb") == [True] * 4
    assert with_groups(4, goes_on, "abbb") == [True] * 4


@pytest.mark.parametrize(
    ("changes", "two"), [({}, True), ({"verify": VerifySettings(compute=0.1)}, False), ({"two_level_sums": False}, False)]
)
@pytest.mark.parametrize("sharding", ["none", "zero1"])
def test_sums_that_are_checked_go_in_one_level(sharding: str, changes: dict[str, Any], two: bool, tmp_path: Path) -> None:
    """Whoever owns a chunk is judged by its sum: nobody else may have had a part in it."""
    chosen = RunSettings(**{"world": 4, "shards": 16, "optimizer_sharding": sharding, "two_level_sums": True, **changes})
    train = TrainStep(tracked(), chosen, Recorder(tmp_path / "ring", 0), None)
    assert train.reducer._two_levels == two
