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
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Form
from benchmarks.peers.common import (
    SETTLE_STEPS,
    SMOKE_SETTINGS,
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
NODES_TO_LOSE = 3
"""With two, the other one takes all ranks in when a node is lost, and the next loss is that of the whole world."""

Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Sizes:
    """``kills`` of each system in so many ``rounds``, and as many ``extra_faults`` of each other kind."""

    kills: int
    rounds: int
    extra_faults: int


FULL, QUICK, SMOKE = Sizes(10, 2, 5), Sizes(3, 1, 1), Sizes(1, 1, 1)


def measure(form: Form) -> dict[str, Any]:
    """What the loss of a rank costs each system, and the loss of a node and a hang Fleet."""
    systems, notes = installed_systems(form.of((), (), ("fleet",)))
    settings = calibrated(form.of(Settings(spares=1), Settings(spares=1), SMOKE_SETTINGS.replace(nodes=NODES_TO_LOSE)))
    sizes = form.of(FULL, QUICK, SMOKE)
    samples: Samples = defaultdict(list)
    form.of(_by_kinds, _by_kinds, _in_one_run)(samples, systems, settings, sizes, notes)
    settings_used = {**vars(settings), "kills_per_system": sizes.kills, "settle_steps": SETTLE_STEPS}
    return {"settings": settings_used, "figures": figures(samples), "samples": dict(samples), "notes": notes}


def _by_kinds(samples: Samples, systems: Sequence[System], settings: Settings, sizes: Sizes, notes: list[str]) -> None:
    """Systems take turns with kills; the other faults come in runs of their own."""
    plan = strikes(settings.seed, sizes.kills, settings.world, settings.checkpoint_steps)
    for number in range(sizes.rounds):
        for system in systems:
            kills = [(strike, "kill") for strike in plan[number :: sizes.rounds]]
            _collect(samples, system, strike_all(system, settings, kills, notes))
    for system in systems:
        for kind in system.extra_faults:
            chosen = settings.replace(nodes=NODES_TO_LOSE) if kind == "node" else settings
            _collect(samples, system, strike_all(system, chosen, [(strike, kind) for strike in plan[: sizes.extra_faults]], notes))


def _in_one_run(samples: Samples, systems: Sequence[System], settings: Settings, sizes: Sizes, notes: list[str]) -> None:
    """Every kind of fault strikes the same run, as often as the sizes say: a cluster takes longer to start than that takes."""
    for system in systems:
        kinds = ["kill"] * sizes.kills + [kind for kind in system.extra_faults for _ in range(sizes.extra_faults)]
        plan = strikes(settings.seed, len(kinds), settings.world, settings.checkpoint_steps)
        _collect(samples, system, strike_all(system, settings, list(zip(plan, kinds, strict=True)), notes))


def strike_all(system: System, settings: Settings, plan: Sequence[tuple[Strike, str]], notes: list[str]) -> list[tuple[str, Report]]:
    """Strike runs of a system until the plan, of strikes and their kinds, is done: one run, and a new one after each fault that a run did
    not survive. A report for each, beside its kind."""
    reports: list[tuple[str, Report]] = []
    while len(reports) < len(plan):
        with tempfile.TemporaryDirectory(prefix=f"bench-{system.name}-", ignore_cleanup_errors=True) as workdir:
            run = system.start(Path(workdir), settings)
            try:
                kills = strike_run(run, settings, plan[len(reports) :])
                _settle(run, kills[-1], settings, f"{system.name}: {kills[-1].kind} {len(reports) + len(kills)}", notes)
            finally:
                run.stop()
        commits = run.commits()
        kinds = [kill.kind for kill in kills]
        reports += zip(kinds, report(commits, run.lost_lines(), kills, settings.world), strict=True)
        struck = ", ".join(f"{count} {kind} faults" for kind, count in Counter(kinds).items())
        notes.append(f"{system.name}: median step {median_step_s(commits):.4f} s over {len(commits)} steps, {struck}")
    return reports


def _settle(run: Run, kill: Kill, settings: Settings, what: str, notes: list[str]) -> None:
    if not wait_until(lambda: steady_steps(run, kill.t_s, settings.world) > SETTLE_STEPS, run, FULL_AGAIN_LIMIT_S):
        notes.append(f"{what}: the world was not full again within {FULL_AGAIN_LIMIT_S:.0f} s; {run.failed() or 'still running'}")


def strike_run(run: Run, settings: Settings, plan: Sequence[tuple[Strike, str]]) -> list[Kill]:
    """Strike one run at the planned points, as far as its world becomes full again. Raises RuntimeError when it never is at first."""
    kills: list[Kill] = []
    for strike, kind in plan:
        since_s = kills[-1].t_s if kills else 0.0
        limit_s = FULL_AGAIN_LIMIT_S if kills else START_LIMIT_S
        if not wait_until(lambda s=strike, t=since_s: steady_steps(run, t, settings.world) >= s.steps, run, limit_s):  # type: ignore[misc]
            break
        time.sleep(strike.phase * median_step_s(run.commits()))
        slots = sorted(run.ranks())
        kills.append(run.inject(kind, slots[strike.rank % len(slots)]))
    if not kills:
        raise RuntimeError(
            f"the world was not full for {plan[0][0].steps} steps within {START_LIMIT_S:.0f} s: {run.failed() or 'still running'}"
        )
    return kills


def _collect(samples: Samples, system: System, reports: Sequence[tuple[str, Report]]) -> None:
    """All of a kill; of other faults the stall, of a hang less its time-out."""
    for kind, one in reports:
        if kind == "kill":
            _collect_kill(samples, system.name, one)
        elif one.stall_s is not None:
            samples[f"{system.name}_{kind}_stall_s"].append(one.stall_s - (system.hang_timeout_s if kind == "hang" else 0.0))


def _collect_kill(samples: Samples, name: str, one: Report) -> None:
    samples[f"{name}_survived"].append(float(one.survived))
    samples[f"{name}_samples_lost"].append(float(one.samples_lost))
    if one.stall_s is not None:
        samples[f"{name}_stall_s"].append(one.stall_s)
    if one.excess_s is not None:
        samples[f"{name}_excess_s"].append(one.excess_s)


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
    for peer in ("torchft", "stock"):
        if {"fleet_stall_s_median", f"{peer}_stall_s_median"} <= result.keys():
            result[f"fleet_over_{peer}_stall_ratio"] = result["fleet_stall_s_median"] / result[f"{peer}_stall_s_median"]
    return result


if __name__ == "__main__":
    harness.run("recovery", measure)
