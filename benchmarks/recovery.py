"""`recovery`: the cost of SIGKILL of one rank in view for each system, and for Fleet also that of a lost node and a hang.

Every system runs the same step (`peers.workload`) at the same world, with faults at the same planned points (`peers.common.injections`).
Systems take turns, round by round, so that the machine's drift falls on all. Figures come from the ranks' event logs alone.

- stall: the gap around a kill less the median step. A stock job's first step after its restart ends the stall, though it repeats old work.
- excess: from the last commit before the kill until 20 steps after the world is full again. The time in which the fault-free rate gives the
  same samples is subtracted. Repeated work, a smaller world and a smaller batch all count here.
- full again: from the kill until a step of all ranks, without the killed process.
- survived: the job committed at least two more steps without a human.
- samples lost: trained on and then undone, or computed and never trained on. Stock jobs undo steps when they go back to a checkpoint.
  With torchft, the batch of a failed step is dropped, and the batch that a returning rank computes while it takes state. A step repeated
  with the same samples loses time, not samples.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Form, on_the_way
from benchmarks.peers.common import (
    SETTLE_STEPS,
    SMOKE_SETTINGS,
    Commit,
    Injection,
    Kill,
    Report,
    Run,
    Settings,
    System,
    calibrated,
    injections,
    installed_systems,
    median_step_s,
    positions,
    report,
    steady_steps,
    wait_until,
)

NODES_TO_LOSE = 3
"""With two nodes, the other node takes all ranks in after a loss, and the next loss is that of the whole world."""

SHOWN_S = (-2.0, 30.0)
"""The part of a run around its first kill, in seconds from it, that the samples have for the picture (`benchmarks.recovery_picture`)."""

Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Sizes:
    """``kills`` of each system in ``rounds`` rounds, and ``extra_faults`` of each other kind. Most seconds until the world is full:
    ``start_limit_s`` when a run begins, and ``full_again_limit_s`` after a fault."""

    kills: int
    rounds: int
    extra_faults: int
    start_limit_s: float = 180.0
    full_again_limit_s: float = 120.0


FULL, QUICK, SMOKE = Sizes(10, 2, 5), Sizes(2, 1, 1, 120.0, 60.0), Sizes(1, 1, 1)


@dataclass(frozen=True)
class Turn:
    """Faults for one system, with their kinds, in one run, for as long as the run survives them."""

    system: System
    settings: Settings
    faults: Sequence[tuple[Injection, str]]


def measure(form: Form) -> dict[str, Any]:
    """Measure the cost of a lost rank for each system, and that of a lost node and of a hang for Fleet."""
    systems, notes = installed_systems(form.of((), (), ("fleet",)))
    in_one = Settings(spares=1, nodes=NODES_TO_LOSE)
    settings = calibrated(form.of(Settings(spares=1), in_one, SMOKE_SETTINGS.replace(nodes=NODES_TO_LOSE)))
    sizes = form.of(FULL, QUICK, SMOKE)
    turns = form.of(by_kinds, in_one_run, in_one_run)(systems, settings, sizes)
    samples: Samples = defaultdict(list)
    around: Samples = {}
    said = [f"{turn.system.name}, {kind} after {injection.steps} steps" for turn in turns for injection, kind in turn.faults]
    way = on_the_way("recovery", said)
    for turn in turns:
        _collect(samples, turn.system, inject_all(turn, sizes, notes, way, around))
    if form != Form.FULL:
        notes.append(f"all faults of a system strike one run, of Fleet's on {NODES_TO_LOSE} nodes; in the full form each kind has its own")
    settings_used = {**vars(settings), "kills_per_system": sizes.kills, "settle_steps": SETTLE_STEPS}
    return {"settings": settings_used, "figures": figures(samples), "samples": dict(samples) | around, "notes": notes}


def by_kinds(systems: Sequence[System], settings: Settings, sizes: Sizes) -> list[Turn]:
    """Turns in which systems alternate with kills; the other faults come in runs of their own."""
    plan = injections(settings.seed, sizes.kills, settings.world, settings.checkpoint_steps)
    rounds = [[(injection, "kill") for injection in plan[number :: sizes.rounds]] for number in range(sizes.rounds)]
    turns = [Turn(system, settings, faults) for faults in rounds for system in systems]
    for system in systems:
        for kind in system.extra_faults:
            chosen = settings.replace(nodes=NODES_TO_LOSE) if kind == "node" else settings
            turns.append(Turn(system, chosen, [(injection, kind) for injection in plan[: sizes.extra_faults]]))
    return turns


def in_one_run(systems: Sequence[System], settings: Settings, sizes: Sizes) -> list[Turn]:
    """One turn for each system with all kinds of faults: a cluster takes longer to start than these faults take."""
    turns = []
    for system in systems:
        kinds = ["kill"] * sizes.kills + [kind for kind in system.extra_faults for _ in range(sizes.extra_faults)]
        plan = injections(settings.seed, len(kinds), settings.world, settings.checkpoint_steps)
        turns.append(Turn(system, settings, list(zip(plan, kinds, strict=True))))
    return turns


def inject_all(turn: Turn, sizes: Sizes, notes: list[str], way: Iterator[str], around: Samples) -> list[tuple[str, Report]]:
    """Inject all faults of a turn; a new run begins after each fault that a run did not survive. Returns (kind, report) of each fault.

    ``way`` goes a step further with each fault. ``around`` gets the commits around the system's first kill."""
    system, settings = turn.system, turn.settings
    reports: list[tuple[str, Report]] = []
    next(way)
    while len(reports) < len(turn.faults):
        left = turn.faults[len(reports) :]
        with tempfile.TemporaryDirectory(prefix=f"bench-{system.name}-", ignore_cleanup_errors=True) as workdir:
            run = system.start(Path(workdir), settings)
            try:
                kills = inject_run(run, settings, left, sizes, way)
                last = len(kills) == len(left) and full(run, kills[-1].t_s, settings, SETTLE_STEPS + 1, sizes.full_again_limit_s)
                if not last:
                    what = f"{system.name}: {kills[-1].kind} {len(reports) + len(kills)}"
                    notes.append(f"{what}: the world was not full again within {sizes.full_again_limit_s:.0f} s; {_state(run)}")
            finally:
                run.stop()
        commits = run.commits()
        kinds = [kill.kind for kill in kills]
        if kinds[0] == "kill" and f"{system.name}_commit_t_s" not in around:
            around[f"{system.name}_commit_t_s"], around[f"{system.name}_trained_samples"] = around_kill(commits, kills[0])
        reports += zip(kinds, report(commits, run.lost_lines(), kills, settings.world), strict=True)
        injected = ", ".join(f"{count} {kind} faults" for kind, count in Counter(kinds).items())
        notes.append(f"{system.name}: median step {median_step_s(commits):.4f} s over {len(commits)} steps, {injected}")
    return reports


