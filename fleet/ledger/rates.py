"""How often faults come, as far as a run can know it: a posterior for each kind, which starts from what is known elsewhere. Pure.

Faults of a kind come at a rate that nobody knows (a Poisson process). What is known of it before is a Gamma law, worth ``PRIOR_EVENTS``
faults at the rate of the catalogue or of a fitted log; after n faults in t seconds it is a Gamma law again, with n and t added to its two
figures (Gelman et al., Bayesian Data Analysis, 3rd edition, sec. 2.6). A small share of the prior, ``SURPRISE``, says nothing of the rate:
without it a run that meets a fault a minute would go on to believe a catalogue that has one in a century (a robust prior: Schmidli et al.
2014, Biometrics 70(4)).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

PRIOR_EVENTS = 2.0
"""Published rates of one component differ two- or threefold between fleets: as much as after two faults."""
SURPRISE = 1e-5
"""Share of a prior that holds that the rate is another one altogether."""
COVERS = 0.90
"""Share of the intervals that hold the truth."""
WIDE = 1_000.0
"""From so many events on they are not counted one by one, and a Gamma law stands for them."""

NOTHING = 1e-60
"""So small a part of a mean is nothing."""


@dataclass(frozen=True, slots=True)
class Gamma:
    """The law of a positive number, by its ``shape`` and its ``rate`` (one over its scale): as many faults in so many seconds."""

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
        """The value that a ``share`` of the law lies below."""
        return quantile(self.below, self.mean, share)

    @classmethod
    def like(cls, mean: float, variance: float) -> Gamma:
        """The one with this mean and variance, both above 0 (Satterthwaite, Biometrics Bulletin 2, 1946)."""
        return cls(mean * mean / variance, mean / variance)


@dataclass(frozen=True, slots=True)
class Rate:
    """What is believed of a rate, in events a second: Gamma laws, each with its weight."""

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
        """What is believed once so many have come in so long: each part learns, and the one that had said so gains weight."""
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
        """Bounds that the rate lies between with probability ``covers``, as likely below as above."""
        ends = ((1 - covers) / 2, (1 + covers) / 2)
        low, high = (quantile(self.below, self.mean, share) for share in ends)
        return low, high


VAGUE = Gamma(0.5, 10.0)
"""Nothing known: Jeffreys' shape for a Poisson rate, and a few seconds, so that one fault soon after the start is no storm."""


def prior(rate_per_s: float, events: float = PRIOR_EVENTS) -> Rate:
    """What is believed before the run, of a kind whose rate elsewhere is ``rate_per_s``; 0: nothing is known of it.

    Args:
        rate_per_s: events a second of this run, at least 0.
        events: from how many that is known.
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
    """How many events ``duration_s`` brings, at least and at most, with probability ``covers`` or a little more, as counts are whole.

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
    """Where the distribution function ``below`` reaches ``share``: bisected on a scale of factors, to one part in 10,000. What lies below
    ``NOTHING`` of ``start``, a mean, is 0."""
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
    """Log of P(events in ``exposure_s``), less what all laws have in common: negative binomial."""
    more = math.lgamma(law.shape + events) - math.lgamma(law.shape)
    return more + law.shape * math.log(law.rate) - (law.shape + events) * math.log(law.rate + exposure_s)
