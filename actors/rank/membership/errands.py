"""Calls that may hang, in threads of their own."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from fleet.host.scheduling import be_prompt

Signal = queue.SimpleQueue[BaseException | None]
"""For one who waits, once: ``put`` wakes it, with what it is to raise. An event does the same with two locks and some 20 us of the
interpreter. Nothing else keeps an error: one held by a frame of its own trace keeps the group's sockets until circles are looked for."""
Errand = tuple[Callable[[], BaseException | None], Signal]


class Errands:
    """Threads for calls that may hang, each kept for the next call once it is back.

    What hangs holds nobody up: neither the next call, nor, unlike in a pool of ``concurrent.futures``, the end of the process.
    """

    def __init__(self, name: str) -> None:
        self._name, self._closed = name, False
        self._idle: list[queue.SimpleQueue[Errand | None]] = []

    def run(self, call: Callable[[], BaseException | None], settled: Signal) -> None:
        """From any thread; tells ``settled`` when it is done, and what it returned. ``call`` raises nothing."""
        try:
            calls = self._idle.pop()
        except IndexError:
            calls = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(calls,), name=self._name, daemon=True).start()
        calls.put((call, settled))

    def close(self) -> None:
        """Let the threads end, those under way when they are back. From any thread, and again."""
        self._closed = True
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().put(None)

    def _serve(self, calls: queue.SimpleQueue[Errand | None]) -> None:
        be_prompt(children=False)
        while (errand := calls.get()) is not None:
            call, settled = errand
            failure = call()
            del errand, call  # and what it held: the next one may be long in coming
            self._idle.append(calls)
            settled.put(failure)
            del settled, failure
            if self._closed:  # perhaps since before this thread was idle
                self.close()
