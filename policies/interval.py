"""The time of the next durable checkpoint, from its cost and from how often faults need it.

Only faults that need *this* checkpoint count for the rate. When another rank holds a lost rank's state, no checkpoint is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from fleet.errors import ConfigError
from fleet.laws.checkpointing import daly_work_s, exact_work_s, young_work_s
from fleet.laws.reliability import all_lost_rate_per_s
from fleet.ledger.rates import PRIOR_EVENTS, prior
from fleet.protocol.decisions import Decision, Interval
from fleet.settings.run import CheckpointSettings, RunSettings

LAWS: dict[str, Callable[[float, float], float]] = {"young": young_work_s, "daly": daly_work_s, "exact": exact_work_s}


FIRST_S, PEER_FIRST_S = 10.0, 3.0
"""When the first durable checkpoint, and the first copy in the memory of other nodes, are due: soon, so that their cost is known."""

MAX_S, PEER_MAX_S = 3600.0, 300.0
"""The longest intervals of both. An operator may want to stop and go on elsewhere also when no fault needs a checkpoint. A fault that needs
a copy costs no more than its interval, however rare the fault is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInterval:
    """An ``IntervalPolicy``: ``law`` is fixed, young, daly or exact.

    Args:
        law: the way in which the interval follows from cost and fault rate.
        interval_s: the interval of ``fixed``.
        first_s: when the first checkpoint is due.
        max_s: the longest interval.
    """

    law: str = CheckpointSettings().policy
    interval_s: float | None = None
    first_s: float = FIRST_S
    max_s: float = MAX_S

    def __post_init__(self) -> None:
        if self.law != "fixed" and self.law not in LAWS:
            raise ConfigError("checkpoint.policy", self.law, "unknown", f"Choose one of fixed, {', '.join(LAWS)}.")
        if (self.law == "fixed") != (self.interval_s is not None):
            reason = "fixed needs an interval" if self.law == "fixed" else f"{self.law} computes the interval itself"
            raise ConfigError("checkpoint.interval_s", self.interval_s, reason, "Set interval_s with policy fixed, and only then.")
        CheckpointSettings(interval_s=self.interval_s)

    @classmethod
    def of(cls, run: RunSettings, own: None) -> Self:
        """The policy of a run, for its durable checkpoints."""
        return cls(law=run.checkpoint.policy, interval_s=run.checkpoint.interval_s)

    @classmethod
    def of_copies(cls, run: RunSettings) -> Self:
        """The policy of a run, for copies in the memory of other nodes. It follows from cost and rate, unless it is fixed."""
        every_s = run.checkpoint.peer_interval_s
        return cls(law="fixed", interval_s=every_s) if every_s else cls(first_s=PEER_FIRST_S, max_s=PEER_MAX_S)

    def configured(self, settings: CheckpointSettings) -> CheckpointInterval:
        """The same policy under new settings."""
        return dataclasses.replace(self, law=settings.policy, interval_s=settings.interval_s)

    def due(
        self, now_s: float, last_s: float, blocked_s: float, latency_s: float, rate_per_s: float, *,
        events: int = 0, exposure_s: float = 0.0,
    ) -> Decision:  # fmt: skip
        """Save now, or wait until ``valid_until_s``.

        Args:
            now_s, last_s: now, and the end of the last checkpoint (or the begin of the run).
            blocked_s: C, the time for which one checkpoint blocks the loop. Unknown when neither it nor ``latency_s`` is above 0.
            latency_s: L, how long one takes until it is durable. The interval is never below it.
            rate_per_s: rate of the faults that need this level's checkpoint, as expected before the run. With several levels each has its
                own, and its interval is the first-order optimum of all together (:func:`fleet.laws.tiers.multilevel_work_s`).
            events, exposure_s: the number of such faults that the run has met, and its time. The rate is the mean of the Gamma posterior.
        """
        rate_per_s = updated_rate_per_s(rate_per_s, events, exposure_s)
        interval_s, why = self._interval(blocked_s, latency_s, rate_per_s)
        if events:
            why = f"{why}; {events} of them in {exposure_s:.0f} s"
        facts = Interval(interval_s, blocked_s, latency_s, rate_per_s, float(events), exposure_s)
        # The reason names no moment, so that it changes only when the interval does.
        reason = f"every {interval_s:.1f} s: {why}"
        due_s = last_s + interval_s
        return Decision("save", reason, facts) if now_s >= due_s else Decision("wait", reason, facts, due_s)

    def _interval(self, blocked_s: float, latency_s: float, rate_per_s: float) -> tuple[float, str]:
        if self.interval_s is not None:
            return self._bounded(self.interval_s, max(self.interval_s, self.max_s), latency_s, "fixed by the user")
        if not (blocked_s > 0 or latency_s > 0):
            return min(self.first_s, self.max_s), "the first one, to learn its cost"
        if not rate_per_s > 0:
            return self._bounded(self.max_s, self.max_s, latency_s, "no fault is expected to need it")
        blocked = max(blocked_s, 0.0)
        work_s = LAWS[self.law](blocked, 1.0 / rate_per_s)
        why = f"{self.law} for C = {blocked:.3g} s and a fault that needs it every {1.0 / rate_per_s:.4g} s"
        return self._bounded(work_s + blocked, self.max_s, latency_s, why)

    @staticmethod
    def _bounded(interval_s: float, max_s: float, latency_s: float, why: str) -> tuple[float, str]:
        if interval_s > max_s:
            interval_s, why = max_s, f"{why}; not above {max_s:g} s"
        if interval_s < latency_s:
            return latency_s, f"{why}; not below the {latency_s:.3g} s that one takes until it is durable"
        return interval_s, why


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelRates:
    """Rates of faults that need each level of checkpoints, from the prior of the run and from its own losses.

    Replicated state is lost only when no rank holds it any more (:func:`fleet.laws.reliability.all_lost_rate_per_s`), or when all ranks go
    at a time. It is an estimate: failures are independent and exponential. So ``whole_per_s`` must have shared causes (a rack, a switch, a
    bug that all ranks meet), and in practice these dominate. A repair time that varies counts with its mean.

    Args:
        faults_per_s: faults that take a rank, over all ranks, as expected before the run.
        head_per_s: of the control plane's node, whose loss needs the store.
        whole_per_s: of faults that take all ranks at a time.
        copies_lost_per_s: of the loss of all nodes that hold a copy; None: there are no copies on other nodes.
        restarts: all ranks begin from a checkpoint after each fault.
        world: ranks.
        copied: copies in memory are made.
        refill_s: time until a lost rank is replaced.
    """

    faults_per_s: float
    head_per_s: float = 0.0
    whole_per_s: float = 0.0
    copies_lost_per_s: float | None = None
    restarts: bool = False
    world: int
    copied: bool = False
    refill_s: float

    def __call__(self, losses: int, exposure_s: float) -> tuple[float, float]:
        """Rates a second of the faults that need the store, and memory, after ``losses`` ranks were lost to faults in ``exposure_s``."""
        faults_per_s = updated_rate_per_s(self.faults_per_s, losses, exposure_s, PRIOR_EVENTS)
        if self.restarts:
            return faults_per_s + self.head_per_s, faults_per_s if self.copied else 0.0
        all_ranks_per_s = self.whole_per_s + all_lost_rate_per_s(faults_per_s, self.world, self.refill_s)
        if self.copies_lost_per_s is None:
            return self.head_per_s + all_ranks_per_s, 0.0
        return self.head_per_s + self.copies_lost_per_s, all_ranks_per_s


def updated_rate_per_s(prior_rate_per_s: float, events: int, exposure_s: float, prior_events: float = 1.0) -> float:
    """Posterior mean of a Poisson rate, as in the run's forecast (``fleet.ledger.rates``): a prior worth ``prior_events`` = a events.

    It is (a + events) / (a / prior_rate + exposure) as long as faults come about as expected. With a = 1, a run without faults for as long
    as its prior MTBF halves the rate. When faults come far more often than expected, the prior loses its weight. A prior rate of 0 has no
    weight: the estimate is then events / exposure, 0 with no exposure.
    """
    if prior_rate_per_s <= 0:
        return events / exposure_s if exposure_s > 0 else 0.0
    if not events:
        return prior_events / (prior_events / prior_rate_per_s + exposure_s)
    return prior(prior_rate_per_s, prior_events).after(events, exposure_s).mean
