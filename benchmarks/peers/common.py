"""The common parts of all systems in `recovery` and `storm`: settings, the event log, the arithmetic on it, and the killer.

Every rank of every system appends one line per step to a file of its own, `<slot>-<pid>.log`:

    t_monotonic_s step samples kind epoch

- ``kind`` is ``commit`` (this rank applied the step), ``drop`` (the step failed, and its samples are lost) or ``unused`` (the commit lacks
  this rank's samples).
- ``samples``: of a commit, the global batch of the step's gradient; of the others, this rank's own.
- ``epoch`` names the membership (a restart's number, a quorum, a view): lines of one (epoch, step) are one commit of the job.

Each line is one `write`, so that SIGKILL loses none. Times are CLOCK_MONOTONIC, so that the lines of one host can be compared. Pure
functions, the same for all systems, compute all figures from these lines and the times of the kills. No system reports its own recovery.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import importlib
import importlib.util
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from fleet.simulation.rng import stream

REPOSITORY = Path(__file__).resolve().parents[2]
SETTLE_STEPS = 20  # the excess of a fault is counted until this many steps after the world is full again
POLL_S = 0.05
MODULES = {
    "fleet": "benchmarks.peers.fleet_run",
    "torchft": "benchmarks.peers.torchft_alone",
    "stock": "benchmarks.peers.stock_ray",
    "stock_torchft": "benchmarks.peers.stock_torchft",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One workload for all systems. ``world`` ranks train; ``spares`` is the room beyond them (processes or free CPUs).

    ``nodes``: of Fleet's local cluster. A run can lose a node of two or more.
    """

    seed: int = 7
    world: int = 4
    spares: int = 0
    shards: int = 16
    shard_samples: int = 32
    compute_s: float = 0.025
    wait_s: float = 0.025
    checkpoint_steps: int = 50
    nodes: int = 2

    @property
    def rank_shards(self) -> int:
        return self.shards // self.world

    @property
    def rank_samples(self) -> int:
        return self.rank_shards * self.shard_samples

    @property
    def global_samples(self) -> int:
        return self.shards * self.shard_samples

    def replace(self, **changes: int | float) -> Settings:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        return cls(**json.loads(text))


SMOKE_SETTINGS = Settings(world=3, spares=1, shards=3, compute_s=0.002, wait_s=0.005, checkpoint_steps=1)
"""One shard a rank, the shortest steps, and the earliest faults."""


def calibrated(settings: Settings) -> Settings:
    """``settings`` with the samples per shard that make a rank's share take ``compute_s`` of a core; measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.peers.workload", settings.to_json()]
    done = subprocess.run(command, cwd=REPOSITORY, env=rank_environment(), check=True, capture_output=True, text=True)
    return settings.replace(shard_samples=int(done.stdout.split()[-1]))


def rank_environment() -> dict[str, str]:
    """The environment of every rank of every system: one thread, and this repository importable."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}


# --- the event log ---


class EventLog:
    """Written by a rank; see the module's text for the format."""

    def __init__(self, directory: Path, slot: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / f"{slot}-{os.getpid()}.log").open("a", buffering=1)

    def write(self, step: int, samples: int, kind: str, epoch: int) -> None:
        self._file.write(f"{time.monotonic():.6f} {step} {samples} {kind} {epoch}\n")


class Line(NamedTuple):
    t_s: float
    step: int
    samples: int
    kind: str
    epoch: int
    slot: int
    pid: int


@dataclass
class Commit:
    """One step of the job, which the first rank had applied at ``t_s``. ``members``: slots -> pids of the ranks that applied it."""

    t_s: float
    step: int
    samples: int
    epoch: int
    members: dict[int, int] = field(default_factory=dict)


