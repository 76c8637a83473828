"""Training data whose order follows from seed, step and shard alone, over files anywhere or over a map-style dataset; fetched ahead.

No position is kept: which samples a shard of a step gets is :func:`actors.rank.sampling.sample_indices`. So a resumed run and a view of
another size skip and repeat none. What is kept, as part of the tracked state, is what the order depends on: the samples there are, and the
batch size.
"""

from __future__ import annotations

import errno
import hashlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import torch
from fsspec.core import url_to_fs

from actors.rank.fingerprint import fingerprint
from actors.rank.readers import File, Reader, Records, shown
from actors.rank.sampling import sample_batch, seed_data, shard_size
from fleet.errors import ConfigError

Key = tuple[int, int]
"""(step, shard)."""


class ShardedDataset(torch.utils.data.Dataset[Any]):
    """Samples of files, or of a map-style dataset. Give it to ``step.batches``; track it (``run.track(data=...)``) to have resumes checked.

    Args:
        source: a path or URL, or several, each a file, a folder or a pattern (``s3://bucket/train/*.bin``): any store that fsspec knows.
            Or a dataset with ``len()`` and ``[]``, which must then bear to be called from another thread.
        reader: the files' format, as ``Tokens(1024)``; None for a dataset.
        storage_options: for the file system, as fsspec takes them.
        workers: threads that fetch ahead; 0 fetches when asked.

    Raises ConfigError when there are no files, an empty one, one that is not of the format, or the dataset has no ``len()`` and ``[]``.
    """

    def __init__(
        self, source: Any, reader: Reader | None = None, *, storage_options: Mapping[str, Any] | None = None, workers: int = 2
    ) -> None:
        if workers < 0:
            raise ConfigError("workers", workers, "it is a number of threads", "0 fetches when asked.")
        self.workers = workers
        self.batch_size: int | None = None
        self._inner: Any = None
        if isinstance(source, (str, Path)) or (reader is not None and isinstance(source, Sequence)):
            urls = [source] if isinstance(source, (str, Path)) else source
            self._open([str(url) for url in urls], reader, dict(storage_options or {}))
        else:
            self._wrap(source, reader)

    def _open(self, urls: Sequence[str], reader: Reader | None, options: dict[str, Any]) -> None:
        if reader is None:
            way_out = "Give JsonLines(), Lines(), Tokens(length), Fixed(record_bytes, parse), Whole(parse) or one of your own."
            raise ConfigError("reader", None, "files need a reader that says what their samples are", way_out)
        self.files = list_files(urls, options)
        self._records = [_records(file, reader) for file in self.files]
        self._ends = np.cumsum([len(records) for records in self._records])
        self._length = int(self._ends[-1])
        names = [Path(file.path).name for file in self.files]
        self._made_of = [type(reader).__name__, self._length, [(n, f.size) for n, f in zip(names, self.files, strict=True)]]
        self._fingerprint = _digest(self._made_of)

    def _wrap(self, inner: Any, reader: Reader | None) -> None:
        if reader is not None or not (hasattr(inner, "__len__") and hasattr(inner, "__getitem__")):
            reason = "it is neither a path nor a dataset with len() and []: the samples of a step are chosen by number"
            raise ConfigError("source", type(inner).__name__, reason, "An iterable dataset can be written to files first.")
        self._inner, self._length = inner, len(inner)
        self._fingerprint = _digest([type(inner).__name__, self._length])
        if not self._length:
            raise ConfigError("source", type(inner).__name__, "it has no samples")

    def __len__(self) -> int:
        return self._length

    def data_sha256(self) -> str:
        """Digest of the format and of the files' names and sizes, without reading them; of a dataset see :func:`fingerprint`."""
        return fingerprint(self._inner) if self._inner is not None else hashlib.sha256(repr(self._made_of).encode()).hexdigest()

    def __getitem__(self, index: int) -> Any:
        return self._inner[index] if self._inner is not None else self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several samples; those of files in one request to the store. Raises ConfigError when a file is not as long as it was."""
        if self._inner is not None:
            many = getattr(self._inner, "__getitems__", None)
            return list(many(indices)) if many is not None else [self._inner[index] for index in indices]
        where = [self._where(index) for index in indices]
        spans = [self._records[file].span(record) for file, record in where]
        found = _read([(self.files[file], start, stop) for (file, _), (start, stop) in zip(where, spans, strict=True)])
        return [self._records[file].decode(data) for (file, _), data in zip(where, found, strict=True)]

    def _where(self, index: int) -> tuple[int, int]:
        """(file, record in it) of sample ``index``."""
        index = index + self._length if index < 0 else index
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} of {self._length}")
        file = int(np.searchsorted(self._ends, index, side="right"))
        return file, index - (int(self._ends[file - 1]) if file else 0)

    # ---- the cursor ----------------------------------------------------------------------------------------------------------------------

    def begin(self, batch_size: int) -> None:
        """The run trains with this batch size. Raises ConfigError when it began with another: samples would be skipped or repeated."""
        self._keep(self.batch_size or batch_size, batch_size)

    def _keep(self, begun: int, wanted: int) -> None:
        if begun != wanted:
            reason = f"the run began with {begun}, and its next step would skip or repeat samples"
            raise ConfigError("batch_size", wanted, reason, "Keep it, or begin a new run.")
        self.batch_size = begun

    def state_dict(self) -> dict[str, Any]:
        """What the order depends on; no position, which follows from the step."""
        return {"samples": self._length, "fingerprint": self._fingerprint, "batch_size": self.batch_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError when the samples are not those that the run began with."""
        if (state["samples"], state["fingerprint"]) != (self._length, self._fingerprint):
            reason = f"the run began with {state['samples']} samples in other files, and would skip or repeat some in these"
            raise ConfigError("dataset", f"{self._length} samples", reason, "Give the same files under the same names, or begin a new run.")
        if state["batch_size"] is not None:
            self._keep(state["batch_size"], self.batch_size or state["batch_size"])


