"""`straggler`: one of four ranks falls to half speed; how near does the run come to the best split of its shards?

- A shard's compute is a timed wait, so that ranks do not contend for cores. From the ``onset`` on, the slow rank waits twice as long.
- Runs with and without mitigation take turns. Steps are timed by a rank's own log of its commits.
- The yardstick is computed: a step takes ``f + u x`` seconds, where ``x`` is the shards of the fullest rank, the slow one's counted twice.
  Before the onset ``x`` is 4; after it, without mitigation, 8. That gives ``u`` and ``f``, from undisturbed steps (the first quartile). The
  best integer split of 16 shards has ``x`` = 5.
- A ratio is the time of the ``steps`` from the onset on at the best split, over their real time. Notice, decision and change of view are in
  it.
- The checks for wrong results are measured on the same loop without a slow rank, with a larger model whose gradients and state are
  digested. Runs with all checks on take turns with runs with all off. In some steps a shard is computed again; a mean step with checks
  weighs these and the others by their frequency.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Form, on_the_way
from fleet.machine.core import FleetMachine
from fleet.protocol.records import Committed
from fleet.protocol.verification import Sampling
from fleet.settings.run import RunSettings, StragglerSettings, VerifySettings
from fleet.simulation.plan import Plan, Trouble
from fleet.simulation.world import World
from policies import placement
from policies.interval import CheckpointInterval
from policies.placement import weighted_ranges
from policies.recovery import ReformPromoteRegrow
from policies.straggler.mitigation import Mitigator

WORLD, SHARDS, SLOW_SLOT, SLOWDOWN = 4, 16, 2, 2.0
BUDGET, WIDTH = 0.01, 512
"""Budget of each of the two kinds of checks; the model's width where they are measured: 1 MB of gradients, 3 MB of state."""
EVERY = Sampling(budget=BUDGET).every(SHARDS, WORLD)
"""Steps between two in which a shard is computed again."""


@dataclass(frozen=True)
class Sizes:
    """Runs of each kind. The rank is well for ``onset`` steps and slow for ``steps``. The first ``settle`` steps are left out. A shard
    takes ``shard_s`` seconds on a well rank. Without mitigation the rank is slow for ``unmitigated`` steps; without a slow rank, a run has
    ``checked`` steps."""

    repetitions: int
    onset: int
    steps: int
    settle: int
    shard_s: float
    unmitigated: int
    checked: int

    @property
    def total(self) -> int:
        return self.onset + self.steps + 1

    def of(self, kind: str) -> Sizes:
        """The sizes of one kind of run."""
        if kind == "unmitigated":
            return dataclasses.replace(self, steps=self.unmitigated)
        return self if kind == "fleet" else dataclasses.replace(self, onset=0, steps=self.checked)


FULL, QUICK, SMOKE = Sizes(3, 60, 200, 10, 0.04, 200, 260), Sizes(1, 60, 200, 10, 0.04, 80, 150), Sizes(1, 12, 50, 2, 0.002, 50, 62)


