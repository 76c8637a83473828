"""Places of a checkpoint's files: a local (or shared) directory, S3, or any other object store of fsspec.

All of them put a file atomically and durably, or not at all. (``memory://`` does not: its files exist, incomplete, while they are written.)
"""

from __future__ import annotations

import errno
import importlib
import os
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import fsspec
from fsspec.implementations.local import LocalFileSystem

from fleet.errors import FleetError
from fleet.host.journal import sync_directory
from storage.backends.blocks import BLOCK_BYTES, BlockStream, Segments, SharedReader, Sink
from storage.backends.direct import DirectWriter, past_the_cache
from storage.backends.urls import redact

TEMPORARY = ".writing-"
IOV_MAX = 1024
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Of a file system without hard links. It cannot create a whole file once."""
LOCAL_WORKERS = 2


class StoreError(FleetError, OSError):
    """The store failed. ``cause`` is one of ``unreachable``, ``timeout``, ``credentials``, ``bucket``, ``refused``, ``server``, ``other``.

    The message names the store, never its credentials.
    """

    def __init__(self, store: str, cause: str, detail: str) -> None:
        super().__init__(redact(store), cause, redact(detail))
        self.store, self.cause, self.detail = redact(store), cause, redact(detail)

    def __str__(self) -> str:
        return f"store {self.store}: {self.cause}: {self.detail}"


class AlreadyThere(StoreError):
    """A conditional write found another file, or another write of the same file at that moment."""


class Files(Protocol):
    """Files named ``directory/file`` under one root. Failures are OSErrors; a missing file is a FileNotFoundError."""

    def writing(self, name: str) -> AbstractContextManager[Sink]:
        """A file that exists, whole and durable, once the block ends, and not at all when the block raises."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file that must not be there, whole and durable. False: another file was there first, and stays as it is.

        A store that cannot do that replaces the other file; :func:`creates_once` finds it.
        """
        ...

    def note(self, name: str, data: bytes) -> None:
        """Write a small file, whole. It need not survive the machine."""
        ...

    def reading(self, name: str) -> AbstractContextManager[SharedReader]: ...

    def read(self, name: str) -> bytes: ...

    def size(self, name: str) -> int | None:
        """Bytes, or None when there is no such file."""
        ...

    def sizes(self, directory: str) -> dict[str, int]:
        """Bytes of every file in ``directory``; empty without such a directory."""
        ...

    def directories(self) -> list[str]: ...

    def remove(self, name: str) -> None:
        """Remove a file or a directory with all in it; without effect when there is none."""
        ...

    def unfinished(self) -> list[tuple[str, Callable[[], None]]]:
        """(directory, function that removes it) of all unfinished files: those of dead writers, and those of writers at work."""
        ...


SCHEMES = {
    "s3": "storage.backends.s3:S3Files",
    "peers": "storage.peers.files:PeerFiles",
}
"""Scheme of a URL -> class of its files, imported when needed. All other schemes are local, or fsspec's."""


def open_files(url: str, **options: Any) -> Files:
    """The files under ``url``: a path or ``file://``, ``s3://``, ``peers://``, ``memory://``, or another scheme of fsspec.

    ``options`` of ``s3://`` are those of :class:`storage.backends.s3.S3Files`; others go to fsspec.
    """
    scheme = url.partition("://")[0]
    if scheme in SCHEMES:
        module, _, name = SCHEMES[scheme].partition(":")
        made: Files = getattr(importlib.import_module(module), name)(url, **options)
        return made
    with _as_os_error(url):
        system, path = fsspec.core.url_to_fs(url, **options)
    return LocalFiles(Path(path)) if isinstance(system, LocalFileSystem) else ObjectFiles(system, path, url)


def addresses_of(url: str) -> tuple[list[str], int]:
    """The current IPv4 addresses of the store under ``url``, and its port. Raises OSError when none are known here."""
    address: str = getattr(open_files(url), "address", "")
    if not address:
        raise OSError(f"the store {url.partition('://')[0]}:// has no known address")
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found}), int(port)


def put(files: Files, name: str, data: bytes) -> tuple[int, str]:
    """Write a small file at once. Returns (bytes, digest)."""
    with files.writing(name) as sink, BlockStream(sink) as stream:
        stream.write(data)
        return stream.finish()


