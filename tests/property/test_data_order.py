"""Whatever happens to the ranks, every sample of an epoch is used exactly once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rank.data.feeds import Feed, ShardedDataset
from actors.rank.data.parquet import Parquet
from actors.rank.data.sampling import MANY, _permuted, sample_indices
from actors.rank.data.streams import Streams
from actors.rank.data.windows import Windows

views = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.booleans()), min_size=1, max_size=6)
"""(ranks, steps committed by them, whether the last step is first tried in vain and some shards fetched for nothing)."""


def split(shards: int, ranks: int) -> list[range]:
    ends = [shards * rank // ranks for rank in range(ranks + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(ends)]


class World:
    """Ranks that come and go, each with a dataset and a feed of its own, restored from what the last ones tracked."""

    def __init__(self, make: Callable[[], Any], shards: int, per_shard: int) -> None:
        self.make, self.shards, self.batch_size = make, shards, shards * per_shard
        self.tracked: dict[str, Any] = make().state_dict()
        self.step = 0
        self.used: list[Any] = []

    def live(self, history: list[tuple[int, int, bool]]) -> None:
        for ranks, steps, in_vain in history:
            self.view(ranks, steps, in_vain)

    def view(self, ranks: int, steps: int, in_vain: bool) -> None:
        feeds = [self._feed() for _ in range(ranks)]
        shares = split(self.shards, ranks)
        for _ in range(steps):
            for feed, share in zip(feeds, shares, strict=True):
                feed.expect([(step, shard) for step in (self.step, self.step + 1) for shard in share])
                self.used += [index for shard in share for index in feed.get(self.step, shard)]
            self.step += 1
        if in_vain:
            feeds[0].get(self.step, shares[0][0] if shares[0] else 0)
        for feed in feeds:
            feed.close()

    def _feed(self) -> Feed:
        data = self.make()
        data.load_state_dict(self.tracked)
        feed = Feed(data, 3, self.shards, self.batch_size, list)
        self.tracked = data.state_dict()
        return feed


@settings(max_examples=60)
@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 5), st.integers(0, 2), views)
def test_views_and_resumes_skip_and_repeat_no_sample(
    length: int, shards: int, per_shard: int, workers: int, history: list[tuple[int, int, bool]]
) -> None:
    world = World(lambda: ShardedDataset(range(length), workers=workers), shards, per_shard)
    world.live(history)
    every_sample_once(world, length)


@dataclass(frozen=True)
class DataProgress:
    """Where in the data a run is: ``samples_seen`` in all, which make ``epoch`` whole epochs and ``seen_in_epoch`` samples of the next."""

    samples_seen: int
    epoch: int
    seen_in_epoch: int


def progress(step: int, batch_size: int, dataset_len: int) -> DataProgress:
    """What ``step`` committed steps have taken from a dataset."""
    return DataProgress(step * batch_size, *divmod(step * batch_size, dataset_len))


def every_sample_once(world: World, length: int) -> None:
    done = progress(world.step, world.batch_size, length)
    assert len(world.used) == done.samples_seen == done.epoch * length + done.seen_in_epoch
    for epoch in range(done.epoch):
        assert sorted(world.used[epoch * length : (epoch + 1) * length]) == list(range(length))
    rest = world.used[done.epoch * length :]
    assert len(set(rest)) == len(rest) == done.seen_in_epoch


@functools.cache
def rows(length: int, rows_a_group: int) -> str:
    url = f"memory://order/{length}-{rows_a_group}.parquet"
    with fsspec.open(url, "wb") as file:
        pq.write_table(pa.table({"number": range(length)}), file, row_group_size=rows_a_group)
    return url


@settings(max_examples=40)
@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 400), st.integers(1, 6), st.integers(1, 5), st.integers(0, 2), views)
def test_nor_do_they_in_parquet(
    length: int, rows_a_group: int, window_bytes: int, shards: int, per_shard: int, workers: int, history: list[tuple[int, int, bool]]
) -> None:
    reader = Parquet(parse=lambda row: row["number"], window_bytes=window_bytes)
    world = World(lambda: ShardedDataset(rows(length, rows_a_group), reader, workers=workers), shards, per_shard)
    world.live(history)
    every_sample_once(world, length)
    again = World(lambda: ShardedDataset(rows(length, rows_a_group), reader, workers=0), shards, per_shard)
    again.live([(1, world.step, False)])
    assert again.used == world.used, "at any world size"


@settings(max_examples=40)
@given(st.integers(2, 6), st.integers(1, 5), st.integers(0, 2), st.integers(1, 30), st.booleans(), views)
def test_nor_do_they_in_streams(
    shards: int, per_shard: int, workers: int, length: int, measured: bool, history: list[tuple[int, int, bool]]
) -> None:
    def make(shard: int, shards: int, epoch: int) -> Any:
        samples = [(shard, epoch, number) for number in range(length + shard)]
        return samples if measured else iter(samples)

    def endless(shard: int) -> Iterator[Any]:
        return (sample for epoch in itertools.count() for sample in make(shard, shards, epoch))

    world = World(lambda: Streams(make, workers=workers), shards, per_shard)
    world.live(history)
    expected = [endless(shard) for shard in range(shards)]
    assert world.used == [next(expected[shard]) for _ in range(world.step) for shard in range(shards) for _ in range(per_shard)]


groups = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 50)), min_size=1, max_size=12).filter(lambda some: any(n for n, _ in some))


@settings(max_examples=100)
@given(st.integers(0, 2**40), groups, st.integers(1, 200), st.data())
def test_an_order_by_windows_has_every_sample_once_an_epoch(
    seed: int, sized: list[tuple[int, int]], window_bytes: int, data: st.DataObject
) -> None:
    sizes, weights = (np.array(numbers, np.int64) for numbers in zip(*sized, strict=True))
    windows, length = Windows(sizes, weights, window_bytes), int(sizes.sum())
    order = windows.indices(seed, 0, 3 * length)
    assert all(sorted(order[epoch * length : (epoch + 1) * length]) == [*range(length)] for epoch in range(3))
    first = data.draw(st.integers(0, 2 * length))
    count = data.draw(st.integers(1, length))
    assert Windows(sizes, weights, window_bytes).indices(seed, first, count) == order[first : first + count]


@settings(max_examples=100)
@given(st.integers(0, 2**40), st.integers(0, 2**20), st.integers(1, 2**50), st.integers(MANY, 3 * MANY))
def test_many_at_once_are_the_same_as_one_by_one(seed: int, step: int, length: int, size: int) -> None:
    positions = range(step * size, (step + 1) * size)
    one_by_one = [_permuted(seed, position // length, position % length, length) for position in positions]
    assert sample_indices(seed, step, 0, 1, size, length) == one_by_one
    assert all(type(index) is int for index in sample_indices(seed, step, 0, 1, size, length))


def test_the_order_does_not_change_between_versions() -> None:
    """A run that began under another version goes on with the same samples."""
    assert sample_indices(7, 3, 1, 4, 16, 1000) == [371, 315, 282, 418]
    sizes = np.array([10, 20, 5, 40, 25])
    assert Windows(sizes, sizes * 8, 200).indices(7, 95, 10) == [29, 11, 28, 22, 21, 50, 72, 63, 35, 65]
