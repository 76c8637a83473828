"""One side of a comparison of commits: a checkout, a run of it that stands ready, and the gate that starts its blocks of steps."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
import time
import tomllib
from collections import defaultdict
from pathlib import Path

from benchmarks.peers.common import REPOSITORY, Kill, LoggedRun, Settings, descendants

LOOP = REPOSITORY / "benchmarks/pace_loop.py"
LIMIT_S = 240.0
FAR = 1_000_000_000
BUILD, BUILT = "from setuptools import setup; setup()", ".built"


class NoSuchCommit(ValueError):
    """The commit cannot be compared: it is not there, does not build, or has no `fleet run`."""


def checkout(commit: str, folder: Path) -> Path:
    """``commit`` in a folder of its own below ``folder``, with its extension built. Raises NoSuchCommit with the commit and the reason.

    It runs with the libraries of this environment, so that the code alone is compared.
    """
    answer = _run(["git", "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"], REPOSITORY)
    if answer.returncode != 0:
        raise NoSuchCommit(f"BASE = {commit}: git knows no such commit. Name one that `git log` shows, or fetch it.")
    place = (folder / answer.stdout.strip()[:12]).resolve()
    if not (place / BUILT).exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        packed = subprocess.run(["git", "archive", answer.stdout.strip()], cwd=REPOSITORY, capture_output=True, check=True)
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as files:
            files.extractall(place, filter="data")
        entry_point(place, commit)
        built = _run([sys.executable, "-c", BUILD, "build_ext", "--inplace"], place)
        if built.returncode != 0:
            raise NoSuchCommit(f"BASE = {commit} does not build: {built.stderr.strip()[-600:]}")
        (place / BUILT).touch()
    return place


def _run(command: list[str], where: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)


def entry_point(place: Path, commit: str) -> tuple[str, str]:
    """(module, function) of the command ``fleet`` of a checkout. Raises NoSuchCommit."""
    project = tomllib.loads((place / "pyproject.toml").read_text()) if (place / "pyproject.toml").exists() else {}
    module, _, function = project.get("project", {}).get("scripts", {}).get("fleet", "").partition(":")
    if not function:
        raise NoSuchCommit(f"BASE = {commit} has no command `fleet` in pyproject.toml, so there is nothing to compare.")
    return module, function


class StepGate:
    """Ranks ask the gate before each block, and it answers when the block may begin. It has a thread for each connection."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen(64)
        self._change = threading.Condition()
        self._granted = 0
        self._asked = 0  # the highest block that any rank has asked for
        self._arrived: dict[int, dict[int, float]] = defaultdict(dict)  # by block: when each process, by its id, has asked for it
        self.known: set[int] = set()  # processes that have asked for anything, and are alive
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        pid = 0
        with connection, connection.makefile("r") as lines, contextlib.suppress(ConnectionError):  # the rank may be killed at any moment
            for line in lines:
                block, pid = map(int, line.split())
                with self._change:
                    self.known.add(pid)
                    self._asked = max(self._asked, block)
                    self._arrived[block][pid] = time.monotonic()
                    self._change.notify_all()
                    self._change.wait_for(lambda block=block: block <= self._granted)
                connection.sendall(b".")
        with self._change:
            self.known.discard(pid)

    def grant(self, block: int) -> None:
        """Let blocks up to this one begin."""
        with self._change:
            self._granted = block
            self._change.notify_all()

    def halt(self) -> int:
        """Let no further block begin, but for those that a rank has begun or asked for. Returns the last of these."""
        with self._change:
            self._granted = self._asked
            self._change.notify_all()
            return self._granted

    def stand(self, block: int, ranks: int, failed: str = "") -> float:
        """Wait until ``ranks`` ranks ask for ``block``. Returns the time of the last one's question."""
        with self._change:
            if not self._change.wait_for(lambda: len(self._live(block)) >= ranks, LIMIT_S):
                raise RuntimeError(f"{len(self._live(block))} of {ranks} ranks came to block {block} within {LIMIT_S:.0f} s{failed}")
            return sorted(self._live(block))[ranks - 1]

    def _live(self, block: int) -> list[float]:
        return [at_s for pid, at_s in self._arrived[block].items() if pid in self.known]

    def close(self) -> None:
        self._socket.close()


def used_by(pid: int) -> tuple[float, int]:
    """(seconds of processors, switches off a processor) of all threads of a process so far. Zeros when it has ended."""
    cpu_s, switches = 0.0, 0
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            cpu_s += int((task / "schedstat").read_text().split()[0]) / 1e9
            switches += sum(map(int, re.findall(r"ctxt_switches:\s+(\d+)", (task / "status").read_text())))
        except OSError:  # it has ended
            continue
    return cpu_s, switches


