"""Which rank is slow, and in what: its compute, its link or its data. Pure: times in, verdicts out, no clock.

A detector sees the steps of a view as they come, and says after each batch of them who is guilty *now*. What makes a verdict:

- Times are a rank's own: seconds of work, never of waiting for a peer. Compute, network and data are judged apart, so that a slow link is
  not blamed on a processor.
- A rank is compared with the others in the same steps. When all are slow alike nobody is guilty. What a rank usually takes more than the
  others, up to ``tolerance``, is how machines differ.
- While the others take what they always took, it is compared with itself, where that is known better: in small worlds it often is.
- It has to be slow by more than the steps so far waver: how much, and for how long in a row, is learned.
- Each window of steps gives a strength, 1 at the threshold. ``persistence`` windows in a row make a rank guilty, ``release`` windows in a
  row below ``release_ratio`` clear it, and in between it stays what it was.
- A rank that is new, or has a new incarnation, starts without a past; after a view change the network does so for all, since other peers
  are at the other end.
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
    """What the ranks of one view measured in some consecutive steps. Rows are view ranks, columns steps; NaN is not measured.

    Attributes:
        generation: the view's. All steps are of this one view.
        first_step: number of the first column's step.
        members: who the rows are.
        shards: batch shards of each rank, [ranks].
        compute_s: own compute, seconds *per shard*: without waiting, and without work that is not divided by shards.
        network_s: seconds a step on the wire, counted from when the peer was there too.
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
    """Who is guilty. ``score`` is reference time / own time, 0.5 for half speed.

    ``confidence`` is how probable it is that the rank really is slower than what would clear it, given the noise seen so far.
    ``since_step`` is the first step of the window that made it guilty; ``step`` the last step that was seen.
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

    window: int = setting(18, "Steps that a score looks at.", least=1)
    stride: int = setting(2, "Steps from one score to the next.", least=1)
    persistence: int = setting(1, "Scores in a row that make a rank guilty.", least=1)
    release: int = setting(5, "Scores in a row that clear it.", least=1)
    release_ratio: float = setting(0.5, "Share of the threshold below which a score counts for clearing.", least=0, below=1)
    warmup: int = setting(5, "First steps of a rank, or of a view's network, that are not looked at.")
    learn: int = setting(34, "Steps after those until a rank may be accused: how much steps waver has to be seen first.")
    network_least: float = setting(1.13, "network_slowdown in a small world, where each peer feels a good share of a slow link.", above=1)
    chance: float = setting(
        1e-5, "Probability that chance alone reaches the threshold in one window, for all ranks of a world together.", above=0, below=0.5
    )
    impact: float = setting(0.01, "Excess time at the threshold, as a share of a step: what costs less is nobody's fault.")
    noise_floor: float = setting(0.015, "Smallest standard deviation of a step that is believed.", above=0)
    wait_share: float = setting(0.05, "Share of the wait for the slowest peer that may have been booked as time on the wire.")
    spread: float = setting(0.03, "Standard deviation of how much machines differ (a logarithm), before anything is seen of them.", above=0)
    tolerance: float = setting(
        0.06, "What a rank usually takes more or less than the others is its own measure, up to so much (a logarithm)."
    )

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

        A slow link is felt by each of the ``ranks - 1`` peers in one of its transfers: those that a rank is compared with are slower, too.
        Two ranks feel the link between them alike.
        """
        slowdown = self.slowdown(kind)
        if kind != NETWORK or ranks <= 2:
            return slowdown
        return max(min(self.network_least, slowdown), slowdown / (1 + (slowdown - 1) / (ranks - 1)))

    def errors(self, ranks: int) -> float:
        """Standard errors at the threshold, in a world of so many ranks: of many one is far off by chance."""
        return NormalDist().inv_cdf(1 - self.chance / ranks)

    def slowdown(self, kind: str) -> float:
        """The threshold of one of ``KINDS``."""
        return float(getattr(self, f"{kind}_slowdown"))


@dataclass(frozen=True, slots=True)
class Scores:
    """Figures of one window and one kind, each [ranks]. ``strength`` is 1 at the threshold; NaN where it cannot be told.

    ``excess`` is log(own / others) of midmeans and ``median_excess`` of medians, ``change`` log(now / own best). ``beyond`` is the mean of
    log(own / others) in each step, without what it does in a single one, less what is usual for this rank; ``error`` the standard
    deviation of that when the rank is well; or log(now / before) in place of log(own / others), while the others are as usual and if that
    is known better. ``impact`` is the excess time as a share of a step.
    """

    kind: str
    excess: Array
    median_excess: Array
    change: Array
    beyond: Array
    error: Array
    impact: Array


def combined(scores_: Scores, limits: Sensitivity) -> Array:
    """The weakest of three: large enough, beyond what steps waver, and worth the time of a step."""
    ranks = len(scores_.beyond)
    large = scores_.beyond / math.log(limits.least(scores_.kind, ranks))
    certain = scores_.beyond / scores_.error / limits.errors(ranks)
    return np.asarray(np.minimum(np.minimum(large, certain), scores_.impact / limits.impact))


Scorer = Callable[[Scores, Sensitivity], Array]
"""What turns the figures of a window into strengths, [ranks]."""
