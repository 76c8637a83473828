"""Lines of a command that waits: a terminal that is silent for some seconds gets a line with the reason."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.text import Text

from fleet.ledger.report import duration

EVERY_S = 2.5
"""Seconds after which the first line comes."""
MOST_S = 60.0
"""Most seconds between two lines; the time between them doubles up to this."""
CHECK_S = 0.25


class Waiting:
    """Prints the reason of a wait after some seconds, and again, until ``over``; an empty reason is not known yet.

    Use as a context manager, in the process that waits.
    Args:
        console: prints whole lines.
        clock: seconds that do not go back.
        what: the reason.
        most_s: most seconds between two lines.
    """

    def __init__(self, console: Console, clock: Callable[[], float], what: str = "", most_s: float = MOST_S) -> None:
        self._console, self._clock, self._most_s = console, clock, most_s
        self._began_s = self._said_s = clock()
        self._what, self._every_s = what, EVERY_S
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="fleet-waiting", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.over()

    def over(self) -> None:
        """The wait is over."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _go_on(self) -> None:
        while not self._stop.wait(CHECK_S):
            with self._lock:
                if self._what and self._clock() - self._said_s >= self._every_s:
                    self._print(f"still: {self._what}")
                    self._every_s = min(2 * self._every_s, self._most_s)

    def _print(self, what: str) -> None:
        self._said_s = self._clock()
        # All later lines have the time of the run's own clock, which begins only with its coordinator.
        self._console.print(Text(f"{'':>9}    {what}, {duration(self._said_s - self._began_s)} after the command", "dim"))
