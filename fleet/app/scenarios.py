"""A fleet to simulate, put together: the fault catalogue, a plan's times, and the live policies. Imports neither Ray nor torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from chaos.catalogue import ASSUMPTIONS, LEMON, Catalogue, Component, Topology, fitted, load_catalogue
from fleet.errors import ConfigError
from fleet.laws.law import HOUR_S
from fleet.ledger.health import NodeHistory, NodeIncident
from fleet.planning.faults import copy_times
from fleet.planning.inputs import PlanInput
from fleet.planning.plan import FleetPlan, make_plan
from fleet.planning.traces.faults import FittedFaults
from fleet.protocol.decisions import Decision
from fleet.protocol.fault_kinds import Cost, kind_of
from fleet.protocol.ports import IntervalPolicy, RecoveryPolicy
from fleet.settings.run import Budgets, CheckpointSettings
from fleet.simulation.fleet_arrivals import Arrivals, draw_arrivals, read_arrivals
from fleet.simulation.fleet_model import HELD, SHARES, FaultClass, FleetModel, FleetOutcome, LemonPolicy, Partial, SlowClass, Tier
from fleet.simulation.fleet_run import FleetRun
from policies.interval import CheckpointInterval
from policies.lemons import Lemons
from policies.placement import ranges
from policies.recovery import RECOVERIES
from policies.straggler.remedies import EVICT, REBALANCE, REPLACE, LeastLoss, Standing

LOCAL, OBJECT = 0, 1
NEEDS = {"job": LOCAL, "model state": OBJECT}
"""Blast radius in the catalogue -> the tier that a run needs after such a fault. After others, peers hold the state."""

STAYS = "job"
"""The blast radius of faults that take no node."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A question to ``fleet simulate``.

    Args:
        plan: fleet, model, times of recovery, spares: as ``fleet plan`` takes them. The rates of failures come not from it, but from
            the faults that are simulated (``mttf_hours`` and the catalogue).
        days: length of the run.
        mttf_hours: of one GPU, from all causes that stop a job; 0: the catalogue's sum.
        interval: checkpoint policy: exact, daly, young, or seconds.
        rack_mttf_hours: of a rack of 64 GPUs; 0: racks do not fail as such.
        notice_s: from a silent corruption until it is noticed.
        lemon_factor: how many times as often a lemon fails (1.2% of the nodes); 1: there are none.
        crews: repairs at a time; 0: any number.
        stragglers: whether nodes and networks are slow at times.
        faults: fitted to a log of faults, in place of the catalogue; None: the catalogue.
    """

    plan: PlanInput = field(default_factory=PlanInput)
    days: float = 54.0
    mttf_hours: float = 0.0
    interval: str = CheckpointSettings().policy
    rack_mttf_hours: float = 0.0
    notice_s: float = 0.0
    lemon_factor: float = 1.0
    crews: int = 0
    stragglers: bool = True
    faults: FittedFaults | None = None

    def __post_init__(self) -> None:
        if not 0 < self.days < math.inf:
            raise ConfigError("days", self.days, "must be greater than 0, and finite", "54 is the default.")
        if not 0 <= self.mttf_hours < math.inf:
            raise ConfigError("mttf_hours", self.mttf_hours, "must be greater than 0 h", "0: what the fault catalogue comes to.")

    @property
    def lemons(self) -> float:
        """How many times as often a lemon fails: the given factor, else the log's."""
        return self.lemon_factor if self.lemon_factor > 1 or self.faults is None else self.faults.lemon_factor

    def topology(self) -> Topology:
        """The fleet as the catalogue sees it."""
        return Topology(gpus=self.plan.gpus, gpus_per_node=self.plan.chip.per_node, rack_mttf_hours=self.rack_mttf_hours or None)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model with the policies that run on it, and the plan whose closed form predicts it."""

    model: FleetModel
    recovery: RecoveryPolicy
    intervals: tuple[IntervalPolicy, ...]
    lemons: LemonPolicy | None
    plan: FleetPlan

    def arrivals(self, seed: int, trace: Path | None = None) -> Arrivals:
        """Faults that are drawn, or read from a trace."""
        return read_arrivals(self.model, trace, seed) if trace is not None else draw_arrivals(self.model, seed)

    def run(self, arrivals: Arrivals, partial: Partial | None = None) -> FleetOutcome:
        """One event-driven run."""
        return FleetRun(self.model, arrivals, self.recovery, self.intervals, self.lemons, partial).run()

    def injected(self, arrivals: Arrivals) -> Arrivals:
        """Those of ``arrivals`` that strike a node when these policies run. A trace has no others: an empty place cannot fail."""
        run = FleetRun(self.model, arrivals, self.recovery, self.intervals, self.lemons)
        run.run()
        return arrivals.only(run.counts.injected)


def prepare(scenario: Scenario, catalogue: Catalogue | None = None) -> Prepared:
    """Model and policies of a scenario.

    Raises:
        ConfigError: the model does not fit the fleet, or the scenario is impossible.
    """
    asked, lemons = scenario.plan, scenario.lemons
    catalogue = catalogue or (fitted(scenario.faults) if scenario.faults else load_catalogue())
    faults = fault_classes(scenario, catalogue)
    plan = make_plan(_with_faults(asked, faults), levers=False)
    replica = max(1, plan.step.mapping.tensor * plan.step.mapping.pipeline // asked.chip.per_node)
    model = FleetModel(
        nodes=asked.nodes,
        duration_s=scenario.days * 24 * HOUR_S,
        faults=faults,
        slow=_slow(scenario, catalogue, plan) if scenario.stragglers else (),
        tiers=_tiers(plan),
        spares=plan.faults.spares,
        reform_s=asked.reform_s,
        restart_s=asked.restart_s,
        replace_s=asked.replace_s,
        repair_s=asked.repair_hours * HOUR_S,
        crews=scenario.crews or None,
        step_s=plan.step.step_s,
        replica_nodes=replica,
        lemon_share=(catalogue.chosen([LEMON])[0].prevalence or 0.0) if lemons > 1 else 0.0,
        lemon_factor=lemons,
    )
    recovery = RECOVERIES[asked.recovery](Budgets(), asked.restart_s + asked.replace_s)
    intervals = tuple(_interval(scenario.interval) for _ in model.tiers)
    return Prepared(model, recovery, intervals, _KeepOut(model) if lemons > 1 else None, plan)


RATES = ("gpu_mttf_hours", "in_place_share", "durable_share")
"""Inputs of ``fleet plan`` that a file of faults gives in the user's place."""


