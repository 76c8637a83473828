"""The detector that runs live: a sliding window over the steps, a scorer, persistence and hysteresis."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from fleet.types import Member
from policies import scores
from policies.detectors import GUILTY, KINDS, NETWORK, UNKNOWN, Detector, Scorer, Scores, Sensitivity, StepTimes, Verdict, combined
from policies.scores import Array

NOISE_SCORES, LAG_STEPS = 60, 20
"""How many scores of each rank tell the noise of a score. Those of the last steps are not among them: they may be what is to be judged."""

LEARNED_SCORES = 8
"""So many scores tell what is usual for a rank."""

FEW = 3
"""In a world of so few ranks a slow one moves the scores of all others: the median of the others is then not robust."""


@dataclass(slots=True)
class _Track:
    """What is remembered of one kind of time; rows are the ranks of the present view, columns steps or scores, newest last."""

    times: Array
    past: Array
    best: Array
    streak: Array
    calm: Array
    guilty: Array
    since: Array

    @classmethod
    def empty(cls, ranks: int, window: int) -> _Track:
        nothing, zeros = np.full(ranks, np.nan), np.zeros(ranks)
        past = np.full((ranks, NOISE_SCORES), np.nan)
        return cls(np.full((ranks, window), np.nan), past, nothing, zeros, zeros.copy(), zeros.copy(), zeros.copy())

    def moved(self, rows: list[int], *, forget: bool) -> _Track:
        """The rows of another view: ``rows[r]`` is where rank ``r`` was, -1 for a newcomer. ``forget`` leaves only the verdicts."""
        fresh = _Track.empty(len(rows), self.times.shape[1])
        here = [row for row, old in enumerate(rows) if old >= 0]
        there = [rows[row] for row in here]
        names = ("streak", "calm", "guilty", "since") if forget else tuple(self.__slots__)
        for name in names:
            getattr(fresh, name)[here] = getattr(self, name)[there]
        return fresh


@dataclass(slots=True)
class WindowedDetector:
    """A :class:`policies.detectors.Detector`. Feeding it the same steps in other portions gives the same verdicts at the same steps.

    Cost of a step: O(ranks x window) every ``stride`` steps. Memory: about 100 numbers a rank and kind.
    """

    limits: Sensitivity = field(default_factory=Sensitivity)
    scorer: Scorer = combined
    _members: tuple[Member, ...] = ()
    _generation: int = -1
    _tracks: dict[str, _Track] = field(default_factory=dict)
    _age: dict[str, Array] = field(default_factory=dict)
    _waits: Array = field(default_factory=lambda: np.zeros((0, 0)))
    _seen: int = 0
    _shown: dict[tuple[Member, str], Verdict] = field(default_factory=dict)

    def observe(self, times: StepTimes) -> tuple[Verdict, ...]:
        """Who is guilty after these steps. Raises ValueError when steps come without any rank."""
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
        for kind in KINDS:
            track, seconds = self._tracks[kind], now[kind]
            self._age[kind] += 1
            usable = (seconds > 0) & (self._age[kind] > self.limits.warmup)
            track.times[:, :-1] = track.times[:, 1:]
            track.times[:, -1] = np.log(np.where(usable, seconds, np.nan))

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
        """A rank that waits for a slower one may have booked some of it on the wire: in its favour that is taken off its own time, and not
        off the others', to which a slower one is compared."""
        seconds = np.exp(log_s)
        waited_s = self.limits.wait_share * scores.median(self._waits)
        return np.asarray(np.log(np.maximum(seconds - waited_s, seconds / 2)))

    def _figures(self, kind: str, median: Array, midmean: Array, weight: float) -> Scores:
        track, limits = self._tracks[kind], self.limits
        own = self._less_waiting if kind == NETWORK else np.asarray
        accused = np.asarray(track.guilty > 0)
        excess = own(midmean) - scores.median_of_others(midmean, accused)
        median_excess = own(median) - scores.median_of_others(median, accused)
        usual, centred = scores.usual(track.past[:, : -max(1, LAG_STEPS // limits.stride)], LEARNED_SCORES, limits.tolerance)
        spread, peak = scores.noise(scores.without_apart(centred, math.log(limits.slowdown(kind))), limits.noise_floor)
        noise = max(spread, scores.window_noise(track.times))
        track.past[:, :-1] = track.past[:, 1:]
        track.past[:, -1] = np.where(accused | (accused.any() and len(accused) <= FEW), np.nan, excess)
        track.best = np.fmin(track.best, median)
        impact = -np.expm1(-excess) * np.exp(midmean) * weight
        return Scores(kind, excess, median_excess, median - track.best, usual, noise, peak, impact)

    def _update(self, kind: str, step: int, figures: Scores, strength: Array) -> None:
        track, limits = self._tracks[kind], self.limits
        known = np.isfinite(strength) & (self._age[kind] >= limits.warmup + limits.learn)
        suspect, calm = known & (strength >= 1), known & (strength < limits.release_ratio)
        track.streak = np.where(suspect, track.streak + np.clip(strength, 1, limits.haste), 0)
        track.calm = np.where(calm, track.calm + 1, 0)
        begins = (track.streak >= limits.persistence) & (track.guilty == 0)
        if begins.any():  # what led to the verdict is no noise, neither of the slow rank nor of those that were compared with it
            track.past[:, -LAG_STEPS // limits.stride :] = np.nan
        track.since = np.where(begins, step - limits.stride * (limits.persistence - 1) - limits.window + 1, track.since)
        track.guilty = np.where(begins, 1.0, np.where(track.calm >= limits.release, 0.0, track.guilty))
        for row, member in enumerate(self._members):
            if track.guilty[row] and known[row]:
                self._shown[member, kind] = self._verdict(kind, row, step, figures)
            elif not track.guilty[row]:
                self._shown.pop((member, kind), None)

    def _verdict(self, kind: str, row: int, step: int, figures: Scores) -> Verdict:
        excess, noise, change = float(figures.excess[row]), figures.noise, float(figures.change[row])
        beyond = (excess - self.limits.release_ratio * math.log(self.limits.slowdown(kind))) / noise
        others = np.delete(figures.change, row)
        evidence = {
            "relative_score": math.exp(-float(figures.median_excess[row])), "individual_score": math.exp(-change),
            "robust_z": excess / noise, "noise": noise, "peak": figures.peak, "ranks": float(len(self._members)),
            "others_individual_score": math.exp(-_typical(others)), "impact_ratio": float(figures.impact[row]),
        }  # fmt: skip
        reason = f"{kind} takes {math.exp(excess):.2f} times what it takes the other ranks, {excess / noise:.1f} times the noise"
        since, confidence = max(0, int(self._tracks[kind].since[row])), 0.5 * math.erfc(-beyond / math.sqrt(2))
        return Verdict(self._members[row], kind, GUILTY, math.exp(-excess), confidence, since, step, evidence, reason)


def _typical(values: Array) -> float:
    known = values[np.isfinite(values)]
    return float(scores.median(known)) if known.size else 0.0


@dataclass(slots=True)
class Guarded:
    """A detector that throws accuses nobody: for these steps every rank is unknown."""

    detector: Detector

    def observe(self, times: StepTimes) -> tuple[Verdict, ...]:
        """What the detector says, or an unknown verdict for each member."""
        try:
            return self.detector.observe(times)
        except Exception as error:  # noqa: BLE001 - whatever a detector trips over, it must not pass for evidence
            reason = f"the detector crashed: {type(error).__name__}: {error}"
            step = times.first_step + np.shape(times.network_s)[-1] - 1
            return tuple(Verdict(m, "", UNKNOWN, math.nan, 0.0, times.first_step, step, {}, reason) for m in times.members)
