"""A rank writes the stacks of all its threads into a file when its agent asks for them, by a message or by a signal.

The listening thread handles the message. It holds the interpreter lock while it writes, so no stack changes meanwhile. If some thread never
gives up the lock, the message gets no answer. The signal's handler then writes without the lock, while at most that one thread runs. In a
process with running threads, the handler would read changing stacks. It was seen to crash two healthy ranks.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

STACKS_SIGNAL = signal.SIGRTMIN + 6
"""A real-time signal: programs use SIGUSR1 and SIGUSR2 for themselves."""


END = "-- these are all threads\n"
"""The line after stacks that a message asked for."""


def stacks_path(folder: Path, token: str) -> Path:
    """The file for the stacks of the process of ``token``, beside its ring."""
    return folder / f"stacks-{token}"


class Stacks:
    """Answers requests for stacks until :meth:`close`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        faulthandler.register(STACKS_SIGNAL, file=self._file, all_threads=True)

    def write(self) -> None:
        """Write the stacks from a thread of this process, which holds the interpreter lock."""
        faulthandler.dump_traceback(self._file, all_threads=True)
        os.write(self._file.fileno(), END.encode())

    def close(self) -> None:
        faulthandler.unregister(STACKS_SIGNAL)
        self._file.close()
