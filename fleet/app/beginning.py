"""What a terminal shows from the command to a run's first step: what is done, and every few seconds that it still goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.text import Text

from fleet.ledger.report import duration
from fleet.protocol.records import Committed, ProcessUp, Record, ViewPublished

EVERY_S = 2.5
"""A line comes at least so often."""
CHECK_S = 0.25


class Beginning:
    """Says what is waited for, until ``over``. Use as a context manager, in the process that waits.

    Args:
        console: prints whole lines.
        clock: seconds that do not go back.
    """

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console, self._clock = console, clock
        self._began_s = self._said_s = clock()
        self._what, self._up, self._slots = "", 0, 0
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="fleet-beginning", daemon=True)

    def __enter__(self) -> Beginning:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.over()

    def say(self, what: str) -> None:
        """``what`` is waited for from now on."""
        with self._lock:
            self._what = what
            self._print(what)

    def take(self, record: Record) -> None:
        """What the journal tells: how many ranks are up, that they form a view, and that the first step is taken."""
        match record:
            case ProcessUp():
                self._up += 1
                self._what = f"{self._up} rank{'s are' if self._up > 1 else ' is'} up"
            case ViewPublished():
                self._what = "the first view forms"
            case Committed():
                self.over()

    def over(self) -> None:
        """Nothing is waited for any more."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _go_on(self) -> None:
        while not self._stop.wait(CHECK_S):
            with self._lock:
                if self._what and self._clock() - self._said_s >= EVERY_S:
                    self._print(f"still: {self._what}")

    def _print(self, what: str) -> None:
        self._said_s = self._clock()
        # The run's own clock, by which all later lines tell, begins only when its coordinator does.
        self._console.print(Text(f"{'':>9}    {what}, {duration(self._said_s - self._began_s)} after the command", "dim"))
