"""A store is tried before anything depends on it: a small object is written, read back, listed and deleted."""

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
"""A trial ends after so long, whatever the store does."""
IMPATIENT: Mapping[str, Any] = {"connect_timeout_s": 3.0, "read_timeout_s": 6.0, "attempts": 2}
"""Of S3, so that what botocore says comes before the limit."""
OTHER_WAY_OUT = "Choose a folder that you may write to, or a URL such as s3://bucket/runs."


@dataclass(frozen=True, slots=True)
class Failure:
    """What could not be done in the store ``url``: ``operation`` is write, read, list or delete. Credentials are hidden."""

    url: str
    operation: str
    cause: str
    detail: str

    def refusal(self, where: str) -> ConfigError:
        """For the user. ``where``: the machine or node on which the store was tried."""
        return refusal(self.url, f"{where} could not {self.operation} a small object there", self.cause, self.detail)


def refusal(url: str, what: str, cause: str, detail: str) -> ConfigError:
    """That ``--storage`` cannot be used: ``what`` is a clause on what failed; with a way out that fits the cause."""
    return ConfigError("--storage", redact(url), f"{what}: {cause}: {redact(detail)}", WAYS_OUT.get(cause, OTHER_WAY_OUT))


class StoreTrial:
    """One trial, in a thread of its own from the start on. It leaves nothing behind, unless the store lets nothing be deleted.

    Args:
        url: of the store, as :func:`storage.backends.files.open_files` takes it.
    """

    def __init__(self, url: str) -> None:
        self._url, self._options = url, IMPATIENT if url.startswith("s3://") else {}
        self._operation, self._done = "write", threading.Event()  # the thread says how far it has come, and who waits reads it
        self._failure: Failure | None = None
        threading.Thread(target=self._run, name="fleet-store-trial", daemon=True).start()

    def result(self) -> Failure | None:
        """What failed, or None when the store can be used: it waits for ``LIMIT_S``. Never raises what the store raised."""
        if self._done.wait(LIMIT_S) or self._failure is not None:
            return self._failure
        return Failure(redact(self._url), self._operation, "timeout", f"no answer within {LIMIT_S:g} s")

    def check(self, where: str) -> None:
        """Raises ConfigError when something failed; ``where`` says on which machine or node."""
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
                files.remove(folder)  # it may be there although no answer came
        except Exception as error:  # noqa: BLE001 - whatever a client library raises, the store cannot be used
            self._fail(error)
        finally:
            self._done.set()

    def _fail(self, error: Exception) -> None:
        """The first one counts: what fails in tidying up follows from it."""
        if self._failure is None:
            self._failure = Failure(redact(self._url), self._operation, cause_of(error), redact(detail_of(error)))

    def _try(self, files: Files, folder: str) -> None:
        content = secrets.token_bytes(64)
        put(files, f"{folder}/object", content)
        self._operation = "read"
        if files.read(f"{folder}/object") != content:
            raise OSError("other bytes came back than were written")
        self._operation = "list"
        if files.sizes(folder) != {"object": len(content)}:
            raise OSError("what was written is not listed")
        self._operation = "delete"
        files.remove(folder)
        if files.size(f"{folder}/object") is not None:
            raise OSError("what was deleted is still there")


def detail_of(error: Exception) -> str:
    """What an error says, without the store's name where a ``StoreError`` repeats it."""
    return error.detail if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"


def try_store(url: str, mark: str = "") -> Failure | None:
    """Try it and wait, for a process that has nothing else to do meanwhile. ``mark`` is what :func:`leave_mark` left there elsewhere."""
    failure = StoreTrial(url).result()
    if failure is None and mark and open_files(url).size(mark) is None:
        return Failure(redact(url), "find", "not shared", "what the run's head has written there is not on this node")
    return failure


def leave_mark(url: str) -> str:
    """Write a small object into a store; returns its name, by which other nodes find out whether theirs is the same store."""
    name = f"mark-{secrets.token_hex(8)}/object"
    put(open_files(url), name, b"here")
    return name


def remove_mark(url: str, mark: str) -> None:
    """The end of :func:`leave_mark`."""
    open_files(url).remove(mark.partition("/")[0])


def check_folder(folder: Path) -> None:
    """Raises ConfigError when files cannot be kept in ``folder``. It is made if need be; when it cannot be used, none of it is left."""
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
