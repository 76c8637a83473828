"""Larger worlds: a fitted law beside the measurements, beyond them, and in money. Pure; ``docs/scale.md`` gives its purpose."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fleet.errors import ConfigError
from fleet.laws.checkpointing import exact_work_s, goodput
from fleet.laws.law import HOUR_S
from fleet.laws.reliability import mtbf_s
from fleet.laws.scale_fit import CONFIDENCE, Estimate, Fit, Visit

FORMAT, VERSION = "fleet-scale", 1
GROUPS: Mapping[str, tuple[str, ...]] = {
    "compute": ("compute", "update"),
    "communication": ("exchange",),
    "coordination": ("data", "wait", "verify"),
}
"""The three C: the terms of a step that belong to each."""
LARGER = 3
"""The law goes up to worlds of 2 to this power times the largest measured one."""


@dataclass(frozen=True, slots=True)
class Failures:
    """The rate of lost ranks, and the cost of a loss.

    Attributes:
        rank_mtbf_hours: mean hours between two losses of one rank.
        recover_s: time for which all ranks stand still.
        blocked_s: time for which a checkpoint stops training, where a loss goes back to one.
        policy: ``in-place``, or ``restart`` from the newest checkpoint.
    """

    rank_mtbf_hours: float
    recover_s: float
    blocked_s: float = 0.0
    policy: str = "in-place"

    def __post_init__(self) -> None:
        if not self.rank_mtbf_hours > 0:
            raise ConfigError("--mtbf-hours", self.rank_mtbf_hours, "must be greater than 0 h", "Leave it out: 50,000 h are published.")
        if not 0 <= self.recover_s < float("inf"):
            raise ConfigError("--recover", self.recover_s, "must be a number of seconds, at least 0")

    def kept_share(self, world: int, step_s: float) -> float:
        """Share of the time that becomes kept steps. In place a loss takes the current step, else all steps since a checkpoint."""
        job_s = mtbf_s(self.rank_mtbf_hours * HOUR_S, world)
        restarts = self.policy == "restart" and self.blocked_s > 0
        work_s = max(step_s, exact_work_s(self.blocked_s, job_s)) if restarts else step_s
        return goodput(work_s, self.blocked_s if restarts else 0.0, job_s, self.recover_s)


@dataclass(frozen=True, slots=True)
class RankPrice:
    """The cost of a rank-second, and the goods of a step."""

    per_rank_s: float
    money: str
    per_step: float
    goods: str


@dataclass(frozen=True, slots=True)
class WorldRow:
    """One world by the law. ``cost``: of a million kept goods. ``further_cost``: of a million goods that this world brings beyond the row
    before; None in the first row, and where it brings no more."""

    world: int
    step: Estimate
    terms: Mapping[str, float]
    efficiency: float
    kept_share: float
    kept_per_s: float
    cost: float
    further_cost: float | None
    pays: bool


def candidates(worlds: Sequence[int]) -> list[int]:
    """The measured worlds, and larger ones by doubling."""
    return sorted({*worlds, *(max(worlds) * 2**power for power in range(1, LARGER + 1))})


def rows(fit: Fit, worlds: Sequence[int], visits: int, failures: Failures, price: RankPrice, most: float) -> list[WorldRow]:
    """A row for each world. A world pays as long as a further kept good costs at most ``most`` times the cheapest one."""
    found = [_row(fit, world, visits, failures, price, min(worlds)) for world in worlds]
    dearest = most * min(row.cost for row in found)
    compared = [_with_further(before, row, price, dearest) for before, row in itertools.pairwise(found)]
    ends = next((number for number, row in enumerate(compared) if not row.pays), len(compared))
    return [found[0], *compared[:ends], *(replace(row, pays=False) for row in compared[ends:])]


def _row(fit: Fit, world: int, visits: int, failures: Failures, price: RankPrice, least: int) -> WorldRow:
    step = fit.step_s(world, visits)
    base_s = fit.step_s(least).value * least
    share = failures.kept_share(world, step.value)
    per_s = share * price.per_step / step.value
    return WorldRow(
        world, step, fit.terms_s(world), base_s / (step.value * world), share, per_s, world * price.per_rank_s / per_s * 1e6, None, True
    )


def _with_further(before: WorldRow, row: WorldRow, price: RankPrice, dearest: float) -> WorldRow:
    gained = row.kept_per_s - before.kept_per_s
    further = (row.world - before.world) * price.per_rank_s / gained * 1e6 if gained > 0 else None
    return replace(row, further_cost=further, pays=further is not None and further <= dearest)


def pays_up_to(found: Sequence[WorldRow]) -> int:
    """The largest world that pays."""
    return max(row.world for row in found if row.pays)


def fastest(found: Sequence[WorldRow]) -> int:
    """The world that keeps most goods a second."""
    return max(found, key=lambda row: row.kept_per_s).world


# ---- room on the host --------------------------------------------------------------------------------------------------------------------


def check_room(world: int, threads: int, cores: float, quota: float | None) -> None:
    """Refuse ranks that would compete for cores, as the fit would measure that. Raises ConfigError."""
    if quota is None:
        if world * threads > cores:
            part = int(90 * cores / world) / 100
            reason = f"{world} ranks of {threads} thread(s) share {cores:g} cores, and the fit would measure that"
            way_out = f"Use worlds up to {max(1, int(cores // threads))}, or give each rank the same part of a core: --cpu-quota {part:g}."
            raise ConfigError("--worlds", world, reason, way_out)
        return
    if not quota > 0:
        raise ConfigError("--cpu-quota", quota, "must be greater than 0 cores")
    if world * quota > cores:
        reason = f"{world} ranks of {quota:g} cores need more than the {cores:g} cores of this host, and would take them from each other"
        raise ConfigError("--cpu-quota", quota, reason, f"The nearest valid value is {int(100 * cores / world) / 100:g}.")
    if quota > threads:
        reason = f"a rank computes with {threads} thread(s) and cannot use more"
        raise ConfigError("--cpu-quota", quota, reason, f"The nearest valid value is {threads}.")


def check_worlds(worlds: Sequence[int], held_out: int, shards: int) -> None:
    """Refuse worlds that no run can have, or that leave no other world for the fit. Raises ConfigError."""
    named = ",".join(map(str, worlds))
    if any(world < 1 for world in worlds) or len(set(worlds)) < len(worlds):
        raise ConfigError("--worlds", named, "must be different whole numbers of ranks, each at least 1", "For example 1,2,4,8.")
    if held_out not in worlds:
        raise ConfigError("--hold-out", held_out, f"is none of the worlds {named}", f"The nearest valid value is {max(worlds)}.")
    if max(worlds) > shards:
        reason = f"a step has {shards} batch shards, and a rank without one has nothing to compute"
        raise ConfigError("--worlds", max(worlds), reason, "Add --config shards=N, a multiple of all worlds.")


# ---- the file ----------------------------------------------------------------------------------------------------------------------------


def judged(prediction: Estimate, visits: Sequence[Visit]) -> dict[str, Any]:
    """The measured step of the held-out world beside its prediction."""
    step_s = sum(visit.step_s for visit in visits) / len(visits)
    return {"step_s": step_s, "visits": len(visits), "inside": prediction.holds(step_s), "off": step_s / prediction.value - 1.0}


def groups(terms: Mapping[str, float]) -> dict[str, float]:
    """Share of a step by compute, communication and coordination."""
    whole = sum(terms.values())
    return {name: sum(terms[term] for term in inside) / whole for name, inside in GROUPS.items()}


def fit_plain(fit: Fit) -> dict[str, Any]:
    """The law for JSON."""
    said = {name: asdict(estimate) for name, estimate in fit.coefficients().items()}
    return {"worlds": list(fit.worlds), "confidence": CONFIDENCE, "coefficients_s": said}
