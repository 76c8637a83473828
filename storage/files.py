"""Where a checkpoint's files lie: a local (or shared) directory, or an object store.

Both put a file atomically and durably, or not at all. (But for ``memory://``, whose files are there, incomplete, while they are written.)
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import fsspec
from fsspec.implementations.local import LocalFileSystem

TEMPORARY = ".writing-"


class Files(Protocol):
    """Files named ``directory/file`` under one root. Failures are OSErrors; a missing file is a FileNotFoundError."""

    def writing(self, name: str) -> AbstractContextManager[BinaryIO]:
        """A file that is there, whole and durable, once the block ends, and not at all when the block raises."""
        ...

    def read(self, name: str) -> BinaryIO: ...

    def size(self, name: str) -> int | None:
        """Bytes, or None when there is no such file."""
        ...

    def directories(self) -> list[str]: ...

    def remove(self, name: str) -> None:
        """Remove a file or a directory with all in it; one that is not there is fine."""
        ...


def open_files(url: str, **options: Any) -> Files:
    """The files under ``url``: a path or ``file://``, ``memory://``, ``s3://``... ``options`` go to fsspec (credentials, endpoint)."""
    system, path = fsspec.core.url_to_fs(url, **options)
    return LocalFiles(Path(path)) if isinstance(system, LocalFileSystem) else ObjectFiles(system, path)


class LocalFiles:
    """A directory: written beside, flushed to the disk, renamed into place, and the directory flushed too."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        path = self._root / name
        self._make(path.parent)
        beside = path.parent / f"{TEMPORARY}{uuid.uuid4().hex}"
        try:
            with beside.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        _sync(path.parent)

    def _make(self, directory: Path) -> None:
        missing = [d for d in (directory, *directory.parents) if not d.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        for made in missing:
            _sync(made.parent)

    def read(self, name: str) -> BinaryIO:
        return (self._root / name).open("rb")

    def size(self, name: str) -> int | None:
        path = self._root / name
        return path.stat().st_size if path.is_file() else None

    def directories(self) -> list[str]:
        return [entry.name for entry in self._root.iterdir() if entry.is_dir()] if self._root.is_dir() else []

    def remove(self, name: str) -> None:
        path = self._root / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=False)
        else:
            path.unlink(missing_ok=True)
        if path.parent.is_dir():
            _sync(path.parent)


class ObjectFiles:
    """An object store through fsspec: an object is there once its upload was completed."""

    def __init__(self, system: Any, root: str) -> None:
        self._system, self._root = system, root.rstrip("/")

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        # A plain `with` would complete the upload of a half written object when the block raises.
        with _as_os_error():
            file = self._system.open(self._path(name), "wb", autocommit=False)
        try:
            yield file
        except BaseException:
            file.discard()
            raise
        with _as_os_error():
            file.close()
            file.commit()

    def read(self, name: str) -> BinaryIO:
        with _as_os_error():
            file: BinaryIO = self._system.open(self._path(name), "rb")
        return file

    def size(self, name: str) -> int | None:
        with _as_os_error():
            self._system.invalidate_cache()
            try:
                return int(self._system.info(self._path(name))["size"])
            except FileNotFoundError:
                return None

    def directories(self) -> list[str]:
        with _as_os_error():
            self._system.invalidate_cache()
            try:
                entries = self._system.ls(self._root, detail=True)
            except FileNotFoundError:
                return []
        return [entry["name"].rstrip("/").rsplit("/", 1)[-1] for entry in entries if entry["type"] == "directory"]

    def remove(self, name: str) -> None:
        with _as_os_error():
            self._system.invalidate_cache()
            if self._system.exists(self._path(name)):
                self._system.rm(self._path(name), recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Client libraries have errors of their own (no route, no credentials); callers are promised OSErrors."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
