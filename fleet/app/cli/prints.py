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
        discard(self.file.fileno())


def waiting(what: str) -> Waiting:
    """Names the reason of a wait on the standard error, when the wait is longer than a few seconds. To be entered."""
    return Waiting(Terminal(stderr=True), time.monotonic, what)


def discard(descriptor: int) -> None:
    """Later output of ``descriptor`` is dropped, with the buffered text that Python writes at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def write(*lines: str) -> bool:
    """Lines to the standard output, as they are. False when the reader has gone."""
    try:
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout.fileno())
        return False
    return True


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines with columns as wide as what is in them."""
    cells = [list(heads), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells]
