"""The secret of a run. The process that starts the run draws it. A call hands it to coordinator and agents; other processes read a file.

The file belongs to the user alone. The coordinator and ``fleet runs set`` find it beside the journal, an agent and its ranks in the node's
own folder. It is removed with the run. The secret is on no command line and in no environment, as other users may read these.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fleet.errors import RunFailed
from fleet.protocol.proof import NONCE_BYTES, SECRET_BYTES, check_secret

T = TypeVar("T")

FILE = "secret"
"""The file's name, in the run's folder and in each node's."""


def fresh() -> bytes:
    """A secret for a run that begins, or is resumed."""
    return secrets.token_bytes(SECRET_BYTES)


def nonce() -> bytes:
    """Random bytes for one connection."""
    return secrets.token_bytes(NONCE_BYTES)


def keep(folder: Path, secret: bytes) -> None:
    """Write the secret into ``folder``, readable by this user alone, at once or not at all. Raises OSError."""
    check_secret(secret)
    beside = folder / f".{FILE}-{secrets.token_hex(8)}"
    number = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(secret)
        beside.replace(folder / FILE)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def read(folder: Path) -> bytes:
    """The secret of the run with this ``folder``. Raises FileNotFoundError where there is none, RunFailed when other users may know it or
    have written it."""
    path = folder / FILE
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        data = file.read(SECRET_BYTES + 1)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise RunFailed(f"{path} belongs to user {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):o}: others may know the secret")
    if len(data) != SECRET_BYTES:
        raise RunFailed(f"{path} holds {len(data)} bytes, a run's secret has {SECRET_BYTES}")
    return data


def forget(folder: Path) -> None:
    """Remove the secret: the run is over, or a new one follows."""
    with contextlib.suppress(FileNotFoundError):
        (folder / FILE).unlink()


def private(folder: Path) -> Path:
    """``folder``, made where it is missing, with mode 0700. Raises RunFailed when it belongs to another user."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise RunFailed(f"{folder} belongs to user {found.st_uid}: its files are no secret, and its sockets may be that user's")
    if stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(0o700)
    return folder


# ---- the secret of this process ----------------------------------------------------------------------------------------------------------


class _Held:
    """A process belongs to one run: its listeners and clients need not be told one by one."""

    def __init__(self) -> None:
        self.secret: bytes | None = None
        self.lock = threading.Lock()


_held = _Held()


def hold(secret: bytes) -> None:
    """From here on this process proves ``secret``, and asks its peers for it."""
    with _held.lock:
        _held.secret = check_secret(secret)


def held() -> bytes:
    """The secret of this process's run. A process without one draws its own: then it can talk to itself alone."""
    with _held.lock:
        if _held.secret is None:
            _held.secret = fresh()
        return _held.secret


def holding(run_secret: bytes, work: Callable[..., T], *arguments: Any) -> T:
    """``work``, as the first call in a process that was not forked from one that holds the secret."""
    hold(run_secret)
    return work(*arguments)
