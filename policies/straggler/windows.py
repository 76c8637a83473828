"""The detector of live runs: a sliding window over the steps, a scorer, persistence and hysteresis."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.protocol.types import Member
from policies.straggler import scores
from policies.straggler.detectors import (
    KINDS,
    NETWORK,
    DetectorVerdict,
    Scorer,
    Scores,
    Sensitivity,
    StepTimes,
    combined,
)
from policies.straggler.scores import Array, Usual

HISTORY_STEPS, LAG_STEPS, LEARN_EVERY = 100, 18, 10
"""The usual values of well ranks come from so many steps, learned anew every so many. The last steps are not among them: the detector may
have to judge them."""

FEW = 3
"""In a world of so few ranks a slow one moves the scores of all others: the median of the others is then not robust."""

ENOUGH = 0.8
"""Share of a window's steps that have to be known."""

OFTEN = 1 / 3
"""Share of a window's steps that have to be slow, each by at least half of the window's mean. A few long steps are a pause."""

ONE_STEP, ONE_STEP_NOISES = 0.5, 3.0
"""A single step counts for no more than this (a logarithm), or so many standard deviations. A pause does not make a rank slow."""

AS_USUAL = 2.0
"""From so many standard errors above their usual time on, the others count as slower, too."""

ANY = 1e3
"""A standard deviation, and a bound, of logarithms of seconds before any time is known."""


class _Past(NamedTuple):
    """Usual values of log(own / others), of log(own) and of log(others)."""

    apart: Usual
    own: Usual
    others: Usual


@dataclass(slots=True)
class _Track:
    """The past of one kind of time; rows are the ranks of the present view, columns steps, newest last.

    ``times`` are logarithms of seconds. ``own``: the part of them that counts against a rank. ``others``: the times to compare with.
    ``well``: whether they show the behaviour of a well rank.
    """

    times: Array
    own: Array
    others: Array
    well: NDArray[np.bool_]
    best: Array
    streak: Array
    calm: Array
    guilty: Array
    since: Array
    past: _Past | None = None

    @classmethod
    def empty(cls, ranks: int, window: int) -> _Track:
        nothing, zeros, past = np.full(ranks, np.nan), np.zeros(ranks), np.full((ranks, HISTORY_STEPS), np.nan)
        verdicts = (zeros, zeros.copy(), zeros.copy(), zeros.copy())
        return cls(np.full((ranks, window), np.nan), past, past.copy(), np.zeros(past.shape, bool), nothing, *verdicts)

    def moved(self, rows: list[int], *, forget: bool) -> _Track:
        """The rows of another view: ``rows[r]`` is the former row of rank ``r``, -1 for a newcomer. ``forget`` leaves only the verdicts."""
        fresh = _Track.empty(len(rows), self.times.shape[1])
        here = [row for row, old in enumerate(rows) if old >= 0]
        there = [rows[row] for row in here]
        verdicts = ("streak", "calm", "guilty", "since")
        for name in verdicts if forget else ("times", "own", "others", "well", "best", *verdicts):
            getattr(fresh, name)[here] = getattr(self, name)[there]
        return fresh

    def push(self, log_s: Array, own_log_s: Array) -> None:
        """Add one step: the time of each rank, and the part of it that counts against the rank."""
        accused = self.guilty > 0
        others = scores.median_of_others(log_s, accused)
        well = ~accused & ~(accused.any() and len(accused) <= FEW)
        for past, now in ((self.times, log_s), (self.own, own_log_s), (self.others, others), (self.well, well)):
            past[:, :-1] = past[:, 1:]
            past[:, -1] = now

    def learn(self, limits: Sensitivity) -> _Past:
        """The usual values, from all but the last steps of well ranks."""
        well = self.well[:, :-LAG_STEPS]
        own, others = (np.where(well, past[:, :-LAG_STEPS], np.nan) for past in (self.own, self.others))
        floor = limits.noise_floor
        apart = scores.usual(own - others, limits.spread, limits.tolerance, floor)
        self.past = _Past(apart, *(scores.usual(past, ANY, ANY, floor) for past in (own, others)))
        return self.past

    def beyond(self, past: _Past, window: int, most: float) -> tuple[Array, Array]:
        """(log of the slowdown against the usual in the last ``window`` steps, its standard error), [ranks]; NaN with too few known steps.

        The slowdown is against the others. It is against the rank's own past if that is known better, the rank was well before, and the
        others take their usual time.
        """
        own, others = self.own[:, -window:], self.others[:, -window:]
        apart, alone, change = (_beyond(*pair) for pair in ((own - others, past.apart), (own, past.own), (others, past.others)))
        as_usual = change.mean < AS_USUAL * change.error
        better = as_usual & (alone.error < apart.error) & (past.apart.apart < most)
        often = np.where(better, alone.often, apart.often)
        mean = np.where(better, alone.mean, apart.mean)
        return np.where(often, mean, np.minimum(mean, 0.0)), np.where(better, alone.error, apart.error)


