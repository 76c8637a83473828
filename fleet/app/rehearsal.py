"""The wind tunnel: a small real run as a scale model of a large fleet. This module chooses, predicts and compares; the command runs it.

A small run tells something about a large one only when all times scale together. Then every time over the time between faults (the ratios
below) is the same as in the fleet. Some ratios can be set: the length of a step, and the interval. Some need an added delay, and some
cannot be matched; the list says which. Imports neither Ray nor torch.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from typing import Any

import numpy as np

from chaos.settings import ChaosSettings
from fleet.app.scenarios import Prepared, Scenario, prepare, repaired_with
from fleet.errors import ConfigError
from fleet.ledger.checkers import Judgement, judged
from fleet.ledger.goodput import Ledger
from fleet.ledger.report import duration
from fleet.ledger.step_law import STEP_NAMES
from fleet.planning.traces.faults import FittedFaults
from fleet.protocol.levels import STORE
from fleet.protocol.records import (
    CheckpointRecord,
    Committed,
    ProcessLost,
    ProcessUp,
    Received,
    Record,
    RunEnded,
    RunStarted,
    ViewPublished,
)
from fleet.protocol.types import Fault
from fleet.settings.run import Budgets
from fleet.simulation.fleet_arrivals import Arrivals
from fleet.simulation.fleet_model import FaultClass, FleetModel, Tier
from fleet.simulation.fleet_run import FleetRun
from fleet.simulation.monte_carlo import monte_carlo
from fleet.simulation.rng import derive_seed
from policies.interval import CheckpointInterval
from policies.recovery import RECOVERIES

MATCHED, IMPOSED, UNMATCHED = "matched", "imposed", "unmatched"
CLOSE = 1.25
"""Ratios within this factor of each other are matched."""
DRAWS = 400
DRIFT = 0.08
"""Standard deviation of the logarithm of a machine's speed between its calibration and a run a few minutes later. On one shared machine,
mean times of recovery differed by 0 to 2% in six of nine pairs. In the others they differed by 5, 10 and 21%."""
LEAST_STEP_S, WORK_S = 0.05, 0.02
"""Least seconds of a step of the small run, and about its seconds without a wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Times of the machine at hand, from a run with injected faults. Seconds.

    ``stalls_s``: from the last loss before a view until its ranks hold their state; the ledger counts what follows as training.
    ``refills_s``: from a loss until a view has its slot again.
    ``absences_s``: from a loss until its slot has a process again, which may be struck before it is in a view.
    ``blocked_s``, ``latency_s``: of a durable checkpoint, the median.
    ``verify_ratio``: share of a healthy rank's time that goes into the check that replicas are equal.
    """

    step_s: float
    stalls_s: tuple[float, ...]
    refills_s: tuple[float, ...]
    blocked_s: float
    latency_s: float
    absences_s: tuple[float, ...]
    verify_ratio: float = 0.0

    @property
    def stall_s(self) -> float:
        """Mean of ``stalls_s``."""
        return statistics.fmean(self.stalls_s)

    @property
    def refill_s(self) -> float:
        """Mean of ``refills_s``."""
        return statistics.fmean(self.refills_s)


def constants(records: Iterable[Record], delay_s: float = 0.0, otherwise: Constants | None = None) -> Constants:
    """The machine's times, from a journal.

    Args:
        records: of a run with injected faults.
        delay_s: seconds that the run added to each stall; they are taken off.
        otherwise: the answer when the run has recovered from no loss; None: raises ConfigError.
    """
    listed = list(records)
    summary = Ledger().apply_all(listed).summary()
    stalls = tuple(max(0.0, stall_s - delay_s) for stall_s in _stalls(listed))
    views = [(record.at_s, [member.slot for member in record.view.members]) for record in listed if isinstance(record, ViewPublished)]
    processes = [(record.at_s, [record.member.slot]) for record in listed if isinstance(record, ProcessUp)]
    refills, absences = tuple(_absences(listed, views)), tuple(_absences(listed, processes))
    saves = [each for each in listed if isinstance(each, CheckpointRecord) and each.phase == "durable" and each.level == STORE]
    if not stalls or not refills:
        if otherwise is not None:
            return otherwise
        raise ConfigError("calibration", summary.run, "no loss in it was recovered from", "Give the calibration more time.")
    return Constants(
        step_s=summary.median_step_s, stalls_s=stalls, refills_s=refills, blocked_s=_median([save.blocked_s for save in saves]),
        latency_s=_median([max(save.latency_s, save.blocked_s) for save in saves]),
        verify_ratio=summary.categories["verify"] / (summary.categories["verify"] + sum(summary.categories[name] for name in STEP_NAMES)),
        absences_s=absences or refills,
    )  # fmt: skip


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _stalls(records: Sequence[Record]) -> Iterator[float]:
    """Seconds from the last fault's loss before a view until the ranks of this view held their state, where it took a step.

    A loss within a stall begins it again: such faults have one stall, as in the simulation.
    """
    lost_s = formed_s = math.nan
    for record in records:
        match record:
            case ProcessLost() if record.fault is not None:
                lost_s, formed_s = record.at_s, math.nan
            case ViewPublished():
                formed_s = math.nan
            case Received(what="Formed"):
                formed_s = record.at_s
            case Committed() if formed_s > lost_s:
                yield formed_s - lost_s
                lost_s = math.nan


def _absences(records: Sequence[Record], seen: Sequence[tuple[float, Sequence[int]]]) -> Iterator[float]:
    """Seconds from each loss by a fault until its slot was ``seen`` again; ``seen``: (when, slots) in order."""
    for record in records:
        if isinstance(record, ProcessLost) and record.fault is not None:
            back_s = next((at_s for at_s, slots in seen if at_s > record.at_s and record.member.slot in slots), None)
            if back_s is not None:
                yield back_s - record.at_s


def recovered(records: Sequence[Record], losses: int) -> bool:
    """Whether injected faults took ``losses`` ranks, and the world has been full again since the last loss."""
    lost = [record.at_s for record in records if isinstance(record, ProcessLost) and record.fault is not None]
    started = next(record for record in records if isinstance(record, RunStarted))
    full = [record.at_s for record in records if isinstance(record, ViewPublished) and len(record.view.computing) == started.world]
    again = len(lost) >= losses and full and full[-1] > lost[-1]
    return bool(again) and any(isinstance(record, Committed) and record.at_s > full[-1] for record in records)


# ---- the scale -------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScaledRatio:
    """One ratio: ``target_s`` and ``real_s`` are the times, ``target`` and ``real`` over the time between faults (or plain numbers)."""

    name: str
    target: float
    real: float
    verdict: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleModel:
    """The scale of the small run. ``delay_s`` is added between a loss and the next view, ``wait_s`` to a step."""

    mtbf_s: float
    compression: float
    delay_s: float
    wait_s: float
    duration_s: float
    groups: tuple[ScaledRatio, ...]
    dominating: str = ""


def choose(target: Prepared, real: Constants, world: int, recovery: str, faults: int, budget_s: float, mtbf_s: float = 0.0) -> ScaleModel:
    """The compression at which no constant of this machine dominates, or the nearest that the time allows.

    Args:
        target, real: the fleet, and the times that were measured here.
        world: ranks of the small run; ``recovery``: in-place or restart.
        faults, budget_s: number of faults, and seconds that the run may take.
        mtbf_s: of the small run; 0: chosen here.
    """
    if faults < 1 or not 0 < budget_s < math.inf:
        raise ConfigError("faults", faults, f"at least one, in a run of {budget_s:g} s", "Try --faults 8 --minutes 3.")
    fleet_s = 1.0 / target.model.rate_per_s
    wanted, times = target_ratios(target, recovery), {"stall": real.stall_s, "replacement": real.refill_s}
    needed = {name: value / wanted[name] for name, value in times.items() if wanted[name] > 0}
    small_s = mtbf_s or min(max(needed.values()), budget_s / faults)
    slowest = max(needed, key=lambda name: needed[name])
    dominating = slowest if needed[slowest] > CLOSE * small_s else ""
    step_s = max(LEAST_STEP_S, wanted["step"] * small_s)
    delay_s = max(0.0, wanted["stall"] * small_s - real.stall_s) if recovery == "in-place" else 0.0
    small = {"stall": real.stall_s + delay_s, "replacement": real.refill_s, "step": step_s, "checkpoint": real.blocked_s,
             "until a checkpoint is safe": real.latency_s}  # fmt: skip
    wait_s = max(0.0, step_s - WORK_S)
    put_in = {"stall": "a delay is put in"} if delay_s > 0 else {}
    put_in |= {"step": "a timed wait is put in"} if wait_s > 0 else {}
    groups = tuple(_times(name, wanted[name], value / small_s, put_in.get(name, "")) for name, value in small.items())
    return ScaleModel(
        mtbf_s=small_s, compression=fleet_s / small_s, delay_s=delay_s, wait_s=wait_s, duration_s=faults * small_s,
        groups=groups + _others(target, world, faults), dominating=dominating,
    )  # fmt: skip


def target_ratios(target: Prepared, recovery: str) -> dict[str, float]:
    """Times of the fleet over its time between faults."""
    model, rate = target.model, target.model.rate_per_s
    detect_s = sum(fault.rate_per_s * fault.detect_s for fault in model.faults) / rate
    far = model.tiers[-1]
    stall_s = detect_s + (model.reform_s if recovery == "in-place" else model.restart_s + far.restore_s)
    return {"stall": rate * stall_s, "replacement": rate * model.replace_s, "step": rate * model.step_s, "checkpoint": rate * far.blocked_s,
            "until a checkpoint is safe": rate * far.latency_s}  # fmt: skip


def _times(name: str, target: float, real: float, put_in: str) -> ScaledRatio:
    if 1 / CLOSE <= real / target <= CLOSE if target > 0 else real == 0:
        return ScaledRatio(name, target, real, IMPOSED if put_in else MATCHED, put_in or "as it is here")
    if real > target:
        return ScaledRatio(
            name, target, real, UNMATCHED, "this machine takes longer, and nothing makes it faster: a longer MTBF would help"
        )
    return ScaledRatio(name, target, real, UNMATCHED, "this machine is faster, and nothing here can put the time in")


def _others(target: Prepared, world: int, faults: int) -> tuple[ScaledRatio, ...]:
    """Ratios that are no times."""
    model = target.model
    takes = sum(fault.rate_per_s for fault in model.faults if fault.nodes) / model.rate_per_s
    lost, expected = model.replica_nodes / model.nodes, model.rate_per_s * model.duration_s
    return (
        ScaledRatio("faults in the run", expected, float(faults), MATCHED if expected <= faults else UNMATCHED,
              "the small run is shorter: its interval is the wider" if expected > faults else "as many"),
        ScaledRatio("capacity lost with a node", lost, 1 / world, MATCHED if lost > 1 / (CLOSE * world) else UNMATCHED,
              f"one rank of {world} is more of the world than one replica of the fleet"),
        ScaledRatio("spares for each node", model.spares / model.nodes, 0.0, MATCHED if not model.spares else UNMATCHED,
              "the small run has none; its replacements are new processes"),
        ScaledRatio("faults that take a node", takes, 1.0, MATCHED if takes > 1 / CLOSE else UNMATCHED,
              "ranks are killed; nothing else is"),
        ScaledRatio("law of arrivals", 1.0, 1.0, MATCHED, "exponential in both"),
    )  # fmt: skip


# ---- the prediction --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalPrediction:
    """A prediction made before the first fault: goodputs, two with 95% intervals. ``seal`` is the SHA-256 of all other fields."""

    closed_form: float
    fleet: tuple[float, float, float]
    run: tuple[float, float, float]
    faults: int
    constants: Constants
    scale: ScaleModel
    seal: str = field(default="")

    def sealed(self) -> RehearsalPrediction:
        """The prediction with its seal, which a reader can compute again from the file."""
        text = json.dumps(asdict(replace(self, seal="")), sort_keys=True)
        return replace(self, seal=sha256(text.encode()).hexdigest())


def predict(
    target: Prepared, real: Constants, scale: ScaleModel, faults: Sequence[Fault], world: int, recovery: str, seed: int
) -> RehearsalPrediction:
    """Predict by a closed form of the fleet, a simulation of it at full size, and one of the small run under the same faults."""
    sample = monte_carlo(target.model, target.recovery, target.intervals, runs=100, seed=seed)
    values = np.sort(sample.shares["goodput"])
    fleet = float(values.mean()), float(np.quantile(values, 0.025)), float(np.quantile(values, 0.975))
    run = goodput_of_run(real, scale, faults, world, recovery, seed)
    return RehearsalPrediction(
        closed_form=target.plan.faults.goodput, fleet=fleet, run=run, faults=len(faults), constants=real, scale=scale
    ).sealed()  # fmt: skip


def goodput_of_run(
    real: Constants, scale: ScaleModel, faults: Sequence[Fault], world: int, recovery: str, seed: int, drift: float = DRIFT
) -> tuple[float, float, float]:
    """Goodput of the small run under ``faults`` on a machine with these times: the mean, and both ends of a 95% interval."""
    rng = np.random.Generator(np.random.PCG64(derive_seed(seed, "rehearsal")))
    drawn = np.sort([_small_run(real, scale, faults, world, recovery, rng, drift) for _ in range(DRAWS)])
    return float(drawn.mean()), float(np.quantile(drawn, 0.025)), float(np.quantile(drawn, 0.975))


def _small_run(
    real: Constants, scale: ScaleModel, faults: Sequence[Fault], world: int, recovery: str, rng: np.random.Generator, deviation: float
) -> float:
    """Goodput of one simulation of the small run. Its times are drawn from a fresh sample of the measured losses, times a random drift.

    So the interval covers the few measurements, the chance in the run's own losses, and a change of the machine's speed.
    """
    drift = math.exp(rng.normal(0.0, deviation))
    stalls = drift * rng.choice(rng.choice(real.stalls_s, len(real.stalls_s)), max(1, len(faults)))
    refills = drift * rng.choice(rng.choice(real.refills_s, len(real.refills_s)), max(1, len(faults)))
    absent_s = drift * rng.choice(real.absences_s, len(real.absences_s)).mean()
    nothing, restarts = np.zeros(0), recovery == "restart"
    times = np.array(_that_find_a_rank(faults, np.minimum(stalls, absent_s)) if restarts else [fault.at_s for fault in faults])
    arrivals = Arrivals(
        times, np.zeros(len(times), dtype=np.int64), np.zeros(len(times), dtype=np.int64),
        np.zeros(len(times)) if restarts else refills[: len(times)], rng.random(len(times)), nothing, nothing, nothing,
    )  # fmt: skip
    model = small_model(real, scale, world, float(stalls.mean()) + scale.delay_s)
    policy = RECOVERIES[recovery](Budgets(), math.inf)
    return FleetRun(model, arrivals, policy, (CheckpointInterval(),)).run().goodput * (1 - real.verify_ratio)


def _that_find_a_rank(faults: Sequence[Fault], absences_s: Iterable[float]) -> list[float]:
    """Times of the faults that find a rank. After a restart of all ranks there is none for a while, and faults that are due are
    suppressed."""
    times: list[float] = []
    back_s = 0.0
    for fault, absent_s in zip(sorted(faults, key=lambda fault: fault.at_s), absences_s, strict=False):
        if fault.at_s >= back_s:
            times.append(fault.at_s)
            back_s = fault.at_s + absent_s
    return times


def small_model(real: Constants, scale: ScaleModel, world: int, stall_s: float) -> FleetModel:
    """The small run as a fleet: a node is a rank, all faults are kills."""
    fault = FaultClass(name="kill", rate_per_s=1.0 / scale.mtbf_s, nodes=1)
    tier = Tier(name="store", blocked_s=real.blocked_s, latency_s=real.latency_s)
    return FleetModel(
        nodes=world, duration_s=scale.duration_s, faults=(fault,), tiers=(tier,), reform_s=stall_s, restart_s=stall_s,
        step_s=scale.wait_s + WORK_S,
    )  # fmt: skip


# ---- the measurement -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """Figures from the journal of the small run: goodput from the first view to the end, and the losses in between."""

    goodput: float
    losses: int
    window_s: float
    shares: dict[str, float]
    checks: tuple[Judgement, ...] = ()


def measured(records: Iterable[Record]) -> MeasuredRun:
    """Measure without the run's start-up and end: a run of weeks has hardly any of either."""
    listed = list(records)
    summary = Ledger().apply_all(listed).summary()
    first_s = next(record.at_s for record in listed if isinstance(record, ViewPublished))
    last_s = next((record.at_s for record in reversed(listed) if isinstance(record, RunEnded)), summary.now_s)
    window_s = last_s - first_s
    slots = summary.world + summary.spares
    kept = sum(summary.categories[name] for name in STEP_NAMES)
    shares = {name: value / (slots * window_s) for name, value in summary.categories.items()}
    start = (first_s - summary.started_s) / window_s
    for name in ("init", "provision", "idle_spare"):  # categories of slots before the first view
        taken = min(start, shares[name])
        shares[name], start = shares[name] - taken, start - taken
    return MeasuredRun(kept / (slots * window_s), summary.in_view_losses, window_s, shares, judged(listed, summary))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The prediction and the measurement, side by side.

    ``hindsight``: the goodput that the same simulation gives with the times of recovery that the run itself showed.
    """

    gpus: int
    days: float
    recovery: str
    prediction: RehearsalPrediction
    measured: MeasuredRun
    hindsight: float

    @property
    def error(self) -> float:
        """Measured less predicted goodput of the small run."""
        return self.measured.goodput - self.prediction.run[0]

    @property
    def model_error(self) -> float:
        """The part of ``error`` that is not a change of the machine between calibration and run."""
        return self.measured.goodput - self.hindsight

    @property
    def inside(self) -> bool:
        """Whether the measurement lies in the predicted interval."""
        return self.prediction.run[1] <= self.measured.goodput <= self.prediction.run[2]

    def to_dict(self) -> dict[str, Any]:
        """The rehearsal as plain data."""
        return asdict(self) | {"error": self.error, "model_error": self.model_error, "inside": self.inside}


def rows(rehearsal: Rehearsal) -> list[tuple[str, str, str]]:
    """(name, goodput, interval or remark) of each row of the table."""
    made, found = rehearsal.prediction, rehearsal.measured
    fleet, run = made.fleet, made.run
    return [
        ("the fleet, closed form", f"{made.closed_form:.2%}", "exact for exponential faults; no slow nodes"),
        ("the fleet, simulated at full size", f"{fleet[0]:.2%}", f"{fleet[1]:.2%} to {fleet[2]:.2%}, slow nodes included"),
        ("this run, predicted", f"{run[0]:.2%}", f"{run[1]:.2%} to {run[2]:.2%}, under the {made.faults} faults that were planned"),
        ("this run, measured", f"{found.goodput:.2%}", f"{found.losses} ranks lost in {duration(found.window_s)}"),
    ]


def reasons(rehearsal: Rehearsal) -> list[str]:
    """Why the figures differ, in sentences."""
    made, found = rehearsal.prediction, rehearsal.measured
    said = []
    verdict = "inside" if rehearsal.inside else "outside"
    said.append(f"The measurement is {100 * rehearsal.error:+.2f} points from the prediction, {verdict} the interval stated before.")
    said.append(
        f"With the times of recovery that the run itself showed, the simulation gives {rehearsal.hindsight:.2%}:"
        f" {100 * rehearsal.model_error:+.2f} points are its own error, the rest is the machine's change since it was calibrated."
    )
    if found.losses != made.faults:
        said.append(f"{made.faults} kills were planned and {found.losses} ranks were lost: a kill of an empty slot is suppressed or waits.")
    loose = [group for group in made.scale.groups if group.verdict == UNMATCHED]
    if loose:
        listed = "; ".join(f"{group.name} ({group.target:.3g} there, {group.real:.3g} here)" for group in loose)
        said.append(f"This run is not the fleet: {listed}.")
    if made.scale.dominating:
        said.append(f"The {made.scale.dominating} of this machine dominates: it would need a longer time between faults than was given.")
    gap = made.fleet[0] - made.closed_form
    said.append(f"The simulation of the fleet is {100 * gap:+.2f} points from the closed form, which leaves slow nodes out.")
    return said


def target_of(gpus: int, days: float, recovery: str, chosen: Scenario | None = None, seen: FittedFaults | None = None) -> Prepared:
    """The fleet to rehearse. ``seen``: its faults, from a log; None: those of the catalogue."""
    scenario = chosen or Scenario()
    plan = replace(scenario.plan, gpus=gpus, recovery=recovery)
    return prepare(replace(scenario, days=days, plan=plan if seen is None else repaired_with(plan, seen), faults=seen or scenario.faults))


def chaos_of(scale: ScaleModel, seed: int) -> ChaosSettings:
    """Kills at the scale's rate, for as long as it lasts."""
    return ChaosSettings(mtbf_s=scale.mtbf_s, kinds=("kill_rank",), duration_s=scale.duration_s, seed=seed)