class Timeline:
    """Reads the logs of one run as they grow."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}
        self._commits: dict[tuple[int, int], Commit] = {}
        self.lost_lines: list[Line] = []

    def commits(self) -> list[Commit]:
        """All commits so far, in order of time."""
        for path in self._directory.glob("*.log"):
            for line in self._fresh(path):
                self._take(line)
        return sorted(self._commits.values(), key=lambda commit: commit.t_s)

    def _fresh(self, path: Path) -> Iterable[Line]:
        slot, pid = map(int, path.stem.split("-"))
        with path.open() as file:
            file.seek(self._offsets.get(path, 0))
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        self._offsets[path] = self._offsets.get(path, 0) + len(whole)
        for t_s, step, samples, kind, epoch in map(str.split, whole.splitlines()):
            yield Line(float(t_s), int(step), int(samples), kind, int(epoch), slot, pid)

    def _take(self, line: Line) -> None:
        if line.kind != "commit":
            self.lost_lines.append(line)
            return
        commit = self._commits.setdefault((line.epoch, line.step), Commit(line.t_s, line.step, line.samples, line.epoch))
        commit.t_s = min(commit.t_s, line.t_s)
        commit.samples = max(commit.samples, line.samples)
        commit.members[line.slot] = line.pid


# --- the arithmetic: pure functions of commits (ordered by time) and kills ---


@dataclass(frozen=True)
class Kill:
    """A fault that was executed: its time, the rank of the view, and the rank's process."""

    t_s: float
    slot: int
    pid: int
    kind: str = "kill"


@dataclass(frozen=True)
class Report:
    """The cost of one kill. ``stall_s``, ``excess_s`` and ``full_again_s`` are None where the log ends before they are known."""

    survived: bool
    stall_s: float | None
    excess_s: float | None
    samples_lost: int
    full_again_s: float | None


def positions(commits: Sequence[Commit]) -> list[int]:
    """The samples in the model's state after each commit. A step that is repeated undoes itself and all later steps."""
    stack: list[Commit] = []
    total, result = 0, []
    for commit in commits:
        while stack and stack[-1].step >= commit.step:
            total -= stack.pop().samples
        stack.append(commit)
        total += commit.samples
        result.append(total)
    return result


def committed_between(commits: Sequence[Commit], begin_s: float, end_s: float) -> int:
    """Samples by which the state grew in the interval, less those that were undone by the end of the log."""
    before = sum(1 for commit in commits if commit.t_s <= begin_s)
    survivors: list[Commit] = []
    for commit in commits:
        while survivors and survivors[-1].step >= commit.step:
            survivors.pop()
        survivors.append(commit)
    at_begin = positions(commits)[before - 1] if before else 0
    return sum(commit.samples for commit in survivors if commit.t_s <= end_s) - at_begin


def median_step_s(commits: Sequence[Commit]) -> float:
    """Median gap between neighbouring steps of one membership."""
    gaps = [b.t_s - a.t_s for a, b in itertools.pairwise(commits) if a.epoch == b.epoch and b.step == a.step + 1]
    return statistics.median(gaps)


def stall_s(commits: Sequence[Commit], t_s: float, step_s: float) -> float | None:
    """The gap around a kill, less the median step.

    A kill may fall after the all-reduce of the step in flight, so that one more commit follows. So the stall is the longer of two gaps:
    that around the kill, and the next. For a system that goes back to a checkpoint, its first repeated step ends the stall (in its favour).
    """
    last = _last_before(commits, t_s)
    gaps = [b.t_s - a.t_s for a, b in zip(commits[last : last + 3], commits[last + 1 : last + 3], strict=False)]
    return max(gaps) - step_s if gaps else None


def full_again(commits: Sequence[Commit], kill: Kill, world: int) -> int | None:
    """Index of the first commit after the kill by ``world`` ranks, without the killed process."""
    for index in range(_last_before(commits, kill.t_s) + 1, len(commits)):
        members = commits[index].members
        if len(members) >= world and kill.pid not in members.values():
            return index
    return None


def excess_s(commits: Sequence[Commit], kill: Kill, world: int, samples_per_s: float) -> float | None:
    """Time from the last commit before the kill until ``SETTLE_STEPS`` steps after the world is full again, beyond the fault-free time.

    The fault-free time is that of the samples gained in between. A smaller world, a smaller batch and undone steps all count, in
    seconds."""
    full = full_again(commits, kill, world)
    if full is None or full + SETTLE_STEPS >= len(commits):
        return None
    begin, end = _last_before(commits, kill.t_s), full + SETTLE_STEPS
    trained = positions(commits)
    return commits[end].t_s - commits[begin].t_s - (trained[end] - trained[begin]) / samples_per_s