class _Beyond(NamedTuple):
    """Of steps less their usual values: their mean, its standard error, and whether many steps cause it; each [ranks]."""

    mean: Array
    error: Array
    often: NDArray[np.bool_]


def _beyond(now: Array, usual: Usual) -> _Beyond:
    most = max(ONE_STEP, ONE_STEP_NOISES * usual.noise)
    values = np.clip(now - usual.apart[:, None], -most, most)
    known = np.isfinite(values)
    count = known.sum(axis=1)
    mean = np.where(count >= ENOUGH * now.shape[1], np.where(known, values, 0.0).sum(axis=1) / np.maximum(count, 1), np.nan)
    often = (values > mean[:, None] / 2).sum(axis=1) >= OFTEN * count
    return _Beyond(mean, np.sqrt(usual.noise**2 * usual.memory / np.maximum(count, 1) + usual.doubt**2), often)


@dataclass(slots=True)
class WindowedDetector:
    """Sees every step once, in order. The same steps in other batches give the same verdicts.

    Cost of a step: O(ranks x window), and O(ranks x history) every ten steps. Memory: about 320 numbers a rank and kind.
    """

    limits: Sensitivity = field(default_factory=Sensitivity)
    scorer: Scorer = combined
    _members: tuple[Member, ...] = ()
    _generation: int = -1
    _tracks: dict[str, _Track] = field(default_factory=dict)
    _age: dict[str, Array] = field(default_factory=dict)
    _waits: Array = field(default_factory=lambda: np.zeros((0, 0)))
    _waited_s: Array = field(default_factory=lambda: np.zeros(0))
    _seen: int = 0
    _shown: dict[tuple[Member, str], DetectorVerdict] = field(default_factory=dict)

    def observe(self, times: StepTimes) -> tuple[DetectorVerdict, ...]:
        """The guilty ranks after these steps. Raises ValueError when steps come without any rank."""
        if not times.members:
            raise ValueError("steps of no rank at all")
        if (times.generation, times.members) != (self._generation, self._members):
            self._enter(times)
        shards = np.asarray(times.shards, dtype=float)
        columns = {kind: times.seconds(kind) for kind in KINDS}
        for offset in range(columns[NETWORK].shape[1]):
            now = {kind: columns[kind][:, offset] for kind in KINDS}
            self._push(now, shards)
            self._seen += 1
            if self._seen % self.limits.stride == 0:
                self._judge(times.first_step + offset, shards)
        return tuple(self._shown.values())

    def _enter(self, times: StepTimes) -> None:
        place = {member: row for row, member in enumerate(self._members)}
        rows = [place.get(member, -1) for member in times.members]
        stay = set(times.members)
        for kind in KINDS:
            old = self._tracks.get(kind, _Track.empty(0, self.limits.window))
            self._tracks[kind] = old.moved(rows, forget=kind == NETWORK)
            ages = self._age.get(kind, np.zeros(0))
            self._age[kind] = np.array([ages[row] if row >= 0 and kind != NETWORK else 0.0 for row in rows])
        self._waits = np.zeros((len(rows), self.limits.window))
        self._shown = {key: verdict for key, verdict in self._shown.items() if key[0] in stay}
        self._members, self._generation = times.members, times.generation

    def _push(self, now: dict[str, Array], shards: Array) -> None:
        """One step."""
        work = shards * np.nan_to_num(now["compute"])
        self._waits[:, :-1] = self._waits[:, 1:]
        self._waits[:, -1] = work.max() - work
        self._waited_s = self.limits.wait_share * scores.median(self._waits)
        for kind in KINDS:
            self._age[kind] += 1
            usable = (now[kind] > 0) & (self._age[kind] > self.limits.warmup)
            log_s = np.log(np.where(usable, now[kind], np.nan))
            self._tracks[kind].push(log_s, self._less_waiting(log_s) if kind == NETWORK else log_s)

    def _judge(self, step: int, shards: Array) -> None:
        share = float(shards.mean())
        weight = {kind: 1.0 if kind == NETWORK else share for kind in KINDS}
        middles = {kind: self._locate(self._tracks[kind]) for kind in KINDS}
        step_s = sum(_typical(np.exp(median)) * weight[kind] for kind, (median, _) in middles.items())
        for kind in KINDS:
            figures = self._figures(kind, *middles[kind], weight[kind] / step_s if step_s > 0 else math.nan)
            self._update(kind, step, figures, self.scorer(figures, self.limits))

    def _locate(self, track: _Track) -> tuple[Array, Array]:
        """(median, midmean) of the window, logarithms, [ranks]."""
        return scores.locations(track.times, least=(2 * self.limits.window + 2) // 3)

    def _less_waiting(self, log_s: Array) -> Array:
        """A rank that waits for a slower one may have counted a part of that wait as time on the wire.

        The rank gets the benefit: that part is taken off its own time. It is not taken off the others' times, against which a slow rank is
        compared.
        """
        seconds = np.exp(log_s)
        return np.asarray(np.log(np.maximum(seconds - self._waited_s, seconds / 2)))

    def _figures(self, kind: str, median: Array, midmean: Array, weight: float) -> Scores:
        track, limits = self._tracks[kind], self.limits
        own = self._less_waiting if kind == NETWORK else np.asarray
        accused = np.asarray(track.guilty > 0)
        excess = own(midmean) - scores.median_of_others(midmean, accused)
        median_excess = own(median) - scores.median_of_others(median, accused)
        learned = track.past if self._seen % LEARN_EVERY else None
        beyond, error = track.beyond(learned or track.learn(limits), limits.window, limits.tolerance)
        track.best = np.fmin(track.best, median)
        impact = -np.expm1(-beyond) * np.exp(midmean) * weight
        return Scores(kind, excess, median_excess, median - track.best, beyond, error, impact)

    def _update(self, kind: str, step: int, figures: Scores, strength: Array) -> None:
        track, limits = self._tracks[kind], self.limits
        known = np.isfinite(strength) & (self._age[kind] >= limits.warmup + limits.learn)
        suspect, calm = known & (strength >= 1), known & (strength < limits.release_ratio)
        track.streak = np.where(suspect, track.streak + 1, 0)
        track.calm = np.where(calm, track.calm + 1, 0)
        begins = (track.streak >= limits.persistence) & (track.guilty == 0)
        if begins.any():  # the steps that led to the verdict are no noise, neither of the slow rank nor of the ranks it was compared with
            track.well[:, -LAG_STEPS:] = False
        track.since = np.where(begins, step - limits.stride * (limits.persistence - 1) - limits.window + 1, track.since)
        track.guilty = np.where(begins, 1.0, np.where(track.calm >= limits.release, 0.0, track.guilty))
        for row, member in enumerate(self._members):
            if track.guilty[row] and known[row]:
                self._shown[member, kind] = self._verdict(kind, row, step, figures)
            elif not track.guilty[row]:
                self._shown.pop((member, kind), None)

    def _verdict(self, kind: str, row: int, step: int, figures: Scores) -> DetectorVerdict:
        beyond, error, change = float(figures.beyond[row]), float(figures.error[row]), float(figures.change[row])
        excess = max(float(figures.excess[row]), beyond)  # the midmean lags at first
        clears = self.limits.release_ratio * math.log(self.limits.least(kind, len(self._members)))
        evidence = {
            "relative_score": math.exp(-float(figures.median_excess[row])), "individual_score": math.exp(-change),
            "robust_z": beyond / error, "noise": error, "ranks": float(len(self._members)),
            "others_individual_score": math.exp(-_typical(np.delete(figures.change, row))), "impact_ratio": float(figures.impact[row]),
        }  # fmt: skip
        reason = f"{kind} takes {math.exp(excess):.2f} times as long as on the other ranks, {beyond / error:.1f} times the noise"
        since, confidence = max(0, int(self._tracks[kind].since[row])), 0.5 * math.erfc((clears - beyond) / error / math.sqrt(2))
        return DetectorVerdict(self._members[row], kind, math.exp(-excess), confidence, since, step, evidence, reason)


def _typical(values: Array) -> float:
    known = values[np.isfinite(values)]
    return float(scores.median(known)) if known.size else 0.0
