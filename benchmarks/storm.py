"""`storm`: one seeded trace of kills, exponential with MTBF 15 s, against each system; committed samples over those without faults.

- The trace is (time, rank of the view), drawn once and the same for all. At its time, the process of the view's n-th slot is killed. When
  the view has no such rank, or its process is dead, the fault is suppressed and counted as such. So a system that is down meets fewer
  faults, which is in its favour.
- Committed samples: the samples by which the state grew during the storm, less those undone later. The log goes on after the storm, so
  steps that a pending restart undoes do not count.
- A machine's speed changes. So the trace is cut into parts, and the systems take turns. Each system has a run for each part, which begins
  and ends with a stretch without faults. A system's rate is the mean samples per second of all its stretches. The greatest of these rates
  is the *one* common fault-free rate: every system's committed samples are divided by it. So a slower step costs its system here, too. All
  rates are reported.
- All systems run on one node: more nodes would cost cores for Ray's daemons, and no node is lost here.
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
from benchmarks.harness import Form, on_the_way
from benchmarks.peers.common import (
    SMOKE_SETTINGS,
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


@dataclass(frozen=True)
class Sizes:
    """A storm of ``duration_s`` in ``parts``, with ``calm_steps`` before and after each, in ``calm_limit_s`` at most."""

    mtbf_s: float
    duration_s: float
    parts: int
    calm_steps: int
    calm_limit_s: float = 180.0

    @property
    def part_s(self) -> float:
        return self.duration_s / self.parts


FULL, QUICK, SMOKE = Sizes(15.0, 300.0, 3, 200), Sizes(15.0, 40.0, 1, 40, 120.0), Sizes(2.0, 3.0, 1, 5)

SYSTEMS = ("fleet", "torchft", "stock")
"""With another one, the short form would take more than five minutes."""

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


def measure(form: Form) -> dict[str, Any]:
    """Measure the committed samples of each system under the same trace of kills, over those without faults."""
    systems, notes = installed_systems(form.of(SYSTEMS, SYSTEMS, ("fleet",)))
    settings = calibrated(form.of(Settings(spares=1, nodes=1), Settings(spares=1, nodes=1), SMOKE_SETTINGS.replace(nodes=1)))
    sizes = form.of(FULL, QUICK, SMOKE)
    trace = storm_trace(settings.seed, sizes.mtbf_s, sizes.duration_s, settings.world)
    found: dict[str, list[Storm]] = {system.name: [] for system in systems}
    turns = [(system, stretch) for stretch in cut(trace, sizes.duration_s, sizes.parts) for system in systems]
    for system, stretch in on_the_way("storm", turns, lambda turn: f"{turn[0].name}, {len(turn[1])} kills in {sizes.part_s:g} s"):
        found[system.name].append(weather(system, settings, stretch, sizes))
    storms = {name: whole(parted) for name, parted in found.items()}
    return {
        "settings": {**vars(settings), **vars(sizes), "faults_planned": len(trace)},
        "figures": figures(storms, sizes.duration_s),
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
    """One storm, put together from its parts."""
    return Storm(
        fault_free_rates=tuple(rate for part in parts for rate in part.fault_free_rates),
        committed_samples=sum(part.committed_samples for part in parts),
        executed=sum(part.executed for part in parts),
        suppressed=sum(part.suppressed for part in parts),
    )


def weather(system: System, settings: Settings, trace: Trace, sizes: Sizes) -> Storm:
    """One run of a system: calm, a part of the storm, aftermath."""
    with tempfile.TemporaryDirectory(prefix=f"bench-{system.name}-", ignore_cleanup_errors=True) as workdir:
        run = system.start(Path(workdir), settings)
        try:
            await_calm(system, run, 0.0, sizes, settings.world)
            begin_s = time.monotonic()
            kills = inject_by_trace(run, trace, begin_s)
            end_s = begin_s + sizes.part_s
            time.sleep(max(0.0, end_s - time.monotonic()))
            await_calm(system, run, end_s, sizes, settings.world)
        finally:
            run.stop()
    commits = run.commits()
    before, after = [commit for commit in commits if commit.t_s <= begin_s], [commit for commit in commits if commit.t_s > end_s]
    rates = [fault_free_rate(calm[-sizes.calm_steps :], [], settings.world) for calm in (before, after)]
    return Storm(
        fault_free_rates=tuple(rates),
        committed_samples=committed_between(commits, begin_s, end_s),
        executed=len(kills),
        suppressed=len(trace) - len(kills),
    )


def await_calm(system: System, run: Run, since_s: float, sizes: Sizes, world: int) -> None:
    steps, limit_s = sizes.calm_steps, sizes.calm_limit_s
    if not wait_until(lambda: steady_steps(run, since_s, world) > steps, run, limit_s):
        raise RuntimeError(f"{system.name}: no {steps} steps at full world within {limit_s:.0f} s; {run.failed() or 'running'}")


def inject_by_trace(run: Run, trace: Trace, begin_s: float) -> list[Kill]:
    """Kill ranks at the times of the trace; returns the faults that were executed."""
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
