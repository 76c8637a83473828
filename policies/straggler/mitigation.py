"""The straggler policy of live runs: a detector watches the steps, and the answer to its verdicts is the least expected loss."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from fleet.protocol.decisions import Decision, Prices, StepFigures, Suspect
from fleet.protocol.slowness import Circumstances, Remedy, StepTime, Timings
from fleet.protocol.types import Member, Ranges
from fleet.settings.run import RunSettings, StragglerSettings
from policies.placement import ranges as even_ranges
from policies.straggler.detectors import (
    COMPUTE,
    DATA,
    NETWORK,
    DetectorVerdict,
    StepTimes,
)
from policies.straggler.remedies import REBALANCE, TOLERATE, LeastLoss, Standing
from policies.straggler.windows import WindowedDetector

LEAST_STEPS, TYPICAL_STEPS, FRESH_STEPS = 5, 16, 6
"""Three numbers of steps. A view has so many measured steps before it is changed. So many last steps give the usual step time. So many give
a fresh slowness, for which a detector's window still holds earlier steps."""

STEADY_STEPS, STEADY = 4, 0.15
"""The policy acts on a slowdown that has changed by less than this (as a logarithm) in so many steps. Before, it may come or go."""

MOSTLY = 0.5
"""The machine counts as the cause when at least this share of a rank's excess over the others was time without a core."""

WELL_STEPS = 60
"""A new process in the slot of a slow one is presumed slow, until it has made so many steps of normal length."""

Key = tuple[Member, str]


