"""The rates of faults, as far as a run can know them: a posterior for each kind, from a prior of other fleets. Also the faults that a run
has met. Pure.

Faults of a kind come at an unknown rate (a Poisson process). The prior of the rate is a Gamma law, worth ``PRIOR_EVENTS`` faults at the
rate of the catalogue or of a fitted log. After n faults in t seconds it is a Gamma law again: n and t add to its two figures (Gelman et
al. 2013, Bayesian Data Analysis, section 2.6).

A small share of the prior, ``SURPRISE``, is vague about the rate. Without it, a run with a fault a minute would still believe a catalogue
with a fault a century (a robust prior: Schmidli et al. 2014, Biometrics 70(4)).

Whenever its training time has doubled, a run forecasts the number of faults for as long again. It scores the forecast when that time is
over: a handful in an hour, a dozen in a month.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from fleet.protocol.causes import AgentHungUp, AgentSilent, Cause, incident
from fleet.protocol.records import FaultRecord, ProcessLost

PRIOR_EVENTS = 2.0
"""Published rates of one component differ two- or threefold between fleets: about the spread after two faults."""
SURPRISE = 1e-5
"""The share of a prior that is vague: the rate may be another one altogether."""
COVERS = 0.90
"""Share of the intervals that hold the truth."""
WIDE = 1_000.0
"""From so many events on, a Gamma law takes the place of the count."""

NOTHING = 1e-60
"""A smaller part of a mean counts as 0."""


@dataclass(frozen=True, slots=True)
class Gamma:
    """The law of a positive number, by its ``shape`` and its ``rate`` (one over its scale): ``shape`` faults in ``rate`` seconds."""

    shape: float
    rate: float

    @property
    def mean(self) -> float:
        return self.shape / self.rate

    @property
    def variance(self) -> float:
        return self.shape / self.rate**2

    def below(self, value: float) -> float:
        """P(X <= value)."""
        if value <= 0:
            return 0.0
        from fleet.laws.reliability import gamma_below  # it takes scipy, which most of a report does without

        return gamma_below(self.shape, value * self.rate)

    def quantile(self, share: float) -> float:
        """The value below which a ``share`` of the law lies."""
        return quantile(self.below, self.mean, share)

    @classmethod
    def like(cls, mean: float, variance: float) -> Gamma:
        """The Gamma law with this mean and variance, both above 0 (Satterthwaite, Biometrics Bulletin 2, 1946)."""
        return cls(mean * mean / variance, mean / variance)


@dataclass(frozen=True, slots=True)
class Rate:
    """The belief of a rate, in events a second: Gamma laws, each with its weight."""

    parts: tuple[tuple[float, Gamma], ...]

    @property
    def mean(self) -> float:
        return sum(weight * law.mean for weight, law in self.parts)

    @property
    def variance(self) -> float:
        return sum(weight * (law.variance + law.mean**2) for weight, law in self.parts) - self.mean**2

    def below(self, rate_per_s: float) -> float:
        """P(rate <= ``rate_per_s``)."""
        return sum(weight * law.below(rate_per_s) for weight, law in self.parts)

    def after(self, events: int, exposure_s: float) -> Rate:
        """The belief after ``events`` in ``exposure_s``: each part learns, and the part that predicted them best gains weight."""
        if not events and not exposure_s:
            return self
        logs = [math.log(weight) + _log_chance(law, events, exposure_s) for weight, law in self.parts]
        chances = [math.exp(log - max(logs)) for log in logs]
        laws = [Gamma(law.shape + events, law.rate + exposure_s) for _, law in self.parts]
        return Rate(tuple((chance / sum(chances), law) for chance, law in zip(chances, laws, strict=True) if chance))

    def none_within(self, duration_s: float) -> float:
        """P(no event in ``duration_s``)."""
        return sum(weight * math.exp(-law.shape * math.log1p(duration_s / law.rate)) for weight, law in self.parts)

    def interval(self, covers: float = COVERS) -> tuple[float, float]:
        """Bounds of the rate with probability ``covers``; the two tails are equal."""
        ends = ((1 - covers) / 2, (1 + covers) / 2)
        low, high = (quantile(self.below, self.mean, share) for share in ends)
        return low, high


VAGUE = Gamma(0.5, 10.0)
"""The vague prior: Jeffreys' shape for a Poisson rate, and a few seconds, so that one fault soon after the start is no storm."""


def prior(rate_per_s: float, events: float = PRIOR_EVENTS) -> Rate:
    """The belief before the run, of a kind whose rate elsewhere is ``rate_per_s``; 0: the rate is unknown.

    Args:
        rate_per_s: events a second of this run, at least 0.
        events: the number of events that the rate rests on.
    """
    if rate_per_s <= 0:
        return Rate(((1.0, VAGUE),))
    return Rate(((1.0 - SURPRISE, Gamma(events, events / rate_per_s)), (SURPRISE, VAGUE)))


def together(rates: Iterable[Rate]) -> Rate:
    """The rate of all kinds, which come independently of each other: the Gamma law with the mean and the variance of their sum."""
    listed = list(rates)
    mean, variance = sum(rate.mean for rate in listed), sum(rate.variance for rate in listed)
    return Rate(((1.0, Gamma.like(mean, variance)),)) if mean > 0 else Rate(((1.0, VAGUE),))


