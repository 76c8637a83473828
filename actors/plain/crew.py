"""The processes of a job without Fleet, for the command: its launcher, and its ranks with their reports."""

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
"""The name of the node of all processes, for signals."""
PIECE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Came:
    """The process of a rank has started; :meth:`Crew.let_in` lets it begin."""

    member: Member
    process: Process


@dataclass(frozen=True, slots=True)
class RankReported:
    """A rank has sent a report."""

    member: Member
    word: Word


@dataclass(frozen=True, slots=True)
class RankGone:
    """The process of a rank has ended. ``at_s``: when the command saw it."""

    member: Member
    at_s: float


Event = Came | RankReported | RankGone


class _Rank:
    """One connection of a rank. It has no member before its first report."""

    def __init__(self, line: socket.socket) -> None:
        self.line, self.pidfd, self.silent = line, -1, False
        self._rest = b""
        line.setblocking(False)

    def words(self) -> list[Word]:
        """The reports that have come since the last call."""
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
    """Starts the launcher in a session of its own. All processes end with this one, also if it is killed.

    Args:
        logs: the folder with a file for the output of each rank, and one for that of the launcher.
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
        """The next events, oldest first; waits for ``limit_s`` at most.

        The reports of a process come before its end, and that before the reports of processes that start later.
        """
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
        """Stop reading connections that their processes have closed."""
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
        """Handle a rank's first report, which names its member. The rank waits for an answer, so its process is there."""
        if word.what != What.UP:
            return
        member = Member(word.rank, word.launch)
        try:
            rank.pidfd = os.pidfd_open(word.pid)
            process = Process(HERE, word.pid, start_ticks(word.pid))
        except ProcessLookupError:
            rank.silent = True  # it was killed at this moment, which the launcher will see
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
        """Let the rank begin; if it has ended meanwhile, do nothing."""
        rank = self._ranks.get(member)
        if rank is not None and not rank.silent:
            try:
                rank.line.send(b"+")
            except ConnectionError:
                rank.silent = True
                self._hush()

    @property
    def status(self) -> int | None:
        """The launcher's exit status, once the launcher and all ranks are known to have ended; None before."""
        return self._launcher.poll() if not self._ranks else None

    def stop(self) -> None:
        """Ask the launcher to end all processes."""
        self._launcher.terminate()

    def close(self) -> None:
        """Kill all processes that are left, and remove the files."""
        kill_all(self._mark)
        self._launcher.wait()
        for rank in [*self._unknown, *self._ranks.values()]:
            rank.close()
        self._server.close()
        self._selector.close()
        os.close(self._launcher_fd)
        shutil.rmtree(self._folder, ignore_errors=True)
