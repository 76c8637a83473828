"""A whole fleet as the fleet simulator sees it: rates and times, a few dozen numbers whatever its size.

One node is the smallest thing that can be lost. Times are seconds, rates are per second over the whole fleet.
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
"""``FaultClass.need``: no checkpoint. Peers hold the same state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Where copies of the state go, the nearest first in ``FleetModel.tiers``.

    ``blocked_s`` is what a copy stops training for, ``latency_s`` how long it takes from the request until it can be relied on (at least
    ``blocked_s``), ``restore_s`` how long all ranks take to have it back.
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
        rate_per_s: over the whole fleet.
        nodes: nodes that each takes; 0 for one that only ends processes.
        need: index of the nearest tier that survives it, or ``HELD``; ``restart_need`` the same when all ranks restart anyway, by
            default the farthest where peers would have held the state.
        detect_s: from the fault until everyone knows. Nothing else can strike meanwhile: nothing runs.
        notice_s: how long training goes on upon a state that is already wrong (silent corruption), before anyone knows.
        announced: comes with a notice, so that it waits for the end of the step and loses no work (maintenance).
        repair_s: mean until the nodes are back; None: the fleet's.
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

    ``mitigated`` is what is left of the severity once the straggler policy has acted, ``notice_s`` after the spell began.
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
        """Mean time of a spell before the policy acts: E[min(D, notice)] of an exponential D. Many are over before they are noticed."""
        return -self.duration_s * math.expm1(-self.notice_s / self.duration_s) if self.duration_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetModel:
    """A job on a fleet.

    Args:
        nodes: that train; ``spares`` stand by beside them.
        duration_s: of the run.
        faults, slow, tiers: see there.
        reform_s: new groups among those who are left, when peers hold the state.
        restart_s: start of all processes, when they do not.
        join_s: what a spare's place in the groups costs everyone besides (its state is sent).
        replace_s: until a spare that was called can take part; 0 for one that runs already.
        repair_s, crews: mean time to repair a node (exponential), and how many at a time; None: all.
        step_s: of a step: half of one is lost where peers hold the state.
        replica_nodes: nodes that stand still for each one that is missing (those of a model replica).
        min_nodes: with fewer the job waits.
        lemon_share, lemon_factor: a share of the nodes fails that many times as often as the others; the total rate is what it is.
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
        """Rate of the faults that need this very tier, ``restarting``: when all ranks restart after each."""
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
        """Share of the faults that strike a lemon."""
        return self.lemon_share * self.lemon_factor / rate_with_lemons_per_s(1.0, self.lemon_share, self.lemon_factor)


@dataclass(frozen=True, slots=True)
class FleetOutcome:
    """What a simulated run came to.

    ``shares`` of the wall clock x nodes add up to 1; ``goodput`` is the first of them. ``counts``: faults by component. ``saves``: copies
    by tier. ``events``: faults, repairs, arrivals of spares and policy questions that were handled; ``asked``: questions that the policies
    answered anew. ``complete_s``: how far the run came, if it was interrupted.
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
        """Share of the wall clock x nodes that became steps that were kept, at full speed."""
        return self.shares["goodput"]


class LemonPolicy(Protocol):
    """Whether a node that keeps failing stays out. Pure; see ``policies.lemons``, to which the caller adapts it."""

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
    """Set from outside, e.g. by a signal: the run stops at the next fault, and says how far it came."""

    stop: bool = False
