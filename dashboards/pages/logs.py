"""What the ranks of a run print: their log files, listed, and read a bounded piece at a time."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Any

from fleet.host.rank_logs import found, log_path, logs_of
from fleet.protocol.types import Member

MOST_BYTES = 65_536
"""Read at once, whatever the size of the file."""
MOST_FILES = 2_000


def log_files(run: Path) -> list[dict[str, Any]]:
    """``{slot, incarnation, bytes}`` of each log in the run's folder, in order; of very many the first ``MOST_FILES``."""
    rows = [
        {"slot": member.slot, "incarnation": member.incarnation, "bytes": path.stat().st_size}
        for member, path in found(logs_of(run)).items()
        if _inside(run, path)
    ]
    return rows[:MOST_FILES]


def log_piece(run: Path, slot: int, incarnation: int, offset: int | None = None) -> dict[str, Any] | None:
    """A piece of a process's log as ``{offset, next, bytes, text}``; None when it has none.

    Args:
        run: the run's folder.
        offset: where to go on, in bytes: ``next`` of the piece before. None: the last whole lines of the file. One behind the end of the
            file, which was made anew, begins at its start.
    """
    path = log_path(logs_of(run), Member(slot, incarnation))
    if not _inside(run, path):
        return None
    with path.open("rb") as file:
        size = path.stat().st_size
        start = max(0, size - MOST_BYTES) if offset is None else offset if offset <= size else 0
        file.seek(start)
        piece = file.read(MOST_BYTES)
    if offset is None and start:
        skipped = piece.find(b"\n") + 1
        start, piece = start + skipped, piece[skipped:]
    text, taken = codecs.utf_8_decode(piece, "replace", False)  # a character that is half written is left for the next piece
    return {"offset": start, "next": start + taken, "bytes": size, "text": text}


def _inside(run: Path, path: Path) -> bool:
    """A plain file of the run: not a link that leads out of its folder, nor a pipe that would be waited for."""
    return path.is_file() and path.resolve().is_relative_to(run.resolve())
