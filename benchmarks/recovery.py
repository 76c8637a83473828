"""`recovery`: what SIGKILL of one rank in view costs each system, and for Fleet the loss of a node and a hang too.

Every system runs the same step (`peers.workload`) at the same world and is struck at the same planned points (`peers.common.strikes`);
systems take turns, round by round, so that the machine's drift falls on all. Figures come from the ranks' event logs alone.

- stall: the gap around a kill less the median step. A stock job's first step after its restart ends the stall, though it repeats old work.
- excess: from the last commit before the kill until 20 steps after the world is full again, less the time in which the fault-free rate
  gives the same samples. Repeated work, a smaller world and a smaller batch all count here.
- survived: the job committed at least two more steps without a human.
- samples lost: trained on and then undone (stock: back to its checkpoint), or computed and never trained on (torchft: the batch of a
  failed step, and the one that a returning rank computes while it takes state). A step repeated with the same samples loses time, not
  samples.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.peers.common import (
    SETTLE_STEPS,
    Kill,
    Report,
    Run,
    Settings,
    Strike,
    System,
    calibrated,
    installed_systems,
    median_step_s,
    report,
    steady_steps,
    strikes,
    wait_until,
)

START_LIMIT_S = 180.0
FULL_AGAIN_LIMIT_S = 120.0
KILLS, ROUNDS = 10, 2
QUICK_KILLS, QUICK_ROUNDS = 3, 1
EXTRA_FAULTS, QUICK_EXTRA_FAULTS = 5, 1
NODES_TO_LOSE = 3
"""With two, the other one takes all ranks in when a node is lost, and the next loss is that of the whole world."""


def measure(quick: bool = False, only: Sequence[str] = ()) -> dict[str, Any]:
    """Run the benchmark; the settings, figures, samples and notes of design section 10's shape."""
    systems, notes = installed_systems(only)
    settings = calibrated(Settings(spares=1))
    kills, rounds = (QUICK_KILLS, QUICK_ROUNDS) if quick else (KILLS, ROUNDS)
    plan = strikes(settings.seed, kills, settings.world, settings.checkpoint_steps)
    samples: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds):
        for system in systems:
            _collect(samples, system.name, strike_all(system, settings, plan[number::rounds], "kill", notes))
    for system in systems:
        _extra_faults(samples, system, settings, plan[: QUICK_EXTRA_FAULTS if quick else EXTRA_FAULTS], notes)
    settings_used = {**vars(settings), "kills_per_system": kills, "settle_steps": SETTLE_STEPS}
    return {"settings": settings_used, "figures": figures(samples), "samples": dict(samples), "notes": notes}


def strike_all(system: System, settings: Settings, plan: Sequence[Strike], kind: str, notes: list[str]) -> list[Report]:
    """Strike runs of a system until the plan is done: one run, and a new one after each kill that a run did not survive."""
    reports: list[Report] = []
    while len(reports) < len(plan):
        with tempfile.TemporaryDirectory(prefix=f"bench-{system.name}-", ignore_cleanup_errors=True) as workdir:
            run = system.start(Path(workdir), settings)
            try:
                kills = strike_run(run, settings, plan[len(reports) :], kind)
                _settle(run, kills[-1], settings, f"{system.name}: {kind} {len(reports) + len(kills)}", notes)
            finally:
                run.stop()
        commits = run.commits()
        reports += report(commits, run.lost_lines(), kills, settings.world)
        notes.append(f"{system.name}: median step {median_step_s(commits):.4f} s over {len(commits)} steps, {len(kills)} {kind} faults")
    return reports


def _settle(run: Run, kill: Kill, settings: Settings, what: str, notes: list[str]) -> None:
    if not wait_until(lambda: steady_steps(run, kill.t_s, settings.world) > SETTLE_STEPS, run, FULL_AGAIN_LIMIT_S):
        notes.append(f"{what}: the world was not full again within {FULL_AGAIN_LIMIT_S:.0f} s; {run.failed() or 'still running'}")


def strike_run(run: Run, settings: Settings, plan: Sequence[Strike], kind: str) -> list[Kill]:
    """Strike one run at the planned points, as far as its world becomes full again. Raises RuntimeError when it never is at first."""
    kills: list[Kill] = []
    for strike in plan:
        since_s = kills[-1].t_s if kills else 0.0
        limit_s = FULL_AGAIN_LIMIT_S if kills else START_LIMIT_S
        if not wait_until(lambda s=strike, t=since_s: steady_steps(run, t, settings.world) >= s.steps, run, limit_s):  # type: ignore[misc]
            break
        time.sleep(strike.phase * median_step_s(run.commits()))
        slots = sorted(run.ranks())
        kills.append(run.inject(kind, slots[strike.rank % len(slots)]))
    if not kills:
        raise RuntimeError(
            f"the world was not full for {plan[0].steps} steps within {START_LIMIT_S:.0f} s: {run.failed() or 'still running'}"
        )
    return kills


def _extra_faults(samples: dict[str, list[float]], system: System, settings: Settings, plan: Sequence[Strike], notes: list[str]) -> None:
    for kind in system.extra_faults:
        timeout_s = system.hang_timeout_s if kind == "hang" else 0.0
        chosen = settings.replace(nodes=NODES_TO_LOSE) if kind == "node" else settings
        for one in strike_all(system, chosen, plan, kind, notes):
            if one.stall_s is not None:
                samples[f"{system.name}_{kind}_stall_s"].append(one.stall_s - timeout_s)


def _collect(samples: dict[str, list[float]], name: str, reports: Sequence[Report]) -> None:
    for one in reports:
        samples[f"{name}_survived"].append(float(one.survived))
        samples[f"{name}_samples_lost"].append(float(one.samples_lost))
        if one.stall_s is not None:
            samples[f"{name}_stall_s"].append(one.stall_s)
        if one.excess_s is not None:
            samples[f"{name}_excess_s"].append(one.excess_s)


def figures(samples: dict[str, list[float]]) -> dict[str, float]:
    """Median of every ``_s`` sample, mean of the samples lost, share of the kills survived."""
    result: dict[str, float] = {}
    for name, values in samples.items():
        if name.endswith("_s"):
            result[f"{name}_median"] = statistics.median(values)
        elif name.endswith("_survived"):
            result[f"{name}_ratio"] = statistics.fmean(values)
        else:
            result[f"{name}_mean"] = statistics.fmean(values)
    for peer in ("torchft", "stock"):
        if {"fleet_stall_s_median", f"{peer}_stall_s_median"} <= result.keys():
            result[f"fleet_over_{peer}_stall_ratio"] = result["fleet_stall_s_median"] / result[f"{peer}_stall_s_median"]
    return result


if __name__ == "__main__":
    harness.run("recovery", measure)
