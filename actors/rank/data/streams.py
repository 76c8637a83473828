"""Samples that come one after the other: each batch shard has a stream of its own, so that whoever computes it can take it up anywhere.

Shard ``s`` takes the same number of samples from stream ``s`` in each step. Where in its stream a step begins follows from the step alone,
so no position is kept: who gets a shard anew opens its stream and passes over what earlier steps took.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker

from actors.rank.data.fingerprint import digest_of, generators_at
from actors.rank.data.sampling import Ordered, shard_size
from fleet.errors import ConfigError
from fleet.protocol.records import STREAMS
from fleet.simulation.rng import derive_seed

PROBE = 8
"""Samples at the beginning of a stream by which it is told whether it is reproducible, and another than its neighbour."""
PASSED = 2
"""Batches that are kept when a later one of the same shard was asked for first: two threads may come in either order."""
END = object()

Make = Callable[[int, int, int], Iterable[Any]]
"""(shard, shards, epoch) -> its samples, the same each time."""


class Streams(Ordered):
    """A stream of samples for each batch shard. Give it to ``step.batches``; track it (``run.track(data=...)``) to have resumes checked.

    Args:
        source: ``make(shard, shards, epoch)``, which gives an iterable of the samples of shard ``shard`` of ``shards``: a new one each
            time, of the same samples. When it ends, the one of the next epoch follows, within a batch if need be. If the iterable has
            ``skip(n)``, which gives it without its first ``n`` samples, it is used to go on in the middle, and so is ``len()``.
            Or a torch IterableDataset that splits itself by ``get_worker_info()``, as for a DataLoader: each batch shard is a worker. It
            is read when asked, never ahead. Its ``set_epoch(epoch)`` is called if there is one.
        workers: threads that fetch ahead; 0 fetches when asked.

    Raises ConfigError, before the first step: when two shards have the same samples, when a stream is not the same the second time, and
    when one has no sample.
    """

    def __init__(self, source: Make | IterableDataset[Any], *, workers: int = 2) -> None:
        if workers < 0:
            raise ConfigError("workers", workers, "it is a number of threads", "0 fetches when asked.")
        self._splits_itself = isinstance(source, IterableDataset)
        if not self._splits_itself and not callable(source):
            way_out = "Give make(shard, shards, epoch), or an IterableDataset that splits itself by get_worker_info()."
            raise ConfigError("source", type(source).__name__, "a stream of its own cannot be made of it for each batch shard", way_out)
        self._source: Any = source
        self.workers = 0 if self._splits_itself else workers
        self._streams: dict[int, Stream] = {}
        self._sha256 = ""

    order = STREAMS

    @property
    def samples(self) -> int:
        """Not known."""
        return 0

    def data_sha256(self) -> str:
        """Digest of the first samples of the first two shards."""
        return self._sha256

    def samples_of(self, seed: int, step: int, shard: int, shards: int, batch_size: int) -> list[Any]:
        """The next ones of the shard's stream."""
        size = shard_size(batch_size, shards, 1)
        return self._streams.setdefault(shard, self._stream(shard, shards)).take(step * size, size)

    def far(self, step: int, shard: int, shards: int, batch_size: int) -> bool:
        """Of a stream that others read until now."""
        size = shard_size(batch_size, shards, 1)
        known = self._streams.get(shard)
        return step > PASSED if known is None else known.far(step * size, size)

    def _stream(self, shard: int, shards: int) -> Stream:
        if self._splits_itself:
            split = SplitsItself(self._source, shard, shards)
            return Stream(split.make, shard, split.as_worker)
        return Stream(lambda epoch: self._source(shard, shards, epoch), shard)

    def begin(self, batch_size: int, shards: int) -> None:
        """As :meth:`Ordered.begin`; and the first samples of two streams are read, to see whether they are what they have to be."""
        super().begin(batch_size, shards)
        first = self._probe(0, shards, 0)
        if first and first != self._probe(0, shards, 1):
            reason = "its first samples are others when it is made a second time, so no other rank could go on with it"
            raise self._refused(
                reason, "Draw from a generator of your own, random.Random(f'{seed} {shard} {epoch}'), and read in a fixed order."
            )
        second = self._probe(1, shards, 0) if shards > 1 else ""
        if first and first == second:
            reason = "batch shards 0 and 1 have the same samples, so each sample would come once for every shard"
            raise self._refused(reason, "Give shard s every so manieth sample: itertools.islice(samples, shard, None, shards).")
        self._sha256 = digest_of([first, second]) if first else ""

    def _probe(self, shard: int, shards: int, seed: int) -> str:
        """Digest of the first samples; empty if they cannot be digested, or are all the same, which tells nothing."""
        with generators_at(seed):
            samples = self._stream(shard, shards).take(0, PROBE)
        return digest_of(samples) if len({digest_of(sample) for sample in samples}) > 1 else ""

    def _refused(self, reason: str, way_out: str) -> ConfigError:
        return ConfigError("source", type(self._source).__name__, reason, way_out)

    def state_dict(self) -> dict[str, Any]:
        """What the order depends on; no position, which follows from the step."""
        return {"batch_size": self.batch_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError when the run began with another batch size."""
        self._resume(state)


class Stream:
    """The samples of one shard, over all epochs.

    Args:
        make: epoch -> iterable.
        shard: for messages.
        within: what the iterable has to be opened and read in.
    """

    def __init__(
        self, make: Callable[[int], Iterable[Any]], shard: int, within: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self._make, self._shard, self._within = make, shard, within
        self._lock = Lock()
        self._passed: dict[int, list[Any]] = {}
        self._opened, self._at = False, 0

    def take(self, first: int, count: int) -> list[Any]:
        """``count`` samples from position ``first`` on."""
        with self._lock, self._within():
            if first in self._passed:
                return self._passed.pop(first)
            try:
                self._go_to(first, count)
                return [self._next() for _ in range(count)]
            except BaseException:
                self._opened = False  # a generator that has raised looks like one that has ended
                raise

    def far(self, first: int, count: int) -> bool:
        """Whether more than a few batches are passed over before position ``first``."""
        return first not in self._passed and first - (self._at if self._opened and self._at <= first else 0) > PASSED * count

    def _go_to(self, first: int, count: int) -> None:
        if not self._opened or first < self._at:
            self._passed.clear()
            self._open(0, 0)
        if first - self._at > PASSED * count:
            self._skip(first - PASSED * count)
        while (at := self._at) < first:
            self._passed[at] = [self._next() for _ in range(min(count, first - at))]
            self._passed = dict(list(self._passed.items())[-PASSED:])

    def _open(self, epoch: int, begins_at: int) -> None:
        self._iterable = self._make(epoch)
        self._items = iter(self._iterable)
        self._epoch, self._begins_at, self._at, self._opened = epoch, begins_at, begins_at, True

    def _next(self) -> Any:
        item = next(self._items, END)
        if item is END:
            self._turn()
            item = next(self._items, END)
        if item is END:
            reason = f"epoch {self._epoch} of its stream has no sample"
            raise ConfigError(
                "shard", self._shard, reason, "Give every batch shard samples, and a new iterable each time: use fewer shards."
            )
        self._at += 1
        return item

    def _turn(self) -> None:
        """To the next epoch. One without a sample is found out by :meth:`_next`."""
        if self._at > self._begins_at:
            self._open(self._epoch + 1, self._at)

    def _skip(self, position: int) -> None:
        """To ``position``, without reading what is before it where the iterable allows that."""
        while (length := _length(self._iterable)) and position >= self._begins_at + length:
            self._open(self._epoch + 1, self._begins_at + length)
        skip = getattr(self._iterable, "skip", None)
        if skip is None or position <= self._at:
            return
        items = iter(skip(position - self._begins_at))
        item = next(items, END)
        if item is END:  # its end lies before, and only reading tells where
            self._open(self._epoch, self._begins_at)
        else:
            self._items, self._at = itertools.chain([item], items), position


def _length(iterable: Any) -> int:
    return len(iterable) if hasattr(iterable, "__len__") else 0


class SplitsItself:
    """One batch shard of a torch IterableDataset: a copy of it that is told that it is worker ``shard`` of ``shards``.

    torch has one place for that in a process. So it says so only while the dataset is read, which the loop's own thread does.
    """

    def __init__(self, dataset: IterableDataset[Any], shard: int, shards: int) -> None:
        self._original, self._info = dataset, ShardWorkerInfo(shard, shards, dataset)

    def make(self, epoch: int) -> Iterator[Any]:
        """The samples of an epoch. Raises ConfigError with the first one, when the dataset has not asked which worker it is."""
        dataset = copy.deepcopy(self._original)
        self._info = ShardWorkerInfo(self._info._id, self._info._num_workers, dataset, epoch)
        worker._worker_info = self._info  # type: ignore[assignment]  # see Told
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        for sample in dataset:
            if not self._info.asked:
                reason = "it does not ask get_worker_info() for its part, so each sample would come once for every batch shard"
                raise ConfigError(
                    "source", type(dataset).__name__, reason, "Give make(shard, shards, epoch) instead, which makes its part."
                )
            yield sample

    @contextmanager
    def as_worker(self) -> Iterator[None]:
        """Within, torch says which worker this is."""
        before, worker._worker_info = worker._worker_info, self._info  # type: ignore[assignment]  # see Told
        try:
            yield
        finally:
            worker._worker_info = before


class ShardWorkerInfo:
    """As torch's WorkerInfo, whose fields are plain attributes: those cannot tell that somebody looked at them, which ``asked`` says."""

    def __init__(self, shard: int, shards: int, dataset: Any, epoch: int = 0) -> None:
        self._id, self._num_workers, self._epoch = shard, shards, epoch
        self.dataset, self.asked = dataset, False

    @property
    def id(self) -> int:
        """The batch shard."""
        self.asked = True
        return self._id

    @property
    def num_workers(self) -> int:
        """How many batch shards there are."""
        self.asked = True
        return self._num_workers

    @property
    def seed(self) -> int:
        """Another for each shard and epoch."""
        self.asked = True
        return derive_seed(0, "stream", self._id, self._epoch)
