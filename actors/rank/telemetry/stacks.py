"""A rank leaves the stacks of all its threads in a file when its node's agent says so: by word, or else by a signal.

The word is heard by the thread that listens to the agent, which holds the interpreter lock while it writes, so that no stack changes under
it. Where nobody hears it, as some thread never gives the lock up, the signal's handler writes without: then at most that one thread runs.
From a process whose threads run, the handler would read stacks that change, and was seen to crash two healthy ranks.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

STACKS_SIGNAL = signal.SIGRTMIN + 6
"""A real-time signal: programs use SIGUSR1 and SIGUSR2 for themselves."""


END = "-- these are all threads\n"
"""Stands behind stacks that were asked for by word."""


def stacks_path(folder: Path, token: str) -> Path:
    """Where the process of ``token`` leaves its stacks; beside its ring."""
    return folder / f"stacks-{token}"


class Stacks:
    """Ready from now on until :meth:`close`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        faulthandler.register(STACKS_SIGNAL, file=self._file, all_threads=True)

    def write(self) -> None:
        """From a thread of this process."""
        faulthandler.dump_traceback(self._file, all_threads=True)
        os.write(self._file.fileno(), END.encode())

    def close(self) -> None:
        faulthandler.unregister(STACKS_SIGNAL)
        self._file.close()
