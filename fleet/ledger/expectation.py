"""What a run should keep of its rank-seconds, said before it starts, from the faults that are planned for it.

First order in faults that do not overlap; what one costs is what it costs on a local cluster. A run that falls far below has a cause that
is not in here: ``fleet diagnose`` looks for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from fleet.protocol.fault_kinds import Cost, kind_of
from fleet.protocol.types import Fault
from fleet.settings.run import RunSettings, recovery_named

STALL_S = 0.25
"""Survivors are training again that long after a loss."""
REFILL_S = 6.0
"""A lost rank's process is replaced in about that long, on a local cluster."""
RESTART_S = 10.0
"""All ranks are training again that long after a restart, work that is done again not counted."""
SAVING = 0.01
"""Share of the time that steps stop for checkpoints, about: their cost is not known before the first one."""
MACHINES = 0.5
"""How much machines differ (standard deviation over mean): each cost above is so uncertain, and all of them in the same way."""
COVERS = 0.95
"""Share of runs that end within the interval of their expectation."""
LEAST_S, LEAST_STEPS = 30.0, 20
"""Nothing is expected of a shorter training, or of fewer steps: one loss more or less, or one long step, decides their goodput."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """Goodput while training, and the interval that 95% of such runs end in, rounded outwards to whole percents."""

    goodput: float
    low: float
    high: float

    def place(self, goodput: float) -> str:
        """Where a measured one lies: ``within``, ``below`` or ``above`` the interval."""
        return "below" if goodput < self.low else "above" if goodput > self.high else "within"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What costs depend on. ``progress_s``: a hang is noticed after so long. ``verify``: the share of time that ranks may check each other.

    ``repair_s``: a lost node comes back after that long; infinity: never.
    """

    world: int
    spares: int
    nodes: int
    recovery: str
    progress_s: float
    verify: float
    repair_s: float

    @classmethod
    def of(cls, settings: RunSettings, repair_s: float | None) -> Terms:
        """The terms of a run that is about to start."""
        back_s, verify = math.inf if repair_s is None else repair_s, settings.verify.replicas + settings.verify.compute
        return cls(
            world=settings.world, spares=settings.spares, nodes=settings.nodes, recovery=settings.recovery.policy,
            progress_s=settings.timeouts.progress_s, verify=verify, repair_s=back_s,
        )  # fmt: skip

    @classmethod
    def said(cls, config: Mapping[str, Any]) -> Terms | None:
        """The terms that a run wrote down when it started; None where it expected nothing, or wrote less down."""
        if "expected_goodput" not in config:
            return None
        try:
            run, repair_s = config["settings"], config["chaos"]["repair_s"]
            return cls(
                world=int(run["world"]), spares=int(run["spares"]), nodes=int(run["nodes"]), recovery=recovery_named(run["recovery"]),
                progress_s=float(run["timeouts"]["progress_s"]), verify=float(run["verify"]["replicas"]) + float(run["verify"]["compute"]),
                repair_s=math.inf if repair_s is None else float(repair_s),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError):  # any text may stand there: an older version wrote less
            return None

    def expectation(self, faults: Sequence[Fault], training_s: float, steps: int) -> Expectation | None:
        """What ``training_s`` seconds and ``steps`` steps should leave, of which those of ``faults`` strike that are due by then.

        ``faults`` are planned on the time since training began. None where that is too short to say anything.
        """
        if training_s < LEAST_S or steps < LEAST_STEPS:
            return None
        rank_s = self.world * training_s
        costs = self.costs(faults, training_s)
        low, high = (_kept(cost_s, rank_s) for cost_s in reversed(interval(costs)))
        return Expectation(_kept(sum(costs), rank_s), math.floor(100 * low) / 100, math.ceil(100 * high) / 100)

    def costs(self, faults: Sequence[Fault], duration_s: float) -> list[float]:
        """Rank-seconds that each fault should cost, and what checkpoints and verification should, which come whether one strikes or not."""
        return [(SAVING + self.verify) * self.world * duration_s, *(self._cost(fault, duration_s) for fault in faults)]

    def _cost(self, fault: Fault, duration_s: float) -> float:
        world, left_s = self.world, max(0.0, duration_s - fault.at_s)
        kind = kind_of(fault.kind)
        if Cost.SLOW in kind.may_cost:
            return world * min(fault.duration_s, left_s) * (1.0 - 1.0 / fault.severity)
        if not kind.takes_ranks:
            return 0.0  # it has no operation, or costs a shard
        stands_still, takes_node = Cost.STILL in kind.may_cost, Cost.NODE in kind.may_cost
        ranks = math.ceil(world / self.nodes) if takes_node else 1
        noticed_s = min(fault.duration_s, self.progress_s) if stands_still else 0.0
        if self.recovery == "restart":
            return world * min(noticed_s + RESTART_S, left_s)
        empty_s = max(REFILL_S, self.repair_s) if takes_node else 0.0 if stands_still else REFILL_S
        return world * min(noticed_s + STALL_S, left_s) + max(0, ranks - self.spares) * min(empty_s, left_s)


def expected_goodput(faults: Sequence[Fault], settings: RunSettings, duration_s: float, repair_s: float | None) -> float:
    """Share of the world's rank-seconds, start-up and end not counted, that becomes committed steps while the faults come.

    1 - sum of costs / (world x duration), at least 0. ``repair_s``: a lost node comes back after that long; None: never.
    """
    return _kept(sum(Terms.of(settings, repair_s).costs(faults, duration_s)), settings.world * duration_s)


def interval(costs: Sequence[float]) -> tuple[float, float]:
    """Bounds that the sum of random costs with these means lies between in 95% of cases. Costs are 0 or more, in any unit.

    How many faults strike is known, as they are planned; what each costs is not. Of a cost of which only the mean is known the exponential
    law assumes least: its variance is its mean squared. Machines differ by a factor that all costs share, with mean 1 and variance d^2,
    d = ``MACHINES``. With S1 the sum of the means and S2 that of their squares, the sum's variance is then V = (1 + d^2) S2 + d^2 S1^2. Its
    law is taken for a gamma law of the same mean and variance (Satterthwaite, Biometrics Bulletin 2, 1946), of shape k = S1^2 / V, whose
    quantile at the normal law's z is S1 (1 - 1/(9k) + z / (3 sqrt(k)))^3 (Wilson and Hilferty, PNAS 17, 1931).
    """
    mean, squares = sum(costs), sum(cost * cost for cost in costs)
    if not mean:
        return 0.0, 0.0
    shape = mean * mean / ((1 + MACHINES**2) * squares + (MACHINES * mean) ** 2)
    z = NormalDist().inv_cdf((1 + COVERS) / 2)
    low, high = (mean * max(0.0, 1 - 1 / (9 * shape) + side * z / (3 * math.sqrt(shape))) ** 3 for side in (-1, 1))
    return low, high


def _kept(lost_s: float, rank_s: float) -> float:
    return max(0.0, 1.0 - lost_s / rank_s)
