"""A terminal for tests: a command on a pseudo-terminal, and the screen as a person would see it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyte

ROOT = Path(__file__).resolve().parents[2]
ROWS = 40
SILENT_S = 120.0


@dataclass(frozen=True)
class Screened:
    """``lines`` is what scrolled by and what stood there at the end; ``lived`` is every bottom line that was seen meanwhile."""

    code: int
    lines: list[str]
    lived: set[str]


def on_a_terminal(command: Sequence[str], folder: Path, columns: int) -> Screened:
    """Run ``command`` in ``folder``, on a terminal of so many columns, to its end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment | {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT)},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    screen = pyte.HistoryScreen(columns, ROWS, history=10_000, ratio=0.5)
    lived = _watch(ours, pyte.ByteStream(screen), screen)
    os.close(ours)
    code = process.wait(60)
    above = ["".join(line[column].data for column in range(columns)).rstrip() for line in screen.history.top]
    return Screened(code, [line for line in [*above, *(line.rstrip() for line in screen.display)] if line], lived)


def _watch(ours: int, stream: pyte.ByteStream, screen: pyte.HistoryScreen) -> set[str]:
    lived: set[str] = set()
    while True:
        if not select.select([ours], [], [], SILENT_S)[0]:
            raise TimeoutError(f"the command has written nothing for {SILENT_S:g} s:\n" + "\n".join(screen.display))
        try:
            data = os.read(ours, 65536)
        except OSError:  # so a pseudo-terminal ends
            return lived
        if not data:
            return lived
        stream.feed(data)
        lived.add(screen.display[screen.cursor.y].rstrip())
