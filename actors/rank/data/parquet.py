"""Parquet files: samples are rows, found from the footers. Ranks read whole row groups, and only the wanted columns."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch

from actors.rank.data.readers import File, needed
from fleet.errors import ConfigError

TAIL_BYTES = 64 << 10
"""So much of a file's end is read to find its row groups; more where the footer is larger. pyarrow itself begins with as much."""
MAGIC, MAGIC_BYTES = (b"PAR1", b"PARE"), 8
WINDOW_BYTES = 128 << 20


@dataclasses.dataclass(frozen=True)
class Parquet:
    """Each row is a sample: a dict of its columns. Numbers are Python's, lists of numbers without gaps are tensors,
    all else is as pyarrow's ``to_pylist`` gives it.

    Attributes:
        columns: which columns are read, by name; None for all.
        parse: the dict of a row -> sample; None leaves the dict.
        window_bytes: samples are drawn from row groups of so many decoded bytes at a time; see docs/data.md. The order depends on it.
    """

    columns: Sequence[str] | None = None
    parse: Callable[[dict[str, Any]], Any] | None = None
    window_bytes: int = WINDOW_BYTES
    schema: Any = dataclasses.field(default=None, repr=False)
    """The schema of the first file: all others have the same."""

    def takes(self, path: str) -> bool:
        """Of the files in a folder, all whose names do not begin with ``_`` or ``.``: other programs put marks and metadata there."""
        return not path.rpartition("/")[2].startswith(("_", "."))

    def prepare(self, files: Sequence[File]) -> Parquet:
        """Raises ConfigError: pyarrow is missing, or the first file is not Parquet or lacks a column."""
        needed("pyarrow.parquet", "Parquet", "pyarrow")
        if self.window_bytes < 1:
            raise ConfigError("window_bytes", self.window_bytes, "a window has at least one byte")
        if isinstance(self.columns, str):
            raise ConfigError("columns", self.columns, "it is a list of names", f"Use [{self.columns!r}].")
        schema = _metadata(files[0]).schema.to_arrow_schema()
        missing = [name for name in self.columns or () if name not in schema.names]
        if missing or self.columns == []:
            reason = f"it has no column {', '.join(missing)}" if missing else "no column is asked for"
            raise files[0].refused(reason, f"Its columns are {', '.join(schema.names)}.")
        return dataclasses.replace(self, schema=self._wanted(schema))

    def records(self, file: File) -> ParquetRows:
        """Raises ConfigError when the file is not Parquet, or its columns are not those of the first file."""
        metadata = _metadata(file)
        schema = self._wanted(metadata.schema.to_arrow_schema())
        if self.schema is not None and not schema.equals(self.schema):
            raise file.refused(
                _difference(schema, self.schema), "All files need the same columns of the same types, or give columns=[...]."
            )
        return ParquetRows(file, metadata, schema, self.parse)

    def _wanted(self, schema: Any) -> Any:
        import pyarrow as pa

        names = schema.names if self.columns is None else self.columns
        return pa.schema([schema.field(name) for name in names if name in schema.names])


