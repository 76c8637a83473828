"""Which rank is slow, and in what: its compute, its link or its data. Pure: times in, verdicts out, no clock.

A detector sees the steps of a view as they come, and says after each batch of them who is guilty *now*. What makes a verdict:

- Times are a rank's own: seconds of work, never of waiting for a peer. Compute, network and data are judged apart, so that a slow link is
  not blamed on a processor.
- A rank is compared with the others in the same steps. When all are slow alike nobody is guilty.
- Each window of steps gives a strength, 1 at the threshold. ``persistence`` windows in a row make a rank guilty, ``release`` windows in a
  row below ``release_ratio`` clear it, and in between it stays what it was.
- A rank that is new, or has a new incarnation, starts without a past; after a view change the network does so for all, since other peers
  are at the other end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from fleet.errors import ConfigError
from fleet.types import Member
from policies import scores
from policies.scores import Array

COMPUTE, NETWORK, DATA = "compute", "network", "data"
KINDS = (COMPUTE, NETWORK, DATA)
GUILTY, UNKNOWN = "guilty", "unknown"


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
class Verdict:
    """``status``: guilty, or unknown when the detector could not tell. ``score`` is reference time / own time, 0.5 for half speed.

    ``confidence`` is how probable it is that the rank really is slower than what would clear it, given the noise seen so far.
    ``since_step`` is the first step of the window that made it guilty; ``step`` the last step that was seen.
    """

    member: Member
    kind: str
    status: str
    score: float
    confidence: float
    since_step: int
    step: int
    evidence: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""


class Detector(Protocol):
    """Sees every step once, in order. Returns who is guilty after them, not only what changed."""

    def observe(self, times: StepTimes) -> tuple[Verdict, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Thresholds, all in steps or ratios. ``benchmarks.detect`` chose them on other seeds than those it reports.

    Args:
        window: steps that a score looks at.
        stride: steps from one score to the next.
        persistence, release: scores in a row that make a rank guilty, or clear it.
        haste: a score far beyond the threshold counts for as many as it is beyond, and for so many at most.
        release_ratio: share of the threshold below which a score counts for clearing.
        warmup: first steps of a rank, or of a view's network, that are not looked at.
        learn: steps after those until a rank may be accused: how much scores waver has to be seen first.
        compute_slowdown, network_slowdown, data_slowdown: own time / the others' at the threshold. Links and disks are slow in bursts that
            last as long as a window, so theirs is higher.
        best_slowdown: the same against the rank's own best, for the individual score alone.
        z: robust z at the threshold.
        peak: at the threshold, a score must exceed the largest one of a rank that was well by this factor: tails are heavy.
        impact: excess time at the threshold, as a share of a step: what costs less is nobody's fault.
        noise_floor: smallest standard deviation of a score that is believed.
        tolerance: what a rank usually takes more or less than the others is its own measure, up to so much (a logarithm): machines differ.
        wait_share: share of the wait for the slowest peer that may have been booked as time on the wire.
    """

    window: int = 14
    stride: int = 2
    persistence: int = 5
    haste: float = 2.0
    release: int = 5
    release_ratio: float = 0.5
    warmup: int = 5
    learn: int = 24
    compute_slowdown: float = 1.15
    network_slowdown: float = 1.18
    data_slowdown: float = 1.15
    best_slowdown: float = 1.25
    z: float = 2.5
    peak: float = 1.35
    impact: float = 0.015
    noise_floor: float = 0.008
    wait_share: float = 0.05
    tolerance: float = 0.06

    def __post_init__(self) -> None:
        for name in ("window", "stride", "persistence", "release"):
            self._need(name, getattr(self, name) >= 1, "must be at least 1")
        for name in ("compute_slowdown", "network_slowdown", "data_slowdown", "best_slowdown"):
            self._need(name, getattr(self, name) > 1, "a ratio of times: must be greater than 1")
        self._need("release_ratio", 0 <= self.release_ratio < 1, "must be from 0 to below 1, or a verdict would flap")
        self._need("haste", self.haste >= 1, "a score counts for one at least")
        for name in ("z", "peak", "noise_floor"):
            self._need(name, getattr(self, name) > 0, "must be greater than 0")

    def slowdown(self, kind: str) -> float:
        """The threshold of one of ``KINDS``."""
        return float(getattr(self, f"{kind}_slowdown"))

    def _need(self, name: str, holds: bool, reason: str) -> None:
        if not holds:
            raise ConfigError(f"detector.{name}", getattr(self, name), reason)


@dataclass(frozen=True, slots=True)
class Scores:
    """Figures of one window and one kind, each [ranks]. ``strength`` is 1 at the threshold; NaN where it cannot be told.

    ``excess`` is log(own / others) of midmeans and ``median_excess`` of medians, ``change`` log(now / own best), ``usual`` what the excess
    of this rank is when it is well, ``noise`` the standard deviation about that and ``peak`` the largest distance from it that was seen,
    ``impact`` the excess time as a share of a step.
    """

    kind: str
    excess: Array
    median_excess: Array
    change: Array
    usual: Array
    noise: float
    peak: float
    impact: Array


def relative(scores_: Scores, limits: Sensitivity) -> Array:
    """Strength by the relative score alone."""
    return scores_.median_excess / math.log(limits.slowdown(scores_.kind))


def individual(scores_: Scores, limits: Sensitivity) -> Array:
    """Strength by the individual score alone. It cannot tell a slow rank from a slow world: for comparison."""
    return scores_.change / math.log(limits.best_slowdown)


def robust_z(scores_: Scores, limits: Sensitivity) -> Array:
    """Strength by the robust z among the ranks of this window."""
    known = np.isfinite(scores_.median_excess).any()
    return scores.robust_z(scores_.median_excess, limits.noise_floor) / limits.z if known else scores_.median_excess


def combined(scores_: Scores, limits: Sensitivity) -> Array:
    """The weakest of four: large enough, beyond the noise, larger than what was seen when all was well, and worth the time of a step."""
    needed = max(math.log(limits.slowdown(scores_.kind)), limits.z * scores_.noise, limits.peak * scores_.peak)
    return np.minimum((scores_.excess - scores_.usual) / needed, scores_.impact / limits.impact)


class Scorer(Protocol):
    """What turns the figures of a window into strengths, [ranks]."""

    def __call__(self, scores_: Scores, limits: Sensitivity, /) -> Array: ...


SCORERS: dict[str, Scorer] = {"combined": combined, "relative": relative, "individual": individual, "robust_z": robust_z}