def creates_once(files: Files, directory: str) -> bool:
    """Whether a name that was created in ``directory`` cannot be created again. The file stays."""
    name = f"{directory}/once"
    return files.create(name, b"first") and not files.create(name, b"second") and files.read(name) == b"first"


def copy_in(files: Files, name: str, source: Path) -> None:
    """Write the bytes of a local file; the file exists when this returns."""
    with source.open("rb") as file, files.writing(name) as sink, BlockStream(sink) as stream:
        while block := file.read(BLOCK_BYTES):
            stream.write(block)
        stream.finish()


# ---- a directory -------------------------------------------------------------------------------------------------------------------------


class LocalFiles:
    """A directory: written beside, flushed to the disk, renamed into place, and the directory flushed too."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @contextmanager
    def writing(self, name: str) -> Iterator[Sink]:
        path = self._root / name
        self._make(path.parent)
        beside = path.parent / f"{TEMPORARY}{uuid.uuid4().hex}"
        try:
            with beside.open("xb", buffering=0) as file:
                direct = DirectWriter(beside, file.fileno())
                try:
                    yield _LocalSink(file.fileno(), direct)
                finally:
                    direct.close()
                os.fsync(file.fileno())
            beside.replace(path)
        except Exception:
            beside.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)

    def create(self, name: str, data: bytes) -> bool:
        path = self._root / name
        self._make(path.parent)
        beside = path.parent / f"{TEMPORARY}{uuid.uuid4().hex}"
        try:
            with beside.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(beside, path)
            except FileExistsError:
                return path.read_bytes() == data
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
        sync_directory(path.parent)
        return True

    def note(self, name: str, data: bytes) -> None:
        path = self._root / name
        beside = path.parent / f"{TEMPORARY}{uuid.uuid4().hex}"
        try:
            beside.write_bytes(data)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)

    def _make(self, directory: Path) -> None:
        missing = [d for d in (directory, *directory.parents) if not d.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        for made in missing:
            sync_directory(made.parent)

    @contextmanager
    def reading(self, name: str) -> Iterator[SharedReader]:
        path = self._root / name
        with path.open("rb", buffering=0) as file, past_the_cache(path, _LocalReader(file.fileno())) as reader:
            yield reader

    def read(self, name: str) -> bytes:
        return (self._root / name).read_bytes()

    def size(self, name: str) -> int | None:
        path = self._root / name
        return path.stat().st_size if path.is_file() else None

    def sizes(self, directory: str) -> dict[str, int]:
        path, found = self._root / directory, dict[str, int]()
        if not path.is_dir():
            return found
        with os.scandir(path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another process has removed the file since
                    if entry.is_file():
                        found[entry.name] = entry.stat().st_size
        return found

    def directories(self) -> list[str]:
        return [entry.name for entry in self._root.iterdir() if entry.is_dir()] if self._root.is_dir() else []

    def remove(self, name: str) -> None:
        path = self._root / name
        if path.is_dir():
            for file in sorted(path.iterdir()):
                file.unlink(missing_ok=True)
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        if path.parent.is_dir():
            sync_directory(path.parent)

    def unfinished(self) -> list[tuple[str, Callable[[], None]]]:
        found = self._root.glob(f"*/{TEMPORARY}*")
        return [(path.parent.name, partial(self.remove, f"{path.parent.name}/{path.name}")) for path in found]


class _LocalSink:
    def __init__(self, descriptor: int, direct: DirectWriter) -> None:
        self.workers, self._descriptor, self._direct = LOCAL_WORKERS, descriptor, direct

    def block(self, number: int, data: Segments) -> None:
        if not self._direct.write(number * BLOCK_BYTES, data):
            self._through_the_cache(number, data)

    def _through_the_cache(self, number: int, data: Segments) -> None:
        at, left = number * BLOCK_BYTES, [memoryview(segment) for segment in data]
        while left:
            written = os.pwritev(self._descriptor, left[:IOV_MAX], at)
            at, left = at + written, skip(left, written)
        # The kernel would begin to write only when memory is full of dirty pages, or at the fsync: this makes it begin now.
        os.posix_fadvise(self._descriptor, number * BLOCK_BYTES, BLOCK_BYTES, os.POSIX_FADV_DONTNEED)

    def whole(self, data: Segments) -> None:
        self._through_the_cache(0, data)


class _LocalReader:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def into(self, offset: int, views: Sequence[memoryview]) -> None:
        left = list(views)
        while left:
            count = os.preadv(self._descriptor, left[:IOV_MAX], offset)
            if count == 0:
                raise EOFError(f"the file ends at byte {offset}")
            offset += count
            left = skip(left, count)


def skip(views: list[memoryview], count: int) -> list[memoryview]:
    """The rest of ``views`` after their first ``count`` bytes."""
    index = 0
    while index < len(views) and count >= len(views[index]):
        count -= len(views[index])
        index += 1
    left = views[index:]
    if count:
        left[0] = left[0][count:]
    return left


# ---- an object store of fsspec -----------------------------------------------------------------------------------------------------------


class ObjectFiles:
    """An object store through fsspec: an object exists once its upload is complete."""

    def __init__(self, system: Any, root: str, url: str = "") -> None:
        self._system, self._root, self._url = system, root.rstrip("/"), url or root

    @contextmanager
    def writing(self, name: str) -> Iterator[Sink]:
        # A plain `with` would complete the upload of a half written object when the block raises.
        with _as_os_error(self._url):
            file = self._system.open(self._path(name), "wb", autocommit=False)
        try:
            yield _ObjectSink(file, self._url)
        except Exception:
            file.discard()
            raise
        with _as_os_error(self._url):
            file.close()
            file.commit()

    def create(self, name: str, data: bytes) -> bool:
        with _as_os_error(self._url):
            try:
                self._system.pipe_file(self._path(name), data, mode="create")
            except FileExistsError:
                return bytes(self._system.cat_file(self._path(name))) == data
        return True

    def note(self, name: str, data: bytes) -> None:
        put(self, name, data)

    @contextmanager
    def reading(self, name: str) -> Iterator[SharedReader]:
        yield _ObjectReader(self._system, self._path(name), self._url)

    def read(self, name: str) -> bytes:
        with _as_os_error(self._url):
            return bytes(self._system.cat_file(self._path(name)))

    def size(self, name: str) -> int | None:
        with _as_os_error(self._url):
            self._system.invalidate_cache()
            try:
                return int(self._system.info(self._path(name))["size"])
            except FileNotFoundError:
                return None

    def sizes(self, directory: str) -> dict[str, int]:
        return {_last(entry["name"]): int(entry["size"]) for entry in self._entries(self._path(directory)) if entry["type"] == "file"}

    def directories(self) -> list[str]:
        return [_last(entry["name"]) for entry in self._entries(self._root) if entry["type"] == "directory"]

    def _entries(self, path: str) -> list[dict[str, Any]]:
        with _as_os_error(self._url):
            self._system.invalidate_cache()
            try:
                return list(self._system.ls(path, detail=True))
            except FileNotFoundError:
                return []

    def remove(self, name: str) -> None:
        with _as_os_error(self._url):
            self._system.invalidate_cache()
            if self._system.exists(self._path(name)):
                self._system.rm(self._path(name), recursive=True)

    def unfinished(self) -> list[tuple[str, Callable[[], None]]]:
        return []  # fsspec cannot list incomplete uploads; stores expire them by a rule of the bucket

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


class _ObjectSink:
    """One worker: a file of fsspec is written in order."""

    workers = 1

    def __init__(self, file: BinaryIO, url: str) -> None:
        self._file, self._url = file, url

    def block(self, number: int, data: Segments) -> None:
        with _as_os_error(self._url):
            for segment in data:
                self._file.write(segment)

    def whole(self, data: Segments) -> None:
        self.block(0, data)


class _ObjectReader:
    def __init__(self, system: Any, path: str, url: str) -> None:
        self._system, self._path, self._url = system, path, url

    def into(self, offset: int, views: Sequence[memoryview]) -> None:
        size = sum(len(view) for view in views)
        with _as_os_error(self._url):
            data = memoryview(self._system.cat_file(self._path, start=offset, end=offset + size))
        if len(data) < size:
            raise EOFError(f"the object ends at byte {offset + len(data)}")
        at = 0
        for view in views:
            view[:] = data[at : at + len(view)]
            at += len(view)


def _last(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


@contextmanager
def _as_os_error(url: str) -> Iterator[None]:
    """Turns errors of client libraries (no route, no credentials) into OSErrors without secrets, as callers expect."""
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if redact(text) != text:
            raise StoreError(url, "other", text) from None  # the cause would show in a traceback
        if isinstance(error, OSError):
            raise
        raise StoreError(url, "other", text) from error
