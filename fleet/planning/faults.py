"""What the fleet loses to faults: the rate that each tier must answer, the best interval for it, and where the wall clock goes.

A tier is a way back: replicas of the state in other ranks, the node's own disk, the object store. The rate that counts for a tier is that
of the faults which need *that* tier. Tiers nest: what one tier keeps is the wall clock of the next, so that their goodputs multiply
(:func:`fleet.laws.tiers.nested_goodput`) and their losses add up to the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleet.errors import ConfigError
from fleet.laws.checkpointing import breakdown, exact_work_s, write_s
from fleet.laws.law import HOUR_S
from fleet.laws.reliability import mtbf_s
from fleet.laws.spares import machine_repair, spares_for_risk
from fleet.planning.inputs import PlanInput
from fleet.planning.kept import survives
from fleet.planning.step import MappedStep

STATE_BYTES = 14.0
"""Bytes of a checkpoint for one parameter: 2 BF16 + 12 of Adam; where Fleet keeps the state, as it does (``parameter_bytes``)."""


@dataclass(frozen=True, slots=True)
class RecoveryTier:
    """One way back. Times in seconds.

    Attributes:
        mtbf_s: between faults that need this tier.
        interval_s: work between two copies; ``blocked_s`` what one blocks training for, ``durable_s`` until it can be relied on.
        limit: why the interval is not the optimum, when it is not.
        down_s, restart_s: after a fault, before work goes on: without and with the chance of another fault.
        goodput: share of its wall clock that is kept, of this tier alone.
        losses: the rest by cause.
    """

    name: str
    mtbf_s: float
    interval_s: float
    blocked_s: float
    durable_s: float
    limit: str
    down_s: float
    restart_s: float
    goodput: float
    losses: dict[str, float]


@dataclass(frozen=True, slots=True)
class FaultLosses:
    """Goodput of the fleet and what it is made of; ``losses`` and ``goodput`` add up to 1."""

    mtbf_s: float
    tiers: tuple[RecoveryTier, ...]
    spares: int
    short_probability: float
    goodput: float
    losses: dict[str, float]


def fault_plan(plan: PlanInput, step: MappedStep) -> FaultLosses:
    """Tiers, spares and goodput for a plan whose step is known."""
    mean_s = mtbf_s(plan.gpu_mttf_hours * HOUR_S, plan.gpus)
    tiers = tuple(_tier(plan, step, name, mean_s / share) for name, share in _shares(plan, step).items() if share > 0)
    spares, short, missing = _spares(plan, step)
    goodput, losses = 1.0, dict[str, float]()
    for name, share in (("too few spares", missing), ("replacement", _replacement_share(plan, step, mean_s))):
        losses[name] = goodput * share
        goodput *= 1.0 - share
    for tier in tiers:
        for name, share in tier.losses.items():
            losses[name] = losses.get(name, 0.0) + goodput * share
        goodput *= tier.goodput
    return FaultLosses(mean_s, tiers, spares, short, goodput, dict(sorted(losses.items(), key=lambda item: -item[1])))


def _shares(plan: PlanInput, step: MappedStep) -> dict[str, float]:
    """Share of all faults that needs each tier. Without a replica, or when all ranks restart, a lost rank needs the object store."""
    lost = plan.in_place_share
    replicas = plan.recovery == "in-place" and survives(plan, step.mapping.data)
    shares = {"replicas": lost if replicas else 0.0, "local": 1.0 - lost - plan.durable_share}
    return {**shares, "object": plan.durable_share + (0.0 if replicas else lost)}


def _rank_bytes(plan: PlanInput, step: MappedStep) -> float:
    """What one GPU of one replica must have back: weights, and the optimizer's part that it holds."""
    return step.memory.weights + step.memory.optimizer


