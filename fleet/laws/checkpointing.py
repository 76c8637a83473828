"""The interval of checkpoints, and the share of the machine that it leaves for work.

Symbols of the literature, all times in seconds; another unit works if all times have it. M = ``mtbf_s``, lambda = 1/M.

* C = ``blocked_s``: time for which one checkpoint blocks training.
* D = ``down_s``: downtime, in which no failure can strike.
* R = ``restart_s``: recovery, in which failures strike again.
* w = ``work_s``: useful work between two checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fleet.laws.law import Domain, NonNegative, Positive, Real, exp, expm1, law, maximum, sqrt, where

YOUNG, DALY = "Young 1974, CACM 17(9)", "Daly 2006, Future Generation Computer Systems 22(3)"
SEGMENT = f"{DALY}, eq. 11; Bougeret et al. 2011 (SC)"
META = "Kokolis et al. 2024, arXiv 2410.21680"
HOUR = 3600.0


@law("Corless et al. 1996, On the Lambert W function", elementwise=True, z=-0.36)
def lambert_w0(z: Real) -> float:
    """Principal branch of Lambert's W: the w >= -1 with w exp(w) = z, for z >= -1/e, where it is real. Halley's iteration."""
    if math.e * z + 1.0 < -1e-12:
        Domain(-1 / math.e).check("z", z)
    return _lambert_w0(z)


def _lambert_w0(z: float) -> float:
    w = _w0_start(z, math.e * z + 1.0)
    for _ in range(50):
        excess = w * math.exp(w) - z
        if excess == 0.0 or w <= -1.0:
            break
        slope = math.exp(w) * (w + 1.0)
        step = excess / (slope - (w + 2.0) * excess / (2.0 * w + 2.0))
        w -= step
        if abs(step) <= 1e-15 * max(1.0, abs(w)):
            break
    return w


def _w0_start(z: float, distance: float) -> float:
    if z < 0.25:
        return _one_plus_w0(math.sqrt(2.0 * max(distance, 0.0))) - 1.0
    return 0.75 * math.log1p(z) if z < math.e else math.log(z) - math.log(math.log(z))


def _one_plus_w0(p: float) -> float:
    """1 + W0 near its branch point, p = sqrt(2 (1 + e z)); Corless et al. 1996, eq. 4.22. Relative error about p^4 / 100."""
    return p * (1.0 + p * (-1.0 / 3.0 + p * (11.0 / 72.0 - p * 43.0 / 540.0)))


@law(YOUNG, blocked_s=300.0, mtbf_s=6 * HOUR)
def young_work_s(blocked_s: NonNegative, mtbf_s: Positive) -> float:
    """w = sqrt(2 C M), first order in C/M."""
    return sqrt(2.0 * blocked_s * mtbf_s)


@law(f"{DALY}, eq. 37", blocked_s=300.0, mtbf_s=6 * HOUR)
def daly_work_s(blocked_s: NonNegative, mtbf_s: Positive) -> float:
    """w = sqrt(2CM) [1 + sqrt(C/(2M))/3 + (C/(2M))/9] - C for C < 2M, else M."""
    ratio = blocked_s / (2.0 * mtbf_s)
    work = sqrt(2.0 * blocked_s * mtbf_s) * (1.0 + sqrt(ratio) / 3.0 + ratio / 9.0) - blocked_s
    return where(ratio >= 1.0, mtbf_s, work)


@law(f"{DALY}, sec. 5", elementwise=True, blocked_s=300.0, mtbf_s=900.0)
def exact_work_s(blocked_s: NonNegative, mtbf_s: Positive) -> float:
    """w = M [1 + W0(-exp(-C/M - 1))], the optimum for exponential failures; does not depend on D or R."""
    p = math.sqrt(-2.0 * math.expm1(-blocked_s / mtbf_s))
    # Far below the MTBF, 1 + W0 would be a difference of nearly equal numbers: the series is the exact one there.
    return mtbf_s * (_one_plus_w0(p) if p < 1e-3 else 1.0 + _lambert_w0(-math.exp(-blocked_s / mtbf_s - 1.0)))


@law(SEGMENT, work_s=600.0, blocked_s=60.0, mtbf_s=1080.0, down_s=300.0, restart_s=300.0)
def segment_s(work_s: Positive, blocked_s: NonNegative, mtbf_s: Positive, down_s: NonNegative = 0.0, restart_s: NonNegative = 0.0) -> float:
    """Expected time to finish one segment of w work and its checkpoint: exp(lambda R) (M + D) (exp(lambda (w + C)) - 1).

    Failures are exponential. They may strike during the restart but not during the downtime.
    """
    return exp(restart_s / mtbf_s) * (mtbf_s + down_s) * expm1((work_s + blocked_s) / mtbf_s)


@law(SEGMENT, work_s=600.0, blocked_s=60.0, mtbf_s=1080.0, down_s=300.0, restart_s=300.0)
def segment_safe_restart_s(
    work_s: Positive, blocked_s: NonNegative, mtbf_s: Positive, down_s: NonNegative = 0.0, restart_s: NonNegative = 0.0
) -> float:
    """As :func:`segment_s` when recovery cannot fail: (M + D + R)(exp(lambda (w + C)) - 1)."""
    return (mtbf_s + down_s + restart_s) * expm1((work_s + blocked_s) / mtbf_s)


@law(SEGMENT, work_s=600.0, blocked_s=60.0, mtbf_s=1080.0, down_s=300.0, restart_s=300.0)
def goodput(work_s: Positive, blocked_s: NonNegative, mtbf_s: Positive, down_s: NonNegative = 0.0, restart_s: NonNegative = 0.0) -> float:
    """Share of the wall clock that becomes kept work: w / E[T(w)], exact. In 0..1; 0 when no segment would ever end."""
    load = (work_s + blocked_s) / mtbf_s
    return work_s / (mtbf_s + down_s) * exp(-load - restart_s / mtbf_s) / -expm1(-load)


@law("first order in (w + C)/M", work_s=600.0, blocked_s=60.0, mtbf_s=1080.0, down_s=300.0, restart_s=300.0)
def goodput_first_order(
    work_s: Positive, blocked_s: NonNegative, mtbf_s: Positive, down_s: NonNegative = 0.0, restart_s: NonNegative = 0.0
) -> float:
    """(1 - (D + R + (w + C)/2)/M) / (1 + C/w): a failure costs a restart and half a segment. Falls below 0 where M is short."""
    return (1.0 - (down_s + restart_s + (work_s + blocked_s) / 2.0) / mtbf_s) / (1.0 + blocked_s / work_s)


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Shares of the wall clock; they add up to 1."""

    work: float
    checkpoint: float
    rework: float
    restart: float
    down: float