def asked_with(asked: PlanInput, faults: FittedFaults, given: Collection[str] = ()) -> PlanInput:
    """The input of ``fleet plan`` with a log's faults: their rate, their needs, and their time of repair, unless that is ``given``.

    A node fails as often as one of the log's, for any number of GPUs. Raises ConfigError where ``given`` contradicts the log.
    """
    for name in given:
        if name in RATES:
            raise ConfigError(f"--set {name}", getattr(asked, name), f"--faults says it, from {faults.source}", "Leave one of them out.")
    repaired = repaired_with(asked, faults, given)
    return _with_faults(repaired, fault_classes(Scenario(plan=repaired, faults=faults), fitted(faults)))


def repaired_with(asked: PlanInput, faults: FittedFaults, given: Collection[str] = ()) -> PlanInput:
    """``asked`` with the log's own time of repair, unless that is ``given`` or not in the log."""
    hours = None if "repair_hours" in given else faults.repair_hours
    return asked if hours is None else replace(asked, repair_hours=hours)


def _with_faults(asked: PlanInput, faults: Sequence[FaultClass]) -> PlanInput:
    """The input of the closed form, with the rate and the needs of the faults that are simulated."""
    rate = sum(fault.rate_per_s for fault in faults)
    in_place = sum(fault.rate_per_s for fault in faults if fault.need == HELD) / rate
    durable = sum(fault.rate_per_s for fault in faults if fault.need == OBJECT) / rate
    hours = asked.gpus / (rate * HOUR_S)
    return replace(asked, gpu_mttf_hours=hours, in_place_share=in_place, durable_share=min(durable, 1.0 - in_place))


def _interval(text: str) -> CheckpointInterval:
    try:
        return CheckpointInterval(law="fixed", interval_s=float(text))
    except ValueError:
        return CheckpointInterval(law=text)


# ---- faults ------------------------------------------------------------------------------------------------------------------------------


def fault_classes(scenario: Scenario, catalogue: Catalogue) -> tuple[FaultClass, ...]:
    """The catalogue's components that stop a job, at the rate of the whole fleet, or scaled to the scenario's MTTF."""
    fleet = scenario.topology()
    rated = [c for c in catalogue.components if c.mttf_hours is not None or (c.per == "rack" and scenario.rack_mttf_hours)]
    rates = catalogue.rates(fleet, [component.name for component in rated])
    scale = scenario.plan.gpus / (scenario.mttf_hours * HOUR_S * sum(rates.values())) if scenario.mttf_hours else 1.0
    return tuple(_fault_class(scenario, component, scale * rates[component.name], fleet) for component in rated)


