"""The processes of a job that is not Fleet's, as the command sees them: its launcher, and its ranks with what they tell."""

from __future__ import annotations

import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from actors.plain import launcher, worker
from fleet.host import leftovers
from fleet.host.clock import MonotonicClock
from fleet.host.proc import start_ticks
from fleet.host.processes import CLUSTER_VARIABLE, kill_all
from fleet.machine.plain.words import What, Word, read
from fleet.protocol.types import Member, Process

ROOT, PREFIX = Path("/dev/shm"), "fleet-plain-"
HERE = "local"
"""The node that all processes are on, as signals see it."""
PIECE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Came:
    """The process of a rank is there; :meth:`Crew.let_in` lets it begin."""

    member: Member
    process: Process


@dataclass(frozen=True, slots=True)
class RankReported:
    """A rank has told something."""

    member: Member
    word: Word


@dataclass(frozen=True, slots=True)
class RankGone:
    """The process of a rank has ended. ``at_s``: when that was seen."""

    member: Member
    at_s: float


Event = Came | RankReported | RankGone


class _Rank:
    """One connection. Until it has said who it is, it has no member."""

    def __init__(self, line: socket.socket) -> None:
        self.line, self.pidfd, self.silent = line, -1, False
        self._rest = b""
        line.setblocking(False)

    def words(self) -> list[Word]:
        """What has come since the last time."""
        while True:
            try:
                piece = self.line.recv(PIECE_BYTES)
            except BlockingIOError:
                break
            except ConnectionError:
                piece = b""
            if not piece:
                self.silent = True
                break
            self._rest += piece
        *lines, self._rest = self._rest.split(b"\n")
        return [read(line) for line in lines]

    def close(self) -> None:
        self.line.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)


class Crew:
    """Starts the launcher in a session of its own. All processes end with this one, however it ends.

    Args:
        logs: the folder in which each rank has a file for what it prints; beside it lies that of the launcher.
    """

    def __init__(self, world: int, script: str, arguments: tuple[str, ...], logs: Path) -> None:
        leftovers.sweep(ROOT, PREFIX)
        self._folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=ROOT))
        leftovers.own(self._folder)
        self._clock, self._selector = MonotonicClock(), selectors.DefaultSelector()
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self._folder / "line"))
        self._server.listen(world)
        self._selector.register(self._server, selectors.EVENT_READ)
        self._unknown: list[_Rank] = []
        self._ranks: dict[Member, _Rank] = {}
        logs.mkdir(parents=True, exist_ok=True)
        self._mark = self._folder.name
        self._launcher = self._start(launcher.words(world, worker.__file__, script, list(arguments)), logs)
        self._launcher_fd = os.pidfd_open(self._launcher.pid)
        self._selector.register(self._launcher_fd, selectors.EVENT_READ)

    def _start(self, words: list[str], logs: Path) -> subprocess.Popen[bytes]:
        given = {worker.SOCKET: str(self._folder / "line"), worker.LOGS: str(logs.resolve()), CLUSTER_VARIABLE: self._mark}
        with (logs / "launcher.log").open("ab") as file:
            return subprocess.Popen(
                [sys.executable, launcher.__file__, *words], stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
                env={**launcher.OWN_STORE, **os.environ, **given},
            )  # fmt: skip

    def turn(self, limit_s: float) -> Iterator[Event]:
        """What has happened, oldest first: waits for so long at most. The words of a process come before its end, and that before the
        words of those that are started afterwards."""
        ready = {key.fd for key, _ in self._selector.select(limit_s)}
        received = [RankReported(member, word) for member, rank in self._ranks.items() for word in rank.words()]
        yield from sorted(received, key=lambda each: each.word.at_us)
        for member, rank in list(self._ranks.items()):
            if rank.pidfd in ready:
                yield from (RankReported(member, word) for word in rank.words())
                yield RankGone(member, self._clock.now_s())
                self._drop(member)
        for rank in list(self._unknown):
            for word in rank.words():
                yield from self._met(rank, word)
        self._hush()
        if self._server.fileno() in ready:
            self._accept()

    def _hush(self) -> None:
        """Nothing more comes from a line that its process has closed."""
        for rank in [*self._unknown, *self._ranks.values()]:
            if rank.silent:
                self._deafen(rank)
        for rank in [rank for rank in self._unknown if rank.silent]:
            self._unknown.remove(rank)
            rank.close()

    def _deafen(self, rank: _Rank) -> None:
        if rank.line in self._selector.get_map():
            self._selector.unregister(rank.line)

    def _accept(self) -> None:
        rank = _Rank(self._server.accept()[0])
        self._unknown.append(rank)
        self._selector.register(rank.line, selectors.EVENT_READ)

    def _met(self, rank: _Rank, word: Word) -> Iterator[Event]:
        """Its first word says who it is. It waits for an answer, so its process is there."""
        if word.what != What.UP:
            return
        member = Member(word.rank, word.launch)
        try:
            rank.pidfd = os.pidfd_open(word.pid)
            process = Process(HERE, word.pid, start_ticks(word.pid))
        except ProcessLookupError:
            rank.silent = True  # it was killed at this very moment: nobody will miss it but the launcher
            return
        self._unknown.remove(rank)
        self._ranks[member] = rank
        self._selector.register(rank.pidfd, selectors.EVENT_READ)
        yield Came(member, process)

    def _drop(self, member: Member) -> None:
        rank = self._ranks.pop(member)
        self._selector.unregister(rank.pidfd)
        self._deafen(rank)
        rank.close()

    def let_in(self, member: Member) -> None:
        """The rank may begin; one that has ended meanwhile is not missed here."""
        rank = self._ranks.get(member)
        if rank is not None and not rank.silent:
            try:
                rank.line.send(b"+")
            except ConnectionError:
                rank.silent = True
                self._hush()

    @property
    def status(self) -> int | None:
        """The launcher's exit status, once it has ended and all ranks are known to have; None before."""
        return self._launcher.poll() if not self._ranks else None

    def stop(self) -> None:
        """Ask the launcher to end all."""
        self._launcher.terminate()

    def close(self) -> None:
        """End whatever is left, at once, and tidy up."""
        kill_all(self._mark)
        self._launcher.wait()
        for rank in [*self._unknown, *self._ranks.values()]:
            rank.close()
        self._server.close()
        self._selector.close()
        os.close(self._launcher_fd)
        shutil.rmtree(self._folder, ignore_errors=True)
