"""Other scorers than Fleet's, for comparison: one published score alone."""

from __future__ import annotations

import math

import numpy as np

from policies.straggler.detectors import Scorer, Scores, Sensitivity, combined
from policies.straggler.scores import NORMAL_MAD, Array

ROBUST_Z = 2.5
BEST_SLOWDOWN = 1.25
"""Slowdown against the rank's own best."""


def relative_score(own: Array, reference: Array) -> Array:
    """Reference time / own time of logarithms of both: 1 as fast as the others, 0.5 half as fast."""
    return np.exp(reference - own)


def individual_score(best: Array, now: Array) -> Array:
    """Own best time / own time now, of logarithms of both. A slowdown of all ranks lowers the score of all."""
    return np.exp(best - now)


def robust_zs(values: Array, floor: float = 0.0) -> Array:
    """0.6745 (x - median) / MAD over ``values`` [ranks] (Iglewicz and Hoaglin, 1993); the MAD is not taken below 0.6745 ``floor``."""
    middle = np.nanmedian(values)
    spread = float(np.nanmedian(np.abs(values - middle)))
    return np.asarray(NORMAL_MAD * (values - middle) / max(spread, NORMAL_MAD * floor, 1e-12))


def relative(scores_: Scores, limits: Sensitivity) -> Array:
    """Strength by the relative score alone."""
    return scores_.median_excess / math.log(limits.slowdown(scores_.kind))


def individual(scores_: Scores, limits: Sensitivity) -> Array:
    """Strength by the individual score alone. It cannot tell a slow rank from a slow world."""
    return scores_.change / math.log(BEST_SLOWDOWN)


def robust_z(scores_: Scores, limits: Sensitivity) -> Array:
    """Strength by the robust z among the ranks of this window."""
    known = np.isfinite(scores_.median_excess).any()
    return robust_zs(scores_.median_excess, limits.noise_floor) / ROBUST_Z if known else scores_.median_excess


SCORERS: dict[str, Scorer] = {"combined": combined, "relative": relative, "individual": individual, "robust_z": robust_z}
