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
from fleet.settings.fields import setting, within
from fleet.settings.run import StragglerSettings
from policies.straggler.scores import Array

COMPUTE, NETWORK, DATA = "compute", "network", "data"
KINDS = (COMPUTE, NETWORK, DATA)
USUAL = StragglerSettings()


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
class DetectorSettings:
    """Thresholds of the detector but for the slowdowns. ``benchmarks.detect`` chose them on other seeds than it reports."""

    window: int = setting(18, "Steps in the window of a score.", least=1)
    stride: int = setting(2, "Steps from one score to the next.", least=1)
    persistence: int = setting(1, "Scores in a row that make a rank guilty.", least=1)
    release: int = setting(5, "Scores in a row that clear it.", least=1)
    release_ratio: float = setting(0.5, "Share of the threshold below which a score counts for clearing.", least=0, below=1)
    warmup: int = setting(5, "First steps of a rank, or of a view's network, that do not count.")
    learn: int = setting(34, "Steps after those until a rank may be accused: the detector first learns how much steps vary.")
    network_least: float = setting(1.13, "network_slowdown in a small world, where each peer feels a good share of a slow link.", above=1)
    chance: float = setting(
        1e-5, "Probability that chance alone reaches the threshold in one window, for all ranks of a world together.", above=0, below=0.5
    )
    impact: float = setting(0.01, "Excess time at the threshold, as a share of a step: a smaller excess makes no rank guilty.")
    noise_floor: float = setting(0.015, "Least standard deviation of a step that the detector assumes.", above=0)
    wait_share: float = setting(0.05, "Share of the wait for the slowest peer that may have been booked as time on the wire.")
    spread: float = setting(0.03, "Prior standard deviation of the difference of machines (a logarithm).", above=0)
    tolerance: float = setting(0.06, "A rank's usual difference from the others counts as normal, up to so much (a logarithm).")

    def __post_init__(self) -> None:
        within(self, "straggler.settings.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity(DetectorSettings):
    """All thresholds: ``compute_slowdown``, ``network_slowdown`` and ``data_slowdown`` are own time / the others' at the threshold."""

    compute_slowdown: float = USUAL.compute_slowdown
    network_slowdown: float = USUAL.network_slowdown
    data_slowdown: float = USUAL.data_slowdown

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
