"""Training data in an order that depends on seed, step and shard alone, from files or a map-style dataset; fetched ahead.

No position is kept: :func:`actors.rank.data.sampling.sample_indices` computes the samples of a shard of a step. So a resumed run and a view
of another size skip and repeat none. The tracked state keeps the facts on which the order depends: the number and names of the samples, and
the batch size.
"""

from __future__ import annotations

import errno
import hashlib
import random
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, SupportsIndex

import fsspec
import numpy as np
import torch
from fsspec.core import url_to_fs
from torch.utils.data import default_collate

from actors.rank.data.catalogue import FileCatalogue, Place, catalogue_of
from actors.rank.data.fingerprint import fingerprint, samples_fingerprint
from actors.rank.data.groups import Groups, Span
from actors.rank.data.readers import File, Grouped, Reader, Records, shown
from actors.rank.data.sampling import Ordered, Shared, read_many, sample_indices, samples_of, seed_data, shard_size
from actors.rank.telemetry.recorder import Recorder
from fleet.errors import ConfigError
from fleet.protocol.draws import LeftOut, draw_of
from fleet.protocol.facts import SHARED
from fleet.protocol.records import DATA, PERMUTED, WINDOWS

Key = tuple[int, int]
"""(step, shard)."""
FEEDS = 8
"""The most datasets that are fetched ahead at a time: a loop that makes a new one in each step must not fill the memory."""
OPENERS = 8
"""In so many files at a time the records are looked for."""


