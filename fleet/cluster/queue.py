"""Runs that wait for room on this machine: kept in files, started as processes of their own, looked after until they end.

A run outlives the service that started it: another one takes up its file, and knows the process by its pid and start time.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.cluster.clock import unix_time_s
from fleet.cluster.proc import start_ticks, stat_fields
from fleet.errors import ConfigError

SUBMITTED = "FLEET_SUBMITTED_UNIX_S"
"""Tells a run when it was handed in, so that its journal has how long it waited."""
LOOK_S = 0.25
KEPT = 200
WAITING, RUNNING, ENDED, CANCELLED = "waiting", "running", "ended", "cancelled"
MOST_WAITING = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run, as it was handed in, and what became of it. ``exit_code`` is None when it ended while nobody looked."""

    name: str
    script: str
    arguments: tuple[str, ...]
    directory: str
    slots: int
    priority: int
    submitted_unix_s: float
    phase: str = WAITING
    pid: int = 0
    ticks: int = 0
    exit_code: int | None = None
    ended_unix_s: float | None = None

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {**dataclasses.asdict(self), "arguments": list(self.arguments)}


class RunQueue:
    """The queue of one folder of runs.

    Args:
        folder: where jobs and their output are kept.
        slots: how many ranks, spares included, may run at once, of all runs together.
        admit: who starts now, of those that wait, with so many slots free.
        command: the command line of a job.
    """

    def __init__(
        self, folder: Path, slots: int, admit: Callable[[Sequence[Job], int], Sequence[str]], command: Callable[[Job], list[str]]
    ) -> None:
        if slots < 1:
            raise ConfigError("--slots", slots, "there must be at least one", "Count the ranks that may run at once.")
        self.folder, self.slots = folder, slots
        self._admit, self._command = admit, command
        self._lock = threading.Lock()
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._stop = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)
        self._jobs = {job.name: job for job in map(_read, sorted(folder.glob("*.json")))}
        self._thread = threading.Thread(target=self._look_after, name="fleet-queue", daemon=True)

    def __enter__(self) -> RunQueue:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Runs go on; those that wait will start when somebody looks after them again."""
        self._stop.set()
        self._thread.join(10.0)

    def submit(self, job: Job) -> None:
        """Let it wait for its turn. Raises ConfigError."""
        if job.slots > self.slots:
            raise ConfigError("slots", job.slots, f"more than the {self.slots} that this service has for all runs", "See fleet up --slots.")
        with self._lock:
            if job.name in self._jobs:
                raise ConfigError("--name", job.name, "there is a run of that name", "Choose another.")
            if len(self._in(WAITING)) >= MOST_WAITING:
                raise ConfigError("queue", MOST_WAITING, "so many runs wait already")
            self._put(job)

    def cancel(self, name: str) -> Job:
        """Take a job that waits out of the queue; end one that runs in order, as Ctrl-C does. Raises KeyError, ConfigError."""
        with self._lock:
            job = self._jobs[name]
            if job.phase == WAITING:
                self._put(dataclasses.replace(job, phase=CANCELLED, ended_unix_s=unix_time_s()))
            elif job.phase == RUNNING and _alive(job):
                os.kill(job.pid, signal.SIGTERM)
            else:
                raise ConfigError("name", name, f"it has {job.phase} already")
            return self._jobs[name]

    def jobs(self) -> list[Job]:
        """All that are kept, in the order in which they were handed in."""
        with self._lock:
            return sorted(self._jobs.values(), key=lambda job: job.submitted_unix_s)

    @property
    def free(self) -> int:
        """Slots that no run has now."""
        with self._lock:
            return self._free()

    def _free(self) -> int:
        return self.slots - sum(job.slots for job in self._in(RUNNING))

    def _in(self, *phases: str) -> list[Job]:
        return [job for job in self._jobs.values() if job.phase in phases]

    # ---- looking after them ------------------------------------------------------------------------------------------------------------

    def _look_after(self) -> None:
        while not self._stop.wait(LOOK_S):
            self.step()

    def step(self) -> None:
        """Take note of what has ended, and start what has room."""
        with self._lock:
            for job in self._in(RUNNING):
                self._notice(job)
            for name in self._admit(self._in(WAITING), self._free()):
                self._start(self._jobs[name])
            self._forget()

    def _notice(self, job: Job) -> None:
        child = self._children.get(job.name)
        code = child.poll() if child is not None else None
        if code is None and (child is not None or _alive(job)):
            return
        self._children.pop(job.name, None)
        self._put(dataclasses.replace(job, phase=ENDED, exit_code=code, ended_unix_s=unix_time_s()))

    def _start(self, job: Job) -> None:
        environment = {**os.environ, SUBMITTED: repr(job.submitted_unix_s)}
        with (self.folder / f"{job.name}.log").open("wb") as log:
            try:
                child = subprocess.Popen(
                    self._command(job), cwd=job.directory, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:  # its folder is gone, say
                log.write(f"it could not be started: {error}\n".encode())
                self._put(dataclasses.replace(job, phase=ENDED, exit_code=127, ended_unix_s=unix_time_s()))
                return
        self._children[job.name] = child
        self._put(dataclasses.replace(job, phase=RUNNING, pid=child.pid, ticks=start_ticks(child.pid)))

    def _forget(self) -> None:
        over = sorted(self._in(ENDED, CANCELLED), key=lambda job: job.ended_unix_s or 0.0)
        for job in over[:-KEPT]:
            del self._jobs[job.name]
            (self.folder / f"{job.name}.json").unlink(missing_ok=True)

    def _put(self, job: Job) -> None:
        path = self.folder / f"{job.name}.json"
        path.with_suffix(".new").write_text(json.dumps(job.plain()) + "\n")
        os.replace(path.with_suffix(".new"), path)
        self._jobs[job.name] = job


def _read(path: Path) -> Job:
    content: Mapping[str, Any] = json.loads(path.read_text())
    return Job(**{**content, "arguments": tuple(content["arguments"])})


def _alive(job: Job) -> bool:
    try:
        return start_ticks(job.pid) == job.ticks and stat_fields(job.pid)[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
