"""The queue of runs that wait for room: it keeps them in files, starts them as processes, and watches them until they end.

It tells a run to give way, and starts it again. A run outlives the service that started it: another service takes up its file, and knows
the process by its pid and start time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fleet.errors import ConfigError, RunFailed
from fleet.host.clock import unix_time_s
from fleet.host.proc import start_ticks, stat_fields
from fleet.host.whole_files import write_whole
from fleet.protocol.exit_codes import Exit
from fleet.protocol.queueing import ONE_SLOT, SLOT, Asked, Decision, Node, Preempt, Running, Start

SUBMITTED = "FLEET_SUBMITTED_UNIX_S"
"""Tells a run when it was handed in, for the wait in its journal."""
LOOK_S = 0.25
KEPT = 200
WAITING, RUNNING, ENDED, CANCELLED = "waiting", "running", "ended", "cancelled"
MOST_WAITING = 1_000
NOTICE_S = 120.0
"""Seconds that a run which is to end has to get ready for the signal, and then again to keep its last state."""
GAVE_WAY = (None, Exit.STOPPED, Exit.NOT_SAVED, -signal.SIGTERM)
"""Exit codes after which a run that was told to give way goes on later. None: no process saw the code. A completed run ends at once when it
is started again."""
HERE = "here"
Noted = Callable[[str, "Job", str], None]
"""Takes (action, run, why) of each action of the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run, as it was handed in, and its state since.

    Args:
        slots: ranks, spares included.
        owner, team: the user that handed it in, and the team whose quota it counts for.
        shape: resources that a slot takes of a node; selector: conditions on the node's labels.
        waits_since_unix_s: since when it waits, if it does; ``waited_s``: seconds that it waited before that, in all.
        starts: how often it was started; refusals: how many of its last starts were refused.
        placed: its slots by node, as the queue counts them.
        gives_way_to: the run for which it is to end; empty: none.
        leaves_since_unix_s: since when it is to end, to give way or because it was cancelled; 0: it is not to end.
        stop_sent_unix_s: when SIGTERM was sent; 0: not yet.
        hurried: it did not end in order, and was ended at once.
        exit_code: None when no service saw it end.
    """

    name: str
    script: str
    arguments: tuple[str, ...]
    directory: str
    slots: int
    priority: int
    submitted_unix_s: float
    owner: str = ""
    team: str = ""
    shape: Mapping[str, float] = field(default_factory=lambda: ONE_SLOT)
    selector: Mapping[str, str] = field(default_factory=dict)
    phase: str = WAITING
    pid: int = 0
    ticks: int = 0
    waits_since_unix_s: float | None = None
    waited_s: float = 0.0
    starts: int = 0
    refusals: int = 0
    started_unix_s: float = 0.0
    placed: Mapping[str, int] = field(default_factory=dict)
    gives_way_to: str = ""
    cancelled: bool = False
    leaves_since_unix_s: float = 0.0
    stop_sent_unix_s: float = 0.0
    hurried: bool = False
    exit_code: int | None = None
    ended_unix_s: float | None = None

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {**dataclasses.asdict(self), "arguments": list(self.arguments)}

    def asked(self, now_s: float) -> Asked:
        """The run as the policy sees it."""
        waits_s = 0.0
        if self.phase == WAITING:
            since_s = self.submitted_unix_s if self.waits_since_unix_s is None else self.waits_since_unix_s
            waits_s = max(0.0, now_s - since_s)
        return Asked(
            name=self.name, slots=self.slots, priority=self.priority, since_s=self.submitted_unix_s, waited_s=self.waited_s + waits_s,
            team=self.team, shape=self.shape, selector=self.selector,
        )  # fmt: skip

    def running(self, now_s: float) -> Running:
        """The same while it runs."""
        return Running(asked=self.asked(now_s), placed=self.placed, began_s=self.started_unix_s, leaving=bool(self.gives_way_to))


class QueueRoom(Protocol):
    """Room for runs."""

    def nodes(self, jobs: Sequence[Job]) -> tuple[list[Node], list[Job]]:
        """Nodes with the resources that the queue may give out now, and its running ``jobs`` with their nodes.

        Raises RunFailed: the room cannot be seen."""

    def most(self) -> list[Node]:
        """All nodes as if they were empty. Raises RunFailed."""


@dataclass(frozen=True)
class OneMachine:
    """A number of slots of this machine, on which each run starts a cluster of its own."""

    slots: int

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ConfigError("--slots", self.slots, "there must be at least one", "Count the ranks that may run at once.")

    def nodes(self, jobs: Sequence[Job]) -> tuple[list[Node], list[Job]]:
        return self.most(), [dataclasses.replace(job, placed={HERE: job.slots}) for job in jobs]

    def most(self) -> list[Node]:
        return [Node(HERE, {SLOT: float(self.slots)})]


class Runs(Protocol):
    """How runs are started and ended.

    Attributes:
        tries: so many refused starts in a row end a run. Another user may take the room that the queue has seen.
    """

    @property
    def tries(self) -> int: ...

    def command(self, job: Job) -> list[str]:
        """The command line of ``job``; it resumes a run that was started before."""

    def listens(self, job: Job) -> bool:
        """Whether the process of ``job`` is so far that SIGTERM ends its run in order."""

    def hurry(self, job: Job) -> None:
        """End at once a run that was told to end in order, and has not ended."""


class Policy(Protocol):
    """Decides which runs start, and which give way: ``policies.admission`` with its rules."""

    def decide(self, waiting: Sequence[Asked], running: Sequence[Running], nodes: Sequence[Node]) -> list[Decision]: ...

    def never(self, one: Asked, nodes: Sequence[Node]) -> tuple[str, str]: ...


def nobody_notes(action: str, job: Job, why: str) -> None:
    """For a queue that records no actions."""


class RunQueue:
    """The queue of one folder of runs.

    Args:
        folder: where jobs and their output are kept.
        room: the slots that there are.
        policy: decides which runs start now, and which give way.
        runs: how runs are started and ended.
        noted: takes each action.
    """

    def __init__(self, folder: Path, room: QueueRoom, policy: Policy, runs: Runs, noted: Noted = nobody_notes) -> None:
        self.folder, self.room = folder, room
        self._policy, self._runs, self._noted = policy, runs, noted
        self._lock = threading.Lock()
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._stop = threading.Event()
        self.trouble = ""
        """Why nothing can be started now; empty: nothing is wrong."""
        folder.mkdir(parents=True, exist_ok=True)
        self._jobs = {job.name: job for job in map(_read, sorted(folder.glob("*.json")))}
        self._thread = threading.Thread(target=self._look_after, name="fleet-queue", daemon=True)

    def __enter__(self) -> RunQueue:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Runs go on. Waiting runs start when a service takes up the folder again."""
        self._stop.set()
        self._thread.join(10.0)

    def submit(self, job: Job) -> None:
        """Let it wait for its turn. Raises ConfigError, RunFailed."""
        reason, way_out = self._policy.never(job.asked(job.submitted_unix_s), self.room.most())
        if reason:
            raise ConfigError("slots", job.slots, reason, way_out)
        with self._lock:
            if job.name in self._jobs:
                raise ConfigError("--name", job.name, "there is a run of that name", "Choose another.")
            if len(self._in(WAITING)) >= MOST_WAITING:
                raise ConfigError("queue", MOST_WAITING, "so many runs wait already")
            self._put(job)

    def get(self, name: str) -> Job:
        """Raises KeyError."""
        with self._lock:
            return self._jobs[name]

    def cancel(self, name: str) -> Job:
        """Take a job that waits out of the queue; end one that runs in order, as Ctrl-C does. Raises KeyError, ConfigError."""
        with self._lock:
            job = self._jobs[name]
            if job.phase == WAITING:
                self._put(dataclasses.replace(job, phase=CANCELLED, ended_unix_s=unix_time_s()))
            elif job.phase == RUNNING and _alive(job):
                self._press(self._leaves(dataclasses.replace(job, cancelled=True)))
            else:
                raise ConfigError("name", name, f"it has {job.phase} already")
            return self._jobs[name]

    def jobs(self) -> list[Job]:
        """All that are kept, in the order in which they were handed in."""
        with self._lock:
            return sorted(self._jobs.values(), key=lambda job: job.submitted_unix_s)

    def _in(self, *phases: str) -> list[Job]:
        return [job for job in self._jobs.values() if job.phase in phases]

    # ---- looking after them ------------------------------------------------------------------------------------------------------------

    def _look_after(self) -> None:
        while not self._stop.wait(LOOK_S):
            self.step()

    def step(self) -> None:
        """Note the runs that ended, start runs that have room, and tell runs to give way."""
        with self._lock:
            for job in self._in(RUNNING):
                self._notice(job)
                self._press(self._jobs[job.name])
            for decision in self._decisions():
                self._carry_out(decision)
            self._forget()

    def _decisions(self) -> list[Decision]:
        if not self._in(WAITING):
            return []
        try:
            nodes, running = self.room.nodes(self._in(RUNNING))
        except RunFailed as error:
            self.trouble = error.reason
            return []
        self.trouble, now_s = "", unix_time_s()
        return self._policy.decide([job.asked(now_s) for job in self._in(WAITING)], [job.running(now_s) for job in running], nodes)

    def _carry_out(self, decision: Decision) -> None:
        job = self._jobs[decision.name]
        match decision:
            case Start(placed=placed, why=why):
                self._start(job, placed, why)
            case Preempt(to=to, why=why):
                self._noted("preempt", job, why)
                self._press(self._leaves(dataclasses.replace(job, gives_way_to=to)))

    def _notice(self, job: Job) -> None:
        child = self._children.get(job.name)
        code = child.poll() if child is not None else None
        if code is None and (child is not None or _alive(job)):
            return
        self._children.pop(job.name, None)
        if (why := self._why_again(job, code)) and not job.cancelled:
            self._noted("released", job, f"{why}; it waits again")
            refusals = job.refusals + 1 if code == Exit.REFUSED else 0
            again = dataclasses.replace(job, phase=WAITING, waits_since_unix_s=unix_time_s(), gives_way_to="", placed={}, refusals=refusals)
            self._put(dataclasses.replace(again, leaves_since_unix_s=0.0, stop_sent_unix_s=0.0, hurried=False))
            return
        self._noted("end", job, "no process saw how" if code is None else f"exit code {code}")
        self._put(dataclasses.replace(job, phase=ENDED, exit_code=code, ended_unix_s=unix_time_s()))

    def _why_again(self, job: Job, code: int | None) -> str:
        """Why a run whose process has ended waits again; empty: the run is over."""
        if job.gives_way_to and (code in GAVE_WAY or (job.hurried and code != Exit.DONE)):
            return f"its slots are free for {job.gives_way_to}"
        if code == Exit.REFUSED and job.refusals + 1 < self._runs.tries:
            return "its start was refused: another user may have taken the room"
        return ""

    def _leaves(self, job: Job) -> Job:
        self._put(dataclasses.replace(job, leaves_since_unix_s=job.leaves_since_unix_s or unix_time_s()))
        return self._jobs[job.name]

    def _press(self, job: Job) -> None:
        """Send SIGTERM to a run that is to end, once it can hear it. A run that has not ended ``NOTICE_S`` later is ended at once."""
        now_s = unix_time_s()
        if job.phase != RUNNING or not job.leaves_since_unix_s or not _alive(job):
            return
        if not job.stop_sent_unix_s and (self._runs.listens(job) or now_s > job.leaves_since_unix_s + NOTICE_S):
            self._put(dataclasses.replace(job, stop_sent_unix_s=now_s))
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(job.pid, signal.SIGTERM)
        elif job.stop_sent_unix_s and now_s > job.stop_sent_unix_s + NOTICE_S:
            self._noted("hurry", job, f"it has not ended {NOTICE_S:g} s after it was told to")
            self._put(dataclasses.replace(job, stop_sent_unix_s=now_s, hurried=True))
            self._runs.hurry(job)

    def _start(self, job: Job, placed: Mapping[str, int], why: str) -> None:
        environment = {**os.environ, SUBMITTED: repr(job.submitted_unix_s)}
        waited_s = job.asked(unix_time_s()).waited_s
        self._noted("resume" if job.starts else "start", job, why)
        with (self.folder / f"{job.name}.log").open("ab" if job.starts else "wb") as log:
            try:
                child = subprocess.Popen(
                    self._runs.command(job), cwd=job.directory, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:  # its folder is gone, say
                log.write(f"it could not be started: {error}\n".encode())
                self._noted("end", job, f"it could not be started: {error}")
                self._put(dataclasses.replace(job, phase=ENDED, exit_code=127, ended_unix_s=unix_time_s()))
                return
        self._children[job.name] = child
        self._put(dataclasses.replace(
            job, phase=RUNNING, pid=child.pid, ticks=start_ticks(child.pid), placed=dict(placed), waited_s=waited_s,
            starts=job.starts + 1, started_unix_s=unix_time_s(),
        ))  # fmt: skip

    def _forget(self) -> None:
        over = sorted(self._in(ENDED, CANCELLED), key=lambda job: job.ended_unix_s or 0.0)
        for job in over[:-KEPT]:
            del self._jobs[job.name]
            (self.folder / f"{job.name}.json").unlink(missing_ok=True)

    def _put(self, job: Job) -> None:
        write_whole(self.folder / f"{job.name}.json", json.dumps(job.plain()) + "\n")
        self._jobs[job.name] = job


def _read(path: Path) -> Job:
    content: Mapping[str, Any] = json.loads(path.read_text())
    return Job(**{**content, "arguments": tuple(content["arguments"])})


def _alive(job: Job) -> bool:
    try:
        return start_ticks(job.pid) == job.ticks and stat_fields(job.pid)[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