def samples_lost(commits: Sequence[Commit], lost_lines: Sequence[Line], begin_s: float, end_s: float) -> int:
    """Samples that were trained on and then undone (rolled back), or computed and never trained on (dropped, unused), in an interval.

    A rank's dropped samples are not lost when another rank committed the same step of the same epoch. Then the sum holds them, and the
    rank takes that state. An attempt that is repeated with the same samples costs time, not samples, in every system.
    """
    trained = positions(commits)
    undone = sum(trained[i - 1] + commits[i].samples - trained[i] for i in range(1, len(commits)) if begin_s < commits[i].t_s <= end_s)
    committed = {(commit.epoch, commit.step) for commit in commits}
    inside = [line for line in lost_lines if begin_s < line.t_s <= end_s]
    return undone + sum(line.samples for line in inside if line.kind == "unused" or (line.epoch, line.step) not in committed)


def fault_free_rate(commits: Sequence[Commit], kills: Sequence[Kill], world: int) -> float:
    """Samples per second between neighbouring commits of the full world, outside every kill's window of recovery."""
    windows = [(commits[_last_before(commits, kill.t_s)].t_s, _window_end_s(commits, kill, world)) for kill in kills]
    samples, seconds = 0, 0.0
    for a, b in itertools.pairwise(commits):
        whole = len(a.members) >= world and len(b.members) >= world and a.epoch == b.epoch
        if whole and not any(begin <= a.t_s < end for begin, end in windows):
            samples, seconds = samples + b.samples, seconds + b.t_s - a.t_s
    return samples / seconds


def report(commits: Sequence[Commit], lost_lines: Sequence[Line], kills: Sequence[Kill], world: int) -> list[Report]:
    """One report for each kill of a run."""
    step_s, rate = median_step_s(commits), fault_free_rate(commits, kills, world)
    ends = [kill.t_s for kill in kills[1:]] + [float("inf")]
    return [
        Report(
            survived=any(commit.t_s > kill.t_s for commit in commits[_last_before(commits, kill.t_s) + 2 :]),
            stall_s=stall_s(commits, kill.t_s, step_s),
            excess_s=excess_s(commits, kill, world, rate),
            samples_lost=samples_lost(commits, lost_lines, kill.t_s, end_s),
            full_again_s=None if (full := full_again(commits, kill, world)) is None else commits[full].t_s - kill.t_s,
        )
        for kill, end_s in zip(kills, ends, strict=True)
    ]


def _last_before(commits: Sequence[Commit], t_s: float) -> int:
    return max(0, bisect.bisect_right(commits, t_s, key=lambda commit: commit.t_s) - 1)


def _window_end_s(commits: Sequence[Commit], kill: Kill, world: int) -> float:
    full = full_again(commits, kill, world)
    return commits[min(full + SETTLE_STEPS, len(commits) - 1)].t_s if full is not None else float("inf")


# --- systems and runs ---


class Run(Protocol):
    """A job that runs. Times are CLOCK_MONOTONIC of this host."""

    def ranks(self) -> dict[int, int]:
        """slot -> pid of the live processes in the view."""

    def commits(self) -> list[Commit]: ...

    def lost_lines(self) -> list[Line]: ...

    def world_full(self) -> bool: ...

    def failed(self) -> str | None:
        """Why the job is over; None while it runs."""

    def inject(self, kind: str, slot: int) -> Kill:
        """Execute a fault on the process of a slot in view: ``kill``, ``hang``, and ``node`` where the system has nodes to lose."""

    def stop(self) -> None: ...


class System(Protocol):
    """A system. Each adapter module has one, named SYSTEM."""

    name: str
    extra_faults: tuple[str, ...]  # fault kinds beside "kill" that `recovery` measures on it
    hang_timeout_s: float  # taken off the stall of a hang

    def missing(self) -> str | None:
        """Why the system cannot run here (a package that is not installed), or None."""

    def start(self, workdir: Path, settings: Settings) -> Run: ...


