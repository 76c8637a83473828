"""The ranks' output in the run's folder, a file for each process of a slot: the names of the files, and their readers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fleet.protocol.types import Member

FOLDER = "logs"
OLDER = ".1"
"""Ends the name of the file with older lines, where a file has grown too long."""
REHEARSAL = "[fleet] a rehearsal begins: this rank stands by, and nothing of the step that it computes counts"
REHEARSED = "[fleet] the rehearsal is over"
PIECE_BYTES = 1 << 20
LONGEST_BYTES = 64 * 1024
"""The reader cuts a line without an end there."""
MOST_LINES, MOST_LOOKS = 10, 8
"""Each look shows at most so many lines of a process; a line with the number of the others comes once in so many looks."""

_NAME = re.compile(r"rank-(\d+)\.(\d+)\.log")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def logs_of(run: Path) -> Path:
    """The folder in which the ranks of the run in folder ``run`` write, on every node that sees this folder."""
    return run / FOLDER


def log_path(folder: Path, member: Member) -> Path:
    """The file of one process in the folder of :func:`logs_of`."""
    return folder / f"rank-{member.slot}.{member.incarnation}.log"


def found(folder: Path, slot: int | None = None) -> dict[Member, Path]:
    """The files that exist now, of all slots or of one, by slot and then by age."""
    with suppress(FileNotFoundError):
        names = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        files = {Member(int(match[1]), int(match[2])): path for match, path in names}
        return {member: files[member] for member in sorted(files, key=lambda m: (m.slot, m.incarnation)) if slot in (None, member.slot)}
    return {}


def prefix(member: Member) -> str:
    """The text before each line: the slot, and the process's number from the second process of a slot on."""
    return f"[rank {member.name}] "


def shown(line: bytes) -> str:
    """A line for a terminal: a progress bar's last text, without codes that move the cursor or change its colour."""
    text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
    return _ESCAPES.sub("", text).expandtabs()


class Tail:
    """Reads the new lines of one file since the last read, also when they go on in a new file of that name.

    Attributes:
        rehearsing: whether the process is in a rehearsal, where its work does not count.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.rehearsing = path, False
        self._descriptor: int | None = None
        self._rest = b""
        self._unshown = self._looks = 0

    def lines(self, last: bool = False) -> Iterator[bytes]:
        """Whole lines, without their ends. ``last``: also one that has no end yet."""
        for piece in self._pieces():
            whole, _, self._rest = (self._rest + piece).rpartition(b"\n")
            yield from whole.split(b"\n") if whole or _ else ()
            if len(self._rest) > LONGEST_BYTES:
                yield self._rest
                self._rest = b""
        if last and self._rest:
            yield self._rest
            self._rest = b""

    def some(self, most: int, last: bool = False) -> Iterator[bytes]:
        """The first ``most`` lines that count, without those of a rehearsal. A line with the number of the others comes now and then.

        The cost of a process that prints without end stays bounded for the reader.
        """
        number = 0
        for line in self.lines(last):
            if line in (REHEARSAL.encode(), REHEARSED.encode()):
                self.rehearsing = line == REHEARSAL.encode()
            elif not self.rehearsing:
                number += 1
                self._unshown += number > most
                if number <= most:
                    yield line
        self._looks = self._looks + 1 if self._unshown else 0
        if self._unshown and most and (number <= most or last or self._looks >= MOST_LOOKS):
            yield f"... {self._unshown:,} lines more in {self.path}".encode()
            self._unshown = self._looks = 0

    def forget(self) -> None:
        """Forget the lines that were not shown so far."""
        self._unshown = self._looks = 0

    def _pieces(self) -> Iterator[bytes]:
        if self._descriptor is None:
            with suppress(FileNotFoundError):
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        while self._descriptor is not None:
            while piece := os.read(self._descriptor, PIECE_BYTES):
                yield piece
            if not self._moved():
                return
            os.close(self._descriptor)
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)

    def _moved(self) -> bool:
        """Whether the open file has another name by now, and another file has its old name."""
        assert self._descriptor is not None
        with suppress(FileNotFoundError):
            return os.fstat(self._descriptor).st_ino != self.path.stat().st_ino
        return False

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class RunLogs:
    """The lines of all ranks of a run, as they come.

    Args:
        folder: see :func:`logs_of`.
        slot: only this slot; None: all.
        from_start: also lines that processes printed before; else only new ones.
    """

    def __init__(self, folder: Path, slot: int | None = None, from_start: bool = True) -> None:
        self.folder, self._slot = folder, slot
        self._tails: dict[Member, Tail] = {}
        if not from_start:
            for _ in self.poll(0):
                pass
            for tail in self._tails.values():
                tail.forget()

    def poll(self, most: int | None = MOST_LINES, last: bool = False) -> Iterator[str]:
        """The lines since the last poll, each with its rank.

        ``most``: the most lines of each process; now and then a line gives the number of the others. Lines of a rehearsal are left out.
        None: all lines, also those of a rehearsal.
        """
        for member, path in found(self.folder, self._slot).items():
            tail = self._tails.setdefault(member, Tail(path))
            lines = tail.lines(last) if most is None else tail.some(most, last)
            yield from (prefix(member) + shown(line) for line in lines)

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()


def older(path: Path) -> Path:
    """The file with the older lines of ``path``, if there were too many."""
    return path.with_name(path.name + OLDER)
