"""The fleet's losses to faults: the rate that each tier must answer, the best interval for it, and the shares of the wall clock.

A tier is a way back: replicas of the state in other ranks, the node's own disk, the object store. The rate of a tier counts only the faults
that need *that* tier. Tiers nest: the wall clock that one tier keeps is the wall clock of the next. So their goodputs multiply
(:func:`fleet.laws.tiers.nested_goodput`), and their losses add up to the whole.
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
"""Bytes of a checkpoint for one parameter: 2 BF16 + 12 of Adam. Where Fleet keeps the state, ``parameter_bytes`` sets them."""


@dataclass(frozen=True, slots=True)
class RecoveryTier:
    """One way back. Times in seconds.

    Attributes:
        mtbf_s: between faults that need this tier.
        interval_s: work between two copies; ``blocked_s``: time for which one blocks training; ``durable_s``: until it is durable.
        limit: why the interval is not the optimum, when it is not.
        down_s, restart_s: times after a fault, before work goes on. No other fault can strike in ``down_s``; one can in ``restart_s``.
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
    """Goodput of the fleet and its parts; ``losses`` and ``goodput`` add up to 1."""

    mtbf_s: float
    tiers: tuple[RecoveryTier, ...]
    spares: int
    short_probability: float
    goodput: float
    losses: dict[str, float]


def fault_plan(plan: PlanInput, step: MappedStep) -> FaultLosses:
    """Tiers, spares and goodput for a plan with a known step."""
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
    """Bytes that one GPU of one replica must get back: weights, and its part of the optimizer's state."""
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
    """(time that a copy blocks, time until it is durable, time to read it). The copy to the host blocks; its write does not."""
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
        reason = f"faults that need the {name} tier come every {mean_s:.3g} s, and no work between them can finish"
        raise ConfigError("gpu_mttf_hours", plan.gpu_mttf_hours, reason, "Plan fewer GPUs, a higher gpu_mttf_hours, or a faster way back.")
    return RecoveryTier(name, mean_s, work_s, blocked_s, durable_s, limit, down_s, restart_s, parts.work, losses)


def _replacement_share(plan: PlanInput, step: MappedStep, mean_s: float) -> float:
    """Capacity that is away until a spare has taken over. With in-place recovery it is one replica, 1/dp of the batch.

    Without, it is the whole batch, for as long as the replacement takes longer than the restart.
    """
    if plan.recovery != "in-place" or step.mapping.data == 1:
        waits = plan.in_place_share * max(0.0, plan.replace_s - plan.detect_s - plan.restart_s) / mean_s
        return waits / (1.0 + waits)
    return min(1.0, plan.in_place_share * plan.replace_s / mean_s / step.mapping.data)


def _spares(plan: PlanInput, step: MappedStep) -> tuple[int, float, float]:
    """(spare nodes, P(more down than spares), share of capacity missing through that)."""
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
