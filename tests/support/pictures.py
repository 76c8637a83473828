"""A terminal without a screen: what a program prints to it, and how that looks. ``python -m tests.support.pictures`` draws a capture.

python -m tests.support.pictures CAPTURE.ansi PICTURE.svg [COLUMNS]
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import pyte
from pyte.screens import Char
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.style import Style
from rich.text import Text

COLUMNS, ROWS = 100, 400
NAMES = {"brown": "yellow", "brightbrown": "bright_yellow", "default": None}
"""What pyte calls otherwise than rich does."""
FETCHED = re.compile(r"\s*@font-face \{\{.*?\}\}\n", re.S)


def in_terminal(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, limit_s: float, columns: int = COLUMNS
) -> list[bytes]:
    """What ``command`` writes to a terminal of that width, in the pieces in which it came.

    Raises TimeoutError, and AssertionError unless it ends with exit code 0.
    """
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    shown = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES", "NO_COLOR", "CI")}
    process = subprocess.Popen(command, cwd=folder, env=shown | {"TERM": "xterm-256color"}, stdin=its, stdout=its, stderr=its)
    os.close(its)
    pieces, deadline_s = [], time.monotonic() + limit_s
    try:
        while piece := _piece(ours, deadline_s):
            pieces.append(piece)
        code = process.wait(limit_s)
        assert code == 0, (code, b"".join(pieces))
        return pieces
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _piece(terminal: int, deadline_s: float) -> bytes:
    """What comes next; nothing when the program has closed its end, which Linux says by an error."""
    ready, _, _ = select.select([terminal], [], [], max(0.0, deadline_s - time.monotonic()))
    if not ready or time.monotonic() > deadline_s:
        raise TimeoutError("the program did not end in time")
    try:
        return os.read(terminal, 65_536)
    except OSError:
        return b""


def screen(data: bytes, columns: int = COLUMNS) -> list[Text]:
    """The lines that are to be seen once ``data`` was written, those that were erased or written over left out."""
    shown = pyte.Screen(columns, ROWS)
    pyte.ByteStream(shown).feed(data.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))
    lines = [_line([shown.buffer[row][column] for column in range(columns)]) for row in range(ROWS)]
    last = max((number for number, line in enumerate(lines) if line.plain), default=-1)
    return lines[: last + 1]


def _line(cells: Sequence[Char]) -> Text:
    line = Text()
    for style, alike in groupby(cells, _style):
        line.append("".join(cell.data for cell in alike), style)
    line.rstrip()
    return line


def _style(cell: Char) -> Style:
    return Style(color=_colour(cell.fg), bgcolor=_colour(cell.bg), bold=cell.bold, italic=cell.italics, reverse=cell.reverse)


def _colour(name: str) -> str | None:
    if re.fullmatch("[0-9a-f]{6}", name):
        return f"#{name}"
    return NAMES.get(name, name.replace("bright", "bright_"))


def picture(lines: Sequence[Text], title: str, columns: int = COLUMNS) -> str:
    """An SVG of the lines that fetches nothing: letters are those of the reader's machine."""
    console = Console(record=True, width=columns, file=io.StringIO(), color_system="truecolor", legacy_windows=False)
    for line in lines:
        console.print(line, soft_wrap=True)
    return console.export_svg(
        title=title, code_format=FETCHED.sub("", CONSOLE_SVG_FORMAT).replace("Fira Code", "DejaVu Sans Mono"), unique_id="fleet"
    )


if __name__ == "__main__":
    width = int(sys.argv[3]) if len(sys.argv) > 3 else COLUMNS
    Path(sys.argv[2]).write_text(picture(screen(Path(sys.argv[1]).read_bytes(), width), "fleet", width))
