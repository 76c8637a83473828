"""What ranks print lies in the run's folder, a file for each process of a slot: how the files are called, and how they are read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fleet.protocol.types import Member

FOLDER = "logs"
OLDER = ".1"
"""Ends the name of the file with the lines before those of the file itself, where that has grown too long."""
REHEARSAL = "[fleet] a rehearsal begins: this rank stands by, and nothing of the step that it computes counts"
REHEARSED = "[fleet] the rehearsal is over"
PIECE_BYTES = 1 << 20
LONGEST_BYTES = 64 * 1024
"""A line without an end is cut there."""
MOST_LINES, MOST_LOOKS = 10, 8
"""Of each process, at each look, so many lines are shown; of how many more it has printed is said once in so many looks."""

_NAME = re.compile(r"rank-(\d+)\.(\d+)\.log")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def logs_of(run: Path) -> Path:
    """Where the ranks of the run in folder ``run`` write, on every node that sees this folder."""
    return run / FOLDER


def log_path(folder: Path, member: Member) -> Path:
    """The file of one process in the folder of :func:`logs_of`."""
    return folder / f"rank-{member.slot}.{member.incarnation}.log"


def found(folder: Path, slot: int | None = None) -> dict[Member, Path]:
    """The files that are there now, of all slots or of one, by slot and then by age."""
    with suppress(FileNotFoundError):
        names = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        files = {Member(int(match[1]), int(match[2])): path for match, path in names}
        return {member: files[member] for member in sorted(files, key=lambda m: (m.slot, m.incarnation)) if slot in (None, member.slot)}
    return {}


def prefix(member: Member) -> str:
    """Before each line: the slot, and from the second process of a slot on its number."""
    return f"[rank {member.name}] "


def shown(line: bytes) -> str:
    """A line as a terminal may show it: what a progress bar wrote last, and no codes that move the cursor or change its colour."""
    text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
    return _ESCAPES.sub("", text).expandtabs()


class Tail:
    """Reads what one file has gained since the last time, also when its lines go on in a new file of that name.

    Attributes:
        rehearsing: the process that writes has said that what it does now does not count.
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
        """The first ``most`` lines that count, without those of a rehearsal; of the others the number, when they end, or every so often.

        A process that prints without end costs whoever reads no more than that.
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
        """Lines that were not shown so far are not missed."""
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
        """Whether the file that is open has another name by now, and another one has its."""
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
        slot: of this slot alone; None: of all.
        from_start: also of processes that were there before; else only what is new.
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
        """What has been printed since the last poll, each line with its rank.

        Of each process ``most`` lines, and now and then one that says how many there are more; None: all. A rehearsal is left out when
        there is a ``most``.
        """
        for member, path in found(self.folder, self._slot).items():
            tail = self._tails.setdefault(member, Tail(path))
            lines = tail.lines(last) if most is None else tail.some(most, last)
            yield from (prefix(member) + shown(line) for line in lines)

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()


def older(path: Path) -> Path:
    """Where the lines lie that were before those of ``path``, if there were too many."""
    return path.with_name(path.name + OLDER)
