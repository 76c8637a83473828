"""Whether lives follow a law: the largest distance between them and the law (Kolmogorov, Smirnov), and how often chance alone gives more.

The law's parameters come from the same lives, so that no table of the distance holds: samples of the same size are drawn from the fitted
law, censored where the real lives could have been, fitted anew, and their distances compared (parametric bootstrap; Stute, Gonzales
Manteiga & Presedo Quindimil 1993, Metrika 40). What is compared with the law is the estimate of Kaplan and Meier.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fleet.planning.traces.lives import LAWS, Floats, survival

AGAIN, MOST_LIVES = 99, 400
"""Samples that are drawn, and lives of each: of more lives these many are taken, so that the test takes no longer."""


def distance(law: str, lives: Floats, seen: Floats, first: float, second: float) -> float:
    """The largest distance between the law and the lives' own distribution, at the lives whose end was seen."""
    order = np.argsort(lives, kind="stable")
    times, ends = lives[order], seen[order]
    left = np.arange(len(times), 0, -1)
    with np.errstate(divide="ignore"):
        steps = np.cumsum(np.log1p(-ends / left))
    after = np.exp(steps)
    before = np.concatenate(([1.0], after[:-1]))
    model = survival(law, times, first, second)
    dead = ends > 0
    _, last = np.unique(times[dead][::-1], return_index=True)  # of lives that are equally long only the ends of the step count
    of_step = np.sum(dead) - 1 - last
    _, begin = np.unique(times[dead], return_index=True)
    return float(np.max(np.maximum(np.abs(after[dead][of_step] - model[dead][of_step]), np.abs(before[dead][begin] - model[dead][begin]))))


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
    first, second = kind.fit(lives[None], seen[None])
    real = distance(law, lives, seen, float(first[0]), float(second[0]))
    drawn = kind.draw(rng.random((AGAIN, len(lives))), first[0], second[0])
    drawn = np.maximum(drawn, float(lives.min()) * 1e-3)
    ends: NDArray[np.float64] = (drawn <= limits).astype(float)
    drawn = np.minimum(drawn, limits)
    enough = ends.sum(axis=-1) >= 2
    drawn, ends = drawn[enough], ends[enough]
    if not len(drawn):
        return math.nan
    firsts, seconds = kind.fit(drawn, ends)
    samples = zip(drawn, ends, firsts, seconds, strict=True)
    further = sum(distance(law, each, end, float(one), float(two)) >= real for each, end, one, two in samples)
    return float(further + 1) / (len(drawn) + 1)