def train(run: Any) -> None:
    """The loop of one rank; it logs when its steps are committed."""
    import torch

    torch.manual_seed(run.seed)
    width, slowdown = int(run.options.get("width", 8)), float(run.options.get("slowdown", SLOWDOWN))
    sizes = Sizes(**json.loads(run.options["sizes"]))
    model = torch.nn.Linear(width, width)
    state = run.track(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
    data = torch.utils.data.TensorDataset(torch.zeros(SHARDS, width))
    log = Path(run.options["folder"]) / f"commits-{run.slot}"
    for step in run.steps(state, total=sizes.total):
        for (batch,) in step.batches(data, batch_size=SHARDS):
            time.sleep(sizes.shard_s * (slowdown if run.slot == SLOW_SLOT and step.number >= sizes.onset else 1.0))
            step.backward(model(batch).sum())
        if step.commit():
            with log.open("a") as file:
                file.write(f"{step.number} {time.monotonic()}\n")


def commit_times(folder: Path, sizes: Sizes) -> list[float]:
    """By step, the time of the first rank that committed it."""
    lines = [line.split() for path in folder.glob("commits-*") for line in path.read_text().splitlines()]
    times = dict[int, float]()
    for step, at_s in lines:  # a rank that is lost, as others keep its core busy, leaves a gap in its own
        times[int(step)] = min(float(at_s), times.get(int(step), math.inf))
    return [times[step] for step in range(sizes.total)]


def one_run(cluster: Any, folder: Path, settings: RunSettings, sizes: Sizes) -> list[float]:
    """Commit times of a run on ``cluster``. Raises RuntimeError when it does not complete."""
    from fleet.app.plans import RunPlan
    from fleet.app.recipes import LiveRun

    folder.mkdir()
    options = {**settings.options, "folder": str(folder), "sizes": json.dumps(dataclasses.asdict(sizes))}
    settings = dataclasses.replace(settings, options=options)
    result = LiveRun(RunPlan(name=folder.name, folder=folder, settings=settings, train=train), cluster).execute()
    if result.status != "completed":
        raise RuntimeError(f"{folder.name}: {result.status}: {result.reason} {result.detail}")
    return commit_times(folder, sizes)


def chosen(mitigated: bool = False) -> RunSettings:
    return RunSettings(world=WORLD, nodes=2, shards=SHARDS, straggler=StragglerSettings(enabled=mitigated))


def checked(budget: float) -> RunSettings:
    """Settings without a slow rank: replicas and gradients are checked, for ``budget`` of a step each."""
    verify = VerifySettings(replicas=budget, compute=budget, jumps=10.0 if budget else 0.0)
    return dataclasses.replace(chosen(), verify=verify, options={"width": str(WIDTH), "slowdown": "1"})


def durations(times: Sequence[float]) -> list[float]:
    """Seconds of all steps but the first."""
    return [round(end - begin, 4) for begin, end in itertools.pairwise(times)]


def verify_samples(runs: dict[str, list[float]], sizes: Sizes) -> dict[str, list[float]]:
    """Step times of the run without checks, and of the run with them: steps in which a shard is computed again, and the others."""
    took = list(enumerate(durations(runs["checked"]), start=1))[sizes.settle :]
    again = [step_s for number, step_s in took if number % EVERY == EVERY - 1]
    others = [step_s for number, step_s in took if number % EVERY != EVERY - 1]
    return {"unchecked_step_s": durations(runs["unchecked"])[sizes.settle :], "checked_step_s": others, "recomputing_step_s": again}


def verify_overhead(samples: dict[str, list[float]]) -> float:
    """Time of a mean step with checks beyond one without, as a share of it."""
    plain_s, others_s, again_s = (undisturbed(samples[f"{name}_step_s"]) for name in ("unchecked", "checked", "recomputing"))
    return (again_s + (EVERY - 1) * others_s) / EVERY / plain_s - 1


def undisturbed(steps_s: Iterable[float]) -> float:
    """The first quartile: other load on the machine makes steps longer, and never shorter."""
    return statistics.quantiles(steps_s, n=4)[0]


def yardstick(plain: Sequence[float], sizes: Sizes, typical: Callable[[Iterable[float]], float] = undisturbed) -> tuple[float, float]:
    """(u, f) in seconds, from the run without mitigation; see the module's text. Of ``typical`` steps before the onset and after it."""
    took = [b - a for a, b in itertools.pairwise(plain)]
    well_s, slow_s = typical(took[sizes.settle : sizes.onset - 1]), typical(took[sizes.onset + 1 :])
    each = SHARDS // WORLD
    unit_s = (slow_s - well_s) / (each * (SLOWDOWN - 1))
    return unit_s, well_s - each * unit_s


def best_split() -> tuple[list[int], float]:
    """Shards by rank, and the shards of the fullest rank; the slow rank's count as often as they take longer."""
    speeds = [1 / SLOWDOWN if slot == SLOW_SLOT else 1.0 for slot in range(WORLD)]
    loads = [end - begin for begin, end in weighted_ranges(SHARDS, speeds)]
    return loads, max(load / speed for load, speed in zip(loads, speeds, strict=True))


def simulated(mitigated: bool, sizes: Sizes) -> list[float]:
    """Times of the commits of the same run in a simulated world, with the live policy and without other load."""
    settings = chosen(mitigated)
    slow = Trouble(kind="slow", point="compute", step=sizes.onset, slots=(SLOW_SLOT,), severity=SLOWDOWN, duration_s=3600.0)
    plan = Plan(
        seed=1, settings=settings, steps=sizes.total, shard_s=sizes.shard_s, jitter=(0.98, 1.02), save_every_s=3600.0, quiet_s=1000.0
    )
    world = World(dataclasses.replace(plan, troubles=(slow,)), _machine)
    outcome = world.run()
    if outcome.broken or outcome.status != "completed":
        raise RuntimeError(outcome.report("simulated"))
    noted = [(0, 0.0), *((record.state.step, record.at_s) for record in world.journal if isinstance(record, Committed))]
    steps, times = zip(*noted, strict=True)
    return [float(at_s) for at_s in np.interp(range(1, sizes.total + 1), steps, times)]


def _machine(settings: RunSettings, plan: Plan, now_s: float) -> FleetMachine:
    recovery = ReformPromoteRegrow(settings.budgets, settings.timeouts.start_s)
    interval = CheckpointInterval(law="fixed", interval_s=plan.save_every_s)
    return FleetMachine(settings, recovery, placement, interval, straggler=Mitigator(settings.straggler), now_s=now_s)


def measure(form: Form) -> dict[str, Any]:
    """Measure throughput over the best integer split, detection and settling included, with mitigation and without."""
    from fleet.app.recipes import local_cluster

    loads, fullest = best_split()
    sizes = form.of(FULL, QUICK, SMOKE)
    samples: dict[str, list[float]] = {
        "fleet_over_best_split_ratio": [],
        "unmitigated_over_best_split_ratio": [],
        "fleet_settled_steps": [],
    }
    with local_cluster(chosen()) as cluster, tempfile.TemporaryDirectory(prefix="bench-straggler-", ignore_cleanup_errors=True) as root:
        kinds = {"unmitigated": chosen(), "fleet": chosen(mitigated=True), "unchecked": checked(0.0), "checked": checked(BUDGET)}
        turns = [(number, name) for number in range(sizes.repetitions) for name in kinds]
        way = on_the_way("straggler", turns, lambda turn: f"{turn[1]}, {sizes.of(turn[1]).total} steps")
        for _ in range(sizes.repetitions):
            runs = {
                name: one_run(cluster, Path(root) / f"{name}-{number}", kinds[name], sizes.of(name))
                for number, name in itertools.islice(way, len(kinds))
            }
            for name, steps_s in verify_samples(runs, sizes).items():
                samples.setdefault(name, []).extend(steps_s)
            unit_s, fixed_s = yardstick(runs["unmitigated"], sizes.of("unmitigated"))
            best_s = fixed_s + unit_s * fullest
            for name in ("unmitigated", "fleet"):
                samples.setdefault(f"{name}_step_s", []).extend(durations(runs[name]))
                samples[f"{name}_over_best_split_ratio"].append(over_best(runs[name], best_s, sizes.of(name)))
            halfway_s = (best_s + fixed_s + unit_s * 2 * SHARDS / WORLD) / 2
            samples["fleet_settled_steps"].append(settled(runs["fleet"], halfway_s, sizes))
    figures = {name: statistics.median(values) for name, values in samples.items() if not name.endswith("_step_s")}
    each_s, rest_s = yardstick(simulated(False, sizes), sizes, statistics.fmean)  # commits are noted at ticks there
    figures |= {"fleet_simulated_over_best_split_ratio": over_best(simulated(True, sizes), rest_s + each_s * fullest, sizes)}
    figures |= {"fleet_verify_overhead_ratio": verify_overhead(samples), "fleet_verify_budget_ratio": 2 * BUDGET}
    figures |= {"best_split_step_s": best_s, "unit_s": unit_s, "fixed_s": fixed_s}
    return {
        "settings": {"world": WORLD, "shards": SHARDS, "slowdown": SLOWDOWN, **dataclasses.asdict(sizes)},
        "figures": figures,
        "samples": samples,
        "notes": [
            f"runs of each kind, in turn: {sizes.repetitions}",
            f"the best integer split of {SHARDS} shards is {loads}: the fullest rank takes as long as {fullest:g} shards of a well one",
            "simulated: the same run on the simulator, by the same policy object, where no other process takes the cores",
            f"verify: {BUDGET:.0%} of a step to compare replicas ({12 * WIDTH * (WIDTH + 1) >> 20} MiB), as much to recompute shards",
            f"the rank is well for {sizes.onset} steps and slow from then on",
            "settled: steps until one was nearer to the best split than to none",
        ],
    }


def over_best(times: Sequence[float], best_s: float, sizes: Sizes) -> float:
    """The time of the steps from the onset on at ``best_s`` each, over their real time."""
    return sizes.steps * best_s / (times[sizes.onset + sizes.steps - 1] - times[sizes.onset - 1])


def settled(times: Sequence[float], limit_s: float, sizes: Sizes) -> float:
    """Steps from the onset until one took less than ``limit_s``; all of them when none did."""
    took = (b - a for a, b in zip(times[sizes.onset : -1], times[sizes.onset + 1 :], strict=True))
    return float(next((number for number, step_s in enumerate(took, start=1) if step_s < limit_s), sizes.steps))


if __name__ == "__main__":
    harness.run("straggler", measure)