class Side:
    """A run of a checkout. Its ranks wait at the beginning of a block until :meth:`block`, or :meth:`go`."""

    def __init__(self, name: str, place: Path, workdir: Path, settings: Settings, block: int) -> None:
        self.name, self.settings, self._steps = name, settings, block
        workdir.mkdir(parents=True)
        (workdir / "events").mkdir()
        self._workdir, self._at = workdir, 0
        self.gate = StepGate(workdir / "gate")
        module, function = entry_point(place, name)
        command = [sys.executable, "-c", f"import sys; from {module} import {function}; sys.exit({function}())", "run", str(LOOP)]
        options = {
            "world": settings.world,
            "spares": settings.spares,
            "nodes": settings.nodes,
            "shards": settings.shards,
            "seed": settings.seed,
            "storage": workdir / "runs",
        }
        given = {
            "gate": workdir / "gate",
            "events": workdir / "events",
            "shards": settings.shards,
            "samples": settings.shard_samples,
            "wait_s": settings.wait_s,
            "block": block,
        }
        # A rank that waits at the gate takes no step. It must not count as hanging while the other side has its turns.
        limits = {"form_s": 30, "progress_s": 300}
        command += [word for key, value in options.items() for word in (f"--{key}", str(value))]
        command += [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
        command += [word for key, value in limits.items() for word in ("--config", f"timeouts.{key}={value}")]
        self.begun_s = time.monotonic()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(place)}
        self.run = LoggedRun(workdir, settings, command, environment, where=place)

    def ready(self) -> None:
        """Wait until all ranks have taken the first block, a warm-up, and the spares have rehearsed."""
        first, world = time.monotonic() + LIMIT_S, self.settings.world
        while len(self.gate.known) < world + self.settings.spares:
            if (why := self.run.failed()) is not None or time.monotonic() > first:
                raise RuntimeError(f"{self.name} did not begin: {why or 'time-out'}: {self._last_words()}")
            time.sleep(0.05)
        self.gate.stand(1, world, self._last_words())
        self._at = 1

    def _last_words(self) -> str:
        return (self._workdir / "output.txt").read_text()[-1500:]

    def block(self) -> float:
        """Take one block: seconds a step."""
        begun_s = time.monotonic()
        self.gate.grant(self._at)
        ended_s = self.gate.stand(self._at + 1, self.settings.world)
        self._at += 1
        return (ended_s - begun_s) / self._steps

    def go(self) -> None:
        """Take steps until :meth:`halt`."""
        self.gate.grant(FAR)

    def halt(self) -> None:
        """Wait until all ranks, and as many spares as before, are at the gate again."""
        self._at = self.gate.halt() + 1
        self.gate.stand(self._at, self.settings.world)
        self.whole()

    def whole(self) -> None:
        """Wait until lost ranks were replaced, and the replacements have rehearsed."""
        deadline_s = time.monotonic() + LIMIT_S
        while len(self.gate.known) < self.settings.world + self.settings.spares:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{self.name}: {len(self.gate.known)} ranks after {LIMIT_S:.0f} s: {self._last_words()}")
            time.sleep(0.05)

    def kill(self, number: int) -> Kill:
        """SIGKILL one of the ranks that train."""
        slots = sorted(self.run.ranks())
        return self.run.inject("kill", slots[number % len(slots)])

    def used(self) -> tuple[float, int]:
        """Sums of :func:`used_by` over the ranks that train."""
        cpu_s, switches = zip(*map(used_by, self.run.ranks().values()), strict=True)
        return sum(cpu_s), sum(switches)

    def begins(self) -> dict[str, float]:
        """Wait for the first commit. Returns the seconds from the command to each part of the start, as seen from outside. Call it at
        once."""
        found: dict[str, float] = {}
        while not (commits := self.run.commits()):
            if (why := self.run.failed()) is not None:
                raise RuntimeError(f"{self.name} did not begin: {why}: {self._last_words()}")
            if "first_line_s" not in found and (self._workdir / "output.txt").stat().st_size:
                found["first_line_s"] = time.monotonic() - self.begun_s
            if "ray_s" not in found and any(_command(pid).endswith("raylet") for pid in descendants(self.run.pid)):
                found["ray_s"] = time.monotonic() - self.begun_s
            time.sleep(0.02)
        begun = [json.loads(path.read_text()) for path in (self._workdir / "events").glob("*.begun")]
        return {**found, "train_function_s": sorted(begun)[0] - self.begun_s, "start_s": commits[0].t_s - self.begun_s}

    def stop(self) -> None:
        self.gate.grant(FAR)
        self.run.stop()
        self.gate.close()


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")
    except OSError:
        return ""


def light(settings: Settings) -> Settings:
    """Settings with short steps and no wait, which show the costs of a step beside its arithmetic."""
    return dataclasses.replace(settings, world=2, shards=4, shard_samples=4, wait_s=0.0)
