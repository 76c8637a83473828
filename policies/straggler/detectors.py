"""Slow ranks, by kind: compute, link or data. Pure: times in, verdicts out, no clock.

A detector sees the steps of a view as they come, and names after each batch the ranks that are guilty *now*. The rules of a verdict:

- Times are a rank's own: seconds of work, never of waiting for a peer. Compute, network and data are judged apart, so that a slow link does
  not look like a slow processor.
- A rank is compared with the others in the same steps. When all are equally slow, no rank is guilty. A rank's usual excess over the others,
  up to ``tolerance``, counts as a difference of machines.
- While the others take their usual time, a rank is compared with its own past, where that is known better. In small worlds it often is.
- A rank has to be slower by more than the steps so far vary. The detector learns their variation, and for how many steps in a row it lasts.
- Each window of steps gives a strength, 1 at the threshold. ``persistence`` windows in a row make a rank guilty. ``release`` windows in a
  row below ``release_ratio`` clear it. In between its verdict stays.
- A new rank, or a new incarnation, starts without a past. After a view change the network does so for all, since other peers are at the
  other end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from fleet.protocol.types import Member
from policies.straggler.scores import Array

COMPUTE, NETWORK, DATA = "compute", "network", "data"
KINDS = (COMPUTE, NETWORK, DATA)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Times of the ranks of one view in some consecutive steps. Rows are view ranks, columns steps; NaN is not measured.

    Attributes:
        generation: the view's. All steps are of this one view.
        first_step: number of the first column's step.
        members: the ranks of the rows.
        shards: batch shards of each rank, [ranks].
        compute_s: own compute, seconds *per shard*: without waiting, and without work that is not divided by shards.
        network_s: seconds a step on the wire, counted from the time when the peer was there too.
        data_s: waiting for samples, seconds per shard.
    """

    generation: int
    first_step: int
    members: tuple[Member, ...]
    shards: Array
    compute_s: Array
    network_s: Array
    data_s: Array

    def __post_init__(self) -> None:
        ranks, steps = len(self.members), np.shape(self.compute_s)[-1]
        for name, shape in (("shards", (ranks,)), *((f"{kind}_s", (ranks, steps)) for kind in KINDS)):
            if np.shape(getattr(self, name)) != shape:
                raise ValueError(f"{name} has shape {np.shape(getattr(self, name))}, not {shape} ([ranks, steps] of {ranks} members)")

    def seconds(self, kind: str) -> Array:
        """[ranks, steps] of one of ``KINDS``."""
        return np.asarray(getattr(self, f"{kind}_s"), dtype=float)


@dataclass(frozen=True, slots=True)
class DetectorVerdict:
    """A guilty rank. ``score`` is reference time / own time, 0.5 for half speed.

    ``confidence``: the probability, given the noise so far, that the rank really is slower than the level that would clear it.
    ``since_step`` is the first step of the window that made it guilty; ``step`` the last step so far.
    """

    member: Member
    kind: str
    score: float
    confidence: float
    since_step: int
    step: int
    evidence: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Thresholds of the detector. ``benchmarks.detect`` chose them on other seeds than it reports.

    Attributes:
        compute_slowdown, network_slowdown, data_slowdown: own time / the others' from which a rank may be called slow.
        window: steps that a score looks at.
        stride: steps from one score to the next.
        persistence: scores in a row that make a rank guilty.
        release: scores in a row that clear it.
        release_ratio: share of the threshold below which a score counts for clearing.
        warmup: first steps of a rank, or of a view's network, that are not looked at.
        learn: steps after those until a rank may be accused: the detector first sees how much steps waver.
        network_least: ``network_slowdown`` in a small world, where each peer feels a good share of a slow link.
        chance: probability that chance alone reaches the threshold in one window, for all ranks of a world together.
        impact: excess time at the threshold, as a share of a step: a smaller excess is no rank's fault.
        noise_floor: smallest standard deviation of a step that is believed.
        wait_share: share of the wait for the slowest peer that may have been booked as time on the wire.
        spread: standard deviation of how much machines differ (a logarithm), before any of them is measured.
        tolerance: a rank's usual difference from the others is its own measure, up to this (a logarithm).
    """

    compute_slowdown: float = 1.10
    network_slowdown: float = 1.18
    data_slowdown: float = 1.21
    window: int = 18
    stride: int = 2
    persistence: int = 1
    release: int = 5
    release_ratio: float = 0.5
    warmup: int = 5
    learn: int = 34
    network_least: float = 1.13
    chance: float = 1e-5
    impact: float = 0.01
    noise_floor: float = 0.015
    wait_share: float = 0.05
    spread: float = 0.03
    tolerance: float = 0.06

    def least(self, kind: str, ranks: int) -> float:
        """Own time / the others' at the threshold, in a world of so many ranks.

        Each of the ``ranks - 1`` peers feels a slow link in one of its transfers, so the ranks of the comparison are slower, too. Two ranks
        feel the link between them equally.
        """
        slowdown = self.slowdown(kind)
        if kind != NETWORK or ranks <= 2:
            return slowdown
        return max(min(self.network_least, slowdown), slowdown / (1 + (slowdown - 1) / (ranks - 1)))

    def errors(self, ranks: int) -> float:
        """Standard errors at the threshold, in a world of so many ranks: among many ranks, one is far off by chance."""
        return NormalDist().inv_cdf(1 - self.chance / ranks)

    def slowdown(self, kind: str) -> float:
        """The threshold of one of ``KINDS``."""
        return float(getattr(self, f"{kind}_slowdown"))


@dataclass(frozen=True, slots=True)
class Scores:
    """Figures of one window and one kind, each [ranks]. ``strength`` is 1 at the threshold; NaN where it is unknown.

    ``excess`` is log(own / others) of midmeans and ``median_excess`` of medians, ``change`` log(now / own best). ``beyond`` is the mean of
    log(own / others) over the steps, with the effect of each single step bounded, less this rank's usual value. ``error`` is its standard
    deviation for a well rank. While the others take their usual time, and log(now / before) is known better, that takes the place of
    log(own / others). ``impact`` is the excess time as a share of a step.
    """

    kind: str
    excess: Array
    median_excess: Array
    change: Array
    beyond: Array
    error: Array
    impact: Array


def combined(scores_: Scores, limits: Sensitivity) -> Array:
    """The weakest of three: large enough, beyond the variation of steps, and a large enough share of a step."""
    ranks = len(scores_.beyond)
    large = scores_.beyond / math.log(limits.least(scores_.kind, ranks))
    certain = scores_.beyond / scores_.error / limits.errors(ranks)
    return np.asarray(np.minimum(np.minimum(large, certain), scores_.impact / limits.impact))


Scorer = Callable[[Scores, Sensitivity], Array]
"""Maps the figures of a window to strengths, [ranks]."""