class Mitigator:
    """A :class:`fleet.protocol.ports.StragglerPolicy`.

    Args:
        settings: thresholds, and the budget of view changes; :meth:`configure` changes them in a running run.
    """

    def __init__(self, settings: StragglerSettings | None = None) -> None:
        self.settings = settings or StragglerSettings()
        self._detector = WindowedDetector()
        self._law = LeastLoss(gain=self.settings.gain, changes=self.settings.changes)
        self._guilty: dict[Key, DetectorVerdict] = {}
        self._since_s: dict[Key, float] = {}
        self._columns: deque[tuple[StepTime | None, ...]] = deque(maxlen=TYPICAL_STEPS)
        self._generation, self._seen, self._watched = -1, 0, 0
        self._scores: dict[Key, deque[tuple[int, float]]] = {}
        self._presumed: dict[int, float] = {}
        self._blind = ""

    @classmethod
    def of(cls, run: RunSettings, own: None) -> Mitigator:
        """The policy of a run."""
        return cls(run.straggler)

    def configure(self, settings: StragglerSettings) -> None:
        """The settings hold from the next step on; the times that were learned stay."""
        self.settings = settings
        self._law = dataclasses.replace(self._law, gain=settings.gain, changes=settings.changes)

    def look(self, timings: Timings | None, circumstances: Circumstances, now_s: float) -> Remedy:
        """See :class:`fleet.protocol.ports.StragglerPolicy`. Disabled, it forgets its accusations, and shards go back to an even split."""
        try:
            findings = self._observe(timings, circumstances, now_s) if timings is not None else []
            return self._answer(tuple(findings), circumstances, now_s)
        except Exception as error:  # noqa: BLE001 - an error of the policy makes no rank guilty, and training goes on
            return Remedy(tuple(self._unknown(f"the straggler policy crashed: {type(error).__name__}: {error}")))

    # ---- slow ranks ----------------------------------------------------------------------------------------------------------------------

    def _observe(self, timings: Timings, circumstances: Circumstances, now_s: float) -> list[Decision]:
        if timings.generation != self._generation:
            self._generation, self._seen = timings.generation, 0
            self._columns.clear()
        self._columns.extend(zip(*timings.rows, strict=True))
        self._seen += len(timings.steps)
        self._watched += len(timings.steps)
        verdicts = self._detector.observe(_arrays(timings, circumstances.view.ranges)) if self.settings.enabled else ()
        self._blind = ""
        guilty = {(verdict.member, verdict.kind): verdict for verdict in verdicts}
        return [*self._accused(guilty, now_s), *self._cleared(guilty, circumstances, now_s)]

    def _unknown(self, reason: str) -> list[Decision]:
        """The decision when no rank can be judged for now; sent once, until ranks can be judged again."""
        said, self._blind = self._blind, reason
        return [Decision("unknown", reason)] if reason != said else []

    def _accused(self, guilty: dict[Key, DetectorVerdict], now_s: float) -> list[Decision]:
        found = []
        for key, verdict in guilty.items():
            if key not in self._guilty:
                self._since_s[key] = now_s
                self._scores[key] = deque(maxlen=2 * STEADY_STEPS)
                found.append(_finding("accuse", verdict, verdict.reason))
            self._guilty[key] = verdict
            self._scores[key].append((verdict.step, math.log(verdict.score)))
        return found

    def _cleared(self, guilty: dict[Key, DetectorVerdict], circumstances: Circumstances, now_s: float) -> list[Decision]:
        """Verdicts that end. When an accused rank has left, the length of its slowness stays unknown."""
        found = []
        for key in [key for key in self._guilty if key not in guilty]:
            verdict, since_s = self._guilty.pop(key), self._since_s.pop(key)
            if key[0] in circumstances.view.members:
                lasted_s = now_s - since_s
                durations = dict(self._law.durations)
                known = durations[verdict.kind]
                durations[verdict.kind] = dataclasses.replace(known, seen_s=(*known.seen_s, lasted_s))
                self._law = dataclasses.replace(self._law, durations=durations)
                found.append(_finding("clear", verdict, f"{verdict.kind} is as with the other ranks again, after {lasted_s:.3g} s"))
        return found

    # ---- remedies ------------------------------------------------------------------------------------------------------------------------

    def _answer(self, findings: tuple[Decision, ...], circumstances: Circumstances, now_s: float) -> Remedy:
        view = circumstances.view
        even = view.ranges == even_ranges(circumstances.shards, len(view.members))
        nothing = self._blind or not (self._guilty or (self._knows and not even))
        if nothing or self._generation != view.generation or self._seen < LEAST_STEPS or not all(map(self._steady, self._guilty)):
            return Remedy(findings)
        standing = self._standing(circumstances, now_s)
        self._forgive(circumstances)
        chosen = self._law.decide(standing, now_s)
        decision = _with_steps(chosen.decision, standing, chosen.ranges)
        if decision.action == TOLERATE:
            return Remedy(findings, decision)
        if chosen.ranges is not None and decision.action == REBALANCE:
            pairs = zip(view.members, standing.slowdowns, strict=True)
            return Remedy(findings, decision, chosen.ranges, tuple((member, 1 / slow) for member, slow in pairs if slow > 1))
        gone = tuple(view.members[rank] for rank in chosen.slots)
        for rank in chosen.slots:
            if standing.slowdowns[rank] > 1:
                self._presumed[view.members[rank].slot] = standing.slowdowns[rank]
        return Remedy(findings, decision, members=gone)

    @property
    def _knows(self) -> bool:
        """Whether it has watched long enough to find a slow rank. After a restart it may not know earlier verdicts."""
        limits = self._detector.limits
        return (
            not self.settings.enabled or self._watched >= limits.warmup + limits.learn + limits.window + limits.persistence * limits.stride
        )

    def _steady(self, key: Key) -> bool:
        """Whether the slowdown is the same as some steps ago; the persistence of a fresh verdict has shown that it exists."""
        last_step, last = self._scores[key][-1]
        before = [score for step, score in self._scores[key] if step <= last_step - STEADY_STEPS]
        return not before or abs(last - before[-1]) < STEADY

    def _forgive(self, circumstances: Circumstances) -> None:
        if self._seen >= WELL_STEPS:
            slow = {member.slot for member, _ in self._guilty}
            for member in circumstances.view.members:
                if member.slot not in slow:
                    self._presumed.pop(member.slot, None)

    def _standing(self, circumstances: Circumstances, now_s: float) -> Standing:
        view = circumstances.view
        compute_s, data_s, network_s, fixed_s, step_s = self._typical(view.members)
        shard_s = compute_s + data_s
        weights = {COMPUTE: compute_s / shard_s, DATA: data_s / shard_s}
        slowdowns = [1.0] * len(view.members)
        kinds = {kind for _, kind in self._guilty}
        kind = NETWORK if kinds == {NETWORK} else DATA if kinds == {DATA} else COMPUTE
        for (member, what), verdict in self._guilty.items():
            share = weights.get(what, 0.0) if kind != NETWORK else 1.0
            rank = view.rank_of(member)
            slowdowns[rank] += share * (self._slowdown(rank, what, verdict) - 1)
        remaining_s = circumstances.steps_left * step_s
        return Standing(
            shards=circumstances.shards, ranges=view.ranges, slowdowns=tuple(max(1.0, slow) for slow in slowdowns), kind=kind,
            nodes=circumstances.nodes, shard_s=shard_s, fixed_s=network_s + fixed_s,
            elapsed_s=max((now_s - since_s for since_s in self._since_s.values()), default=0.0), remaining_s=remaining_s,
            spares=tuple(self._presumed.get(member.slot, 1.0) for member, _ in circumstances.spares), changes=circumstances.changes,
            spare_rate_per_s=circumstances.losses_per_s, waiting=self._waiting(view.members),
        )  # fmt: skip

    def _waiting(self, members: Sequence[Member]) -> tuple[int, ...]:
        """View ranks that are accused, and that had no core for most of their excess over the others."""
        accused = {member for member, _ in self._guilty}
        others = [rank for rank, member in enumerate(members) if member not in accused]
        found = []
        for rank, member in enumerate(members):
            kinds = [kind for who, kind in self._guilty if who == member]
            beyond = [(self._beyond(rank, others, _took(kind)), self._beyond(rank, others, _waited(kind))) for kind in kinds]
            if kinds and all(0 < took_s and waited_s >= MOSTLY * took_s for took_s, waited_s in beyond):
                found.append(rank)
        return tuple(found)

    def _beyond(self, rank: int, others: Sequence[int], seconds: Callable[[StepTime], float]) -> float:
        """The rank's excess in seconds over the others' median, in all of the last steps together."""
        total = 0.0
        for column in self._columns:
            rest = [seconds(time) for other in others if (time := column[other]) is not None]
            if rest and (own := column[rank]) is not None:
                total += seconds(own) - _median(rest)
        return total

    def _slowdown(self, rank: int, kind: str, verdict: DetectorVerdict) -> float:
        """The detector's figure; for a fresh verdict the figure of the very last steps, if that is more."""
        known = self._scores[verdict.member, kind]
        if known[-1][0] - known[0][0] >= STEADY_STEPS or kind != COMPUTE:
            return 1 / verdict.score
        columns = [[time.compute_s / time.shards if time is not None else math.nan for time in column] for column in self._columns]
        ratios = [own[rank] / float(np.nanmedian(own)) for own in columns[-FRESH_STEPS:] if math.isfinite(own[rank])]
        return max([1 / verdict.score, _median(ratios)] if ratios else [1 / verdict.score])

    def _typical(self, members: Sequence[Member]) -> tuple[float, float, float, float, float]:
        """(compute and data a shard, network, fixed) of a well rank, and seconds of a whole step; medians of the last steps."""
        slow = {member for member, _ in self._guilty}
        well = [rank for rank, member in enumerate(members) if member not in slow] or list(range(len(members)))
        times = [column[rank] for column in self._columns for rank in well]
        known = [time for time in times if time is not None]
        columns = [[time.own_s for time in column if time is not None] for column in self._columns]
        step_s = _median([max(own) for own in columns if own])
        compute_s, data_s = (
            _median([time.compute_s / time.shards for time in known]),
            _median([time.data_s / time.shards for time in known]),
        )
        return compute_s, data_s, _median([time.network_s for time in known]), _median([time.fixed_s for time in known]), step_s


