"""The first Ctrl-C ends a run in order, the second one at once; the same for SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stopped_by_signals(stop: Callable[[str], None], say: Callable[[str], None]) -> Iterator[None]:
    """The first SIGINT or SIGTERM calls ``stop`` with its name, in a thread; the second one does what it did before.

    Python handles signals in its main thread: in another one nothing is changed, and a signal does what it does there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, before[each])
        say(f"{signal.Signals(number).name}: stopping in order; once more to stop at once")
        threading.Thread(target=stop, args=(signal.Signals(number).name,), daemon=True).start()

    before = {each: signal.signal(each, on_signal) for each in SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
