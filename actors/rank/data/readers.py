"""How samples lie in files: a reader knows which bytes of a file are record ``i``, and decodes them. It reads no file itself.

So the dataset can read all records of a batch at once, from several files of any store.
"""

from __future__ import annotations

import importlib
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import fsspec
import numpy as np
import torch

from fleet.errors import ConfigError

SCAN_BYTES = 16 << 20
HEADER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class File:
    """One file of a dataset. ``path`` is as its file system writes it, without credentials and options; ``size`` in bytes."""

    system: fsspec.AbstractFileSystem
    path: str
    size: int

    def read(self, start: int, stop: int) -> bytes:
        """The bytes ``start`` to ``stop``."""
        return bytes(self.system.cat_file(self.path, start=start, end=stop))

    def scan(self) -> Iterator[bytes]:
        """The whole file, a stretch at a time."""
        for start in range(0, self.size, SCAN_BYTES):
            yield self.read(start, min(self.size, start + SCAN_BYTES))

    def refused(self, reason: str, way_out: str = "") -> ConfigError:
        return ConfigError("dataset", shown(self.path), reason, way_out)


def shown(path: str) -> str:
    """A path or URL fit for messages: without credentials and query."""
    return re.sub(r"(?<=//)[^/@]*@", "", path).partition("?")[0]


