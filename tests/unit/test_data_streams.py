"""Each batch shard has a stream of its own, which any rank can take up anywhere; what cannot be taken up so is refused by name."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from actors.rank.data.feeds import Feed, Feeds, ShardedDataset
from actors.rank.data.sampling import samples_of
from actors.rank.data.streams import PASSED, Stream
from actors.rank.telemetry.recorder import Recorder
from fleet.data import Streams
from fleet.errors import ConfigError
from fleet.protocol.records import COMPUTE, DATA
from fleet.simulation.rng import stream as generator

SHARDS, BATCH = 4, 8


def numbers(shard: int, shards: int, epoch: int) -> Iterator[tuple[int, int, int]]:
    """Endless."""
    return ((shard, epoch, number) for number in itertools.count())


def finite(shard: int, shards: int, epoch: int) -> list[tuple[int, int, int]]:
    """Of another length in each shard and epoch; with ``len()``."""
    return [(shard, epoch, number) for number in range(5 + shard + 3 * epoch)]


def forwards(shard: int, shards: int, epoch: int) -> Iterator[int]:
    return itertools.count(100 * shard)


def read(make: Any, step: int, shard: int) -> list[Any]:
    """As a rank that has just come would."""
    data = Streams(make)
    data.begin(BATCH, SHARDS)
    return samples_of(data, 7, step, shard, SHARDS, BATCH)


# ---- positions ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [numbers, finite, lambda *which: iter(finite(*which))])
def test_whoever_takes_a_shard_up_gets_what_one_who_read_it_all_gets(make: Any) -> None:
    data = Streams(make)
    for step, shard in itertools.product(range(20), range(SHARDS)):
        assert samples_of(data, 7, step, shard, SHARDS, BATCH) == read(make, step, shard)


def test_an_epoch_begins_where_the_last_one_ends() -> None:
    data = Streams(finite)
    seen = [sample for step in range(10) for sample in samples_of(data, 7, step, 1, SHARDS, BATCH)]
    assert seen == [*finite(1, SHARDS, 0), *finite(1, SHARDS, 1), *finite(1, SHARDS, 2)][:20]


def test_a_step_can_be_taken_again() -> None:
    data = Streams(numbers)
    first = [samples_of(data, 7, step, 2, SHARDS, BATCH) for step in (0, 1, 2, 1, 0, 5, 4, 5)]
    assert first == [read(numbers, step, 2) for step in (0, 1, 2, 1, 0, 5, 4, 5)]


class Counted:
    """Notes how much is read of it."""

    def __init__(self, first: int = 0, length: int = 10_000) -> None:
        self.first, self.length = first, length
        self.read: list[int] = []

    def __iter__(self) -> Iterator[int]:
        for number in range(self.first, self.length):
            self.read.append(number)
            yield number


class Skips(Counted):
    def skip(self, count: int) -> Skips:
        later = type(self)(min(self.first + count, self.length), self.length)
        later.read = self.read
        return later


def test_what_can_skip_is_not_read_from_its_beginning() -> None:
    slow, quick = Counted(), Skips()
    for one in (slow, quick):
        found = Stream(lambda epoch, one=one: one, 0)
        assert found.take(0, 2) == [0, 1] and found.take(2000, 2) == [2000, 2001] and found.take(2002, 2) == [2002, 2003]
    assert slow.read == [*range(2004)]
    assert quick.read == [0, 1, *range(2000 - 2 * PASSED, 2004)]


def test_a_skip_beyond_the_end_reads_to_find_it() -> None:
    class Moves(Counted):
        """Skips as a file does: in place."""

        def skip(self, count: int) -> Moves:
            self.first = min(self.first + count, self.length)
            return self

    for kind in (Skips, Moves):
        assert Stream(lambda epoch, kind=kind: kind(length=7), 0).take(40, 4) == [5, 6, 0, 1]


def test_epochs_of_known_length_are_passed_over() -> None:
    class Measured(Counted):
        def __len__(self) -> int:
            return self.length

    epochs: dict[int, Measured] = {}
    found = Stream(lambda epoch: epochs.setdefault(epoch, Measured(length=10)), 0)
    assert found.take(3 * 10 + 4, 2) == [4, 5]
    assert [one.read for one in epochs.values()] == [[], [], [], [*range(6)]]


def test_two_threads_may_come_in_either_order() -> None:
    counted = Counted()
    found = Stream(lambda epoch: counted, 0)
    assert [found.take(2, 2), found.take(0, 2), found.take(4, 2)] == [[2, 3], [0, 1], [4, 5]]
    assert counted.read == [*range(6)]


def test_a_stream_that_failed_is_read_anew_and_does_not_look_ended() -> None:
    fails = [True]

    def make(epoch: int) -> Iterator[int]:
        for number in range(100):
            if number == 4 and fails.pop():
                fails.append(False)
                raise OSError("away")
            yield 1000 * epoch + number

    found = Stream(make, 0)
    found.take(0, 4)
    with pytest.raises(OSError, match="away"):
        found.take(4, 4)
    assert found.take(4, 4) == [4, 5, 6, 7]


# ---- fetched ahead -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_are_the_same_however_they_are_fetched(workers: int) -> None:
    feed = Feed(Streams(numbers, workers=workers), 7, SHARDS, BATCH, list)
    for step in range(20):
        feed.expect([(at, shard) for at in (step, step + 1) for shard in range(SHARDS)])
        for shard in range(SHARDS):
            assert feed.get(step, shard) == [(shard, 0, 2 * step), (shard, 0, 2 * step + 1)]
    assert feed._ahead is bool(workers) and feed.samples == 0
    feed.close()


def test_the_record_tells_streams_apart() -> None:
    digests = []
    for make in (numbers, numbers, forwards, lambda shard, shards, epoch: itertools.count(shard)):
        feed = Feed(Streams(make), 7, SHARDS, BATCH, list)
        digests.append(feed.data_sha256)
        feed.close()
    assert digests[0] == digests[1] and len(set(digests)) == 3 and all(digests)


def test_another_batch_size_is_refused() -> None:
    data, again = Streams(numbers), Streams(numbers)
    data.begin(8, SHARDS)
    again.load_state_dict(data.state_dict())
    with pytest.raises(ConfigError, match="batch_size = 16: the run began with 8"):
        Feed(again, 7, SHARDS, 16)
    with pytest.raises(ConfigError, match="batch_size = 6"):
        Feed(Streams(numbers), 7, SHARDS, 6)


@pytest.mark.parametrize("workers", [0, 2])
def test_to_pass_over_what_others_read_is_no_hang(workers: int) -> None:
    reported: list[Any] = []
    recorder: Any = SimpleNamespace(code=COMPUTE, switch=reported.append, stepping=lambda yes: reported.append(yes) or True)
    recorder.during = functools.partial(Recorder.during, recorder)
    feed = Feeds(7, SHARDS, recorder).of(Streams(numbers, workers=workers), BATCH, list)
    assert reported == [DATA, False, True, COMPUTE], "the first samples are read, to see whether the streams can be taken up"
    reported.clear()
    for step in (0, 1, 2):
        feed.get(step, 1)
    assert reported == []
    for step, shard, far in ((3, 2, True), (4, 2, False), (40, 1, True), (41, 1, False), (20, 1, True)):
        reported.clear()
        feed.get(step, shard)
        assert reported == [False, True] * far, (step, shard)
    feed.close()


# ---- what splits itself ------------------------------------------------------------------------------------------------------------------


class Splits(IterableDataset[int]):
    """As torch's documentation has it."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None and info.dataset is self
        return iter(range(info.id, 40, info.num_workers))


