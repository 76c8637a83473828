"""Confidence that a rank is gone, or slow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigError
from fleet.laws.law import NonNegative, Positive, exp, law

LN10 = math.log(10.0)


@law("Hayashibara et al. 2004 (SRDS), exponential inter-arrival times", silent_s=10.0, mean_s=1.0)
def phi_exponential(silent_s: NonNegative, mean_s: Positive) -> float:
    """Suspicion after ``silent_s`` without a heartbeat: phi = -log10(1 - F(t)) = t / (mean ln 10)."""
    return silent_s / (mean_s * LN10)


@law("Hayashibara et al. 2004 (SRDS), normal inter-arrival times", elementwise=True, silent_s=2.0, mean_s=1.0, deviation_s=0.2)
def phi_normal(silent_s: NonNegative, mean_s: Positive, deviation_s: Positive) -> float:
    """phi = -log10(1 - F(t)), F normal, also far in the tail, where 1 - F would be 0."""
    from scipy.special import log_ndtr

    return -float(log_ndtr((mean_s - silent_s) / deviation_s)) / LN10


@law("phi solved for t", phi=8.0, mean_s=1.0)
def phi_timeout_s(phi: Positive, mean_s: Positive) -> float:
    """Silence at which phi is reached, exponential inter-arrival times: phi mean ln 10. A live rank is accused once in 10^phi times."""
    return phi * mean_s * LN10


@law("Iglewicz & Hoaglin 1993, How to Detect and Handle Outliers", values=(1.0, 1.01, 0.99, 1.0, 1.3))
def robust_z(values: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """0.6745 (x - median) / MAD for each value. The values must not all be equal."""
    array = np.asarray(values, dtype=np.float64)
    if array.size < 2 or not np.all(np.isfinite(array)):
        raise ConfigError("values", array.tolist(), "needs at least 2 finite numbers")
    away = array - np.median(array)
    spread = float(np.median(np.abs(away)))
    if spread == 0.0:
        raise ConfigError("values", array.tolist(), "more than half are equal, so that their spread (MAD) is 0", "Use a relative score.")
    return np.asarray(0.6745 * away / spread, dtype=np.float64)


@law("NVIDIA Resiliency Extension, straggler detection: flagged under 0.75", reference_s=1.0, own_s=1.4)
def relative_score(reference_s: Positive, own_s: Positive) -> float:
    """Reference median / own median: 1 for a rank as fast as the others, lower for a slow one."""
    return reference_s / own_s


@law("first passage: half a heartbeat on the mean, then the time-out", heartbeat_s=1.0, timeout_s=3.0)
def mean_detection_s(heartbeat_s: Positive, timeout_s: Positive) -> float:
    """Mean time from a silent death to its detection: time-out - heartbeat/2, for time-outs counted from the last heartbeat."""
    if np.any(np.asarray(timeout_s) < heartbeat_s):
        raise ConfigError("timeout_s", timeout_s, f"shorter than the heartbeat of {heartbeat_s} s: every rank would be accused",
                          f"The nearest valid value is {heartbeat_s}.")  # fmt: skip
    return timeout_s - heartbeat_s / 2.0


@law("log-likelihood of exponential arrivals", phi=8.0)
def false_accusation_share(phi: NonNegative) -> float:
    """Chance that a live rank is that silent: 10^-phi."""
    return exp(-LN10 * phi)
