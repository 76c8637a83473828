"""How far a run's forecast can be believed: its two questions, asked of real runs and of simulated ones. Used by ``benchmarks.account``.

- Given the faults that came: the run's predicted goodput beside the measured one. Real runs of three sorts take turns: the storm of the
  demo, chaos with a fault every 15 s, and kills from outside. Each fault has the price that was known when it
  struck.
- The future: halfway through a run, a forecast is made of the goodput of its second half, and compared with the truth. The simulated fleet
  has rates that are drawn from the forecast's prior, so that its 90% intervals must hold the truth in 90% of the runs. Two more figures are
  for a fleet that is three times better or worse than the prior.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fleet.errors import FleetError
from fleet.host.journal import read_journal
from fleet.host.proc import start_ticks
from fleet.ledger.forecast import Price, coming, forecast, predict
from fleet.ledger.goodput import Ledger
from fleet.ledger.rates import Rate, prior
from fleet.ledger.summary import LedgerSummary
from fleet.protocol.records import Committed, ProcessLost, ProcessUp, Record, RunEnded
from fleet.settings.run import Budgets
from fleet.simulation.fleet_arrivals import draw_arrivals
from fleet.simulation.fleet_model import FaultClass, FleetModel, FleetOutcome, Tier
from fleet.simulation.fleet_run import FleetRun
from fleet.simulation.rng import derive_seed
from policies.interval import CheckpointInterval
from policies.recovery import RECOVERIES

ROOT = Path(__file__).parents[1]
MTBF_S, LOOK_S, LEAST_S = 15.0, 0.5, 20.0


# ---- real runs ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sort:
    """A sort of real run: its options, and the mean seconds between kills from outside (0: none)."""

    name: str
    options: tuple[str, ...]
    kill_every_s: float = 0.0


SORTS = (
    Sort("demo", ("--world", "2", "--spares", "1", "--chaos", "storm")),
    Sort("mtbf", ("--world", "2", "--chaos", f"mtbf={MTBF_S:g}s")),
    Sort("outside", ("--world", "2", "--chaos", "off"), MTBF_S),
)
QUIET = Sort("quiet", ("--world", "2", "--chaos", "off"))


@dataclass(frozen=True)
class Made:
    """The real runs: ``each`` of every sort, and ``quiet`` runs without faults, of ``steps`` steps. None may take longer than
    ``limit_s``."""

    folder: Path
    each: int
    quiet: int
    steps: int
    limit_s: float

    def wanted(self) -> dict[str, tuple[Sort, int]]:
        """Name of each run -> its sort and seed. The name is that of its folder in ``folder``."""
        runs = [(sort, number) for number in range(self.each) for sort in SORTS] + [(QUIET, number) for number in range(self.quiet)]
        return {f"{sort.name}-{number}": (sort, number) for sort, number in runs}

    def work(self) -> dict[str, Callable[[], Path]]:
        """Name of each run -> a function that makes the run, unless its folder has one already, and returns its journal."""
        return {name: partial(_journal, self, self.folder / name, *of) for name, of in self.wanted().items()}


def _journal(made: Made, folder: Path, sort: Sort, seed: int) -> Path:
    found = list(folder.glob("*/journal.jsonl"))
    if not found:
        folder.mkdir(parents=True, exist_ok=True)
        _train(made, folder, sort, seed)
        found = list(folder.glob("*/journal.jsonl"))
    return found[0]


def _train(made: Made, folder: Path, sort: Sort, seed: int) -> None:
    """Make one real run, in a process of its own, as a user would start it. Raises TimeoutExpired after its limit."""
    command = [sys.executable, "-m", "fleet", "run", "examples/gpt.py", "--seed", str(seed), "--steps", str(made.steps), *sort.options]
    end_s = time.monotonic() + made.limit_s
    with (folder / "output.txt").open("w") as output:
        child = subprocess.Popen([*command, "--storage", str(folder)], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            if sort.kill_every_s:
                _kill_from_outside(folder, child, sort.kill_every_s, random.Random(derive_seed(seed, "outside")), end_s)
            child.wait(max(0.0, end_s - time.monotonic()))
        finally:
            if child.poll() is None:
                child.send_signal(signal.SIGINT)
                child.wait(60.0)


def _kill_from_outside(folder: Path, child: subprocess.Popen[bytes], every_s: float, draw: random.Random, end_s: float) -> None:
    """Kill live processes of the run, one after the other, from the start of training until ``end_s``."""
    tick, inject_s = threading.Event(), 0.0
    while child.poll() is None and time.monotonic() < end_s:
        tick.wait(LOOK_S)
        seen = list(_known(folder))
        if not any(isinstance(record, Committed) for record in seen):
            continue
        if inject_s and time.monotonic() >= inject_s:
            _inject(seen, draw)
        if not inject_s or time.monotonic() >= inject_s:
            inject_s = time.monotonic() + draw.expovariate(1.0 / every_s)


def _known(folder: Path) -> Iterator[Record]:
    for path in folder.glob("*/journal.jsonl"):
        with contextlib.suppress(FleetError):  # its last line is being written
            yield from read_journal(path, spans=False)


def _inject(seen: Sequence[Record], draw: random.Random) -> None:
    alive = {record.member: record.process for record in seen if isinstance(record, ProcessUp)}
    for record in seen:
        if isinstance(record, ProcessLost):
            alive.pop(record.member, None)
    if alive and not isinstance(seen[-1], RunEnded):
        target = draw.choice(sorted(alive.values(), key=lambda process: process.pid))
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has gone by itself
            if start_ticks(target.pid) == target.start_ticks:
                os.kill(target.pid, signal.SIGKILL)


def summary_of(journal: Path) -> LedgerSummary:
    """The ledger of a run that has ended."""
    return Ledger().apply_all(read_journal(journal)).summary()


def conditional_errors(found: Iterable[Path]) -> list[float]:
    """Error of each run's prediction, in points of goodput."""
    return [100.0 * abs(predict(summary_of(journal)).error) for journal in found]