def _fault_class(scenario: Scenario, component: Component, rate_per_s: float, fleet: Topology) -> FaultClass:
    name, asked = component.name, scenario.plan
    kind, need = kind_of(component.kind), NEEDS.get(component.blast_radius, HELD)
    detect_s = 0.0 if kind.announced else ASSUMPTIONS[name].duration_s if Cost.STILL in kind.may_cost else asked.detect_s
    nodes = 0 if component.blast_radius == STAYS else max(1, fleet.gpus_per_rack // fleet.gpus_per_node) if component.per == "rack" else 1
    notice_s = scenario.notice_s if Cost.WRONG in kind.may_cost else 0.0
    return FaultClass(
        name=name, rate_per_s=rate_per_s, nodes=nodes, need=need, detect_s=detect_s, announced=kind.announced, notice_s=notice_s
    )


def _tiers(plan: FleetPlan) -> tuple[Tier, ...]:
    """Local disks and the object store, with the plan's cost of a copy."""
    found = []
    for name in ("local", "object"):
        blocked_s, durable_s, load_s = copy_times(plan.asked, plan.step, name)
        found.append(Tier(name=name, blocked_s=blocked_s, latency_s=max(blocked_s, durable_s), restore_s=load_s))
    return tuple(found)


# ---- slow nodes and networks -------------------------------------------------------------------------------------------------------------


def _slow(scenario: Scenario, catalogue: Catalogue, plan: FleetPlan) -> tuple[SlowClass, ...]:
    fleet, found = scenario.topology(), []
    for component in catalogue.chosen(["slow_compute", "slow_network"]):
        assumed, rate = ASSUMPTIONS[component.name], catalogue.rates(fleet, [component.name])[component.name]
        kind = "compute" if component.name == "slow_compute" else "network"
        left = mitigated_severity(plan, kind, assumed.severity, plan.faults.spares)
        found.append(
            SlowClass(
                name=component.name, rate_per_s=rate, duration_s=assumed.duration_s, severity=assumed.severity,
                mitigated=left if left < assumed.severity else None, notice_s=NOTICE_STEPS * plan.step.step_s,
            )
        )  # fmt: skip
    return tuple(found)


NOTICE_STEPS = 30
"""Steps until the live detector accuses a rank: its window, and the strides for which a verdict has to persist."""


def mitigated_severity(plan: FleetPlan, kind: str, severity: float, spares: int) -> float:
    """The slowness that is left of one slow replica's after the live straggler policy. Ranks are replicas here, and shards
    micro-batches."""
    shards, replicas = max(1, plan.step.micro_batches), plan.step.mapping.data
    if replicas < 2:
        return severity
    even = ranges(replicas * shards, replicas)
    fixed_s = plan.step.step_s - plan.step.compute_s
    standing = Standing(
        shards=replicas * shards, ranges=even, slowdowns=(severity,) + (1.0,) * (replicas - 1), kind=kind,
        nodes=tuple(f"replica-{number}" for number in range(replicas)), shard_s=plan.step.compute_s / shards, fixed_s=fixed_s,
        elapsed_s=0.0,
        remaining_s=plan.bill.days * 24 * HOUR_S, spares=(1.0,) if spares else (),
        rebalance_s=plan.step.step_s, replace_s=plan.asked.reform_s, evict_s=plan.asked.reform_s,
        provision_s=plan.asked.repair_hours * HOUR_S, spare_rate_per_s=1.0 / plan.faults.mtbf_s,
    )  # fmt: skip
    answer = LeastLoss().decide(standing, 0.0)
    well_s = standing.step_s(even, (1.0,) * replicas)
    if answer.decision.action == REBALANCE and answer.ranges is not None:
        return max(1.0, standing.step_s(answer.ranges, standing.slowdowns) / well_s)
    return 1.0 if answer.decision.action in (REPLACE, EVICT) else severity


# ---- lemons ------------------------------------------------------------------------------------------------------------------------------


class _KeepOut:
    """The live lemon policy, told of a simulated node's failures."""

    def __init__(self, model: FleetModel) -> None:
        per_h = sum(fault.rate_per_s for fault in model.faults if fault.nodes) * HOUR_S / model.nodes
        self._policy = Lemons(fleet_rate_per_h=per_h)

    def judge(self, node: int, failures_s: Sequence[float], now_s: float) -> Decision:
        """See ``LemonPolicy``."""
        incidents = tuple(NodeIncident(at_s / HOUR_S, "lost", "simulated") for at_s in failures_s)
        return self._policy.judge(NodeHistory(str(node), ((0.0, now_s / HOUR_S),), incidents), now_s / HOUR_S)


# ---- answers -----------------------------------------------------------------------------------------------------------------------------


def summed_up(outcomes: Sequence[FleetOutcome], wanted: int, duration_s: float) -> dict[str, Any]:
    """Means over runs, with normal 95% intervals of the means (None for a single run), as plain data."""
    number = len(outcomes)
    done_s = min(outcome.complete_s for outcome in outcomes)
    columns = {name: np.array([outcome.shares[name] for outcome in outcomes]) for name in SHARES}
    halves = {name: 1.96 * float(v.std(ddof=1)) / math.sqrt(number) if number > 1 else None for name, v in columns.items()}
    names = outcomes[0].counts
    return {
        "runs": number,
        "complete": number == wanted and done_s >= duration_s,
        "days_done": done_s / (24 * HOUR_S),
        "shares": {name: {"mean": float(column.mean()), "halfwidth": halves[name]} for name, column in columns.items()},
        "faults": sum(sum(outcome.counts.values()) for outcome in outcomes) / number,
        "counts": {name: sum(outcome.counts[name] for outcome in outcomes) / number for name in names},
        "saves": {name: sum(outcome.saves[name] for outcome in outcomes) / number for name in outcomes[0].saves},
        "events": sum(outcome.events for outcome in outcomes) / number,
        "asked": outcomes[0].asked,
        "kept_out": sorted({node for outcome in outcomes for node in outcome.kept_out}),
    }
