"""How much do announced losses of nodes cost, and losses of the head? On a local cluster, with real processes.

- A node is announced, and goes 30 s later: chaos does both, as a cloud would. The stall is the longest time between two commits from the
  announcement to some seconds after the loss, less a median step. Steps wait for a timer (`elastic_script`). The cost is the time of these
  steps beyond the median on all ranks, and the processor time of all processes that begin meanwhile. It is counted until the new spare
  stands by, and is a share of the world's rank-seconds. The empty slots until another node comes are a figure by
  themselves, in rank-seconds.
- The head is lost: the driver gets SIGKILL at a random moment, and its whole cluster ends with it, memory included. Then
  ``fleet run --resume-or-start`` is typed again, as a RayJob does it. The figures are the time from the kill to the next commit, and the
  lost training over the time between two durable checkpoints.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import Form, Part, in_parts, run
from chaos.arrivals import save_trace
from fleet.errors import FleetError
from fleet.host.journal import read_journal
from fleet.ledger.goodput import Ledger
from fleet.protocol.records import STANDBY, Committed, FaultRecord, HistoryBegun, ProcessUp, Record, RunEnded, Spans
from fleet.protocol.types import Fault
from fleet.simulation.rng import derive_seed

ROOT = Path(__file__).parents[1]
SCRIPT, TIMED_SCRIPT = "examples/gpt.py", "benchmarks/elastic_script.py"
WORLD = 2
NOTICE_S, BEHIND_S, LOOK_S = 30.0, 5.0, 0.1
LIMITS_S = {Form.FULL: 600.0, Form.QUICK: 150.0, Form.SMOKE: 600.0}
"""Most seconds of each run, and until it trains."""
SAVE_S = 3.0
"""Seconds between durable checkpoints, where the head is lost."""


def _command(folder: Path, script: str, *options: str) -> subprocess.Popen[bytes]:
    """``fleet run`` in a process of its own, with its runs in ``folder``."""
    with (folder / "output.txt").open("ab") as output:
        command = [sys.executable, "-m", "fleet", "run", script, *options, "--storage", str(folder), "--seed", "7"]
        return subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.kill()
        child.wait()


# ---- a node is taken away ----------------------------------------------------------------------------------------------------------------


class Began:
    """The processor time of all processes of this machine that began after this was made: (Unix time, seconds), in order."""

    def __init__(self) -> None:
        self.seen = list[tuple[float, float]]()
        self._took, self._known = dict[int, float](), set(psutil.pids())
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="processor time", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()
        self._thread.join()

    def until_s(self, since_unix_s: float, until_unix_s: float) -> float:
        """Seconds from one time to another. Raises RuntimeError when nothing was seen then."""
        took = [[seconds for at_s, seconds in self.seen if at_s <= end_s] for end_s in (since_unix_s, until_unix_s)]
        if not all(took):
            raise RuntimeError(f"no process was looked at before {since_unix_s}")
        return took[1][-1] - took[0][-1]

    def _look(self) -> None:
        while not self._closed.wait(LOOK_S):
            for pid in set(psutil.pids()) - self._known:
                with contextlib.suppress(psutil.NoSuchProcess):  # its time until the last look counts
                    times = psutil.Process(pid).cpu_times()
                    self._took[pid] = times.user + times.system
            self.seen.append((time.time(), sum(self._took.values())))


def drain(folder: Path, notice_s: float, steps: int, node: int, limit_s: float) -> dict[str, float]:
    """One run from which one node is taken away. Raises RuntimeError when the run does not come to its end, and TimeoutExpired after its
    limit."""
    folder.mkdir(parents=True)
    save_trace((Fault("m1", 8.0, "host_maintenance", "maintenance", node=node, duration_s=notice_s),), folder / "trace.csv")
    sizes = ("--world", str(WORLD), "--spares", "1", "--nodes", "3", "--steps", str(steps), "--shards", str(2 * WORLD))
    began = Began()
    child = _command(folder, TIMED_SCRIPT, "--name", "drain", *sizes, "--chaos", f"trace={folder / 'trace.csv'},repair=5s")
    try:
        code = child.wait(limit_s)
    finally:
        _end(child)
        began.close()
    if code:
        raise RuntimeError(f"the run ended with code {code}: {(folder / 'output.txt').read_text()[-2000:]}")
    return figures_of(list(read_journal(folder / "drain" / "journal.jsonl")), began.until_s)


def figures_of(records: Sequence[Record], processor_s: Callable[[float, float], float]) -> dict[str, float]:
    """Seconds of stall, steps lost, the drain's share of the world's rank-seconds, and the rank-seconds of its empty slots.

    ``processor_s``: the processor time of new processes between two Unix times.
    """
    phases = {record.phase: record.at_s for record in records if isinstance(record, FaultRecord)}
    if "executed" not in phases:
        raise RuntimeError(f"the node was not taken away: {phases}")
    commits = [record.at_s for record in records if isinstance(record, Committed)]
    gaps = [(after - before, before) for before, after in itertools.pairwise(commits)]
    median_s = statistics.median(gap for gap, _ in gaps)
    standing_s = stands_by_s(records, phases["executed"])
    near = [gap for gap, at_s in gaps if phases["announced"] <= at_s <= max(standing_s, phases["executed"] + BEHIND_S)]
    summary = Ledger().apply_all(records).summary()
    item = next(incident for incident in summary.incidents if incident.id == "m1")
    excess_s = sum(max(0.0, gap - median_s) for gap in near)
    lost = sum(record.from_state.step for record in records if isinstance(record, HistoryBegun)) + summary.rolled_back_total
    started_s = summary.started_unix_s - summary.started_s
    start_up_s = processor_s(started_s + phases["announced"], started_s + standing_s)
    return {
        "stall_s": max(near) - median_s, "step_s": median_s, "steps_lost": float(lost), "start_up_cpu_s": start_up_s,
        "cost_ratio": (WORLD * excess_s + start_up_s) / (WORLD * summary.training_s), "empty_s": item.cost["maintenance"],
    }  # fmt: skip


def stands_by_s(records: Sequence[Record], lost_s: float) -> float:
    """When the process that was started for the lost node's stood by. Raises RuntimeError when it never did."""
    members = [record.member for record in records if isinstance(record, ProcessUp) and record.at_s > lost_s]
    for record in records:
        if isinstance(record, Spans) and record.member in members[:1] and STANDBY in record.codes:
            return (record.start_us + sum(record.durations_us[: record.codes.index(STANDBY)])) / 1e6
    raise RuntimeError(f"no process stood by after {lost_s:g} s: {members}")