def real_coverage(found: Iterable[Path]) -> float:
    """Share of the runs whose forecast, made halfway through the training, held the goodput of the second half."""
    held = [inside for journal in found if (inside := _held(list(read_journal(journal)))) is not None]
    return statistics.fmean(held) if held else float("nan")


def _held(records: Sequence[Record]) -> bool | None:
    """Whether the forecast held; None for a run too short to have two halves. The bound is low: all runs have the same number of steps, and
    with a high bound only runs with many faults would count."""
    whole = Ledger().apply_all(records).summary()
    if whole.training_s < LEAST_S:
        return None
    half = Ledger()
    end_s = whole.ends[-1][0]
    middle_s = end_s - whole.training_s / 2
    for record in records:
        if getattr(record, "at_s", 0.0) > middle_s:
            break
        half.apply(record)
    before = half.summary(middle_s)
    rest_s = end_s - before.now_s
    found = forecast(before, rest_s)
    kept = (whole.kept_s - _kept_by(before)) / (rest_s * whole.world)
    return found is not None and found.goodput.holds(min(1.0, kept))


def _kept_by(before: LedgerSummary) -> float:
    """Rank-seconds in kept steps until then. Of undecided time, the same share counts as of the rest."""
    return before.training_goodput * before.training_s * before.world


# ---- simulated runs ----------------------------------------------------------------------------------------------------------------------

NODES, DURATION_S, STEP_S = 64, 30 * 86_400.0, 10.0
BELIEVED = {"kill_rank": 1 / 40_000.0, "lose_node": 1 / 90_000.0, "hang": 1 / 200_000.0}
"""Faults a second by kind: one in seven hours, in all."""
DETECT_S, REFORM_S, HANG_S, REPLACE_S = 10.0, 120.0, 600.0, 3_600.0


def fleet_of(rates: Mapping[str, float], duration_s: float) -> FleetModel:
    """A fleet of 64 nodes, whose peers hold the state: a fault costs the recovery, and a node until it is replaced."""
    faults = tuple(
        FaultClass(name=kind, rate_per_s=rate, nodes=int(kind == "lose_node"), detect_s=HANG_S if kind == "hang" else DETECT_S)
        for kind, rate in rates.items()
    )
    tier = Tier(name="store", blocked_s=5.0, latency_s=60.0, restore_s=60.0)
    return FleetModel(nodes=NODES, duration_s=duration_s, faults=faults, tiers=(tier,), reform_s=REFORM_S, repair_s=REPLACE_S,
                      step_s=STEP_S)  # fmt: skip