class ShardedDataset(Ordered, torch.utils.data.Dataset[Any]):
    """Samples of files, or of a map-style dataset. Give it to ``step.batches``; track it (``run.track(data=...)``) to have resumes checked.

    Args:
        source: a path or URL, or several, each a file, a folder or a pattern (``s3://bucket/train/*.bin``): any store that fsspec knows.
            Or a dataset with ``len()`` and ``[]``, which other threads may call.
        reader: the files' format, as ``Tokens(1024)``; None for a dataset.
        storage_options: for the file system, as fsspec takes them.
        workers: threads that fetch ahead; 0: the loop fetches each batch when it needs it.

    Raises ConfigError: there are no files, one is empty or not of the format, or the dataset has no ``len()`` and ``[]``.
    """

    def __init__(
        self, source: Any, reader: Reader | None = None, *, storage_options: Mapping[str, Any] | None = None, workers: int = 2
    ) -> None:
        if workers < 0:
            raise ConfigError("workers", workers, "it is a number of threads", "0 fetches when asked.")
        self.workers = workers
        self._made_from = partial(ShardedDataset, source, reader, storage_options=storage_options, workers=workers)
        self._inner: Any = None
        self._groups: Groups | None = None
        if isinstance(source, (str, Path)) or (reader is not None and isinstance(source, Sequence)):
            urls = [source] if isinstance(source, (str, Path)) else source
            self._open([str(url) for url in urls], reader, dict(storage_options or {}))
        else:
            self._wrap(source, reader)

    def _open(self, urls: Sequence[str], reader: Reader | None, options: dict[str, Any]) -> None:
        if reader is None:
            way_out = "Give JsonLines(), Lines(), Tokens(length), Fixed(record_bytes, parse), Whole(parse) or one of your own."
            raise ConfigError("reader", None, "files need a reader that says what their samples are", way_out)
        self.files = list_files(urls, options, getattr(reader, "takes", None))
        prepare = getattr(reader, "prepare", None)
        self.reader: Reader = reader if prepare is None else prepare(self.files)
        self._found = found = find_records(self.files, self.reader)
        self._records, grouped = _apart(found, self.reader)
        self._ends = np.cumsum([len(records) for records in found])
        self._length = int(self._ends[-1])
        names = [Path(file.path).name for file in self.files]
        self._made_of = [type(reader).__name__, self._length, [(n, f.size) for n, f in zip(names, self.files, strict=True)]]
        if grouped:
            window_bytes = getattr(reader, "window_bytes", 1)
            self._groups = Groups(self.files, grouped, _read, window_bytes)
            self._made_of.append(window_bytes)
        self._fingerprint = _digest(self._made_of)

    def _wrap(self, inner: Any, reader: Reader | None) -> None:
        if reader is not None:
            raise ConfigError("reader", type(reader).__name__, f"it reads files, and {type(inner).__name__} is no path", "Leave it out.")
        check_source(inner, "source")
        self._inner, self._length = inner, len(inner)
        self._fingerprint = _digest([type(inner).__name__, self._length])
        if not self._length:
            raise ConfigError("source", type(inner).__name__, "it has no samples")

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Of a dataset of files: another process opens the files itself."""
        return (self._made_from, ()) if self._inner is None and type(self) is ShardedDataset else super().__reduce_ex__(protocol)

    def __len__(self) -> int:
        return self._length

    def data_sha256(self) -> str:
        """Digest of the format and of the files' names and sizes, without reading them; of a dataset see :func:`fingerprint`."""
        return fingerprint(self._inner) if self._inner is not None else self._fingerprint_sha256()

    def _fingerprint_sha256(self) -> str:
        return hashlib.sha256(repr(self._made_of).encode()).hexdigest()

    def __getitem__(self, index: int) -> Any:
        return self._inner[index] if self._inner is not None else self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several samples; those of files in one request to the store. Raises ConfigError when a file has another size than at the
        start."""
        if self._inner is not None:
            return read_many(self._inner, indices)
        if self._groups is not None:
            return self._groups.get([self._checked(index) for index in indices])
        where = [self._where(index) for index in indices]
        spans = [self._records[file].span(record) for file, record in where]
        found = _read([(self.files[file], start, stop) for (file, _), (start, stop) in zip(where, spans, strict=True)])
        return [self._decoded(*place, data) for place, data in zip(where, found, strict=True)]

    def _decoded(self, file: int, record: int, data: bytes) -> Any:
        try:
            return self._records[file].decode(data)
        except Exception as error:
            error.add_note(f"in record {record} of {shown(self.files[file].path)}")
            raise

    @property
    def samples(self) -> int:
        """How many there are."""
        return self._length

    def samples_of(self, seed: int, step: int, shard: int, shards: int, batch_size: int) -> list[Any]:
        """The samples of one shard, in a random order; of files that are read in groups, in the order of :class:`Windows`."""
        indices = self.indices_of(seed, step, shard, shards, batch_size)
        return self.__getitems__(indices) if self._groups is None else self._groups.get(indices)

    def indices_of(self, seed: int, step: int, shard: int, shards: int, batch_size: int) -> list[int]:
        """The numbers of these samples."""
        if self._groups is None:
            return sample_indices(seed, step, shard, shards, batch_size, self._length)
        size = shard_size(batch_size, shards, self._length)
        return self._groups.order.indices(seed, step * batch_size + shard * size, size)

    @property
    def order(self) -> str:
        """See ``DataRead``."""
        return PERMUTED if self._groups is None else WINDOWS

    def where(self, index: int) -> Place | None:
        """The file of sample ``index``, and its place in it. A dataset without files answers with its own ``where``, if it has one; else
        None."""
        if self._inner is not None:
            own = getattr(self._inner, "where", None)
            return own(self._checked(index)) if own is not None else None
        file, record = self._where(index)
        path = self.files[file].path
        if self._groups is not None:
            return self._groups.place(path, file, self._checked(index), record)
        start, stop = self._records[file].span(record)
        return Place(shown(path), record, start, stop - start)

    def catalogue(self) -> FileCatalogue | None:
        """The files, and how samples lie in them; None of a dataset without files."""
        if self._inner is not None:
            return None
        return catalogue_of(self.reader, self.files, self._found, self._fingerprint_sha256())

    def _checked(self, index: int) -> int:
        index = index + self._length if index < 0 else index
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} of {self._length}")
        return index

    def _where(self, index: int) -> tuple[int, int]:
        """(file, record in it) of sample ``index``."""
        index = self._checked(index)
        file = int(np.searchsorted(self._ends, index, side="right"))
        return file, index - (int(self._ends[file - 1]) if file else 0)

    # ---- the cursor ----------------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The facts on which the order depends. There is no position: the step determines it."""
        return {"samples": self._length, "fingerprint": self._fingerprint, "batch_size": self.batch_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError when the samples are not those that the run began with."""
        if (state["samples"], state["fingerprint"]) != (self._length, self._fingerprint):
            reason = f"the run began with {state['samples']} samples in other files, and would skip or repeat some in these"
            raise ConfigError("dataset", f"{self._length} samples", reason, "Give the same files under the same names, or begin a new run.")
        self._resume(state)


WAYS_OUT = {
    "stream": (
        "its samples have no numbers, so a step cannot choose them",
        "Give each batch shard a stream of its own: fleet.data.Streams(make). See docs/data.md.",
    ),
    "ray": (
        "its rows have no numbers, and no order unless preserve_order is set",
        "Write it once, ds.write_parquet(path), and read ShardedDataset(path, Parquet()). Or use fleet.data.Streams: see docs/data.md.",
    ),
    "loader": (
        "Fleet makes the batches, from the samples that belong to each batch shard",
        "Give its dataset, the batch size of all ranks together, and its collate_fn.",
    ),
    "mapping": ("it is a dict, and not one of samples by number", "Name the split: dataset['train']."),
    "other": ("it has not both len() and []: the samples of a step are chosen by number", "Give it both, or use fleet.data.Streams(make)."),
}
"""Kind of a dataset that cannot be read by number -> (why, the way out)."""


def check_source(dataset: Any, field: str) -> None:
    """Raises ConfigError when the samples of ``dataset`` cannot be read by number."""
    kind = ""
    if isinstance(dataset, torch.utils.data.IterableDataset):
        kind = "stream"
    elif type(dataset).__module__.startswith("ray.data."):
        kind = "ray"
    elif isinstance(dataset, torch.utils.data.DataLoader):
        kind = "loader"
    elif isinstance(dataset, Mapping) and dataset and 0 not in dataset:
        kind = "mapping"
    elif not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        kind = "other"
    if kind:
        raise ConfigError(field, type(dataset).__name__, *WAYS_OUT[kind])


def list_files(urls: Iterable[str], options: Mapping[str, Any], takes: Callable[[str], bool] | None = None) -> list[File]:
    """The files that ``urls`` name, each once, in order of their paths. Raises ConfigError when one names none, or a file is empty.

    ``takes`` says whether a file in a folder belongs to the data; None: all do. A file that is named, or matches a pattern, always does.
    """
    found: dict[str, File] = {}
    for url in urls:
        system, path = url_to_fs(url, **options)
        listed = _list(system, path, takes)
        if not listed:
            raise ConfigError("source", shown(url), "no file matches", "Check the path, and that every node can read it.")
        found |= {name: File(system, name, size) for name, size in listed.items()}
    for file in found.values():
        if not file.size:
            raise file.refused("the file is empty", "Remove it, or leave it out.")
    return [found[name] for name in sorted(found)]


def _list(system: fsspec.AbstractFileSystem, path: str, takes: Callable[[str], bool] | None) -> dict[str, int]:
    """Path -> size of a file, the files under a folder, or those that match a pattern."""
    if any(sign in path for sign in "*?["):
        details = system.glob(path, detail=True)
    elif system.isfile(path):
        details = {path: system.info(path)}
    else:
        details = {name: info for name, info in system.find(path, detail=True).items() if takes is None or takes(name)}
    return {name: info["size"] for name, info in details.items() if info["type"] == "file"}


def find_records(files: Sequence[File], reader: Reader) -> list[Records | Grouped]:
    """The records of each file; several files at a time, as a store is slow for each."""
    found: list[Any] = [None] * len(files)

    def find(first: int) -> None:
        found[first::OPENERS] = [_records(file, reader) for file in files[first::OPENERS]]

    with ThreadPoolExecutor(OPENERS) as openers:
        list(openers.map(find, range(OPENERS)))
    return found


def _records(file: File, reader: Reader) -> Records | Grouped:
    records = reader.records(file)
    if not len(records):
        raise file.refused(f"{type(reader).__name__} finds no sample in it", "Remove it, or leave it out.")
    return records


def _apart(found: Sequence[Records | Grouped], reader: Reader) -> tuple[list[Records], list[Grouped]]:
    """(plain records, grouped records) of all files; one of the two is empty. Raises ConfigError when ``reader`` has given both."""
    plain: list[Records] = []
    grouped: list[Grouped] = []
    for one in found:
        if isinstance(one, Grouped):
            grouped.append(one)
        else:
            plain.append(one)
    if plain and grouped:
        reason = f"the samples of {len(grouped)} files can be read only in groups, those of {len(plain)} one by one"
        raise ConfigError("reader", type(reader).__name__, reason, "Let it give Records for all files, or Grouped for all.")
    return plain, grouped


def _digest(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()


def _read(wanted: Sequence[Span]) -> list[bytes]:
    """The bytes of each (file, start, stop), from a remote store all at once."""
    system = wanted[0][0].system
    found: list[bytes | Exception]
    if isinstance(system, fsspec.get_filesystem_class("file")):
        found = [_read_local(file, start, stop) for file, start, stop in wanted]
    else:
        paths, starts, stops = zip(*((file.path, start, stop) for file, start, stop in wanted), strict=True)
        found = system.cat_ranges(list(paths), list(starts), list(stops), on_error="return")
    return [_whole(span, data) for span, data in zip(wanted, found, strict=True)]


def _whole(span: Span, data: bytes | Exception) -> bytes:
    """Raises ConfigError when ``data`` is not all of ``span``, or the error of the store."""
    file, start, stop = span
    if isinstance(data, Exception):
        if getattr(data, "errno", None) == errno.EINVAL:  # S3's answer when a range begins after the end
            raise file.refused(f"byte {start} was asked for and is not there: it has changed since the run began") from data
        raise data
    if len(data) != stop - start:
        raise file.refused(f"bytes {start} to {stop} were asked for and {len(data)} came: it has changed since the run began")
    return data


def _read_local(file: File, start: int, stop: int) -> bytes:
    with open(file.path, "rb", buffering=0) as opened:
        size = opened.seek(0, 2)
        if size != file.size:
            raise file.refused(f"it had {file.size} bytes when the run began, and has {size} now", "Leave the data as it is during a run.")
        opened.seek(start)
        return opened.read(stop - start)


class Feed:
    """Hands out the batches of one rank by (step, shard), the coming ones fetched ahead in threads.

    Only an :class:`Ordered` dataset is fetched ahead, and only if its first batch draws no numbers from the global random generators. Those
    belong to the loop. Batches are collated ahead, too, if that draws no numbers and the function is the same each time. A fetch or
    collation that is not ahead runs with the generators set by (seed, step, shard).

    Args:
        seed, shards: of the run.
        batch_size: samples of a step.
        collate_fn: list of samples -> batch; None: as torch's DataLoader does.
        stepping: called with False before a call that may take longer than any step; it returns the old value, with which it is called
            after.
        left_out: samples that no step takes, see :mod:`fleet.protocol.draws`.

    Raises ConfigError: the batch does not divide into the shards, the run began with another batch size, or the dataset cannot be read by
    number.
    """

    def __init__(
        self,
        dataset: Any,
        seed: int,
        shards: int,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        stepping: Callable[[bool], bool] = bool,
        left_out: LeftOut = (),
    ) -> None:
        self._stepping, self._left_out = stepping, left_out
        dataset, self._steps_each = (dataset.dataset, dataset.steps) if isinstance(dataset, Shared) else (dataset, 1)
        self._dataset, self._seed, self._shards, self._batch_size = dataset, seed, shards, batch_size
        if collate_fn is not None and not callable(collate_fn):
            raise ConfigError("collate_fn", collate_fn, "it is no function", "Give one that makes a batch of a list of samples.")
        self._collate = collate_fn
        if isinstance(dataset, Ordered):
            shard_size(batch_size, shards, dataset.samples or 1)  # raises if the batch does not divide
            dataset.begin(batch_size, shards)
        else:
            check_source(dataset, "dataset")
            shard_size(batch_size, shards, len(dataset))
        self._workers = dataset.workers if isinstance(dataset, Ordered) else 0
        self._ahead: bool | None = None if self._workers else False
        self._collates_ahead = True
        self._pool = ThreadPoolExecutor(max(1, self._workers), thread_name_prefix="data")
        self._coming: dict[Key, Future[Any]] = {}
        self._keys: dict[Key, None] = {}

    @cached_property
    def data_sha256(self) -> str:
        """Digest that identifies this data set in the run's record; empty when it cannot be computed."""
        return self._dataset.data_sha256() if isinstance(self._dataset, Ordered) else fingerprint(self._dataset)

    @property
    def samples_sha256(self) -> str:
        """Digest of the samples alone: name and module of the data set's class do not count."""
        return self.data_sha256 if isinstance(self._dataset, Ordered) else samples_fingerprint(self._dataset)

    @property
    def kind(self) -> str:
        """Class of the data set."""
        return type(self._dataset).__qualname__

    @property
    def order(self) -> str:
        """The order of its samples, see ``DataRead``."""
        return self._dataset.order if isinstance(self._dataset, Ordered) else PERMUTED

    @property
    def reported_order(self) -> str:
        """The order, together with how many steps take the same samples, see ``DataRead``."""
        return self.order if self._steps_each == 1 else f"{self.order}{SHARED}{self._steps_each}"

    @property
    def catalogue(self) -> FileCatalogue | None:
        """The files of the data set; None where it has no known files."""
        return self._dataset.catalogue() if isinstance(self._dataset, ShardedDataset) else None

    @property
    def files(self) -> Sequence[File]:
        """The files as the data set has opened them."""
        return list(self._dataset.files)

    @property
    def samples(self) -> int:
        """How many samples there are; 0: unknown."""
        return self._dataset.samples if isinstance(self._dataset, Ordered) else len(self._dataset)

    def collate_with(self, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        """Collate with this function from now on. If it is not the same object as before, batches are no longer collated ahead."""
        if collate_fn == self._collate:
            return
        self._collate = collate_fn
        if self._collates_ahead:
            self._collates_ahead = False
            self._drop(())

    def expect(self, keys: Sequence[Key]) -> None:
        """Fetch these, which are needed next, in this order: the rest of this step and the shards of the next. Drop all other fetches."""
        self._keys = dict.fromkeys(keys)
        self._drop(self._keys)
        if self._ahead:
            for key in self._keys:
                if key not in self._coming:
                    self._coming[key] = self._pool.submit(self._fetch, *key, self._collates_ahead)

    def _drop(self, keep: Container[Key]) -> None:
        for key in [key for key in self._coming if key not in keep]:
            self._coming.pop(key).cancel()

    def get(self, step: int, shard: int) -> Any:
        """The collated batch of one shard of a step; waits for it. Raises what its fetch raised."""
        coming = self._coming.get((step, shard))
        if (coming is not None and coming.done()) or not self._is_far(step, shard):
            return self._get(step, shard)
        with long_call(self._stepping):
            return self._get(step, shard)

    def _is_far(self, step: int, shard: int) -> bool:
        draw = draw_of(self._left_out, step) // self._steps_each
        return isinstance(self._dataset, Ordered) and self._dataset.far(draw, shard, self._shards, self._batch_size)

    def _get(self, step: int, shard: int) -> Any:
        self._keys.pop((step, shard), None)
        coming = self._coming.pop((step, shard), None)
        if coming is None:
            seed_data(self._seed, step // self._steps_each, shard)
            return self._get_now(step, shard)
        found = coming.result()
        if self._collates_ahead:
            return found
        seed_data(self._seed, step // self._steps_each, shard)
        return self._collated(found, step, shard)

    def _get_now(self, step: int, shard: int) -> Any:
        """Fetch and collate in this thread. The first call finds out which of both draws random numbers."""
        before = _generators() if self._ahead is None else None
        samples = self._fetch(step, shard, False)
        between = _generators() if before is not None else None
        batch = self._collated(samples, step, shard)
        if before is not None:
            self._ahead = before == between
            self._collates_ahead = self._collates_ahead and between == _generators()
            self.expect(list(self._keys))
        return batch

    def _fetch(self, step: int, shard: int, collate: bool) -> Any:
        try:
            draw = draw_of(self._left_out, step) // self._steps_each
            samples = samples_of(self._dataset, self._seed, draw, shard, self._shards, self._batch_size)
        except Exception as error:
            error.add_note(f"while the samples of step {step}, shard {shard} were fetched")
            raise
        return self._collated(samples, step, shard) if collate else samples

    def _collated(self, samples: list[Any], step: int, shard: int) -> Any:
        try:
            return (self._collate or default_collate)(samples)
        except Exception as error:
            error.add_note(f"while the samples of step {step}, shard {shard} were made into a batch")
            raise

    def close(self) -> None:
        """Drop all fetches. It does not wait for a store."""
        self.expect(())
        self._pool.shutdown(wait=False, cancel_futures=True)


class Feeds:
    """The feeds of a run's datasets. Each is made once, also when its ``collate_fn`` changes, as it fetches ahead over steps.

    Args:
        seed, shards, left_out: of the run.
        recorder: of the rank's time.
    """

    def __init__(self, seed: int, shards: int, recorder: Recorder, left_out: LeftOut = ()) -> None:
        self._seed, self._shards, self._recorder, self._left_out = seed, shards, recorder, left_out
        self._feeds: dict[tuple[int, int], Feed] = {}

    def of(self, dataset: Any, batch_size: int, collate_fn: Callable[[list[Any]], Any] | None) -> Feed:
        """The feed of this dataset. Raises ConfigError as :class:`Feed` does."""
        feed = self._feeds.get((id(dataset), batch_size))
        if feed is None:
            while len(self._feeds) >= FEEDS:
                self._feeds.pop(next(iter(self._feeds))).close()
            feed = self._feeds[id(dataset), batch_size] = self._make(dataset, batch_size, collate_fn)
        feed.collate_with(collate_fn)
        return feed

    def _make(self, dataset: Any, batch_size: int, collate_fn: Callable[[list[Any]], Any] | None) -> Feed:
        """Make a feed. It may read streams, which counts as data, and as no hang."""
        with self._recorder.during(DATA), long_call(self._recorder.stepping):
            return Feed(dataset, self._seed, self._shards, batch_size, collate_fn, self._recorder.stepping, self._left_out)


@contextmanager
def long_call(stepping: Callable[[bool], bool]) -> Iterator[None]:
    """Context in which the rank does not count as hung."""
    was = stepping(False)
    try:
        yield
    finally:
        stepping(was)


def _generators() -> list[Any]:
    drawn = np.random.get_state(legacy=False)
    words = drawn["state"]["key"].tobytes(), drawn["state"]["pos"]
    return [torch.get_rng_state().numpy().tobytes(), random.getstate(), *words, drawn["has_gauss"], drawn["gauss"]]
