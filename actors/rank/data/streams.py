"""Samples that come one after the other: each batch shard has a stream of its own, so any rank can continue it at any position.

Shard ``s`` takes the same number of samples from stream ``s`` in each step. The step alone determines where in the stream it begins, so no
position is kept. A rank that gets a shard opens its stream and passes over the samples of earlier steps.
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
"""So many first samples show whether a stream is reproducible, and different from its neighbour."""
PASSED = 2
"""So many batches are kept when a thread asked for a later one of the same shard first: two threads may come in either order."""
END = object()

Make = Callable[[int, int, int], Iterable[Any]]
"""(shard, shards, epoch) -> its samples, the same each time."""


class Streams(Ordered):
    """A stream of samples for each batch shard. Give it to ``step.batches``; track it (``run.track(data=...)``) to have resumes checked.

    Args:
        source: ``make(shard, shards, epoch)``, which gives an iterable of the samples of shard ``shard`` of ``shards``: a new one each
            time, of the same samples. When it ends, that of the next epoch follows, also within a batch. A method ``skip(n)`` of the
            iterable gives it without its first ``n`` samples. Fleet uses ``skip`` and ``len()``, if they are there, to continue in the
            middle. Or a torch IterableDataset that splits itself by ``get_worker_info()``, as for a DataLoader: each batch shard is a
            worker. It is never read ahead. Fleet calls its ``set_epoch(epoch)`` if there is one.
        workers: threads that fetch ahead; 0: the loop fetches each batch when it needs it.

    Raises ConfigError before the first step: two shards have the same samples, a stream is different the second time, or a stream is empty.
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
        """0: the number is unknown."""
        return 0

    def data_sha256(self) -> str:
        """Digest of the first samples of the first two shards."""
        return self._sha256

    def samples_of(self, seed: int, step: int, shard: int, shards: int, batch_size: int) -> list[Any]:
        """The samples of the step from the shard's stream."""
        size = shard_size(batch_size, shards, 1)
        return self._streams.setdefault(shard, self._stream(shard, shards)).take(step * size, size)

    def far(self, step: int, shard: int, shards: int, batch_size: int) -> bool:
        """Whether many samples are passed over first, as for a stream that another rank has read until now."""
        size = shard_size(batch_size, shards, 1)
        known = self._streams.get(shard)
        return step > PASSED if known is None else known.far(step * size, size)

    def _stream(self, shard: int, shards: int) -> Stream:
        if self._splits_itself:
            split = SplitsItself(self._source, shard, shards)
            return Stream(split.make, shard, split.as_worker)
        return Stream(lambda epoch: self._source(shard, shards, epoch), shard)

    def begin(self, batch_size: int, shards: int) -> None:
        """As :meth:`Ordered.begin`. It also reads the first samples of two streams, to check them."""
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
            raise self._refused(reason, "Give shard s each shards-th sample: itertools.islice(samples, shard, None, shards).")
        self._sha256 = digest_of([first, second]) if first else ""

    def _probe(self, shard: int, shards: int, seed: int) -> str:
        """Digest of the first samples; empty if they cannot be digested, or are all the same, so that a comparison has no meaning."""
        with generators_at(seed):
            samples = self._stream(shard, shards).take(0, PROBE)
        return digest_of(samples) if len({digest_of(sample) for sample in samples}) > 1 else ""

    def _refused(self, reason: str, way_out: str) -> ConfigError:
        return ConfigError("source", type(self._source).__name__, reason, way_out)

    def state_dict(self) -> dict[str, Any]:
        """The facts on which the order depends. There is no position: the step determines it."""
        return {"batch_size": self.batch_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError when the run began with another batch size."""
        self._resume(state)


class Stream:
    """The samples of one shard, over all epochs.

    Args:
        make: epoch -> iterable.
        shard: for messages.
        within: the context in which to open and read the iterable.
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
        """Go to the next epoch. :meth:`_next` finds an epoch without samples."""
        if self._at > self._begins_at:
            self._open(self._epoch + 1, self._at)

    def _skip(self, position: int) -> None:
        """Go to ``position``, without reading the samples before it where the iterable allows that."""
        while (length := _length(self._iterable)) and position >= self._begins_at + length:
            self._open(self._epoch + 1, self._begins_at + length)
        skip = getattr(self._iterable, "skip", None)
        if skip is None or position <= self._at:
            return
        items = iter(skip(position - self._begins_at))
        item = next(items, END)
        if item is END:  # the epoch ends before, and only reading shows where
            self._open(self._epoch, self._begins_at)
        else:
            self._items, self._at = itertools.chain([item], items), position


def _length(iterable: Any) -> int:
    return len(iterable) if hasattr(iterable, "__len__") else 0


class SplitsItself:
    """One batch shard of a torch IterableDataset: a copy that torch presents as worker ``shard`` of ``shards``.

    torch keeps the worker in one variable of the process. So it is set only while the loop's own thread reads the dataset.
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
        """Context in which ``get_worker_info()`` gives this worker."""
        before, worker._worker_info = worker._worker_info, self._info  # type: ignore[assignment]  # see Told
        try:
            yield
        finally:
            worker._worker_info = before


class ShardWorkerInfo:
    """As torch's WorkerInfo. ``asked``: the dataset has read a field, which plain attributes could not show."""

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
        """A different number for each shard and epoch."""
        self.asked = True
        return derive_seed(0, "stream", self._id, self._epoch)
