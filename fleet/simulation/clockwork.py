"""Simulated time: an event queue, futures, and the coroutines of simulated processes."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator
from typing import Any

Steps = Generator[Any, Any, Any]


class Timer:
    """A call that is due later, unless it is ``cancelled``."""

    __slots__ = ("call", "cancelled")

    def __init__(self, call: Callable[[], None]) -> None:
        self.call, self.cancelled = call, False


class Clockwork:
    """Calls in order of simulated time. Calls that are due at the same time run in the order in which they were added."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.calls = 0
        self._queue: list[tuple[float, int, Timer]] = []
        self._number = 0

    def after(self, delay_s: float, call: Callable[[], None]) -> Timer:
        timer = Timer(call)
        self._number += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._number, timer))
        return timer

    def run(self, until_s: float, done: Callable[[], bool]) -> None:
        """Run until ``done()`` or ``until_s``, whichever comes first."""
        while self._queue and not done():
            at_s, _, timer = heapq.heappop(self._queue)
            if at_s > until_s:
                self.now_s = until_s
                return
            self.now_s = at_s
            if not timer.cancelled:
                self.calls += 1
                timer.call()


class Future:
    """A value or an error that a coroutine can wait for, once."""

    __slots__ = ("done", "error", "on_done", "value")

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self.error: Exception | None = None
        self.on_done: Callable[[Future], None] | None = None

    def resolve(self, value: Any = None, error: Exception | None = None) -> None:
        if self.done:
            return
        self.done, self.value, self.error = True, value, error
        if self.on_done is not None:
            self.on_done(self)


class Coroutine:
    """Runs a generator that yields seconds to sleep or a ``Future`` to wait for.

    ``gate`` gets every resumption: a frozen process delays it until it wakes, and a dead process drops it.
    """

    def __init__(self, clock: Clockwork, steps: Steps, gate: Callable[[Callable[[], None]], None]) -> None:
        self._clock, self._steps, self._gate = clock, steps, gate
        self._resume(None, None)

    def _resume(self, value: Any, error: Exception | None) -> None:
        try:
            wanted = self._steps.throw(error) if error is not None else self._steps.send(value)
        except StopIteration:
            return
        if isinstance(wanted, Future):
            if wanted.done:
                self._clock.after(0.0, lambda: self._gate(lambda: self._resume(wanted.value, wanted.error)))
            else:
                wanted.on_done = lambda future: self._gate(lambda: self._resume(future.value, future.error))
        else:
            self._clock.after(wanted, lambda: self._gate(lambda: self._resume(None, None)))


class Stoppable:
    """A process that may stand still (SIGSTOP). All its calls pass through ``gate``, which delays them while it is ``stopped``.

    ``went_on_s``: when the process went on last.
    """

    def __init__(self) -> None:
        self.stopped, self.went_on_s = False, -math.inf
        self._queued: list[Callable[[], None]] = []

    def gate(self, call: Callable[[], None]) -> None:
        """Run ``call`` now, or once the process goes on."""
        if self.stopped:
            self._queued.append(call)
        else:
            call()

    def went_on(self, now_s: float) -> list[Callable[[], None]]:
        """The process goes on (SIGCONT). Returns the delayed calls, in order."""
        queued, self._queued, self.stopped, self.went_on_s = self._queued, [], False, now_s
        return queued
