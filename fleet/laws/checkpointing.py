"""How often to write a checkpoint, and what that leaves of the machine.

Symbols of the literature: M = ``mtbf_s``, lambda = 1/M, C = ``blocked_s`` (what one checkpoint blocks training for), D = ``down_s`` (in
which nothing can fail), R = ``restart_s`` (recovery, in which failures strike again), w = ``work_s`` (useful work between two checkpoints).
All times are seconds; any other unit works if it is the same for all.
"""

from __future__ import annotations

import math


def lambert_w0(z: float) -> float:
    """Principal branch of Lambert's W: the w >= -1 with w exp(w) = z, for z >= -1/e. Halley's iteration.

    Raises:
        ValueError: z < -1/e, where W has no real value.
    """
    distance = math.e * z + 1.0
    if distance < -1e-12:
        raise ValueError(f"Lambert W0 is real for z >= -1/e = {-1 / math.e:.6f} only, z = {z}")
    w = _w0_start(z, distance)
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


def young_work_s(blocked_s: float, mtbf_s: float) -> float:
    """w = sqrt(2 C M): Young 1974, first order in C/M."""
    return math.sqrt(2.0 * blocked_s * mtbf_s)


def daly_work_s(blocked_s: float, mtbf_s: float) -> float:
    """w = sqrt(2CM) [1 + sqrt(C/(2M))/3 + (C/(2M))/9] - C for C < 2M, else M: Daly 2006, eq. 37."""
    if blocked_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = blocked_s / (2.0 * mtbf_s)
    return young_work_s(blocked_s, mtbf_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - blocked_s


def exact_work_s(blocked_s: float, mtbf_s: float) -> float:
    """w = M [1 + W0(-exp(-C/M - 1))], the optimum for exponential failures (Daly 2006, sec. 5); does not depend on D or R."""
    p = math.sqrt(-2.0 * math.expm1(-blocked_s / mtbf_s))
    # Far below the MTBF, 1 + W0 would be a difference of nearly equal numbers: the series is the exact one there.
    return mtbf_s * (_one_plus_w0(p) if p < 1e-3 else 1.0 + lambert_w0(-math.exp(-blocked_s / mtbf_s - 1.0)))


def segment_s(work_s: float, blocked_s: float, mtbf_s: float, down_s: float = 0.0, restart_s: float = 0.0) -> float:
    """Expected time to finish one segment of w work and its checkpoint: exp(lambda R) (M + D) (exp(lambda (w + C)) - 1).

    Exponential failures, which may strike during the restart but not during the downtime (Daly 2006, eq. 11; Bougeret et al. 2011).
    """
    return math.exp(restart_s / mtbf_s) * (mtbf_s + down_s) * math.expm1((work_s + blocked_s) / mtbf_s)


def segment_safe_restart_s(work_s: float, blocked_s: float, mtbf_s: float, down_s: float = 0.0, restart_s: float = 0.0) -> float:
    """As :func:`segment_s` when recovery cannot fail: (M + D + R)(exp(lambda (w + C)) - 1)."""
    return (mtbf_s + down_s + restart_s) * math.expm1((work_s + blocked_s) / mtbf_s)


def goodput(work_s: float, blocked_s: float, mtbf_s: float, down_s: float = 0.0, restart_s: float = 0.0) -> float:
    """Share of the wall clock that becomes work that is kept: w / E[T(w)]. In 0..1."""
    return work_s / segment_s(work_s, blocked_s, mtbf_s, down_s, restart_s)


def goodput_first_order(work_s: float, blocked_s: float, mtbf_s: float, down_s: float = 0.0, restart_s: float = 0.0) -> float:
    """(1 - (D + R + (w + C)/2)/M) / (1 + C/w): a failure costs a restart and half a segment. Falls below 0 where M is short."""
    return (1.0 - (down_s + restart_s + (work_s + blocked_s) / 2.0) / mtbf_s) / (1.0 + blocked_s / work_s)


def ettr(work_s: float, blocked_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """(1 - (u0 + w/2)/M) / (1 + C/w), u0 = ``restart_s``: effective training time ratio of arXiv 2410.21680, without detection or queue."""
    return (1.0 - (restart_s + work_s / 2.0) / mtbf_s) / (1.0 + blocked_s / work_s)


def state_bytes(parameters: float, bytes_per_parameter: float = 14.0) -> float:
    """Bytes of a training state. 14 B a parameter: 2 BF16 + 12 FP32 master, m, v (Adam); 16 with BF16 gradients."""
    return parameters * bytes_per_parameter


def write_s(size_bytes: float, bytes_per_s: float) -> float:
    """Time to move ``size_bytes`` at ``bytes_per_s``."""
    return size_bytes / bytes_per_s


def least_gpus(size_bytes: float, gpu_bytes: float) -> int:
    """GPUs whose memory holds ``size_bytes`` in all."""
    return math.ceil(size_bytes / gpu_bytes)


def lost_s(duration_s: float, interval_s: float, blocked_s: float, mtbf_s: float) -> float:
    """First-order loss of a run: writes x C + failures x interval/2."""
    return duration_s / interval_s * blocked_s + duration_s / mtbf_s * interval_s / 2.0