def drains(form: Form, folder: Path) -> Part:
    """Several runs; each loses another node."""
    notice_s, steps = form.of(NOTICE_S, NOTICE_S, 4.0), form.of(300, 300, 90)
    work = {
        f"run {number + 1} from which a node is taken": partial(drain, folder / f"{number}", notice_s, steps, number % 3, LIMITS_S[form])
        for number in range(form.of(4, 1, 1))
    }
    return Part(work, lambda found: _drained(list(found.values()), notice_s))


def _drained(found: Sequence[dict[str, float]], notice_s: float) -> dict[str, Any]:
    each = {name: [one[name] for one in found] for name in found[0]}
    over = [one["stall_s"] / one["step_s"] for one in found]
    figures = {
        "fleet_drain_stall_s_median": statistics.median(each["stall_s"]),
        "fleet_drain_step_s_median": statistics.median(each["step_s"]),
        "fleet_drain_stall_over_step_ratio_median": statistics.median(over),
        "fleet_drain_steps_lost_total": sum(each["steps_lost"]),
        "fleet_drain_start_up_cpu_s_median": statistics.median(each["start_up_cpu_s"]),
        "fleet_drain_cost_ratio": statistics.median(each["cost_ratio"]),
    }
    samples = {f"drain_{name}": values for name, values in each.items()}
    return {"settings": {"notice_s": notice_s}, "figures": figures, "samples": samples, "notes": []}


# ---- the head is lost --------------------------------------------------------------------------------------------------------------------


