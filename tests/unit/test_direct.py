"""Reads past the page cache bring what is in the file, wherever it lies, and where there is no such way."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from storage.backends import direct
from storage.backends.blocks import BLOCK_BYTES, BlockStream
from storage.backends.files import LocalFiles

SIZE = BLOCK_BYTES + 5_000
CONTENT = os.urandom(1 << 20) * 33


@pytest.fixture
def files(tmp_path: Path) -> LocalFiles:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "large").write_bytes(CONTENT[:SIZE])
    (tmp_path / "d" / "small").write_bytes(CONTENT[:5_000])
    return LocalFiles(tmp_path)


def taken(files: LocalFiles, name: str, offset: int, *lengths: int) -> bytes:
    pieces = [bytearray(length) for length in lengths]
    with files.reading(f"d/{name}") as reader:
        reader.into(offset, [memoryview(piece) for piece in pieces])
    return b"".join(pieces)


@pytest.mark.parametrize("offset", [0, 1, 4_095, 4_096, 12_345, SIZE - 4_500])
@pytest.mark.parametrize("lengths", [(4_400,), (1, 4_096, 3), (0, 100), ()])
def test_what_is_read_is_what_is_there(files: LocalFiles, offset: int, lengths: tuple[int, ...]) -> None:
    assert taken(files, "large", offset, *lengths) == CONTENT[offset : offset + sum(lengths)]


def test_all_of_it_and_not_more(files: LocalFiles) -> None:
    assert taken(files, "large", 0, BLOCK_BYTES, 5_000) == CONTENT[:SIZE]
    for offset, length in ((0, SIZE + 1), (SIZE - 10, 11), (SIZE, 1), (SIZE + 10_000, 1)):
        with pytest.raises(EOFError, match="the file ends at byte"):
            taken(files, "large", offset, length)


def test_threads_have_room_of_their_own(files: LocalFiles) -> None:
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda at: taken(files, "large", at, 100_000), range(0, SIZE - 100_000, 100_000)))
    assert b"".join(parts) == CONTENT[: 100_000 * len(parts)]


def test_a_file_system_without_it_reads_through_the_cache(files: LocalFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some refuse to open such a file, some to read it."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    with monkeypatch.context() as patch:
        patch.setattr(direct._DirectReader, "_pages", refuse)
        assert taken(files, "large", 7, 5_000) == CONTENT[7:5_007]
    monkeypatch.setattr(direct, "_O_DIRECT", None)
    assert taken(files, "large", 7, 5_000) == CONTENT[7:5_007]


def test_other_errors_are_not_hidden(files: LocalFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(direct._DirectReader, "_pages", fail)
    with pytest.raises(OSError, match="Input/output error"):
        taken(files, "large", 0, 10)


def test_a_small_file_is_read_through_the_cache(files: LocalFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_DirectReader", None)  # would fail when called
    assert taken(files, "small", 0, 5_000) == CONTENT[:5_000]


def written(files: LocalFiles, size: int) -> None:
    with files.writing("d/new") as sink, BlockStream(sink) as stream:
        for at in range(0, size, 3 << 20):
            stream.write(CONTENT[at : min(size, at + (3 << 20))])
        assert stream.finish()[0] == size


@pytest.mark.parametrize("size", [BLOCK_BYTES + 1, SIZE, BLOCK_BYTES + 4_096])
def test_what_is_written_is_what_was_given(files: LocalFiles, tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    right = direct.DirectWriter.write
    monkeypatch.setattr(direct.DirectWriter, "write", lambda self, at, data: seen.append(right(self, at, data)) or seen[-1])
    written(files, size)
    assert (tmp_path / "d" / "new").read_bytes() == CONTENT[:size]
    assert seen in ([True, True], [False, False])  # some file systems have no such way


@pytest.mark.parametrize("when", ["opened", "written"])
def test_what_cannot_be_written_past_the_cache_is_written_through_it(
    files: LocalFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    if when == "opened":
        monkeypatch.setattr(direct, "_O_DIRECT", None)
    else:
        monkeypatch.setattr(direct, "_write_all", refuse)
    written(files, SIZE)
    assert (tmp_path / "d" / "new").read_bytes() == CONTENT[:SIZE]


def test_nothing_is_cut_off_that_went_the_other_way(files: LocalFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block went past the cache, and the last ones could not; they are no whole number of pages."""
    right = direct._write_all

    def refuse(descriptor: int, pages: np.ndarray, offset: int) -> None:
        if offset:
            raise OSError(errno.EINVAL, "Invalid argument")
        right(descriptor, pages, offset)

    monkeypatch.setattr(direct, "_write_all", refuse)
    written(files, SIZE)
    assert (tmp_path / "d" / "new").read_bytes() == CONTENT[:SIZE]
    (tmp_path / "d" / "new").unlink()
    written(files, size := 2 * BLOCK_BYTES + 5_000)
    assert (tmp_path / "d" / "new").read_bytes() == CONTENT[:size]


def test_a_disk_that_fails_is_not_hidden(files: LocalFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(direct, "_write_all", fail)
    with pytest.raises(OSError, match="No space left"):
        written(files, SIZE)
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == ["large", "small"]
