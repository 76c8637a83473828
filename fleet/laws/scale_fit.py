"""The Fleet Law of a job, fitted to the measured steps at some worlds: T(N) = T_compute/N + T_comm(N) + T_sync(N), term by term.

Each term is a sum of shapes, functions of the world alone, with a coefficient in seconds for each. Least squares give the coefficients,
never below 0 (Lawson & Hanson 1974, Solving Least Squares Problems, chapter 23).

The sample is made of visits: one visit is one world, trained with once for a while. Visits of one world differ by more than the noise of
their steps, so steps are no sample. The fit takes the visits' deviations as normal. It takes them as correlated between terms: a delay of a
host delays all of them. The likelihood chooses how a deviation grows with its term. Intervals are Student's, of weighted linear regression
(Draper & Smith 1998, Applied Regression Analysis, chapters 3 and 9).

An interval covers the difference between visits, and the uncertainty of coefficients from few visits. It does not cover another shape of
the law at worlds without a visit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigError

Array = NDArray[np.float64]
Shape = Callable[[int, int], float]
CONFIDENCE = 0.9
PARTS_OF_STEP = (0.02, 0.1, 0.5)
"""A term deviates in proportion to itself and to one of these parts of the step. A delay of a rank delays some term of its step. The
visits' likelihood chooses the part."""


def largest_part(world: int, shards: int) -> float:
    """Share of the shards that the rank with most of them has. Beyond one rank a shard, the law cuts the batch as finely."""
    return math.ceil(shards / world) / shards if world <= shards else 1.0 / world


def slowest(world: int) -> float:
    """Expected largest of ``world`` independent normal deviations, in their standard deviations: Blom 1958, Statistical Estimates."""
    from scipy.special import ndtri

    return float(ndtri((world - 0.375) / (world + 0.25))) if world > 1 else 0.0


SHAPES: Mapping[str, Mapping[str, Shape]] = {
    "compute": {"compute": largest_part},
    "update": {"update": lambda world, shards: 1.0},
    "data": {"data": largest_part},
    "exchange": {
        "exchange_alone": lambda world, shards: 1.0,
        "exchange_volume": lambda world, shards: 2.0 * (world - 1) / world,
        "exchange_peers": lambda world, shards: world - 1.0,
    },
    "wait": {"wait": lambda world, shards: slowest(world)},
    "verify": {"verify": lambda world, shards: float(world > 1)},
}
"""Term -> name of a coefficient -> its shape. Volume and peers are those of a ring all-reduce (``collectives.ring_all_reduce_s``)."""


