"""Which samples went into a shard of a step, and which steps used a file: computed from a run's journal, as the ranks computed it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from actors.rank.data.catalogue import FileCatalogue, Located, Place
from actors.rank.data.sampling import positions_many, sample_indices, shard_size
from actors.rank.data.windows import Windows
from fleet.errors import ConfigError
from fleet.ledger.lineage import DataHistory, FilesOf, ReadStretch
from fleet.protocol.draws import draw_of, step_of
from fleet.protocol.records import PERMUTED, STREAMS, WINDOWS, DataRead

AT_ONCE = 1 << 16
"""Samples whose order is computed at a time."""


@dataclass(frozen=True, slots=True)
class Took:
    """The samples that shard ``shard`` of step ``step`` took in one history.

    Attributes:
        stretch: the history, and whether the step still counts.
        indices: numbers of the samples; of streams, positions in the shard's own stream; empty: unknown.
        places: where each of them lies; None: unknown.
        unknown: the unknown facts, and why; empty when all are known.
    """

    step: int
    shard: int
    stretch: ReadStretch
    indices: tuple[int, ...]
    places: tuple[Place | None, ...]
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class Use:
    """In step ``step`` of history ``history``, shard -> how many samples of the file it took. ``counts``: see ``ReadStretch``."""

    history: int
    step: int
    counts: bool
    shards: Mapping[int, int]


class Lineage:
    """Answers for one run.

    Args:
        history: of its journal.
        dataset: the user's data set, where the journal says too little: with ``len()``, and ``where(index)`` if it lies in files.

    Raises ConfigError when ``dataset`` has another number of samples than the run's data set, or another digest.
    """

    def __init__(self, history: DataHistory, dataset: Any = None) -> None:
        self._history, self._dataset = history, dataset
        self._catalogues: dict[str, FileCatalogue] = {}
        if dataset is not None:
            _check_same(history, dataset)

    def took(self, step: int, shard: int) -> list[Took]:
        """One for each history in which the step was committed; the newest last. Raises ConfigError: the run has no such step or shard."""
        shards = self._history.shards
        if not 0 <= shard < shards:
            raise ConfigError("--shard", shard, f"the run has {shards} shards", f"Give 0 to {shards - 1}.")
        found = [one for one in self._history.stretches() if one.first <= step < one.end]
        if not found:
            raise ConfigError("--step", step, self._no_step(), "Steps are numbered from 0 on, as step.number is.")
        return [self._took(step, shard, one) for one in found]

    def _no_step(self) -> str:
        ends = [one.end for one in self._history.stretches()]
        begun = f"; what came before step {self._first()} is in the run that it went on from, {self._history.origin}"
        return f"the run has committed {max(ends, default=0)} steps{begun if self._history.origin else ''}"

    def _first(self) -> int:
        return min((one.first for one in self._history.stretches()), default=0)

    def _took(self, step: int, shard: int, stretch: ReadStretch) -> Took:
        read = stretch.read
        if read is None:
            return Took(step, shard, stretch, (), (), "the journal does not say from what this step was read")
        size = shard_size(read.batch_size, self._history.shards, read.samples or 1)
        draw = draw_of(stretch.left_out, step) // read.steps_each
        if read.kind == STREAMS or not read.samples:
            positions = tuple(range(draw * size, (draw + 1) * size))
            return Took(step, shard, stretch, positions, (None,) * size, f"they are numbers in stream {shard}, which the script makes")
        indices, unknown = self._indices(read, draw, shard)
        places, lost = self._places(read, indices)
        return Took(step, shard, stretch, tuple(indices), places, unknown or lost)

    def _indices(self, read: DataRead, draw: int, shard: int) -> tuple[Sequence[int], str]:
        seed, shards = self._history.seed, self._history.shards
        if read.kind == PERMUTED or (not read.order and getattr(self._dataset, "order", "") != WINDOWS):
            return sample_indices(seed, draw, shard, shards, read.batch_size, read.samples), ""
        if (own := getattr(self._dataset, "indices_of", None)) is not None:
            return own(seed, draw, shard, shards, read.batch_size), ""
        windows = self._windows(read)
        if windows is None:
            return (), "the order is that of row groups, of which the journal has no list: give the data set with --data"
        size = read.batch_size // shards
        return windows.indices(seed, draw * read.batch_size + shard * size, size), ""

    def _windows(self, read: DataRead) -> Windows | None:
        catalogue = self.catalogue(read)
        return catalogue.windows() if catalogue is not None else None

    def catalogue(self, read: DataRead) -> FileCatalogue | None:
        """The files of the data set that was read; None where the journal does not have all of them."""
        sha256, known = read.data_sha256, self._history.files.get(read.data_sha256)
        if known is None or not known.whole:
            return None
        if sha256 not in self._catalogues:  # it keeps what it has looked up
            self._catalogues[sha256] = made_of(sha256, known)
        return self._catalogues[sha256]

    def _places(self, read: DataRead, indices: Sequence[int]) -> tuple[tuple[Place | None, ...], str]:
        source = self._source(read)
        if source is None:
            return (None,) * len(indices), "of its files the journal says nothing: give the data set, with where(index), by --data"
        places = tuple(source.where(index) for index in indices)
        vague = any(place is None or place.offset < 0 for place in places)
        return places, "where in its file a sample lies, the data set alone knows: give it by --data" if vague else ""

    # ---- the other way round -------------------------------------------------------------------------------------------------------------

    def uses(self, name: str) -> Iterator[Use]:
        """Steps that took samples of file ``name``: its path, or the end of it. Raises ConfigError when no file or several match."""
        paths = self._named(name)
        for stretch in self._history.stretches():
            if stretch.read is None or stretch.read.kind == STREAMS:
                continue
            samples = self._samples_in(stretch.read, paths[0])
            if samples is not None and len(samples):
                for use in self._used(stretch, stretch.read, samples):
                    yield from (replace(use, step=step) for step in _steps_of(stretch, stretch.read, use.step))

    def unanswerable(self) -> list[ReadStretch]:
        """Steps whose files ``uses`` does not know."""
        return [one for one in self._history.stretches() if one.read is None or self._source(one.read) is None]

    def _source(self, read: DataRead) -> Any:
        if read.kind == STREAMS:
            return None
        return self._dataset if isinstance(self._dataset, Located) else self.catalogue(read)

    def _named(self, name: str) -> list[str]:
        every = sorted(self._paths())
        paths = [path for path in every if path == name] or [path for path in every if path.endswith(f"/{name.lstrip('/')}")]
        if not paths:
            way_out = "fleet runs data RUN lists them." if every else "Give the data set, with where(index), by --data."
            raise ConfigError("--file", name, f"it is none of the {len(every)} files that are known of the run's data", way_out)
        if len(paths) > 1:
            raise ConfigError("--file", name, f"{len(paths)} files end so: {', '.join(paths[:3])}", "Give more of its path.")
        return paths

    def _paths(self) -> set[str]:
        if isinstance(self._dataset, Located):
            places = (self._dataset.where(index) for index in range(len(self._dataset)))  # type: ignore[arg-type]
            return {place.path for place in places if place is not None}
        return {file.path for known in self._history.files.values() for file in known.files.values()}

    def _samples_in(self, read: DataRead, path: str) -> np.ndarray | None:
        if isinstance(self._dataset, Located):
            places = ((index, self._dataset.where(index)) for index in range(read.samples))
            return np.array([index for index, place in places if place is not None and place.path == path], np.uint64)
        catalogue = self.catalogue(read)
        if catalogue is None:
            return None
        ends = catalogue.ends
        mine = [
            np.arange(end - file.samples, end, dtype=np.uint64)
            for file, end in zip(catalogue.files, ends, strict=True)
            if file.path == path
        ]
        return np.concatenate(mine) if mine else np.empty(0, np.uint64)

    def _used(self, stretch: ReadStretch, read: DataRead, samples: np.ndarray) -> Iterator[Use]:
        """The uses, from the positions of ``samples`` in each epoch. Steps are numbers of batches here, including batches that are left
        out."""
        batch, length = read.batch_size, read.samples
        first, last = (draw_of(stretch.left_out, step) // read.steps_each for step in (stretch.first, stretch.end - 1))
        first, end = first * batch, (last + 1) * batch
        size = batch // self._history.shards
        pending: dict[int, dict[int, int]] = {}
        for epoch in range(first // length, -(-end // length)):
            places = np.sort(self._positions(read, epoch, samples)) + epoch * length
            for at in places[(places >= first) & (places < end)].tolist():
                shards = pending.setdefault(at // batch, {})
                shards[at % batch // size] = shards.get(at % batch // size, 0) + 1
            whole = [step for step in pending if (step + 1) * batch <= (epoch + 1) * length]
            yield from (Use(stretch.history, step, stretch.counts, pending.pop(step)) for step in whole)
        yield from (Use(stretch.history, step, stretch.counts, shards) for step, shards in pending.items())

    def _positions(self, read: DataRead, epoch: int, samples: np.ndarray) -> np.ndarray:
        """The positions of ``samples`` within the epoch."""
        seed, length = self._history.seed, read.samples
        if read.kind != WINDOWS:
            return positions_many(seed, epoch, samples.copy(), length).astype(np.int64)
        wanted, found = np.zeros(length, bool), []
        wanted[samples.astype(np.int64)] = True
        windows = self._windows_anyhow(read)
        for start in range(0, length, AT_ONCE):
            order = windows.indices(seed, epoch * length + start, min(AT_ONCE, length - start))
            found.append(np.flatnonzero(wanted[np.array(order)]) + start)
        return np.concatenate(found)

    def _windows_anyhow(self, read: DataRead) -> Windows:
        windows = self._windows(read)
        if windows is None:
            reason = "the order is that of row groups, of which the journal has no list"
            raise ConfigError("--file", read.data_sha256[:12], reason, "Ask for a step and a shard, with --data.")
        return windows


def _steps_of(stretch: ReadStretch, read: DataRead, batch: int) -> Iterator[int]:
    """The steps of the stretch that take the samples of this batch."""
    steps = (step_of(stretch.left_out, batch * read.steps_each + each) for each in range(read.steps_each))
    return (step for step in steps if step is not None and stretch.first <= step < stretch.end)


def made_of(data_sha256: str, known: FilesOf) -> FileCatalogue:
    """The catalogue, as the rank that reported it had it."""
    files = [known.files[number] for number in sorted(known.files)]
    return FileCatalogue(data_sha256, known.reader, known.layout, known.window_bytes, files)


def _check_same(history: DataHistory, dataset: Any) -> None:
    if not hasattr(dataset, "__len__"):
        raise ConfigError("--data", type(dataset).__name__, "it has no len()", "Give the data set that the run was trained on.")
    known = {read.samples for read in history.reads}
    if known and len(dataset) not in known:
        raise ConfigError(
            "--data", f"{len(dataset)} samples", f"the run was trained on {', '.join(map(str, sorted(known)))}", "Give the same data set."
        )
    own = getattr(dataset, "data_sha256", None)
    digests = {read.data_sha256 for read in history.reads}
    if own is not None and "" not in digests and (sha256 := own()) and sha256 not in digests:
        raise ConfigError("--data", sha256[:12], f"the run was trained on {', '.join(one[:12] for one in digests)}", "Give the same files.")
