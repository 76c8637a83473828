"""Whether lives follow a law: the largest distance between them and the law (Kolmogorov, Smirnov), and how often chance gives a larger one.

The law's parameters come from the same lives, so that no table of the distance holds. The test draws samples of the same size from the
fitted law, and censors them where the real lives could have been. It fits them anew and compares their distances. That is a parametric
bootstrap (Stute, Gonzales Manteiga & Presedo Quindimil 1993, Metrika 40). The lives' side of the distance is the estimate of Kaplan and
Meier.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from fleet.planning.traces.lives import LAWS, Floats

AGAIN, MOST_LIVES = 99, 400
"""The number of samples, and the lives of each. Of more lives the test takes so many, to bound its time."""


def distance(law: str, lives: Floats, seen: Floats, first: float, second: float) -> float:
    """The largest distance between the law and the lives' own distribution, at the lives with a known end."""
    kept = stats.ecdf(stats.CensoredData.right_censored(lives, seen == 0)).sf
    after, times = kept.probabilities, kept.quantiles
    before = np.concatenate(([1.0], after[:-1]))
    model, dead = LAWS[law].of(first, second).sf(times), np.isin(times, lives[seen > 0])
    return float(np.max(np.maximum(np.abs(after - model), np.abs(before - model))[dead]))


def probability(law: str, lives: Floats, seen: Floats, limits: Floats, rng: np.random.Generator) -> float:
    """How often lives that follow the law are as far from it; below 0.05 the lives hardly follow it.

    Args:
        law: name.
        lives, seen: [lives], see :mod:`fleet.planning.traces.lives`.
        limits: the longest that the log could have shown of each life; inf: no limit.
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
