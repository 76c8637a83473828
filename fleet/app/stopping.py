"""Handlers of signals. The first Ctrl-C or SIGTERM ends a run in order, the second at once. A command that only looks just ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LEAVE = (*SIGNALS, signal.SIGHUP)
"""Signals that end a command that only looks. SIGHUP comes when its terminal is closed."""
ANSWER_S = 1.0
"""Seconds for the main thread to get to its handler."""
RESTORED = 0
"""Stands in the pipe behind all signals that came before the old handlers were restored; no signal has this number."""
KILLED = 128
"""Exit code of a process that a signal has ended, less the signal's number."""


class StopSignal:
    """Keeps the signal that came to stop this process. ``by``: its name; empty: none has come."""

    def __init__(self) -> None:
        self.by = ""

    def stopping(self, stop: Callable[[str], None]) -> Callable[[str], None]:
        """``stop`` for :func:`stopped_by_signals`."""

        def noted(name: str) -> None:
            self.by = name
            stop(name)

        return noted


@contextmanager
def stopped_by_signals(stop: Callable[[str], None], say: Callable[[str], None]) -> Iterator[None]:
    """The first SIGINT or SIGTERM calls ``stop`` with its name; the second has its old effect.

    A thread of its own takes the signals. Python's main thread handles one only when its current call returns, and a stop has little time.
    Handlers can be set in the main thread alone; called in another thread, this changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if not handled.is_set():
            for each in SIGNALS:
                signal.signal(each, before[each])
            os.write(write_fd, bytes([RESTORED]))
            handled.set()

    def listen() -> None:
        first, restored = True, False
        while data := os.read(read_fd, 64):
            for number in data:
                if number == RESTORED:
                    restored = True
                elif number in SIGNALS and first:
                    first = False
                    say(f"{signal.Signals(number).name}: stopping in order; once more to stop at once")
                    stop(signal.Signals(number).name)
                elif number in SIGNALS and not restored:  # Python calls a handler once for several signals
                    if not handled.wait(ANSWER_S):  # the main thread is in the same call as at the first one
                        os._exit(KILLED + number)
                    os.kill(os.getpid(), number)

    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    thread = threading.Thread(target=listen, name="fleet-signals", daemon=True)
    before = {each: signal.signal(each, on_signal) for each in SIGNALS}
    waking = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(waking)
        for each, handler in before.items():
            signal.signal(each, handler)
        os.close(write_fd)
        thread.join()
        os.close(read_fd)


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt in the main thread: a command that only looks ends, and the run goes on.

    A second one ends the process at once. An ignored signal, as by ``nohup``, stays ignored. In another thread nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught = [each for each in LEAVE if signal.getsignal(each) is not signal.SIG_IGN]

    def on_signal(number: int, frame: FrameType | None) -> None:
        for each in caught:
            signal.signal(each, signal.SIG_DFL)
        raise KeyboardInterrupt

    before = {each: signal.signal(each, on_signal) for each in caught}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