class ParquetRows:
    """The rows of one file."""

    def __init__(self, file: File, metadata: Any, schema: Any, parse: Callable[[dict[str, Any]], Any] | None) -> None:
        self._file, self._metadata, self._schema, self._parse = file, metadata, schema, parse
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        self.sizes = [group.num_rows for group in groups]
        self._chunks = [[chunk for chunk in map(group.column, range(group.num_columns)) if self._meant(chunk)] for group in groups]

    def __len__(self) -> int:
        return sum(self.sizes)

    def _meant(self, chunk: Any) -> bool:
        """Whether a chunk belongs to a wanted column. Parts of a nested column are stored separately, as ``column.list.element``."""
        path = chunk.path_in_schema
        return any(path == name or path.startswith(f"{name}.") for name in self._schema.names)

    def weight(self, group: int) -> int:
        """Bytes of the group in memory: without compression, and with repeated values written out."""
        widths = {"INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
        plain = [chunk.num_values * widths.get(chunk.physical_type, 0) for chunk in self._chunks[group]]
        return sum(max(chunk.total_uncompressed_size, size) for chunk, size in zip(self._chunks[group], plain, strict=True))

    def spans(self, group: int) -> list[tuple[int, int]]:
        """The spans of the wanted columns."""
        begins = [min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset))) for chunk in self._chunks[group]]
        return [(begin, begin + chunk.total_compressed_size) for begin, chunk in zip(begins, self._chunks[group], strict=True)]

    def load(self, group: int, data: Sequence[bytes]) -> Any:
        """The row group as an Arrow table. Raises ConfigError, with the file's name, when it cannot be decoded."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        parts = FileParts([(start, piece) for (start, _), piece in zip(self.spans(group), data, strict=True)], self._file.size)
        try:
            read = pq.ParquetFile(parts, metadata=self._metadata, pre_buffer=False)
            return read.read_row_group(group, columns=self._schema.names, use_threads=False).combine_chunks()
        except (pa.ArrowException, OSError) as error:
            raise self._file.refused(f"row group {group} cannot be decoded: {error}", "Write the file anew.") from error

    def pick(self, loaded: Any, rows: Sequence[int]) -> list[Any]:
        """The samples of these rows of a table."""
        import pyarrow as pa

        table = loaded.take(pa.array(rows, pa.int64()))
        columns = {name: _values(table[name].combine_chunks()) for name in self._schema.names}
        samples = [{name: values[row] for name, values in columns.items()} for row in range(len(rows))]
        return samples if self._parse is None else [self._parse(sample) for sample in samples]


def _values(column: Any) -> list[Any]:
    """An Arrow array -> its values. Lists of numbers become tensors, which fit into a batch, except lists with gaps."""
    import pyarrow.types as types

    listed = types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type)
    kind = column.type.value_type if listed else None
    if not listed or not (types.is_integer(kind) or types.is_floating(kind)):
        return list(column.to_pylist())
    return [_tensor(row.values) if row.is_valid and not row.values.null_count else row.as_py() for row in column]


def _tensor(numbers: Any) -> torch.Tensor:
    return torch.from_numpy(numbers.to_numpy(zero_copy_only=False).copy())


class FileParts(io.RawIOBase):
    """A file of ``size`` bytes of which only some parts are there: (first byte, bytes) of each."""

    def __init__(self, parts: Sequence[tuple[int, bytes]], size: int) -> None:
        super().__init__()
        self._parts, self._size, self._at = parts, size, 0

    def readable(self) -> bool:
        """For pyarrow."""
        return True

    def seekable(self) -> bool:
        """For pyarrow."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """From the beginning, from here, or from the end."""
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence] + offset
        return self._at

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Raises OSError for bytes that are in no part."""
        stop = self._size if size < 0 else min(self._size, self._at + size)
        for start, data in self._parts:
            if start <= self._at and stop <= start + len(data):
                found = data[self._at - start : stop - start]
                self._at = stop
                return found
        raise OSError(f"bytes {self._at} to {stop} belong to no part that was read")


def _metadata(file: File) -> Any:
    """A file's footer. Raises ConfigError when it has none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tail = file.read(max(0, file.size - TAIL_BYTES), file.size)
    if not tail.endswith(MAGIC):
        raise file.refused("it is no Parquet file", "Give a pattern that names only those, as folder/*.parquet.")
    footer_bytes = int.from_bytes(tail[-MAGIC_BYTES:-4], "little") + MAGIC_BYTES
    if footer_bytes > len(tail):
        tail = file.read(max(0, file.size - footer_bytes), file.size)
    try:
        return pq.read_metadata(FileParts([(file.size - len(tail), tail)], file.size))
    except (pa.ArrowException, OSError) as error:
        raise file.refused(f"its footer cannot be read: {error}", "Write the file anew.") from error


def _difference(schema: Any, first: Any) -> str:
    for field in first:
        if field.name not in schema.names:
            return f"it has no column {field.name}, as the first file has"
        if not schema.field(field.name).equals(field):
            return f"its column {field.name} is {schema.field(field.name).type}, and {field.type} in the first file"
    more = [name for name in schema.names if name not in first.names]
    return f"it has the column {more[0]}, and the first file has not" if more else "its columns are in another order than the first file's"
