"""Reports this process's death to the node's agent when it begins, not when it is complete.

A killed process frees its memory before it closes its files: 20 to 70 ms after SIGKILL with 50 to 400 MB, 0.1 to 0.3 s with 1.5 GB, and
more for a rank that pinned the memory of a large model. Until then no socket shows end-of-file, and its pidfd is not readable either.

Each *thread*, though, closes its table of open files as it ends, and does not wait for the memory. So one thread leaves the shared table of
files, and gets a table of its own with a single connection. No other thread, and no forked child, has that connection open. It ends some
milliseconds after the signal, with the process.
"""

from __future__ import annotations

import contextlib
import gc
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from fleet.host.linux import leave_shared_files
from fleet.host.wire import connect_unix

TOKEN_BYTES = 32
FAREWELL = b"."
RETRY_MS = 200
CONNECT_S = 5.0


def lifeline_path(folder: Path, node: str) -> str:
    """The socket at which the agent of ``node`` accepts lifelines."""
    return str(folder / f"life-{node[-16:]}.sock")


class Lifeline:
    """A connection that ends with this process, or with :meth:`close`, after a farewell.

    Where the kernel lacks the call (before Linux 5.9) there is no lifeline: the agent's pidfd shows the death, later.

    Args:
        path: of the agent's socket, see :func:`lifeline_path`.
        token: identifies this process to the agent, ``TOKEN_BYTES`` characters.
    """

    def __init__(self, path: str, token: str) -> None:
        self._path, self._token = path, token.encode()
        self._signal, theirs = socket.socketpair()
        self._kept = theirs.fileno()
        apart = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(apart,), name="fleet-lifeline", daemon=True)
        self._thread.start()
        apart.wait()
        theirs.close()  # in the shared table; the thread's own table keeps it open

    def close(self) -> None:
        """End the connection with a farewell. The process may live on, and the agent no longer watches it."""
        with contextlib.suppress(OSError):  # without a lifeline the other end is closed
            self._signal.shutdown(socket.SHUT_RDWR)  # forked children may hold copies, so that to close it would not be enough
        self._signal.close()
        self._thread.join()

    def _run(self, apart: threading.Event) -> None:
        separate = leave_shared_files(self._kept)
        apart.set()
        while separate and not self._hold():
            pass

    def _hold(self) -> bool:
        """Hold one connection until the agent hangs up; True when this side is closed.

        Garbage collection is off meanwhile: a finalizer in this thread would close a file of the wrong table.
        """
        with _no_finalizers():
            stream = self._connect()
            poll = select.poll()
            poll.register(self._kept, select.POLLIN)
            if stream is not None:
                poll.register(stream, select.POLLIN)
            wait_ms = None if stream is not None else RETRY_MS
        ready = poll.poll(wait_ms)
        with _no_finalizers():
            closed = any(number == self._kept for number, _ in ready)
            if stream is not None:
                if closed:
                    stream.send(FAREWELL)
                stream.close()
        return closed

    def _connect(self) -> socket.socket | None:
        try:
            stream = connect_unix(self._path, timeout_s=CONNECT_S)
            stream.sendall(self._token)
        except OSError:
            return None
        return stream


@contextlib.contextmanager
def _no_finalizers() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