def _tier(plan: PlanInput, step: MappedStep, name: str, mean_s: float) -> RecoveryTier:
    if name == "replicas":
        restore_s = write_s(_rank_bytes(plan, step), plan.net.bytes_per_s)
        down = {"detect": plan.detect_s, "reform": plan.reform_s, "restore": restore_s}
        return _measured(plan, name, mean_s, step.step_s, 0.0, 0.0, "", down, 0.0)
    blocked_s, durable_s, load_s = copy_times(plan, step, name)
    work_s, limit = exact_work_s(blocked_s, mean_s), ""
    if work_s < durable_s:
        work_s, limit = durable_s, f"not below the {durable_s:.0f} s until a copy is durable"
    if work_s < step.step_s:
        work_s, limit = step.step_s, "not below one step"
    down = {"detect": plan.detect_s, "work not yet durable": durable_s}
    return _measured(plan, name, mean_s, work_s, blocked_s, durable_s, limit, down, plan.restart_s + load_s)


def copy_times(plan: PlanInput, step: MappedStep, name: str) -> tuple[float, float, float]:
    """(what a copy blocks, until it is durable, to read it again). The copy to the host blocks; the write goes on behind the steps."""
    whole = plan.what.parameters * (plan.parameter_bytes * (1 + plan.moments) if plan.whole else STATE_BYTES)
    snapshot_s = write_s(_rank_bytes(plan, step), plan.snapshot_bytes_per_s)
    rate = plan.object_bytes_per_s if name == "object" else plan.local_bytes_per_s * plan.nodes
    return snapshot_s, snapshot_s + write_s(whole, rate), write_s(whole, rate) + snapshot_s


def _measured(plan: PlanInput, name: str, mean_s: float, work_s: float, blocked_s: float, durable_s: float, limit: str,
              down: dict[str, float], restart_s: float) -> RecoveryTier:  # fmt: skip
    down_s = sum(down.values())
    parts = breakdown(work_s, blocked_s, mean_s, down_s, restart_s)
    losses = {"checkpoint stall": parts.checkpoint, "rework": parts.rework, "restart": parts.restart}
    losses |= {part: parts.down * seconds / down_s for part, seconds in down.items() if down_s > 0}
    losses["rework"] += losses.pop("work not yet durable", 0.0)
    if parts.work <= 0.0:
        reason = f"faults that need the {name} tier come every {mean_s:.3g} s, and no work between them is ever finished"
        raise ConfigError("gpu_mttf_hours", plan.gpu_mttf_hours, reason, "Plan fewer GPUs, a higher gpu_mttf_hours, or a faster way back.")
    return RecoveryTier(name, mean_s, work_s, blocked_s, durable_s, limit, down_s, restart_s, parts.work, losses)


def _replacement_share(plan: PlanInput, step: MappedStep, mean_s: float) -> float:
    """Capacity that is away until a spare has taken over: with in-place recovery one replica of 1/dp of the batch; else all of it, for as
    long as the replacement takes longer than the restart."""
    if plan.recovery != "in-place" or step.mapping.data == 1:
        waits = plan.in_place_share * max(0.0, plan.replace_s - plan.detect_s - plan.restart_s) / mean_s
        return waits / (1.0 + waits)
    return min(1.0, plan.in_place_share * plan.replace_s / mean_s / step.mapping.data)


def _spares(plan: PlanInput, step: MappedStep) -> tuple[int, float, float]:
    """(spare nodes, P(more down than spares), share of capacity that is missing for it)."""
    rate = plan.in_place_share * plan.chip.per_node / (plan.gpu_mttf_hours * HOUR_S)
    repair_s = plan.repair_hours * HOUR_S
    if rate == 0.0:
        return max(plan.spares, 0), 0.0, 0.0
    spares = plan.spares if plan.spares >= 0 else spares_for_risk(plan.nodes, rate, repair_s, plan.risk)
    balance = machine_repair(plan.nodes, spares, rate, repair_s)
    if plan.recovery == "restart" or step.mapping.data == 1:
        return spares, balance.short_probability, balance.short_probability
    replica_gpus = max(plan.chip.per_node, step.mapping.tensor * step.mapping.pipeline)
    return spares, balance.short_probability, min(1.0, balance.missing * replica_gpus / plan.gpus)
