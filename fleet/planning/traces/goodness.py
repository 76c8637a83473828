"""Whether lives follow a law: the largest distance between them and the law (Kolmogorov, Smirnov), and how often chance alone gives more.

The law's parameters come from the same lives, so that no table of the distance holds: samples of the same size are drawn from the fitted
law, censored where the real lives could have been, fitted anew, and their distances compared (parametric bootstrap; Stute, Gonzales
Manteiga & Presedo Quindimil 1993, Metrika 40). What is compared with the law is the estimate of Kaplan and Meier.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from fleet.planning.traces.lives import LAWS, Floats

AGAIN, MOST_LIVES = 99, 400
"""Samples that are drawn, and lives of each: of more lives these many are taken, so that the test takes no longer."""


def distance(law: str, lives: Floats, seen: Floats, first: float, second: float) -> float:
    """The largest distance between the law and the lives' own distribution, at the lives whose end was seen."""
    kept = stats.ecdf(stats.CensoredData.right_censored(lives, seen == 0)).sf
    after, times = kept.probabilities, kept.quantiles
    before = np.concatenate(([1.0], after[:-1]))
    model, dead = LAWS[law].of(first, second).sf(times), np.isin(times, lives[seen > 0])
    return float(np.max(np.maximum(np.abs(after - model), np.abs(before - model))[dead]))


def probability(law: str, lives: Floats, seen: Floats, limits: Floats, rng: np.random.Generator) -> float:
    """How often lives that do follow the law are as far from it: below 0.05 they hardly do.

    Args:
        law: name.
        lives, seen: [lives], see :mod:`fleet.planning.traces.lives`.
        limits: how long each life could have been seen at most; inf: for ever.
        rng: of the samples.
    """
    if len(lives) > MOST_LIVES:
        chosen = rng.choice(len(lives), MOST_LIVES, replace=False)
        lives, seen, limits = lives[chosen], seen[chosen], limits[chosen]
    if seen.sum() < 2:
        return math.nan
    kind = LAWS[law]
    first, second = kind.fit(lives, seen)
    real = distance(law, lives, seen, first, second)
    again = kind.of(first, second).ppf(rng.random((AGAIN, len(lives))))
    again = np.maximum(again, float(lives.min()) * 1e-3)
    drawn = [(np.minimum(each, limits), (each <= limits).astype(float)) for each in again]
    further = [distance(law, each, ends, *kind.fit(each, ends)) >= real for each, ends in drawn if ends.sum() >= 2]
    return float(sum(further) + 1) / (len(further) + 1) if further else math.nan