def _took(kind: str) -> Callable[[StepTime], float]:
    """The seconds that a rank is accused of: of a shard, or of a step's exchange."""
    return lambda time: time.network_s if kind == NETWORK else (time.compute_s + time.data_s) / time.shards


def _waited(kind: str) -> Callable[[StepTime], float]:
    """The same for the time in which it had no core to run on."""
    return lambda time: time.waited_s if kind == NETWORK else time.waited_s / time.shards


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if values else math.nan


def _arrays(timings: Timings, split: Ranges) -> StepTimes:
    def column(read: Callable[[StepTime], float]) -> np.ndarray:
        return np.array([[math.nan if time is None else read(time) for time in row] for row in timings.rows])

    return StepTimes(
        generation=timings.generation, first_step=timings.steps[0], members=timings.members,
        shards=np.array([end - begin for begin, end in split], dtype=float), compute_s=column(lambda time: time.compute_s / time.shards),
        network_s=column(lambda time: time.network_s), data_s=column(lambda time: time.data_s / time.shards),
    )  # fmt: skip


def _finding(action: Literal["accuse", "clear"], verdict: DetectorVerdict, what: str) -> Decision:
    member = verdict.member
    suspect = Suspect(
        float(member.slot), float(member.incarnation), verdict.score, verdict.confidence, float(verdict.since_step), float(verdict.step),
        verdict.kind, dict(verdict.evidence),
    )  # fmt: skip
    return Decision(action, f"rank {member}: {what}", suspect)


def _with_steps(decision: Decision, standing: Standing, split: Ranges | None) -> Decision:
    """The inputs of the report's counterfactual: a step now, a step after the change, and a step had the policy never acted."""
    prices, even = decision.payload, even_ranges(standing.shards, len(standing.ranges))
    assert isinstance(prices, Prices)
    steps = StepFigures(
        standing.shard_s, standing.fixed_s, standing.step_s(standing.ranges, standing.slowdowns), standing.step_s(even, standing.slowdowns),
        standing.step_s(even, (1.0,) * len(standing.ranges)), standing.step_s(split, standing.slowdowns) if split is not None else None,
    )  # fmt: skip
    return dataclasses.replace(decision, payload=dataclasses.replace(prices, steps=steps))