class LoggedRun:
    """A run whose ranks write event logs to ``workdir/events`` and which one process (driver, supervisor) keeps alive."""

    def __init__(
        self, workdir: Path, settings: Settings, command: Sequence[str], environment: Mapping[str, str], where: Path = REPOSITORY
    ) -> None:
        self.workdir, self.settings = workdir, settings
        workdir.mkdir(parents=True, exist_ok=True)
        self._timeline = Timeline(workdir / "events")
        self._output: IO[bytes] = (workdir / "output.txt").open("ab")
        self._process = subprocess.Popen(
            command, cwd=where, env=dict(environment), stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True
        )
        self.pid = self._process.pid

    def commits(self) -> list[Commit]:
        return self._timeline.commits()

    def lost_lines(self) -> list[Line]:
        return sorted(self._timeline.lost_lines)

    def ranks(self) -> dict[int, int]:
        """Members of the newest membership's last two commits (the last one's lines may still be coming) that are alive."""
        recent = self.commits()[-2:]
        members = {slot: pid for commit in recent if commit.epoch == recent[-1].epoch for slot, pid in commit.members.items()}
        return {slot: pid for slot, pid in sorted(members.items()) if alive(pid)}

    def world_full(self) -> bool:
        return len(self.ranks()) >= self.settings.world

    def failed(self) -> str | None:
        code = self._process.poll()
        return None if code is None else f"exit status {code}, see {self.workdir / 'output.txt'}"

    def inject(self, kind: str, slot: int) -> Kill:
        signals = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}
        kill = Kill(time.monotonic(), slot, self.ranks()[slot], kind)
        os.kill(kill.pid, signals[kind])
        return dataclasses.replace(kill, t_s=time.monotonic())

    def stop(self) -> None:
        """SIGTERM to the keeper, 20 s for it to end in order, and SIGKILL to the rest of its tree."""
        tree = descendants(self._process.pid)
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=20)
        for pid in [self._process.pid, *tree]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    return _stat(pid)[0] not in ("", "Z", "X")


def descendants(pid: int) -> list[int]:
    """All processes below ``pid``, by their parents' ids."""
    parents = {int(entry): _stat(int(entry))[1] for entry in os.listdir("/proc") if entry.isdigit()}
    found, frontier = [], [pid]
    while frontier:
        frontier = [child for child, parent in parents.items() if parent in frontier]
        found += frontier
    return found


def _stat(pid: int) -> tuple[str, int]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "", 0
    return fields[0], int(fields[1])


def installed_systems(only: Sequence[str] = ()) -> tuple[list[System], list[str]]:
    """The systems that can run here, and a note for each that cannot."""
    systems: list[System] = []
    notes: list[str] = []
    for name, module in MODULES.items():
        if only and name not in only:
            notes.append(f"{name} left out: not asked for")
            continue
        if importlib.util.find_spec(module) is None:
            notes.append(f"{name} left out: no adapter {module}")
            continue
        system: System = importlib.import_module(module).SYSTEM
        reason = system.missing()
        if reason is None:
            systems.append(system)
        else:
            notes.append(f"{name} left out: {reason}")
    return systems, notes


def not_installed(*packages: str) -> str | None:
    absent = [package for package in packages if importlib.util.find_spec(package) is None]
    return f"{', '.join(absent)} not installed" if absent else None


# --- the killer ---


def wait_until(condition: Callable[[], bool], run: Run, limit_s: float) -> bool:
    """Poll a condition until it holds (True), the job is over, or the limit has passed (False)."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s and run.failed() is None:
        if condition():
            return True
        time.sleep(POLL_S)
    return condition()


def steady_steps(run: Run, since_s: float, world: int) -> int:
    """Number of the full world's last commits in a row, after ``since_s``."""
    count = 0
    for commit in reversed(run.commits()[:-1]):  # the newest one's lines may still be coming
        if commit.t_s <= since_s or len(commit.members) < world:
            break
        count += 1
    return count


class Injection(NamedTuple):
    """A planned fault: steps after the world is full (again), fraction of a step, and rank of the view."""

    steps: int
    phase: float
    rank: int


def injections(seed: int, count: int, world: int, checkpoint_steps: int) -> list[Injection]:
    """Planned faults, the same for every system. ``steps`` covers one checkpoint interval evenly, so that the loss of steps is a fair mean.

    It is beyond ``SETTLE_STEPS``, so that no two windows overlap."""
    plan = []
    for index in range(count):
        rng = stream(seed, "recovery", index)
        plan.append(Injection(SETTLE_STEPS + 5 + rng.randrange(checkpoint_steps), rng.random(), rng.randrange(world)))
    return plan


def storm_trace(seed: int, mtbf_s: float, duration_s: float, world: int) -> list[tuple[float, int]]:
    """(time in s, rank of the view): exponential gaps of mean ``mtbf_s``, victims even over the ranks. The same for every system."""
    rng = stream(seed, "storm")
    trace: list[tuple[float, int]] = []
    t_s = rng.expovariate(1 / mtbf_s)
    while t_s < duration_s:
        trace.append((t_s, rng.randrange(world)))
        t_s += rng.expovariate(1 / mtbf_s)
    return trace
