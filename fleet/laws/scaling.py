"""The gain from more ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import cast

import numpy as np

from fleet.errors import ConfigError
from fleet.laws.law import Domain, NonNegative, OneToInfinity, Positive, PositiveShare, Share, law

TEXTBOOK = "Machine Learning Systems (textbook), vol. 2, appendix Fleet"
PUBLISHED_EFFICIENCY = ((32, 0.90), (256, 0.70), (1024, 0.50), (8192, 0.35))
"""(GPUs, scaling efficiency) of that appendix: typical values, not a law."""


@law("Amdahl 1967 (AFIPS)", serial_share=0.1, ranks=1024)
def amdahl_speedup(serial_share: Share, ranks: OneToInfinity) -> float:
    """Speedup of a fixed problem: 1 / (s + (1 - s)/N); 1/s for infinitely many ranks."""
    return 1.0 / (serial_share + (1.0 - serial_share) / ranks)


@law("Gustafson 1988, CACM 31(5)", serial_share=0.1, ranks=1024)
def gustafson_speedup(serial_share: Share, ranks: Positive) -> float:
    """Speedup of a problem that grows with the ranks: N - s (N - 1), s measured on the large run."""
    return ranks - serial_share * (ranks - 1.0)


@law("Karp & Flatt 1990, CACM 33(5)", speedup=9.9, ranks=1024)
def serial_share(speedup: Positive, ranks: Positive) -> float:
    """The serial share that a measured speedup implies: (1/S - 1/N) / (1 - 1/N)."""
    if np.any(np.asarray(ranks) <= 1):
        raise ConfigError("ranks", ranks, "one rank says nothing about scaling", "The nearest valid value is 2.")
    return (1.0 / speedup - 1.0 / ranks) / (1.0 - 1.0 / ranks)


@law("throughput per rank against that of the reference", throughput_ratio=2.5, ranks_ratio=4.0, reference_efficiency=0.5)
def scaling_efficiency(throughput_ratio: Positive, ranks_ratio: Positive, reference_efficiency: PositiveShare = 1.0) -> float:
    """Throughput ratio / ranks ratio x efficiency of the reference."""
    return throughput_ratio / ranks_ratio * reference_efficiency


@law(TEXTBOOK, ranks=2048)
def published_efficiency(ranks: OneToInfinity) -> float:
    """Typical scaling efficiency: 90, 70, 50, 35% at 32, 256, 1,024, 8,192 GPUs, linear in log N between. No value outside 32..8,192."""
    low, high = PUBLISHED_EFFICIENCY[0][0], PUBLISHED_EFFICIENCY[-1][0]
    Domain(low, high).check("ranks", ranks)
    points = np.array(PUBLISHED_EFFICIENCY)
    return cast(float, np.interp(np.log2(ranks), np.log2(points[:, 0]), points[:, 1]))


@law("bytes moved per floating-point operation", size_bytes=1e9, work_flop=1e13)
def communication_intensity_bytes_per_flop(size_bytes: NonNegative, work_flop: Positive) -> float:
    """Bytes communicated / FLOP computed, of one step."""
    return size_bytes / work_flop


@law("overheads before and after", nominal=10.0, overhead_before=0.05, overhead_after=0.40)
def effective_speedup(nominal: Positive, overhead_before: Share, overhead_after: Share) -> float:
    """The real gain of a nominal speedup when the overhead grows: nominal x (1 - after) / (1 - before)."""
    return nominal * (1.0 - overhead_after) / (1.0 - overhead_before)


@law(TEXTBOOK, gpus=1024, peak_flop_per_s=989e12, mfu=0.5, scaling=0.5, goodput=0.77)
def effective_flop_per_s(gpus: Positive, peak_flop_per_s: Positive, mfu: Share, scaling: Share, goodput: Share) -> float:
    """Useful rate of a fleet: N x peak x MFU x scaling efficiency x goodput."""
    return gpus * peak_flop_per_s * compound_share((mfu, scaling, goodput))


@law(TEXTBOOK, shares=(0.5, 0.5, 0.77))
def compound_share(shares: Iterable[Share]) -> float:
    """The share of the peak after independent efficiencies: their product."""
    values = [*shares]
    for value in values:
        Domain(0.0, 1.0).check("shares", value)
    return math.prod(values)


@law("speedups multiply", wanted=100.0, parts=(4.0, 2.5))
def remaining_factor(wanted: Positive, parts: Iterable[float]) -> float:
    """The factor still to find when the others are known: wanted / product of the parts."""
    values = [*parts]
    for value in values:
        Domain(0.0, open=True).check("parts", value)
    return wanted / math.prod(values)
