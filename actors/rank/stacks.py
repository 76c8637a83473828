"""A rank leaves the stacks of all its threads in a file when its node's agent says so, by a signal."""

from __future__ import annotations

import faulthandler
import signal
from pathlib import Path

STACKS_SIGNAL = signal.SIGRTMIN + 6
"""A real-time signal: programs use SIGUSR1 and SIGUSR2 for themselves."""


def stacks_path(folder: Path, token: str) -> Path:
    """Where the process of ``token`` leaves its stacks; beside its ring."""
    return folder / f"stacks-{token}"


class Stacks:
    """Listens from now on until :meth:`close`. ``faulthandler`` needs no interpreter lock, so this works while another thread keeps it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        faulthandler.register(STACKS_SIGNAL, file=self._file, all_threads=True)

    def close(self) -> None:
        faulthandler.unregister(STACKS_SIGNAL)
        self._file.close()
