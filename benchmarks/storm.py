"""`storm`: one seeded trace of kills, exponential with MTBF 15 s, against each system; committed samples over what no fault would give.

- The trace is (time, rank of the view), drawn once and the same for all. At its time the process of the view's n-th slot is killed; when
  the view has no such rank, or its process is dead, the fault is suppressed and counted as such. So a system that is down meets fewer
  faults, which is in its favour.
- Committed samples: by how much the state grew during the storm, less what was undone later: the log goes on after the storm, so that steps
  which a pending restart undoes are not counted.
- No machine stays as fast as it is. So the trace is cut into parts, and the systems take turns: each has a run for each part, which begins
  and ends with a stretch without faults. A system's rate is the mean of all its stretches' samples per second, and the greatest of all
  systems is the *one* common fault-free rate by which every system's committed samples are divided: a slower step costs its system here
  too, and no system is measured by its own yardstick. All rates are reported.
- All systems run on one node: nodes that share a machine's cores with the ranks would cost Ray's daemons for each, and none is lost here.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.peers.common import (
    Kill,
    Run,
    Settings,
    System,
    calibrated,
    committed_between,
    fault_free_rate,
    installed_systems,
    steady_steps,
    storm_trace,
    wait_until,
)

CALM_LIMIT_S = 180.0
MTBF_S, DURATION_S, QUICK_DURATION_S = 15.0, 300.0, 45.0
PARTS, QUICK_PARTS = 3, 1
CALM_STEPS, QUICK_CALM_STEPS = 200, 60

Trace = Sequence[tuple[float, int]]
"""(time in s, rank of the view) of each fault."""


@dataclass(frozen=True)
class Storm:
    """One system's storm, or a part of it: fault-free samples per second around it, samples committed in it, and its faults."""

    fault_free_rates: tuple[float, ...]
    committed_samples: int
    executed: int
    suppressed: int

    @property
    def fault_free_samples_per_s(self) -> float:
        return statistics.mean(self.fault_free_rates)


def measure(quick: bool = False, only: Sequence[str] = ()) -> dict[str, Any]:
    """Run the benchmark; the settings, figures, samples and notes of design section 10's shape."""
    systems, notes = installed_systems(only)
    settings = calibrated(Settings(spares=1, nodes=1))
    duration_s, parts, calm_steps = (QUICK_DURATION_S, QUICK_PARTS, QUICK_CALM_STEPS) if quick else (DURATION_S, PARTS, CALM_STEPS)
    trace = storm_trace(settings.seed, MTBF_S, duration_s, settings.world)
    found: dict[str, list[Storm]] = {system.name: [] for system in systems}
    for stretch in cut(trace, duration_s, parts):
        for system in systems:
            found[system.name].append(weather(system, settings, stretch, duration_s / parts, calm_steps))
    storms = {name: whole(parted) for name, parted in found.items()}
    weather_used = {"mtbf_s": MTBF_S, "duration_s": duration_s, "parts": parts, "calm_steps": calm_steps, "faults_planned": len(trace)}
    return {
        "settings": {**vars(settings), **weather_used},
        "figures": figures(storms, duration_s),
        "samples": {
            "fault_at_s": [t for t, _ in trace],
            **{f"{name}_fault_free_samples_per_s": list(storm.fault_free_rates) for name, storm in storms.items()},
            **{f"{name}_committed_samples": [part.committed_samples for part in parted] for name, parted in found.items()},
        },
        "notes": notes,
    }


def cut(trace: Trace, duration_s: float, parts: int) -> list[Trace]:
    """Equal parts of a trace of ``duration_s``, each from its own beginning."""
    part_s = duration_s / parts
    return [[(at_s - n * part_s, rank) for at_s, rank in trace if n * part_s <= at_s < (n + 1) * part_s] for n in range(parts)]


def whole(parts: Sequence[Storm]) -> Storm:
    """The storm that these are the parts of."""
    return Storm(
        fault_free_rates=tuple(rate for part in parts for rate in part.fault_free_rates),
        committed_samples=sum(part.committed_samples for part in parts),
        executed=sum(part.executed for part in parts),
        suppressed=sum(part.suppressed for part in parts),
    )


def weather(system: System, settings: Settings, trace: Trace, duration_s: float, calm_steps: int) -> Storm:
    """One run of a system: calm, storm, aftermath."""
    with tempfile.TemporaryDirectory(prefix=f"bench-{system.name}-", ignore_cleanup_errors=True) as workdir:
        run = system.start(Path(workdir), settings)
        try:
            await_calm(system, run, 0.0, calm_steps, settings.world)
            begin_s = time.monotonic()
            kills = strike_by_trace(run, trace, begin_s)
            end_s = begin_s + duration_s
            time.sleep(max(0.0, end_s - time.monotonic()))
            await_calm(system, run, end_s, calm_steps, settings.world)
        finally:
            run.stop()
    commits = run.commits()
    before, after = [commit for commit in commits if commit.t_s <= begin_s], [commit for commit in commits if commit.t_s > end_s]
    rates = [fault_free_rate(calm[-calm_steps:], [], settings.world) for calm in (before, after)]
    return Storm(
        fault_free_rates=tuple(rates),
        committed_samples=committed_between(commits, begin_s, end_s),
        executed=len(kills),
        suppressed=len(trace) - len(kills),
    )


def await_calm(system: System, run: Run, since_s: float, steps: int, world: int) -> None:
    if not wait_until(lambda: steady_steps(run, since_s, world) > steps, run, CALM_LIMIT_S):
        raise RuntimeError(f"{system.name}: no {steps} steps at full world within {CALM_LIMIT_S:.0f} s; {run.failed() or 'running'}")


def strike_by_trace(run: Run, trace: Trace, begin_s: float) -> list[Kill]:
    """Kill by the clock; returns the faults that were executed."""
    kills: list[Kill] = []
    for at_s, rank in trace:
        time.sleep(max(0.0, begin_s + at_s - time.monotonic()))
        slots = sorted(run.ranks())
        if rank < len(slots):
            with contextlib.suppress(KeyError, ProcessLookupError):  # it died by itself meanwhile: suppressed
                kills.append(run.inject("kill", slots[rank]))
    return kills


def figures(storms: dict[str, Storm], duration_s: float) -> dict[str, float]:
    """``faults_executed`` is Fleet's own count where Fleet ran, else the least of the others'."""
    if not storms:
        return {}
    common_rate = max(storm.fault_free_samples_per_s for storm in storms.values())
    result: dict[str, float] = {"common_fault_free_samples_per_s": common_rate}
    for name, storm in storms.items():
        result[f"{name}_committed_samples_ratio"] = storm.committed_samples / (common_rate * duration_s)
        result[f"{name}_committed_samples"] = storm.committed_samples
        result[f"{name}_fault_free_samples_per_s"] = storm.fault_free_samples_per_s
        result[f"{name}_faults_executed"] = storm.executed
        result[f"{name}_faults_suppressed"] = storm.suppressed
    least = min(storm.executed for storm in storms.values())
    result["faults_executed"] = storms["fleet"].executed if "fleet" in storms else least
    return result


if __name__ == "__main__":
    harness.run("storm", measure)