@law(f"{SEGMENT}; failures strike at rate lambda whenever D does not run", work_s=600.0, blocked_s=60.0, mtbf_s=1080.0, down_s=300.0,
     restart_s=300.0)  # fmt: skip
def breakdown(
    work_s: Positive, blocked_s: NonNegative, mtbf_s: Positive, down_s: NonNegative = 0.0, restart_s: NonNegative = 0.0
) -> Breakdown:
    """Where the wall clock goes, exact: work = goodput, checkpoint = C/w of it, down = F D, restart = F M (1 - exp(-R/M)), rework the rest.

    F = 1/(M + D) failures per unit of wall clock. A downtime follows each failure, then a restart that lasts R or until the next failure.
    Rework is work, and checkpoints of it, that a failure took before it was safe.
    """
    work = goodput(work_s, blocked_s, mtbf_s, down_s, restart_s)
    checkpoint = work * blocked_s / work_s
    restart = mtbf_s / (mtbf_s + down_s) * -expm1(-restart_s / mtbf_s)
    down = down_s / (mtbf_s + down_s)
    return Breakdown(work, checkpoint, maximum(0.0, 1.0 - work - checkpoint - restart - down), restart, down)


@law(f"{META}, eq. 2", work_s=3600.0, blocked_s=0.0, mtbf_s=6646.0, restart_s=300.0)
def ettr(work_s: Positive, blocked_s: NonNegative, mtbf_s: Positive, restart_s: NonNegative = 0.0) -> float:
    """(1 - (u0 + w/2)/M) / (1 + C/w), u0 = ``restart_s``: effective training time ratio, first order, without detection or queue."""
    return (1.0 - (restart_s + work_s / 2.0) / mtbf_s) / (1.0 + blocked_s / work_s)


@law("mixed-precision Adam: Rajbhandari et al. 2020 (ZeRO), sec. 3.1", parameters=70.6e9)
def state_bytes(parameters: Positive, bytes_per_parameter: Positive = 14.0) -> float:
    """Bytes of a training state: parameters x 14 B (2 BF16 + 12 FP32 master, m, v), or x 16 with BF16 gradients."""
    return parameters * bytes_per_parameter


@law("bandwidth", size_bytes=988.4e9, bytes_per_s=7e9)
def write_s(size_bytes: NonNegative, bytes_per_s: Positive) -> float:
    """Time to move ``size_bytes`` at ``bytes_per_s``: size / bandwidth."""
    return size_bytes / bytes_per_s


@law("capacity", size_bytes=16e12, gpu_bytes=80e9, elementwise=True)
def least_gpus(size_bytes: Positive, gpu_bytes: Positive) -> int:
    """GPUs whose memory holds ``size_bytes`` in all: ceil(size / memory)."""
    return math.ceil(size_bytes / gpu_bytes)


@law("first order", duration_s=30 * 86_400.0, interval_s=4920.0, blocked_s=141.2, mtbf_s=120_600.0)
def lost_s(duration_s: NonNegative, interval_s: Positive, blocked_s: NonNegative, mtbf_s: Positive) -> float:
    """First-order loss of a run: writes x C + failures x interval/2."""
    return duration_s / interval_s * blocked_s + duration_s / mtbf_s * interval_s / 2.0