class _Head:
    """A run whose driver is killed again and again."""

    def __init__(self, folder: Path, steps: int, seed: int, limit_s: float) -> None:
        self._folder, self._steps, self._limit_s = folder, steps, limit_s
        self._draw = random.Random(derive_seed(seed, "head"))
        self._journal = folder / "head" / "journal.jsonl"

    def start(self, name: str = "head") -> subprocess.Popen[bytes]:
        self._folder.mkdir(parents=True, exist_ok=True)
        sizes = ("--world", "2", "--spares", "0", "--nodes", "1", "--steps", str(self._steps), "--checkpoint", f"{SAVE_S:g}")
        return _command(self._folder, SCRIPT, "--resume-or-start", name, *sizes)

    def records(self) -> list[Record]:
        try:
            return list(read_journal(self._journal, spans=False)) if self._journal.exists() else []
        except FleetError:  # its last line is being written
            return []

    def trains(self, child: subprocess.Popen[bytes], known: int) -> tuple[float, list[Record]] | None:
        """(time, records) once there is a commit beyond the first ``known`` records; None: the run came to its end."""
        end_s = time.monotonic() + self._limit_s
        while time.monotonic() < end_s:
            found = self.records()
            if any(isinstance(record, Committed) and record.state.step for record in found[known:]):
                return time.monotonic(), found
            if child.poll() is not None:
                return None
            time.sleep(LOOK_S)
        raise TimeoutError(f"no commit within {self._limit_s:g} s: {(self._folder / 'output.txt').read_text()[-2000:]}")

    def kill(self, child: subprocess.Popen[bytes]) -> tuple[float, list[Record]]:
        """Kill the driver after a while; returns the time, and the journal's records then."""
        time.sleep(self._draw.uniform(SAVE_S / 2, 3 * SAVE_S))
        os.kill(child.pid, signal.SIGKILL)
        at_s = time.monotonic()
        child.wait()
        return at_s, self.records()

    def killed(self, kills: int) -> tuple[list[float], list[float], bool]:
        """(seconds until the run trains again, seconds of training lost) of each kill; and whether the run came to its end."""
        back, lost = list[float](), list[float]()
        child = self.start()
        try:
            seen = self.trains(child, 0)
            for _ in range(kills):
                if seen is None:
                    break
                killed_s, before = self.kill(child)
                child = self.start()
                seen = self.trains(child, len(before))
                if seen is not None:
                    back.append(seen[0] - killed_s)
                    lost.append(lost_s(before, seen[1]))
            return back, lost, child.wait(self._limit_s) == 0
        finally:
            _end(child)

    def twin(self) -> None:
        """Make a run that is not killed."""
        child = self.start("twin")
        try:
            child.wait(self._limit_s)
        finally:
            _end(child)

    def digests(self, name: str) -> list[str]:
        """Digest of the final state at each end of a run."""
        path = self._folder / name / "journal.jsonl"
        return [record.digest for record in read_journal(path, spans=False) if isinstance(record, RunEnded)]


def lost_s(before: Sequence[Record], after: Sequence[Record]) -> float:
    """Seconds of training that are repeated after the kill: from the state that the run goes on from to its last commit."""
    begun = next(record for record in after[len(before) :] if isinstance(record, HistoryBegun))
    commits = [record for record in before if isinstance(record, Committed)]
    kept = [record.at_s for record in commits if record.state.step <= begun.from_state.step]
    return max(0.0, commits[-1].at_s - (kept[-1] if kept else commits[0].at_s))


def heads(form: Form, folder: Path) -> Part:
    """A run whose driver is killed again and again, and that then ends with the bits of an undisturbed run."""
    head, kills = _Head(folder, form.of(240, 40, 60), 1, LIMITS_S[form]), form.of(10, 2, 1)
    what = f"a run whose head is lost {kills} times"

    def reported(found: dict[str, Any]) -> dict[str, Any]:
        back, lost, ended = found[what]
        figures = {
            "fleet_resume_after_head_s_median": statistics.median(back),
            "fleet_head_kills": len(back),
            "fleet_head_lost_over_interval_ratio_max": max(lost) / SAVE_S,
            "fleet_head_bit_identical_ratio": float(ended and head.digests("head") == head.digests("twin")[-1:]),
        }
        samples = {"resume_after_head_s": back, "head_lost_s": lost}
        return {"settings": {"save_s": SAVE_S}, "figures": figures, "samples": samples, "notes": []}

    return Part({what: lambda: head.killed(kills), "its twin": head.twin}, reported)


def measure(form: Form) -> dict[str, Any]:
    """Measure nodes that go after a notice, then a head that is lost."""
    with tempfile.TemporaryDirectory() as folder:
        return in_parts("elastic", [drains(form, Path(folder) / "drains"), heads(form, Path(folder) / "heads")])


if __name__ == "__main__":
    run("elastic", measure)
