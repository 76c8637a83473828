"""How every command prints: lines are never wrapped, nor cut; the terminal does that if it must. A reader that leaves is no error."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence

from rich.console import Console

from fleet.app.waiting import Waiting


class Terminal(Console):
    """Rich's console for whole lines. When its reader has gone (``fleet run ... | head``), it is silent from then on, and a run goes on.

    Args:
        stderr: print to the standard error.
        width: columns; None: the terminal's.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, highlight=False, soft_wrap=True, width=width)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        leave_to_nobody(self.file.fileno())


def waiting(what: str) -> Waiting:
    """Says on the standard error what is waited for, when that takes longer than a few seconds. To be entered."""
    return Waiting(Terminal(stderr=True), time.monotonic, what)


def leave_to_nobody(descriptor: int) -> None:
    """What is written there from now on goes nowhere: also what is still buffered, which Python writes at its end."""
    nobody = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nobody, descriptor)
    os.close(nobody)


def write(*lines: str) -> bool:
    """Lines to the standard output, as they are. False when nobody reads them any more."""
    try:
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
    except BrokenPipeError:
        leave_to_nobody(sys.stdout.fileno())
        return False
    return True


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines with columns as wide as what is in them."""
    cells = [list(heads), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells]