def needed(library: str, reader: str, install: str) -> Any:
    """A library that only ``reader`` needs. Raises ConfigError when it is not installed."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise ConfigError("reader", reader, f"it needs {install}, which cannot be imported: {error}", f"pip install {install}") from error


class Records(Protocol):
    """The records of one file."""

    def __len__(self) -> int:
        """How many records there are."""

    def span(self, index: int) -> tuple[int, int]:
        """Where record ``index`` begins and ends in the file, in bytes."""

    def decode(self, data: bytes) -> Any:
        """The sample of these bytes. It may draw no random numbers, and several threads call it."""


@runtime_checkable
class Grouped(Protocol):
    """The records of one file that can be read only many at once, as those of a row group of a Parquet file."""

    sizes: Sequence[int]
    """Records in each group."""

    def __len__(self) -> int:
        """How many records there are in all groups."""

    def weight(self, group: int) -> int:
        """About how many bytes of memory the group takes when it is loaded."""

    def spans(self, group: int) -> list[tuple[int, int]]:
        """The bytes of the file that the group needs: (start, stop) of each stretch."""

    def load(self, group: int, data: Sequence[bytes]) -> Any:
        """The loaded group for ``pick``, from the bytes of its spans. Its size is ``nbytes``."""

    def pick(self, loaded: Any, rows: Sequence[int]) -> list[Any]:
        """The samples of these rows of a loaded group. As ``Records.decode`` it may draw no random numbers."""


class Reader(Protocol):
    """A file format: anything with this method may be given to a ``ShardedDataset``.

    It may have two further methods. ``takes(path) -> bool``: whether a file in a folder belongs to the data; without it, all do.
    ``prepare(files) -> Reader``: the reader to use once all files are known.
    """

    def records(self, file: File) -> Records | Grouped:
        """Find the records of ``file``. Called once for each file, at the start. Raises ConfigError when the file is not of this format."""


@dataclass(frozen=True)
class Lines:
    """Each line of a text file that is not empty is a record. The file is read once at the start, to find them.

    Attributes:
        parse: text of a line -> sample.
        encoding: of the text; one in which byte 10 only ends lines, as in UTF-8.
    """

    parse: Callable[[str], Any] = str
    encoding: str = "utf-8"

    def records(self, file: File) -> Records:
        ends = [np.flatnonzero(np.frombuffer(data, np.uint8) == 10) + SCAN_BYTES * part for part, data in enumerate(file.scan())]
        stops = np.append(np.concatenate([np.empty(0, np.int64), *ends]), file.size)
        starts = np.append(0, stops[:-1] + 1)
        full = stops > starts
        return _Lines(self, starts[full], stops[full])


@dataclass(frozen=True)
class _Lines:
    reader: Lines
    starts: np.ndarray
    stops: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def span(self, index: int) -> tuple[int, int]:
        return int(self.starts[index]), int(self.stops[index])

    def decode(self, data: bytes) -> Any:
        return self.reader.parse(data.decode(self.reader.encoding).rstrip("\r"))


def JsonLines() -> Lines:  # noqa: N802  a format, like its neighbours
    """Each line of a file is a record in JSON."""
    return Lines(json.loads)


@dataclass(frozen=True)
class Fixed:
    """Records of ``record_bytes`` each, one after the other; ``parse``: bytes of a record -> sample.

    Raises ConfigError when a file is no whole number of records.
    """

    record_bytes: int
    parse: Callable[[bytes], Any]

    def records(self, file: File) -> Records:
        if self.record_bytes < 1:
            raise ConfigError("record_bytes", self.record_bytes, "a record has at least one byte")
        if file.size % self.record_bytes:
            reason = f"its {file.size} bytes are no whole number of records of {self.record_bytes} bytes"
            raise file.refused(reason, "Give the size of the records in it.")
        return _Strided(0, self.record_bytes, self.record_bytes, file.size // self.record_bytes, self.parse)


@dataclass(frozen=True)
class Whole:
    """A file is one record, as an image is; ``parse``: bytes of the file -> sample."""

    parse: Callable[[bytes], Any]

    def records(self, file: File) -> Records:
        return _Strided(0, file.size, file.size, 1, self.parse)


@dataclass(frozen=True)
class Tokens:
    """Packed tokens, for language models: raw integers of ``dtype`` (``.bin``), or a one-dimensional ``.npy``.

    A sample is an int64 tensor of ``length + 1`` tokens, inputs and targets shifted by one; neighbouring samples share one token. Tokens
    left at the end of a file are not used.
    """

    length: int
    dtype: str = "uint16"

    def records(self, file: File) -> Records:
        if self.length < 1:
            raise ConfigError("length", self.length, "a sequence has at least one token")
        start, dtype = _npy_header(file) if file.path.endswith(".npy") else (0, np.dtype(self.dtype))
        if dtype.kind not in "iu":
            raise file.refused(f"it holds {dtype}, and tokens are integers")
        if (file.size - start) % dtype.itemsize:
            raise file.refused(f"its {file.size - start} bytes are no whole number of tokens of {dtype}", "Give the right dtype=...")
        count = max(0, (file.size - start) // dtype.itemsize - 1) // self.length
        size = dtype.itemsize
        return _Strided(start, self.length * size, (self.length + 1) * size, count, _tokens(dtype))


def _tokens(dtype: np.dtype[Any]) -> Callable[[bytes], torch.Tensor]:
    return lambda data: torch.from_numpy(np.frombuffer(data, dtype).astype(np.int64))


def _npy_header(file: File) -> tuple[int, np.dtype[Any]]:
    """(where the numbers begin, their type) of a ``.npy`` file."""
    head = io.BytesIO(file.read(0, min(file.size, HEADER_BYTES)))
    try:
        major, _ = np.lib.format.read_magic(head)
        read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(head)
    except ValueError as error:
        raise file.refused(f"it is no .npy file: {error}") from error
    if len(shape) != 1 or file.size != head.tell() + shape[0] * dtype.itemsize:
        raise file.refused(f"its header says shape {shape} of {dtype}, which is no list of tokens of the file's {file.size} bytes")
    return head.tell(), dtype


@dataclass(frozen=True, slots=True)
class _Strided:
    """``count`` records of ``size`` bytes, a new one every ``stride`` bytes."""

    start: int
    stride: int
    size: int
    count: int
    parse: Callable[[bytes], Any]

    def __len__(self) -> int:
        return self.count

    @property
    def layout(self) -> tuple[int, int, int]:
        """Where records lie, as ``DataFile`` has it."""
        return self.start, self.stride, self.size

    def span(self, index: int) -> tuple[int, int]:
        start = self.start + index * self.stride
        return start, start + self.size

    def decode(self, data: bytes) -> Any:
        return self.parse(data)
