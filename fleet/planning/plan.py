"""A plan: the step, the faults, the bill, and the levers, ranked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fleet.errors import ConfigError
from fleet.laws import energy
from fleet.laws.fleet_law import term_to_attack
from fleet.laws.law import DAY_S, HOUR_S
from fleet.laws.reliability import expected_failures
from fleet.laws.training import training_time_s
from fleet.planning.faults import FaultLosses, fault_plan
from fleet.planning.inputs import FSDP, PlanInput
from fleet.planning.kept import laws_of, survives
from fleet.planning.step import MappedStep, best_step


@dataclass(frozen=True, slots=True)
class Bill:
    """The bill of the whole run, spares included."""

    days: float
    usd: float
    mwh: float
    tons_co2: float
    power_mw: float
    faults: float


@dataclass(frozen=True, slots=True)
class Lever:
    """One change, and its gain. ``goodput_points`` are percentage points, ``throughput_ratio`` is of kept tokens a second."""

    sentence: str
    change: dict[str, Any]
    goodput_points: float
    throughput_ratio: float


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The plan: the answer to a ``PlanInput``."""

    asked: PlanInput
    step: MappedStep
    faults: FaultLosses
    bill: Bill
    levers: tuple[Lever, ...]

    @property
    def kept_tokens_per_s(self) -> float:
        """Tokens per second of wall clock that no fault takes back."""
        return self.step.tokens_per_s * self.faults.goodput

    @property
    def attack(self) -> str:
        """The term of the Fleet Law to work on."""
        step = self.step
        comm_s = step.tensor_s + step.pipeline_s + step.data_s + step.gather_s + step.hidden_s
        return term_to_attack(step.compute_s, comm_s, step.bubble_s + step.straggler_s, step.hidden_s)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, for JSON; times in seconds."""
        data = dataclasses.asdict(self)
        derived = {"step_s": self.step.step_s, "tokens_per_s": self.step.tokens_per_s, "shares": self.step.shares, "fits": self.step.fits}
        data["step"] |= {**derived, "memory_bytes": self.step.memory.total_bytes, "attack": self.attack, "laws": laws_of(self.asked)}
        assumed = {"batch_tokens": self.asked.step_tokens, "sequence": self.asked.sequence_tokens, "tokens": self.asked.run_tokens}
        return {**data, "asked": data["asked"] | assumed, "kept_tokens_per_s": self.kept_tokens_per_s, "notes": notes(self)}


def make_plan(asked: PlanInput, levers: bool = True) -> FleetPlan:
    """The plan. Raises ConfigError for an impossible mapping, a model that does not fit, or faults that outrun every recovery."""
    step = best_step(asked)
    faults = fault_plan(asked, step)
    plan = FleetPlan(asked, step, faults, _bill(asked, step, faults), ())
    return replace(plan, levers=_levers(plan)) if levers else plan


def _bill(asked: PlanInput, step: MappedStep, faults: FaultLosses) -> Bill:
    duration_s = training_time_s(asked.run_tokens, step.tokens_per_s, faults.goodput)
    nodes = asked.nodes + faults.spares
    gpus = nodes * asked.chip.per_node
    it_w = nodes * asked.chip.node_w if asked.chip.node_w else gpus * asked.chip.power_w
    power_w = energy.facility_w(it_w, asked.pue)
    kwh = energy.energy_kwh(power_w, duration_s)
    return Bill(
        days=duration_s / DAY_S,
        usd=energy.rental_usd(gpus, duration_s, asked.usd_per_gpu_hour),
        mwh=kwh / 1e3,
        tons_co2=energy.carbon_kg(kwh, asked.g_per_kwh) / 1e3,
        power_mw=power_w / 1e6,
        faults=expected_failures(duration_s, faults.mtbf_s),
    )


def notes(plan: FleetPlan) -> list[str]:
    """Limits of the figures, for the reader."""
    asked, said = plan.asked, []
    if not asked.batch_tokens and asked.what.batch_tokens is None:
        said.append(f"The batch of {asked.model} is not published: {asked.step_tokens:,.0f} tokens are assumed (batch_tokens).")
    if not asked.what.dense:
        said.append("Mixture of experts: the all-to-all between experts is not counted.")
    if not asked.chip.node_w:
        said.append(f"The power of a node of {asked.hardware} is not published: only the accelerators' is counted.")
    if plan.step.recompute == "full":
        said.append("Activations only fit when all are computed again, which costs a third more arithmetic.")
    ranks = plan.step.mapping.data
    if ranks > 1 and not survives(asked, ranks):
        said.append("No copies: the part of a lost rank is only in a checkpoint, so every fault needs one.")
    if asked.whole and asked.optimizer_sharding != FSDP and asked.overlap > 0.0:
        said.append(f"{asked.overlap:.0%} of the sums are taken as hidden (overlap): ranks on CPUs hide them, ranks on GPUs do not yet.")
    if asked.optimizer_sharding == FSDP and ranks > 2:
        said.append("The law of the exposed exchange held within 8% for two ranks, and was 15% too low for four (docs/benchmarks.md).")
    if asked.optimizer_sharding == FSDP and not asked.exchange_bytes_per_s:
        said.append("Gathers go by plain connections through host memory: set exchange_bytes_per_s to their measured rate.")
    if ranks == 1:
        said.append("One replica: no rank holds the state of a lost one, so every fault needs a checkpoint.")
    return said


# ---- levers ------------------------------------------------------------------------------------------------------------------------------

Change = Callable[[PlanInput], dict[str, Any]]


def _scaled(factor: float, *names: str) -> Change:
    return lambda asked: {name: getattr(asked, name) * factor for name in names}


def _faster_fabric(asked: PlanInput) -> dict[str, Any]:
    faster = {"eth-100": "eth-200", "eth-200": "roce-400", "ib-hdr": "ib-ndr", "ib-ndr": "ib-xdr", "roce-400": "ib-xdr"}
    return {"fabric": faster[asked.fabric]} if asked.fabric in faster else {}


LEVERS: tuple[tuple[str, Change], ...] = (
    ("Halving recovery time (detection, reform, restart)", _scaled(0.5, "detect_s", "reform_s", "restart_s")),
    ("Halving detection time", _scaled(0.5, "detect_s")),
    ("Halving restart time", _scaled(0.5, "restart_s")),
    ("Halving the time until a spare takes over", _scaled(0.5, "replace_s")),
    ("Recovering in place instead of restarting all ranks", lambda asked: {"recovery": "in-place"}),
    ("GPUs that fail half as often", _scaled(2.0, "gpu_mttf_hours")),
    ("Twice the bandwidth to the object store", _scaled(2.0, "object_bytes_per_s")),
    ("Twice the bandwidth to local disks", _scaled(2.0, "local_bytes_per_s")),
    ("Twice the bandwidth from GPU to host", _scaled(2.0, "snapshot_bytes_per_s")),
    ("A faster fabric", _faster_fabric),
    ("An exchange that is twice as fast", _scaled(2.0, "exchange_bytes_per_s")),
    ("Hiding all of the gradient exchange", lambda asked: {"overlap": 1.0}),
    ("Ranks that are all equally fast", lambda asked: {"slowest_speed": 1.0}),
    ("Kernels that are a tenth faster", lambda asked: {"kernel_efficiency": min(1.0, 1.1 * asked.kernel_efficiency)}),
    ("Twice as many chunks in the pipeline", lambda asked: {"interleave": 2 * asked.interleave}),
    ("A batch twice as large", lambda asked: {"batch_tokens": 2 * asked.step_tokens}),
)


def _levers(plan: FleetPlan) -> tuple[Lever, ...]:
    """Each change alone, on the mapping of the plan, best first; changes without effect are left out."""
    mapping = plan.step.mapping
    fixed = replace(plan.asked, tp=mapping.tensor, pp=mapping.pipeline, dp=mapping.data, recompute=plan.step.recompute)
    found = [_lever(plan, fixed, name, change(plan.asked)) for name, change in LEVERS]
    return tuple(sorted((lever for lever in found if lever and lever.throughput_ratio > 1.00005), key=lambda each: -each.throughput_ratio))


def _lever(plan: FleetPlan, fixed: PlanInput, name: str, change: dict[str, Any]) -> Lever | None:
    if all(getattr(plan.asked, field) == value for field, value in change.items()):
        return None
    try:
        after = make_plan(replace(fixed, **change), levers=False)
    except ConfigError:
        return None  # e.g. a larger batch whose activations no longer fit
    points = 100.0 * (after.faults.goodput - plan.faults.goodput)
    ratio = after.kept_tokens_per_s / plan.kept_tokens_per_s
    return Lever(f"{name} would be worth {_worth(points, ratio)}.", change, points, ratio)


def _worth(points: float, ratio: float) -> str:
    tokens = f"{100 * (ratio - 1):.{1 if ratio >= 1.001 else 2}f}% more tokens a day"
    if abs(points) < 0.05:
        return tokens
    return f"{points:.1f} points of goodput ({tokens})" if points > 0 else f"{tokens}, for {-points:.1f} points less goodput"


def days(seconds: float) -> str:
    """A time with a unit that fits."""
    for unit, size in (("days", DAY_S), ("h", HOUR_S), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