def list_files(urls: Iterable[str], options: Mapping[str, Any]) -> list[File]:
    """The files that ``urls`` name, each once, in order of their paths. Raises ConfigError when one names none, or a file is empty."""
    found: dict[str, File] = {}
    for url in urls:
        system, path = url_to_fs(url, **options)
        listed = _list(system, path)
        if not listed:
            raise ConfigError("source", shown(url), "no file matches", "Check the path, and that every node can read it.")
        found |= {name: File(system, name, size) for name, size in listed.items()}
    for file in found.values():
        if not file.size:
            raise file.refused("the file is empty", "Remove it, or leave it out.")
    return [found[name] for name in sorted(found)]


def _list(system: fsspec.AbstractFileSystem, path: str) -> dict[str, int]:
    """Path -> size of a file, the files under a folder, or those that match a pattern."""
    if any(sign in path for sign in "*?["):
        details = system.glob(path, detail=True)
    elif system.isfile(path):
        details = {path: system.info(path)}
    else:
        details = system.find(path, detail=True)
    return {name: info["size"] for name, info in details.items() if info["type"] == "file"}


def _records(file: File, reader: Reader) -> Records:
    records = reader.records(file)
    if not len(records):
        raise file.refused(f"{type(reader).__name__} finds no sample in it", "Remove it, or leave it out.")
    return records