def prices_of(kinds: Iterable[str]) -> dict[str, Price]:
    """Expected price of a fault of each kind in such a fleet, in node-seconds: all nodes stand still, and a lost node is missing.

    The time until it is replaced is exponential, so its standard deviation is its mean.
    """
    found = {}
    for kind in kinds:
        still_s = NODES * ((HANG_S if kind == "hang" else DETECT_S) + REFORM_S + STEP_S / 2)
        taken_s = REPLACE_S if kind == "lose_node" else 0.0
        found[kind] = Price(still_s + taken_s, taken_s / (still_s + taken_s), known=100)
    return found


def drawn(before: Rate, rng: np.random.Generator) -> float:
    """A rate, drawn from the forecast's prior."""
    weights = np.array([weight for weight, _ in before.parts])
    law = before.parts[rng.choice(len(weights), p=weights / weights.sum())][1]
    return float(rng.gamma(law.shape, 1.0 / law.rate))


def simulated_coverage(runs: int, seed: int = 0, rates: Callable[[np.random.Generator], dict[str, float]] | None = None) -> float:
    """Share of the simulated runs whose second half had a goodput inside the interval of the forecast made halfway.

    Args:
        runs: number of runs.
        seed: of rates and faults.
        rates: draws the true rates of a run; None: from the forecast's prior.
    """
    inside = Counter(_inside(number, seed, rates or _believed) for number in range(runs))
    return inside[True] / runs


def _believed(rng: np.random.Generator) -> dict[str, float]:
    return {kind: drawn(prior(rate), rng) for kind, rate in BELIEVED.items()}


def _inside(number: int, seed: int, rates: Callable[[np.random.Generator], dict[str, float]]) -> bool:
    own = derive_seed(seed, "forecast", number)
    true = rates(np.random.Generator(np.random.PCG64(own)))
    whole = _run(true, DURATION_S, DURATION_S, own)
    half = _run(true, DURATION_S, DURATION_S / 2, own)
    believed = {kind: prior(rate).after(half.counts[kind], DURATION_S / 2) for kind, rate in BELIEVED.items()}
    found = coming(believed, prices_of(believed), DURATION_S / 2, NODES, half.shares["checkpoint_stall"])
    return found.holds(2 * whole.goodput - half.goodput)


def _run(rates: Mapping[str, float], duration_s: float, until_s: float, seed: int) -> FleetOutcome:
    """The first ``until_s`` of a run of ``duration_s``, under the same faults."""
    arrivals = draw_arrivals(fleet_of(rates, duration_s), seed)
    policy = RECOVERIES["in-place"](Budgets(), float("inf"))
    return FleetRun(fleet_of(rates, until_s), arrivals, policy, (CheckpointInterval(),)).run()


OFF = {"better_fleet_": 1 / 3, "worse_fleet_": 3.0}
"""Part of a figure's name -> true rate of faults over the rate of the prior."""


def simulations(runs: int) -> dict[str, Callable[[], float]]:
    """Name of a figure of simulated runs -> the function that computes it."""
    own: dict[str, Callable[[], float]] = {"fleet_forecast_coverage_ratio": partial(simulated_coverage, runs)}
    return own | {f"fleet_forecast_coverage_{name}ratio": partial(simulated_coverage, runs, rates=_scaled(n)) for name, n in OFF.items()}


def figures_of(made: Made, found: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of this module by name, from the journals of real runs and the results of :func:`simulations`."""
    journals = {name: found[name] for name in made.wanted()}
    calm = [journal for name, journal in journals.items() if name.startswith(QUIET.name)]
    stormy = [journal for journal in journals.values() if journal not in calm]
    errors, still = conditional_errors(stormy), conditional_errors(calm)
    figures = {
        "fleet_conditional_error_points_median": statistics.median(errors),
        "fleet_conditional_error_points_max": max(errors),
        **({"fleet_quiet_error_points_max": max(still)} if still else {}),
        **{name: value for name, value in found.items() if name not in journals},
        "fleet_forecast_coverage_real_ratio": real_coverage(journals.values()),
    }
    samples = {"conditional_error_points": errors, "quiet_error_points": still}
    settings = {"real_runs": len(stormy), "quiet_runs": len(calm), "steps": made.steps}
    return {"figures": figures, "samples": samples, "settings": settings}


def _scaled(factor: float) -> Callable[[np.random.Generator], dict[str, float]]:
    return lambda rng: {kind: factor * rate for kind, rate in BELIEVED.items()}