def test_a_dataset_that_splits_itself_is_split_by_batch_shards() -> None:
    feed = Feed(Streams(Splits()), 7, SHARDS, BATCH, list)
    seen = [sample for step in range(5) for shard in range(SHARDS) for sample in feed.get(step, shard)]
    assert sorted(seen) == [*range(40)] and seen[:4] == [0, 4, 1, 5]
    assert feed.get(5, 1) == [1, 5] and feed._ahead is False
    assert get_worker_info() is None
    feed.close()


def test_it_is_split_as_a_loader_would() -> None:
    ours = [samples_of(Streams(Splits()), 7, 0, shard, 2, 40) for shard in range(2)]
    theirs = list(DataLoader(Splits(), batch_size=20, num_workers=2, collate_fn=list))
    assert ours == theirs


class Shuffles(Splits):
    """A shuffle of its own in each shard and epoch, by torch's conventions."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        info: Any = get_worker_info()
        mine = [(self.epoch, number) for number in range(info.id, 40, info.num_workers)]
        random.Random(info.seed).shuffle(mine)
        return iter(mine)


def test_it_is_told_the_epoch_and_a_seed() -> None:
    data = Streams(Shuffles())
    data.begin(BATCH, SHARDS)
    first = [sample for step in range(5) for sample in samples_of(data, 7, step, 1, SHARDS, BATCH)]
    second = [sample for step in range(5, 10) for sample in samples_of(data, 7, step, 1, SHARDS, BATCH)]
    assert {epoch for epoch, _ in first} == {0} and {epoch for epoch, _ in second} == {1}
    assert sorted(number for _, number in first) == sorted(number for _, number in second) == [*range(1, 40, 4)]
    assert [number for _, number in first] != [number for _, number in second]
    assert samples_of(Streams(Shuffles()), 7, 7, 1, SHARDS, BATCH) == second[4:6]


def test_the_streams_of_a_hugging_face_dataset() -> None:
    shown = datasets.Dataset.from_dict({"x": [*range(64)]}).to_iterable_dataset(num_shards=8)

    def make(shard: int, shards: int, epoch: int) -> Iterable[Any]:
        part = shown.shard(num_shards=shards, index=shard).shuffle(seed=3, buffer_size=10)
        part.set_epoch(epoch)
        return part

    for data in (Streams(make), Streams(shown)):
        data.begin(BATCH, SHARDS)
        seen = [row["x"] for step in range(8) for shard in range(SHARDS) for row in samples_of(data, 7, step, shard, SHARDS, BATCH)]
        assert sorted(seen) == [*range(64)]
    assert read(make, 11, 2) == samples_of(Streams(make), 7, 11, 2, SHARDS, BATCH)


# ---- what is refused ---------------------------------------------------------------------------------------------------------------------


class Ignores(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


def drawn(draw: Callable[[], Any]) -> Callable[[int, int, int], Iterator[Any]]:
    return lambda shard, shards, epoch: (draw() for _ in itertools.count())


ONCE = iter(range(5))
BAD = {
    "every shard has the same": (lambda shard, shards, epoch: itertools.count(), "batch shards 0 and 1 have the same samples"),
    "does not split itself": (Ignores(), "Ignores.*does not ask get_worker_info"),
    "python's generator": (drawn(random.random), "others when it is made a second time"),
    "numpy's generator": (drawn(np.random.rand), "others when it is made a second time"),
    "torch's generator": (drawn(lambda: torch.rand(2)), "others when it is made a second time"),
    "one shard has none": (lambda shard, shards, epoch: range(100) if shard == 0 else [], "shard = 1: epoch 0 of its stream has no sample"),
    "the same iterator again": (lambda shard, shards, epoch: ONCE, "shard = 0: epoch 1 of its stream has no sample"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_stream_is_refused_before_the_first_step(what: str) -> None:
    source, message = BAD[what]
    with pytest.raises(ConfigError, match=message):
        Feed(Streams(source), 7, SHARDS, BATCH)


def test_the_generators_are_the_loops_own() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    with pytest.raises(ConfigError):
        Streams(drawn(lambda: torch.rand(2))).begin(BATCH, SHARDS)
    assert torch.equal(torch.rand(1), expected)


def test_what_tells_nothing_is_not_refused() -> None:
    """All samples are the same: shards cannot be told apart by them."""
    Streams(lambda shard, shards, epoch: itertools.repeat(0)).begin(BATCH, SHARDS)
    Streams(lambda shard, shards, epoch: itertools.repeat(lambda: 0)).begin(BATCH, SHARDS)


class FromRay:
    def __len__(self) -> int:
        return 100


FromRay.__module__ = "ray.data.dataset"


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Ignores(), r"'Ignores'.*no numbers.*Streams\(make\)"),
        (FromRay(), r"'FromRay'.*preserve_order.*write_parquet"),
        (DataLoader([1, 2, 3]), r"'DataLoader'.*Give its dataset"),
        ({"train": [1, 2]}, r"'dict'.*Name the split"),
        (iter([1]), r"'list_iterator'.*chosen by number"),
        (numbers, r"'function'.*chosen by number"),
    ],
)
def test_what_has_no_numbers_is_refused_by_name(dataset: Any, message: str) -> None:
    for take in (lambda: Feed(dataset, 7, SHARDS, BATCH), lambda: ShardedDataset(dataset)):
        with pytest.raises(ConfigError, match=message):
            take()


def test_a_dataset_by_number_may_be_a_dict() -> None:
    assert ShardedDataset({0: "a", 1: "b"})[1] == "b"


@pytest.mark.parametrize("batch_size", ["8", 8.0, None])
def test_a_batch_size_is_a_number_of_samples(batch_size: Any) -> None:
    with pytest.raises(ConfigError, match="batch_size = .*Give an int"):
        Feed([1, 2, 3], 7, SHARDS, batch_size)


@pytest.mark.parametrize(("source", "workers", "message"), [([1, 2], 2, "source = 'list'"), (numbers, -1, "workers = -1")])
def test_what_streams_cannot_be_made_of_is_refused(source: Any, workers: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Streams(source, workers=workers)


def test_a_real_ray_dataset_is_known_by_its_module() -> None:
    import ray.data

    assert isinstance(ray.data, ModuleType) and ray.data.Dataset.__module__.startswith("ray.data.")


def test_private_generators_are_what_a_stream_may_draw_from() -> None:
    def make(shard: int, shards: int, epoch: int) -> Iterator[float]:
        draw = generator(3, shard, epoch)
        return (draw.random() for _ in range(1000))

    assert read(make, 100, 3) == samples_of(Streams(make), 7, 100, 3, SHARDS, BATCH)