def count_interval(rate: Rate, duration_s: float, covers: float = COVERS) -> tuple[int, int]:
    """The least and the most events in ``duration_s``, with probability ``covers`` or a little more, as counts are whole.

    A Poisson count at a Gamma rate is negative binomial: P(0) = (b / (b + t))^a, P(n + 1) = P(n) (a + n) / (n + 1) t / (b + t).
    """
    law = rate.parts[0][1] if len(rate.parts) == 1 else Gamma.like(rate.mean, rate.variance)
    if law.mean * duration_s > WIDE:
        counted = Gamma.like(law.mean * duration_s, law.mean * duration_s + law.variance * duration_s**2)
        return math.floor(counted.quantile((1 - covers) / 2)), math.ceil(counted.quantile((1 + covers) / 2))
    chance, step = (law.rate / (law.rate + duration_s)) ** law.shape, duration_s / (law.rate + duration_s)
    sums, low = chance, 0
    number = 0
    while sums < (1 + covers) / 2:
        if sums < (1 - covers) / 2:
            low = number + 1
        chance *= step * (law.shape + number) / (number + 1)
        number, sums = number + 1, sums + chance
    return low, number


def quantile(below: Callable[[float], float], start: float, share: float) -> float:
    """The value at which the distribution function ``below`` reaches ``share``, bisected on a scale of factors, to one part in 10,000.

    A value below ``NOTHING`` of ``start``, a mean, is 0.
    """
    low = high = start
    if below(start * NOTHING) >= share:
        return 0.0
    while below(low) > share:
        low /= 16.0
    while below(high) < share:
        high *= 4.0
    while high > 1.0001 * low:
        middle = math.sqrt(low) * math.sqrt(high)
        low, high = (middle, high) if below(middle) < share else (low, middle)
    return high


def _log_chance(law: Gamma, events: int, exposure_s: float) -> float:
    """Log of P(events in ``exposure_s``), without the terms that all laws share: negative binomial."""
    more = math.lgamma(law.shape + events) - math.lgamma(law.shape)
    return more + law.shape * math.log(law.rate) - (law.shape + events) * math.log(law.rate + exposure_s)


FIRST_S = 30.0
"""The run makes its first scored forecast after so much training."""
TOGETHER_S = 1.0
"""Ranks of a node that are lost within this time of each other are one fault."""
LIKE = {"hang": "hang", "corruption": "flip_weight"}
"""The kind of fault that an unplanned loss looks like, by the kind of its incident."""
UNKNOWN = "kill_rank"
"""The assumed kind where a run has no rates before it: the commonest kind."""
NODE_GONE = (AgentHungUp, AgentSilent)


def looks_like(cause: Cause) -> str:
    """The kind of fault of a loss that no fault explains, for its cost and its count."""
    return "lose_node" if isinstance(cause, NODE_GONE) else LIKE.get(incident(cause), UNKNOWN)


@dataclass(slots=True)
class Met:
    """``before``: rates by kind, faults a second, as recorded when the run started. ``events``: the faults since then, by kind.

    ``inside`` of ``scored`` forecasts of the number of faults held the truth.
    """

    before: Mapping[str, float] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    inside: int = 0
    scored: int = 0
    _seen: set[str] = field(default_factory=set)
    _node_lost_s: float = float("-inf")
    _due_s: float = FIRST_S
    """The training time at which the open forecast is scored, and the next one made."""
    _bounds: tuple[int, int] | None = None
    """The least and the most faults in all by then."""

    def rates(self, exposure_s: float) -> dict[str, Rate]:
        """The belief of each kind after so much training."""
        kinds = dict.fromkeys([*self.before, *self.events]) or {UNKNOWN: None}
        return {kind: prior(self.before.get(kind, 0.0)).after(self.events[kind], exposure_s) for kind in kinds}

    def fault(self, record: FaultRecord) -> None:
        """A fault of chaos, or of an operator, was carried out. Each fault counts once."""
        if record.phase == "executed" and record.fault.id not in self._seen:
            self._seen.add(record.fault.id)
            self.events[record.fault.kind] += 1

    def lost(self, record: ProcessLost) -> None:
        """A process was lost. It counts when no fault explains it, and its end is an incident of its own."""
        if record.fault is not None or not incident(record.cause):
            return
        kind = looks_like(record.cause)
        if kind == "lose_node":
            with_others, self._node_lost_s = record.at_s - self._node_lost_s < TOGETHER_S, record.at_s
            if with_others:
                return
        self.events[kind] += 1

    def trained(self, exposure_s: float) -> None:
        """After so much training, and before the next fault counts: score the forecast that is due, and make the next one.

        The due times do not depend on the times of the calls: a journal with a folded old part gives the same score.
        """
        while exposure_s >= self._due_s:
            count = self.events.total()
            if self._bounds is not None:
                self.inside, self.scored = self.inside + (self._bounds[0] <= count <= self._bounds[1]), self.scored + 1
            few, many = count_interval(together(self.rates(self._due_s).values()), self._due_s)
            self._bounds, self._due_s = (count + few, count + many), 2 * self._due_s