@dataclass(frozen=True, slots=True)
class Visit:
    """A world, trained with once: mean seconds of a step by term, as in ``fleet.ledger.step_terms``."""

    world: int
    terms: Mapping[str, float]

    @property
    def step_s(self) -> float:
        """The sum of all terms."""
        return sum(self.terms.values())


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure, and the interval that holds it with ``CONFIDENCE``."""

    value: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether ``value`` is in the interval."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class _Term:
    """One term's regression, of observations in proportion to their deviation.

    ``pseudo`` maps observations to coefficients, and ``left`` maps them to residuals.
    """

    shapes: Mapping[str, Shape]
    part: float
    coefficients: Array
    pseudo: Array
    left: Array
    residuals: Array

    @property
    def freedom(self) -> int:
        return round(float(np.trace(self.left)))

    def row(self, world: int, shards: int) -> Array:
        return np.array([shape(world, shards) for shape in self.shapes.values()])


@dataclass(frozen=True)
class Fit:
    """The law of a job. ``worlds`` are the worlds of its visits."""

    shards: int
    worlds: tuple[int, ...]
    terms: Mapping[str, _Term]

    def term_s(self, name: str, world: int) -> float:
        """Seconds of one term at a world."""
        term = self.terms[name]
        return float(term.row(world, self.shards) @ term.coefficients)

    def terms_s(self, world: int) -> dict[str, float]:
        """Seconds by term at a world."""
        return {name: self.term_s(name, world) for name in self.terms}

    def step_s(self, world: int, visits: int = 1) -> Estimate:
        """The mean step of so many visits to a world."""
        names = list(self.terms)
        middle = sum(self.terms_s(world).values())
        variances = np.array([[self._covariance(a, b, world, visits, middle) for b in names] for a in names])
        return _around(middle, float(variances.sum()), self._freedom(names, np.diag(variances)))

    def coefficients(self) -> dict[str, Estimate]:
        """Estimates by name of the coefficient, in seconds."""
        found = {}
        for term in self.terms.values():
            sigma2 = float(term.residuals @ term.residuals) / term.freedom
            spread = (term.pseudo**2).sum(axis=1) * sigma2
            for name, value, variance in zip(term.shapes, term.coefficients, spread, strict=True):
                found[name] = _around(float(value), float(variance), term.freedom)
        return found

    def _covariance(self, one: str, other: str, world: int, visits: int, step_s: float) -> float:
        """Covariance of the errors of two predicted terms: the errors of their coefficients, and the deviations of visits to come."""
        a, b = self.terms[one], self.terms[other]
        sigma2 = float(a.residuals @ b.residuals) / float((a.left * b.left).sum())
        known = (a.row(world, self.shards) @ a.pseudo) @ (b.row(world, self.shards) @ b.pseudo)
        to_come = math.hypot(self.term_s(one, world), a.part * step_s) * math.hypot(self.term_s(other, world), b.part * step_s)
        return sigma2 * (float(known) + to_come / visits)

    def _freedom(self, names: Sequence[str], variances: Array) -> float:
        """The terms' degrees of freedom, weighted by their part in the variance. A host's delay hits all terms: a sum would be too high."""
        below = sum(float(v) / self.terms[name].freedom for name, v in zip(names, variances, strict=True))
        return float(variances.sum()) / below if below > 0 else float(min(self.terms[name].freedom for name in names))


def _around(value: float, variance: float, freedom: float) -> Estimate:
    from scipy.special import stdtrit

    half = float(stdtrit(freedom, 0.5 + CONFIDENCE / 2)) * math.sqrt(max(0.0, variance))
    return Estimate(value, max(0.0, value - half), value + half)


def evened(visit: Visit, shards: int) -> Visit:
    """The visit with compute and data of the rank with most shards. The other ranks wait for it, and that wait is not noise."""
    longer = largest_part(visit.world, shards) * visit.world - 1.0
    more = {name: visit.terms[name] * longer for name in ("compute", "data")}
    terms = {name: value + more.get(name, 0.0) for name, value in visit.terms.items()}
    return Visit(visit.world, terms | {"wait": terms["wait"] - sum(more.values())})


def fit(visits: Sequence[Visit], shards: int) -> Fit:
    """The law that fits the visits best, at ``shards`` shards a step. Raises ConfigError when there are too few visits."""
    worlds = tuple(sorted({visit.world for visit in visits}))
    check_determines(worlds, len(visits))
    even = [evened(visit, shards) for visit in visits]
    return Fit(shards, worlds, {name: _regression(name, even, shards) for name in SHAPES})


def check_determines(worlds: Sequence[int], visits: int) -> None:
    """Check that so many visits of these worlds determine the law. Raises ConfigError."""
    if len(worlds) < 2 or max(worlds) < 2:
        reason = f"the law is fitted to the worlds {', '.join(map(str, worlds)) or 'none'}, and one world does not show how a step scales"
        raise ConfigError("--worlds", ",".join(map(str, worlds)), reason, "Name at least two worlds beside the held-out one: 1,2,4.")
    if visits < 3:
        reason = "a line always fits two visits, so that its error is unknown"
        raise ConfigError("--rounds", visits, reason, "Visit each world twice: --rounds 2.")


def _regression(name: str, visits: Sequence[Visit], shards: int) -> _Term:
    """The regression of one term with the most likely deviations."""
    shapes = _separable(SHAPES[name], visits, shards)
    found = [_weighted(name, visits, shapes, part, shards) for part in PARTS_OF_STEP]
    return max(found, key=lambda pair: pair[0])[1]


def _weighted(name: str, visits: Sequence[Visit], shapes: Mapping[str, Shape], part: float, shards: int) -> tuple[float, _Term]:
    """(log-likelihood, regression) with deviations in proportion to the term and to ``part`` of the step."""
    from scipy.optimize import nnls

    means = {world: np.mean([(v.terms[name], v.step_s) for v in visits if v.world == world], axis=0) for world in {v.world for v in visits}}
    weights = np.array([1.0 / math.hypot(means[v.world][0], part * means[v.world][1]) for v in visits])
    rows = np.array([[shape(visit.world, shards) for shape in shapes.values()] for visit in visits]) * weights[:, None]
    informative = rows.any(axis=1)
    seen = np.array([visit.terms[name] for visit in visits]) * weights * informative
    coefficients = np.asarray(nnls(rows, seen)[0], dtype=np.float64)
    pseudo, residuals = np.asarray(np.linalg.pinv(rows), dtype=np.float64), seen - rows @ coefficients
    left = np.diag(informative.astype(np.float64)) - rows @ pseudo
    mean_square = max(float(residuals @ residuals) / float(informative.sum()), 1e-30)
    likely = float(np.log(weights[informative]).sum()) - 0.5 * float(informative.sum()) * math.log(mean_square)
    return likely, _Term(shapes, part, coefficients, pseudo, left, residuals)


def _separable(shapes: Mapping[str, Shape], visits: Sequence[Visit], shards: int) -> dict[str, Shape]:
    """The first shapes that these worlds tell apart; one visit more than shapes remains, for their error."""
    kept: dict[str, Shape] = {}
    informative = sum(any(shape(visit.world, shards) for shape in shapes.values()) for visit in visits)
    for name, shape in shapes.items():
        tried = kept | {name: shape}
        rows = np.array([[each(visit.world, shards) for each in tried.values()] for visit in visits])
        if len(tried) < informative and np.linalg.matrix_rank(rows) == len(tried):
            kept = tried
    return kept
