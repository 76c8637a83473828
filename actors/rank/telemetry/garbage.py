"""Garbage collection in a rank's process: its part of a step, and the time of full collections.

Python collects where objects are made. So ranks would do it in different steps, and in each of these the others would wait. Here a full
collection that is due on one rank is announced beside its gradients, and all ranks collect behind that step.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Mapping
from types import TracebackType

from actors.rank.telemetry.recorder import Recorder

NEVER = 1 << 30
REST = 50
"""Full collections take at most a part in so many of the time: the next one is due so many times its length later."""


class Garbage:
    """Context of a rank's loop, which its thread enters. Where the script has disabled the collector, the script alone collects.

    The ledger gets collections in the thread of the loop. Those of other threads hold Python's lock, too, and are no part of it.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._thread = recorder, 0
        self._thresholds = gc.get_threshold()
        self._began_us = self._full_us = self._took_us = 0
        self._settled = False

    def __enter__(self) -> Garbage:
        self._thread = threading.get_ident()
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        gc.callbacks.remove(self._note)
        if self._settled:
            gc.set_threshold(*self._thresholds)

    def settle(self) -> None:
        """The script is built: its objects are looked through once more, and never again. Full collections wait for :meth:`collect`."""
        if self._settled or not gc.isenabled():
            return
        self._settled, self._thresholds = True, gc.get_threshold()
        if gc.get_freeze_count():  # by the fork server; else this would look through all imports, half a second in each process
            gc.collect()
        gc.freeze()
        gc.set_threshold(*self._thresholds[:2], NEVER)

    @property
    def _active(self) -> bool:
        return self._settled and gc.isenabled()

    @property
    def due(self) -> bool:
        """Whether a full collection of this process is due: Python's own rule says so, and the last one was long enough ago."""
        if not self._active or gc.get_count()[2] <= self._thresholds[2]:
            return False
        return self._recorder.now_us() - self._full_us >= REST * self._took_us

    def collect(self) -> None:
        """Collect all garbage now, as all ranks do."""
        if self._active:
            began_us = self._recorder.now_us()
            gc.collect()
            self._full_us = self._recorder.now_us()
            self._took_us = self._full_us - began_us

    def _note(self, phase: str, info: Mapping[str, int]) -> None:
        at_us = self._recorder.now_us()
        if phase == "start":
            self._began_us = at_us
        self._recorder.collecting(phase == "start")
        if phase == "stop" and threading.get_ident() == self._thread:
            self._recorder.collected(at_us - self._began_us)
