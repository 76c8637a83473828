"""Calls that may hang, in threads of their own."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from fleet.host.scheduling import be_prompt

Signal = queue.SimpleQueue[BaseException | None]
"""Wakes one waiting thread, once: ``put`` gives it the error to raise, or None. An event takes two locks and some 20 us more.

No other object may keep an error. A frame of its own traceback that holds it would keep the group's sockets until the next garbage
collection.
"""
Errand = tuple[Callable[[], BaseException | None], Signal]


class Errands:
    """Threads for calls that may hang, each kept for the next call once it is back.

    A call that hangs delays neither the next call nor, unlike in a pool of ``concurrent.futures``, the end of the process.
    """

    def __init__(self, name: str) -> None:
        self._name, self._closed = name, False
        self._idle: list[queue.SimpleQueue[Errand | None]] = []

    def run(self, call: Callable[[], BaseException | None], settled: Signal) -> None:
        """Run ``call``, which raises no error, and put its result into ``settled``. From any thread."""
        try:
            calls = self._idle.pop()
        except IndexError:
            calls = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(calls,), name=self._name, daemon=True).start()
        calls.put((call, settled))

    def close(self) -> None:
        """Let the threads end, busy ones once their call is back. From any thread, also repeatedly."""
        self._closed = True
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().put(None)

    def _serve(self, calls: queue.SimpleQueue[Errand | None]) -> None:
        be_prompt(children=False)
        while (errand := calls.get()) is not None:
            call, settled = errand
            failure = call()
            del errand, call  # and the objects that it holds: the next call may come much later
            self._idle.append(calls)
            settled.put(failure)
            del settled, failure
            if self._closed:  # perhaps since before this thread was idle
                self.close()
