"""Copies growing files into another folder, piece by piece: a run's journal and its ranks' output, where no folder is shared.

Files only grow, but for two cases. A writer may cut off an incomplete last line. A file that has grown too long gets another name (its own
and ``.1``), and a new file takes its place.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fleet.errors import OutOfSight

OLDER = ".1"
PIECE_BYTES = 4 << 20
RUN = ("journal.jsonl", "code.patch", "driver.log", "logs/*.log", "evidence/*", "outcome.json", "track/*.json")
"""Files of a run's folder that are copied."""

Known = Mapping[str, tuple[int, int]]
"""Name -> inode of the original, and the number of its bytes that have arrived."""


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Bytes of file ``name`` from ``offset`` on. The copy's own bytes behind them are wrong. ``inode`` tells files of one name apart."""

    name: str
    inode: int
    offset: int
    data: bytes


def pieces(folder: Path, patterns: Iterable[str], known: Known, limit_bytes: int = PIECE_BYTES) -> list[FilePiece]:
    """The bytes of files in ``folder`` that match ``patterns`` and are not ``known`` yet, at most ``limit_bytes`` of them."""
    found: list[FilePiece] = []
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}):
        name = str(path.relative_to(folder))
        for piece in _news(path, name, known.get(name), limit_bytes):
            found.append(piece)
            limit_bytes -= len(piece.data)
        if limit_bytes <= 0:
            break
    return found


def _news(path: Path, name: str, known: tuple[int, int] | None, limit_bytes: int) -> Iterable[FilePiece]:
    try:
        inode = path.stat().st_ino
    except FileNotFoundError:
        return
    older = path.with_name(path.name + OLDER)
    if known is not None and known[0] != inode and older.exists() and older.stat().st_ino == known[0]:
        rest = _read(older, known[1], limit_bytes)
        if rest is not None and rest[1]:
            yield FilePiece(name, known[0], *rest)
            if len(rest[1]) >= limit_bytes:
                return
    new = _read(path, known[1] if known is not None and known[0] == inode else 0, limit_bytes)
    if new is not None and (new[1] or known is None or known != (inode, new[0])):
        yield FilePiece(name, inode, *new)


def _read(path: Path, offset: int, limit_bytes: int) -> tuple[int, bytes] | None:
    """(first offset, bytes); the offset is the end of a file that is shorter than ``offset``. None: the file is gone."""
    try:
        with path.open("rb") as file:
            offset = min(offset, os.fstat(file.fileno()).st_size)
            file.seek(offset)
            return offset, file.read(max(0, limit_bytes))
    except FileNotFoundError:
        return None


class MirroredFiles:
    """The files of another folder in this one. A request for the next pieces sends ``known`` along."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[str, tuple[int, int]] = {}

    def take(self, pieces: Iterable[FilePiece]) -> int:
        """Write the pieces. Returns the number of bytes.

        Raises ValueError for a name that leads out of the folder, and OutOfSight when a copy is not there any more.
        """
        count = 0
        for piece in pieces:
            path = self.folder / piece.name
            if not path.resolve().is_relative_to(self.folder.resolve()):
                raise ValueError(f"{piece.name!r} leads out of {self.folder}")
            if piece.name in self.known and not path.exists():
                raise OutOfSight(f"{self.folder} was deleted while it was looked at; the run itself may go on")
            path.parent.mkdir(parents=True, exist_ok=True)
            if self.known.get(piece.name, (piece.inode, 0))[0] != piece.inode and path.exists():
                path.replace(path.with_name(path.name + OLDER))
            with path.open("r+b" if path.exists() else "w+b") as file:
                file.seek(piece.offset)
                file.write(piece.data)
                file.truncate()
            self.known[piece.name] = piece.inode, piece.offset + len(piece.data)
            count += len(piece.data)
        return count
