"""``collate_fn``: as torch's DataLoader has it, ahead where that changes nothing, and with the same random numbers on whichever rank."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.rank.data.feeds import FEEDS, Feed, Feeds, ShardedDataset
from actors.rank.data.sampling import samples_of
from fleet.errors import ConfigError

SHARDS, BATCH = 2, 8
RECORDER: Any = SimpleNamespace(during=nullcontext, stepping=bool)


def ragged(samples: list[int]) -> torch.Tensor:
    """What the default cannot do."""
    return torch.nn.utils.rnn.pad_sequence([torch.full((1 + sample % 3,), sample) for sample in samples], batch_first=True)


class Noted:
    """A collate function that notes its threads, and draws if told."""

    def __init__(self, draws: bool = False) -> None:
        self.draws, self.threads = draws, list[str]()

    def __call__(self, samples: list[int]) -> torch.Tensor:
        self.threads.append(threading.current_thread().name.partition("_")[0])
        noise = torch.randint(1000, (len(samples),)) if self.draws else torch.zeros(len(samples))
        return torch.stack([torch.tensor(samples).float(), noise.float()])

    method = __call__


def run(feed: Feed, steps: int = 6, collate: Any = None) -> list[torch.Tensor]:
    found = []
    for step in range(steps):
        if collate is not None:
            feed.collate_with(collate(step))
        feed.expect([(at, shard) for at in (step, step + 1) for shard in range(SHARDS)])
        found += [feed.get(step, shard) for shard in range(SHARDS)]
    feed.close()
    return found


def feed(collate_fn: Any, workers: int = 2, dataset: Any = None) -> Feed:
    return Feed(ShardedDataset(dataset or range(64), workers=workers), 7, SHARDS, BATCH, collate_fn)


def expected(collate_fn: Any, steps: int = 6) -> list[torch.Tensor]:
    return [collate_fn(samples_of(range(64), 7, step, shard, SHARDS, BATCH)) for step in range(steps) for shard in range(SHARDS)]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_made_by_it(workers: int) -> None:
    assert all(map(torch.equal, run(feed(ragged, workers)), expected(ragged)))
    plain = Feed(range(64), 7, SHARDS, BATCH, ragged)
    assert all(map(torch.equal, run(plain), expected(ragged)))


def test_one_that_draws_none_works_ahead() -> None:
    noted = Noted()
    run(feed(noted))
    assert noted.threads.count("MainThread") == 1 and set(noted.threads) == {"MainThread", "data"}


def test_one_that_draws_is_called_when_asked_and_its_samples_come_ahead() -> None:
    class Source:
        def __init__(self) -> None:
            self.threads: set[str] = set()

        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> int:
            self.threads.add(threading.current_thread().name.partition("_")[0])
            return index

    noted, source = Noted(draws=True), Source()
    ahead = run(feed(noted, dataset=source))
    assert set(noted.threads) == {"MainThread"} and "data" in source.threads
    torch.rand(3)
    when_asked = run(feed(Noted(draws=True), workers=0))
    assert all(map(torch.equal, ahead, when_asked))
    late = feed(Noted(draws=True))
    assert torch.equal(late.get(5, 1), ahead[11]), "a rank that takes the shard up draws the same"
    late.close()


@pytest.mark.parametrize("draws", [False, True])
def test_a_new_function_in_each_step_changes_no_batch(draws: bool) -> None:
    noted = Noted(draws)
    one = run(feed(Noted(draws)))
    each = run(feed(None), collate=lambda step: lambda samples, step=step: noted(samples))
    assert all(map(torch.equal, one, each))


def test_each_step_has_its_own_function() -> None:
    found = run(feed(None), collate=lambda step: lambda samples: torch.tensor(samples) + 1000 * step)
    assert [int(batch[0]) // 1000 for batch in found] == [step for step in range(6) for _ in range(SHARDS)]


def test_a_method_stays_the_same_function() -> None:
    noted = Noted()
    run(feed(noted.method), collate=lambda step: noted.method)
    assert "data" in noted.threads


def test_a_new_function_in_each_step_makes_no_new_feed() -> None:
    feeds, data = Feeds(7, SHARDS, RECORDER), ShardedDataset(range(64))
    made = {id(feeds.of(data, BATCH, lambda samples, step=step: samples)) for step in range(20)}
    assert len(made) == len(feeds._feeds) == 1
    feeds.of(data, BATCH, None).close()


def test_a_dataset_in_each_step_does_not_fill_the_memory() -> None:
    feeds = Feeds(7, SHARDS, RECORDER)
    kept = [[step] for step in range(2 * FEEDS)]
    for dataset in kept:
        feeds.of(dataset, BATCH, None)
    assert len(feeds._feeds) == FEEDS


def test_its_error_says_where() -> None:
    found = feed(lambda samples: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        found.get(3, 1)
    assert caught.value.__notes__ == ["while the samples of step 3, shard 1 were made into a batch"]
    found.close()


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="collate_fn = 'pad'"):
        feed("pad")
