"""A trial of a store before a run depends on it: it writes, reads, lists and deletes a small object."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.errors import ConfigError
from storage.backends.causes import WAYS_OUT, cause_of
from storage.backends.files import Files, StoreError, open_files, put
from storage.backends.urls import redact

LIMIT_S = 20.0
"""A trial ends after so long, with or without an answer of the store."""
IMPATIENT: Mapping[str, Any] = {"connect_timeout_s": 3.0, "read_timeout_s": 6.0, "attempts": 2}
"""Limits for S3, so that botocore's error comes before the limit."""
OTHER_WAY_OUT = "Choose a folder that you may write to, or a URL such as s3://bucket/runs."


@dataclass(frozen=True, slots=True)
class Failure:
    """The failed ``operation`` in the store ``url``: write, read, list or delete. Credentials are hidden."""

    url: str
    operation: str
    cause: str
    detail: str

    def refusal(self, where: str) -> ConfigError:
        """The error for the user. ``where``: the machine or node of the trial."""
        return refusal(self.url, f"{where} could not {self.operation} a small object there", self.cause, self.detail)


def refusal(url: str, what: str, cause: str, detail: str) -> ConfigError:
    """The error that ``--storage`` cannot be used: ``what`` is a clause on the failure; with a way out that fits the cause."""
    return ConfigError("--storage", redact(url), f"{what}: {cause}: {redact(detail)}", WAYS_OUT.get(cause, OTHER_WAY_OUT))


class StoreTrial:
    """One trial, in a thread of its own from the start on. It leaves no object behind, unless the store does not delete it.

    Args:
        url: of the store, as for :func:`storage.backends.files.open_files`.
    """

    def __init__(self, url: str) -> None:
        self._url, self._options = url, IMPATIENT if url.startswith("s3://") else {}
        self._operation, self._done = "write", threading.Event()  # the thread writes its progress, and the waiting thread reads it
        self._failure: Failure | None = None
        threading.Thread(target=self._run, name="fleet-store-trial", daemon=True).start()

    def result(self) -> Failure | None:
        """The failure, or None when the store can be used. It waits for ``LIMIT_S``, and raises no error of the store."""
        if self._done.wait(LIMIT_S) or self._failure is not None:
            return self._failure
        return Failure(redact(self._url), self._operation, "timeout", f"no answer within {LIMIT_S:g} s")

    def check(self, where: str) -> None:
        """Raises ConfigError after a failure; ``where`` names the machine or node."""
        if (failure := self.result()) is not None:
            raise failure.refusal(where)

    def _run(self) -> None:
        folder = f"trial-{secrets.token_hex(8)}"
        try:
            files = open_files(self._url, **self._options)
            try:
                self._try(files, folder)
            except Exception as error:  # noqa: BLE001 - see below
                self._fail(error)
                files.remove(folder)  # it may exist although no answer came
        except Exception as error:  # noqa: BLE001 - after any error of a client library, the store cannot be used
            self._fail(error)
        finally:
            self._done.set()

    def _fail(self, error: Exception) -> None:
        """The first failure counts: a failure of the tidying up follows from it."""
        if self._failure is None:
            self._failure = Failure(redact(self._url), self._operation, cause_of(error), redact(detail_of(error)))

    def _try(self, files: Files, folder: str) -> None:
        content = secrets.token_bytes(64)
        put(files, f"{folder}/object", content)
        self._operation = "read"
        if files.read(f"{folder}/object") != content:
            raise OSError("the store returned other bytes than were written")
        self._operation = "list"
        if files.sizes(folder) != {"object": len(content)}:
            raise OSError("the object that was written is not listed")
        self._operation = "delete"
        files.remove(folder)
        if files.size(f"{folder}/object") is not None:
            raise OSError("the object that was deleted still exists")


def detail_of(error: Exception) -> str:
    """The text of an error, without the store's name where a ``StoreError`` repeats it."""
    return error.detail if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"


def try_store(url: str, mark: str = "") -> Failure | None:
    """Try the store and wait, for a process without other work. ``mark``: the result of :func:`leave_mark` on another node."""
    failure = StoreTrial(url).result()
    if failure is None and mark and open_files(url).size(mark) is None:
        return Failure(redact(url), "find", "not shared", "the object that the run's head wrote there is not on this node")
    return failure


def leave_mark(url: str) -> str:
    """Write a small object into a store. Returns its name, by which other nodes find out whether they have the same store."""
    name = f"mark-{secrets.token_hex(8)}/object"
    put(open_files(url), name, b"here")
    return name


def remove_mark(url: str, mark: str) -> None:
    """Remove the object of :func:`leave_mark`."""
    open_files(url).remove(mark.partition("/")[0])


def check_folder(folder: Path) -> None:
    """Raises ConfigError when files cannot be kept in ``folder``. It makes the folder if needed, and removes it if it cannot be used."""
    made = [each for each in (folder, *folder.parents) if not _there(each)]
    failure = try_store(f"file://{folder.absolute()}")
    if failure is None:
        return
    for each in made:
        with contextlib.suppress(OSError):
            each.rmdir()
    raise dataclasses.replace(failure, url=str(folder)).refusal("this machine")


def _there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a folder on the way may not be looked into
        return True