def _digest(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()


def _read(wanted: Sequence[tuple[File, int, int]]) -> list[bytes]:
    """The bytes of each (file, start, stop), from a remote store all at once."""
    system = wanted[0][0].system
    if isinstance(system, fsspec.get_filesystem_class("file")):
        found = [_read_local(file, start, stop) for file, start, stop in wanted]
    else:
        paths, starts, stops = zip(*((file.path, start, stop) for file, start, stop in wanted), strict=True)
        found = system.cat_ranges(list(paths), list(starts), list(stops), on_error="return")
    for (file, start, stop), data in zip(wanted, found, strict=True):
        if isinstance(data, Exception):
            if getattr(data, "errno", None) == errno.EINVAL:  # what S3 says when a range begins behind the end
                raise file.refused(f"byte {start} was asked for and is not there: it has changed since the run began") from data
            raise data
        if len(data) != stop - start:
            raise file.refused(f"bytes {start} to {stop} were asked for and {len(data)} came: it has changed since the run began")
    return found


def _read_local(file: File, start: int, stop: int) -> bytes:
    with open(file.path, "rb", buffering=0) as opened:
        size = opened.seek(0, 2)
        if size != file.size:
            raise file.refused(f"it had {file.size} bytes when the run began, and has {size} now", "Leave the data as it is during a run.")
        opened.seek(start)
        return opened.read(stop - start)


class Feed:
    """Hands out the batches of one rank by (step, shard), the coming ones fetched ahead in threads.

    Only a :class:`ShardedDataset` is fetched ahead, and only if its first batch draws no numbers from the global random generators: those
    belong to the loop. Others are fetched when asked for, with the generators set by (seed, step, shard).

    Args:
        seed, shards: of the run.
        batch_size: samples of a step.

    Raises ConfigError when the batch does not divide into the shards, or the run began with another.
    """

    def __init__(self, dataset: Any, seed: int, shards: int, batch_size: int) -> None:
        self._dataset = dataset
        self._fetch: Callable[[int, int], Any] = partial(_batch, dataset, seed, shards, batch_size)
        self._seed = seed
        shard_size(batch_size, shards, len(dataset))  # refuses what does not divide
        if isinstance(dataset, ShardedDataset):
            dataset.begin(batch_size)
        self._workers = dataset.workers if isinstance(dataset, ShardedDataset) else 0
        self._ahead: bool | None = None if self._workers else False
        self._pool = ThreadPoolExecutor(max(1, self._workers), thread_name_prefix="data")
        self._coming: dict[Key, Future[Any]] = {}
        self._keys: dict[Key, None] = {}

    @cached_property
    def data_sha256(self) -> str:
        """What tells this data set from others, for the run's record; empty when that cannot be told."""
        return self._dataset.data_sha256() if isinstance(self._dataset, ShardedDataset) else fingerprint(self._dataset)

    def expect(self, keys: Sequence[Key]) -> None:
        """These are asked for next, in this order: the rest of this step and the shards of the next. What else was under way is dropped."""
        self._keys = dict.fromkeys(keys)
        for key in self._coming.keys() - self._keys.keys():
            self._coming.pop(key).cancel()
        if self._ahead:
            for key in self._keys:
                if key not in self._coming:
                    self._coming[key] = self._pool.submit(self._fetch, *key)

    def get(self, step: int, shard: int) -> Any:
        """The collated batch of one shard of a step; waits for it. Raises what its fetch raised."""
        self._keys.pop((step, shard), None)
        coming = self._coming.pop((step, shard), None)
        if coming is not None:
            return coming.result()
        seed_data(self._seed, step, shard)
        before = _generators() if self._ahead is None else None
        batch = self._fetch(step, shard)
        if before is not None:
            self._ahead = before == _generators()
            self.expect(list(self._keys))
        return batch

    @property
    def fetches_ahead(self) -> bool | None:
        """None until the first batch has shown whether its samples draw random numbers."""
        return self._ahead

    def close(self) -> None:
        """Drop what is under way. Waits for no store."""
        self.expect(())
        self._pool.shutdown(wait=False, cancel_futures=True)


def _batch(dataset: Any, seed: int, shards: int, batch_size: int, step: int, shard: int) -> Any:
    try:
        return sample_batch(dataset, seed, step, shard, shards, batch_size)
    except Exception as error:
        error.add_note(f"while the samples of step {step}, shard {shard} were fetched")
        raise


def _generators() -> list[Any]:
    kind, keys, *rest = np.random.get_state()
    return [torch.get_rng_state().numpy().tobytes(), random.getstate(), kind, keys.tobytes(), rest]
