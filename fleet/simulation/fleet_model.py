"""The fleet simulator's model of a whole fleet: rates and times, a few dozen numbers for a fleet of any size.

A fault takes whole nodes, or none. Times are seconds, rates are per second over the whole fleet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fleet.errors import ConfigError
from fleet.laws.spares import rate_with_lemons_per_s
from fleet.protocol.decisions import Decision

HELD = -1
"""Value of ``FaultClass.need``: no checkpoint is needed, since peers hold the same state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A place for copies of the state. ``FleetModel.tiers`` has the nearest first.

    ``blocked_s``: seconds for which a copy stops training. ``latency_s``: seconds from the request until the copy is safe (at least
    ``blocked_s``). ``restore_s``: seconds until all ranks have loaded it.
    """

    name: str
    blocked_s: float = 0.0
    latency_s: float = 0.0
    restore_s: float = 0.0

    def __post_init__(self) -> None:
        _at_least_zero(self, "tiers", ("blocked_s", "restore_s"))
        if not self.blocked_s <= self.latency_s < math.inf:
            reason = f"a copy cannot be relied on before it stops blocking, after blocked_s = {self.blocked_s:g}"
            raise ConfigError(f"tiers.{self.name}.latency_s", self.latency_s, reason, f"The nearest valid value is {self.blocked_s:g}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultClass:
    """Faults of one component.

    Args:
        rate_per_s: rate over the whole fleet.
        nodes: nodes that each fault takes; 0 for a fault that only ends processes.
        need: index of the nearest tier that survives it, or ``HELD``. ``restart_need``: the same when all ranks restart anyway; by default
            the farthest, where peers would have held the state.
        detect_s: seconds from the fault until the job knows of it. No other fault can stop the job meanwhile, since it does not run.
        notice_s: seconds that training goes on with a wrong state (silent corruption) before the job knows.
        announced: the fault comes with a notice: it waits for the end of the step and loses no work (maintenance).
        repair_s: mean seconds until the nodes are back; None: the fleet's.
    """

    name: str
    rate_per_s: float
    nodes: int = 0
    need: int = HELD
    restart_need: int | None = None
    detect_s: float = 0.0
    notice_s: float = 0.0
    announced: bool = False
    repair_s: float | None = None

    def __post_init__(self) -> None:
        _at_least_zero(self, "faults", ("rate_per_s", "nodes", "detect_s", "notice_s"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowClass:
    """Slow spells: they come at ``rate_per_s``, last ``duration_s`` on average, and make a step ``severity`` times as long.

    ``mitigated`` is the severity once the straggler policy has acted, ``notice_s`` after the spell began.
    """

    name: str
    rate_per_s: float
    duration_s: float
    severity: float
    mitigated: float | None = None
    notice_s: float = 0.0

    def __post_init__(self) -> None:
        _at_least_zero(self, "slow", ("rate_per_s", "duration_s", "notice_s"))
        if not 1 <= self.severity < math.inf:
            raise ConfigError(f"slow.{self.name}.severity", self.severity, "1 is full speed, 2 half of it", "Set it to 1 or more.")
        if self.mitigated is not None and not 1 <= self.mitigated <= self.severity:
            reason = f"lies between 1 (no loss left) and severity = {self.severity:g} (nothing was done)"
            raise ConfigError(f"slow.{self.name}.mitigated", self.mitigated, reason)

    @property
    def unnoticed_s(self) -> float:
        """Mean time of a spell before the policy acts: E[min(D, notice)] of an exponential D. Many spells end before that."""
        return -self.duration_s * math.expm1(-self.notice_s / self.duration_s) if self.duration_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetModel:
    """A job on a fleet.

    Args:
        nodes: nodes that train; ``spares`` stand by beside them.
        duration_s: seconds of the run.
        faults, slow, tiers: see their classes.
        reform_s: seconds for new groups among the ranks that are left, when peers hold the state.
        restart_s: seconds for the start of all processes, when they do not.
        join_s: additional seconds of all ranks when a spare joins (its state is sent).
        replace_s: seconds until a called spare can take part; 0 for a spare that runs already.
        repair_s, crews: mean time to repair a node (exponential), and how many at a time; None: all.
        step_s: seconds of a step: half a step is lost where peers hold the state.
        replica_nodes: nodes that stand still for each missing one (those of a model replica).
        min_nodes: with fewer nodes the job waits.
        lemon_share, lemon_factor: this share of the nodes fails so many times as often as the others. The total rate stays the same.
    """

    nodes: int
    duration_s: float
    faults: tuple[FaultClass, ...]
    slow: tuple[SlowClass, ...] = ()
    tiers: tuple[Tier, ...] = ()
    spares: int = 0
    reform_s: float = 15.0
    restart_s: float = 300.0
    join_s: float = 0.0
    replace_s: float = 0.0
    repair_s: float = 86_400.0
    crews: int | None = None
    step_s: float = 0.0
    replica_nodes: int = 1
    min_nodes: int = 1
    lemon_share: float = 0.0
    lemon_factor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("nodes", "replica_nodes", "min_nodes"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be at least 1", "The nearest valid value is 1.")
        if self.min_nodes > self.nodes:
            raise ConfigError("min_nodes", self.min_nodes, f"more than the {self.nodes} nodes: the job could never start")
        if not 0 < self.duration_s < math.inf:
            raise ConfigError("duration_s", self.duration_s, "must be greater than 0 s, and finite")
        _at_least_zero(self, "", ("spares", "reform_s", "restart_s", "join_s", "replace_s", "repair_s", "step_s"))
        if self.crews is not None and self.crews < 1:
            raise ConfigError("crews", self.crews, "must be at least 1", "None mends every node at once.")
        if not 0 <= self.lemon_share < 1 or not 1 <= self.lemon_factor < math.inf:
            raise ConfigError("lemon_share", self.lemon_share, f"a share from 0 to 1, with lemon_factor = {self.lemon_factor:g} at least 1")
        for fault in self.faults:
            if not HELD <= fault.need < len(self.tiers):
                raise ConfigError(
                    f"faults.{fault.name}.need", fault.need, f"there are {len(self.tiers)} tiers", "-1: peers hold the state."
                )

    @property
    def rate_per_s(self) -> float:
        """Rate of all faults that stop the job."""
        return sum(fault.rate_per_s for fault in self.faults)

    def tier_rate_per_s(self, tier: int, restarting: bool = False) -> float:
        """Rate of the faults that need exactly this tier. ``restarting``: all ranks restart after each fault."""
        return sum(fault.rate_per_s for fault in self.faults if self.needed(fault, restarting) == tier)

    def needed(self, fault: FaultClass, restarting: bool) -> int:
        """The nearest tier that survives ``fault``, or ``HELD``."""
        if not restarting:
            return fault.need
        if fault.restart_need is not None:
            return fault.restart_need
        return fault.need if fault.need != HELD else len(self.tiers) - 1

    @property
    def lemon_probability(self) -> float:
        """Share of the faults that hit a lemon."""
        return self.lemon_share * self.lemon_factor / rate_with_lemons_per_s(1.0, self.lemon_share, self.lemon_factor)


@dataclass(frozen=True, slots=True)
class FleetOutcome:
    """The result of a simulated run.

    ``shares`` of the wall clock x nodes add up to 1; ``goodput`` is the first of them. ``counts``: faults by component. ``saves``: copies
    by tier. ``events``: faults, repairs, arrivals of spares and policy questions that were handled. ``asked``: questions without a
    remembered answer. ``complete_s``: the end of the run, or of its part if it was interrupted.
    """

    shares: dict[str, float]
    counts: dict[str, int]
    saves: dict[str, float]
    recoveries: int
    rollbacks: int
    events: int
    asked: int
    kept_out: tuple[int, ...] = ()
    complete_s: float = 0.0

    @property
    def goodput(self) -> float:
        """Share of the wall clock x nodes in kept steps, at full speed."""
        return self.shares["goodput"]


class LemonPolicy(Protocol):
    """Decides whether a node that keeps failing stays out. Pure; the caller adapts ``policies.lemons`` to it."""

    def judge(self, node: int, failures_s: Sequence[float], now_s: float) -> Decision:
        """Action ``admit`` or ``keep_out``."""


SHARES = ("goodput", "straggler_wait", "checkpoint_stall", "rework", "detect", "reform", "restore", "provision")
"""Keys of ``Outcome.shares``: categories of the ledger, and goodput."""


def _at_least_zero(owner: object, where: str, names: Sequence[str]) -> None:
    prefix = f"{where}.{getattr(owner, 'name', '')}." if where else ""
    for name in names:
        value = getattr(owner, name)
        if not 0 <= value < math.inf:
            raise ConfigError(f"{prefix}{name}", value, "must be finite and at least 0", "The nearest valid value is 0.")


@dataclass(slots=True)
class Partial:
    """``stop`` is set from outside, e.g. by a signal: the run ends at the next fault, and gives the result of that part."""

    stop: bool = False
