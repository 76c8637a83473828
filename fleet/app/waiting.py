"""What a command says while it waits: no terminal is silent for long without a word of what for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.text import Text

from fleet.ledger.report import duration

EVERY_S = 2.5
"""A line comes after so long at the latest."""
MOST_S = 60.0
"""It is repeated ever more seldom: at least so often."""
CHECK_S = 0.25


class Waiting:
    """Says what is waited for, from the first few seconds of it on, until ``over``. Use as a context manager, in the process that waits.

    Args:
        console: prints whole lines.
        clock: seconds that do not go back.
        what: is waited for; empty: nothing yet.
        most_s: it is repeated at least so often.
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
        """Nothing is waited for any more."""
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
        # The run's own clock, by which all later lines tell, begins only when its coordinator does.
        self._console.print(Text(f"{'':>9}    {what}, {duration(self._said_s - self._began_s)} after the command", "dim"))