def around_kill(commits: Sequence[Commit], kill: Kill) -> tuple[list[float], list[float]]:
    """Times of the commits within `SHOWN_S`, in seconds from the kill, and the samples trained by each since the last one before the
    kill."""
    trained = positions(commits)
    before = max((number for number, commit in enumerate(commits) if commit.t_s <= kill.t_s), default=0)
    shown = [number for number, commit in enumerate(commits) if SHOWN_S[0] <= commit.t_s - kill.t_s <= SHOWN_S[1]]
    return [commits[number].t_s - kill.t_s for number in shown], [float(trained[number] - trained[before]) for number in shown]


def full(run: Run, since_s: float, settings: Settings, steps: int, limit_s: float) -> bool:
    """Wait until the world has been full for ``steps`` steps; False: it was not in time."""
    return wait_until(lambda: steady_steps(run, since_s, settings.world) >= steps, run, limit_s)


def _state(run: Run) -> str:
    return run.failed() or "still running"


def inject_run(run: Run, settings: Settings, faults: Sequence[tuple[Injection, str]], sizes: Sizes, way: Iterator[str]) -> list[Kill]:
    """Inject faults into one run at the planned points, while its world becomes full again. ``way`` goes a step further from the second on.

    Raises RuntimeError when the world is never full at first."""
    kills: list[Kill] = []
    for injection, kind in faults:
        if kills:
            next(way)
        since_s, limit_s = (kills[-1].t_s, sizes.full_again_limit_s) if kills else (0.0, sizes.start_limit_s)
        if not full(run, since_s, settings, injection.steps, limit_s):
            break
        time.sleep(injection.phase * median_step_s(run.commits()))
        slots = sorted(run.ranks())
        kills.append(run.inject(kind, slots[injection.rank % len(slots)]))
    if not kills:
        raise RuntimeError(f"the world was not full for {faults[0][0].steps} steps within {sizes.start_limit_s:.0f} s: {_state(run)}")
    return kills


def _collect(samples: Samples, system: System, reports: Sequence[tuple[str, Report]]) -> None:
    """Add all samples of kills; of other faults the stall, less the time-out of a hang."""
    for kind, one in reports:
        if kind == "kill":
            _collect_kill(samples, system.name, one)
        elif one.stall_s is not None:
            samples[f"{system.name}_{kind}_stall_s"].append(one.stall_s - (system.hang_timeout_s if kind == "hang" else 0.0))


def _collect_kill(samples: Samples, name: str, one: Report) -> None:
    samples[f"{name}_survived"].append(float(one.survived))
    samples[f"{name}_samples_lost"].append(float(one.samples_lost))
    for what, value in (("stall_s", one.stall_s), ("full_again_s", one.full_again_s), ("excess_s", one.excess_s)):
        if value is not None:
            samples[f"{name}_{what}"].append(value)


def figures(samples: Samples) -> dict[str, float]:
    """Median of every ``_s`` sample, mean of the samples lost, share of the kills survived."""
    result: dict[str, float] = {}
    for name, values in samples.items():
        if name.endswith("_s"):
            result[f"{name}_median"] = statistics.median(values)
        elif name.endswith("_survived"):
            result[f"{name}_ratio"] = statistics.fmean(values)
        else:
            result[f"{name}_mean"] = statistics.fmean(values)
    for peer in ("torchft", "stock", "stock_torchft"):
        if {"fleet_stall_s_median", f"{peer}_stall_s_median"} <= result.keys():
            result[f"fleet_over_{peer}_stall_ratio"] = result["fleet_stall_s_median"] / result[f"{peer}_stall_s_median"]
    return result


if __name__ == "__main__":
    harness.run("recovery", measure)
