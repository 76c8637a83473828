"""Whatever happens to the ranks, every sample of an epoch is used exactly once."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rank.data import Feed, ShardedDataset
from actors.rank.sampling import MANY, _permuted, progress, sample_indices

views = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.booleans()), min_size=1, max_size=6)
"""(ranks, steps committed by them, whether the last step is first tried in vain and some shards fetched for nothing)."""


def split(shards: int, ranks: int) -> list[range]:
    ends = [shards * rank // ranks for rank in range(ranks + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(ends)]


class World:
    """Ranks that come and go, each with a dataset and a feed of its own, restored from what the last ones tracked."""

    def __init__(self, length: int, shards: int, per_shard: int, workers: int) -> None:
        self.length, self.shards, self.batch_size, self.workers = length, shards, shards * per_shard, workers
        self.tracked: dict[str, Any] = ShardedDataset(range(length)).state_dict()
        self.step = 0
        self.used: list[int] = []

    def view(self, ranks: int, steps: int, in_vain: bool) -> None:
        feeds = [self._feed() for _ in range(ranks)]
        shares = split(self.shards, ranks)
        for _ in range(steps):
            for feed, share in zip(feeds, shares, strict=True):
                feed.expect([(step, shard) for step in (self.step, self.step + 1) for shard in share])
                self.used += [index for shard in share for index in feed.get(self.step, shard).tolist()]
            self.step += 1
        if in_vain:
            feeds[0].get(self.step, shares[0][0] if shares[0] else 0)
        for feed in feeds:
            feed.close()

    def _feed(self) -> Feed:
        data = ShardedDataset(range(self.length), workers=self.workers)
        data.load_state_dict(self.tracked)
        feed = Feed(data, 3, self.shards, self.batch_size)
        self.tracked = data.state_dict()
        return feed


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 5), st.integers(0, 2), views)
def test_views_and_resumes_skip_and_repeat_no_sample(
    length: int, shards: int, per_shard: int, workers: int, history: list[tuple[int, int, bool]]
) -> None:
    world = World(length, shards, per_shard, workers)
    for ranks, steps, in_vain in history:
        world.view(ranks, steps, in_vain)
    done = progress(world.step, world.batch_size, length)
    assert len(world.used) == done.samples_seen == done.epoch * length + done.seen_in_epoch
    for epoch in range(done.epoch):
        assert sorted(world.used[epoch * length : (epoch + 1) * length]) == list(range(length))
    rest = world.used[done.epoch * length :]
    assert len(set(rest)) == len(rest) == done.seen_in_epoch


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**40), st.integers(0, 2**20), st.integers(1, 2**50), st.integers(MANY, 3 * MANY))
def test_many_at_once_are_the_same_as_one_by_one(seed: int, step: int, length: int, size: int) -> None:
    positions = range(step * size, (step + 1) * size)
    one_by_one = [_permuted(seed, position // length, position % length, length) for position in positions]
    assert sample_indices(seed, step, 0, 1, size, length) == one_by_one
    assert all(type(index) is int for index in sample_indices(seed, step, 0, 1, size, length))


def test_the_order_does_not_change_between_versions() -> None:
    """A run that began under another version goes on with the same samples."""
    assert sample_indices(7, 3, 1, 4, 16, 1000) == [371, 315, 282, 418]
