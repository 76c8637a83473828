"""Remedies for slow ranks: tolerate them, give them fewer shards, put a spare in their place, or drop their node.

Each way has a price in lost rank-seconds, against a world in which every rank is well; the policy takes the cheapest. A way has a cost at
once: a view change, a transfer of state, a spare that the next fault will miss. It has another cost for as long as the slowness lasts. That
time is unknown. Its estimate comes from earlier slowness (:class:`Durations`), and grows while this one goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from fleet.protocol.decisions import Decision, Prices
from fleet.settings.run import StragglerSettings
from policies.placement import Ranges, ranges, weighted_ranges
from policies.straggler.detectors import COMPUTE, DATA, NETWORK

Measure = Literal["tolerate", "rebalance", "replace", "evict"]
TOLERATE: Final = "tolerate"
REBALANCE: Final = "rebalance"
REPLACE: Final = "replace"
EVICT: Final = "evict"

SHAPE = 2.0
"""Shape of the prior of :class:`Durations`."""

_Lost = Callable[[float], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """The duration of slowness: exponential, with a prior rate of Gamma(shape, (shape - 1) x mean).

    ``mean_s`` is the prior mean: about 10 minutes for slow compute, 24 to 72 for a slow network (published for Greyhound). ``seen_s`` are
    the durations that ended. With n of them, and this one lasting for e so far, the rate is Gamma(shape + n, ... + sum + e). The mean time
    left is ((shape - 1) mean + sum(seen) + e) / (shape + n - 1). It grows with e, as it should when the cause is unknown.
    """

    mean_s: float
    seen_s: tuple[float, ...] = ()

    def left_s(self, elapsed_s: float) -> float:
        """Expected seconds that the slowness still lasts."""
        return ((SHAPE - 1) * self.mean_s + sum(self.seen_s) + elapsed_s) / (SHAPE + len(self.seen_s) - 1)


REVIEW_S = 10.0
"""How long a decision holds without an event."""

MEAN_S = {COMPUTE: 600.0, NETWORK: 2880.0, DATA: 600.0}
"""Prior mean of :class:`Durations`, by kind of slowness, in seconds."""

USUAL = StragglerSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The known facts when a decision is due. Sequences are by view rank.

    Attributes:
        shards, ranges: the batch shards, and the range of each rank at present.
        slowdowns: own time / the others' (``1 / Verdict.score``) of guilty ranks, 1 for all others.
        kind: the kind of slowness: compute, network or data.
        nodes: the node of each rank.
        shard_s: seconds that a well rank takes for one shard; ``fixed_s``: the rest of a step. For a slow network the fixed part is the
            slow one.
        elapsed_s: how long the slowness has lasted.
        remaining_s: how long the run still lasts.
        spares: slowdown of each ready spare, 1 for a spare that is well or was never measured.
        changes: how many view changes the policy made within its window.
        rebalance_s, replace_s, evict_s: how long the view change of each way stalls all ranks.
        provision_s: time until a lost slot is filled again; infinite without room for a replacement.
        spare_rate_per_s: rate of the faults that would need a spare.
        waiting: ranks that are slow only because they wait for cores. Their machine is busy, which is no reason to end a process.
    """

    shards: int
    ranges: Ranges
    slowdowns: tuple[float, ...]
    kind: str
    nodes: tuple[str, ...]
    shard_s: float
    fixed_s: float
    elapsed_s: float
    remaining_s: float
    spares: tuple[float, ...] = ()
    changes: int = 0
    rebalance_s: float = 0.05
    replace_s: float = 0.5
    evict_s: float = 1.0
    provision_s: float = 60.0
    spare_rate_per_s: float = 0.0
    waiting: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("slowdowns", "nodes"):
            if len(getattr(self, name)) != len(self.ranges):
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {len(self.ranges)} ranks")
        if not all(0 < value < math.inf for value in (*self.slowdowns, *self.spares)):
            raise ValueError(f"slowdowns must be positive numbers: {self.slowdowns}, spares {self.spares}")

    @property
    def blamed(self) -> list[int]:
        """Ranks whose slowness, if they are slow, does not come from a busy machine."""
        return [rank for rank in range(len(self.slowdowns)) if rank not in self.waiting]

    def step_s(self, split: Ranges, slowdowns: Sequence[float]) -> float:
        """Seconds of a step: those of the slowest rank."""
        if self.kind == NETWORK:
            return max(end - begin for begin, end in split) * self.shard_s + self.fixed_s * max(slowdowns)
        busiest = max((end - begin) * slow for (begin, end), slow in zip(split, slowdowns, strict=True))
        return busiest * self.shard_s + self.fixed_s


@dataclass(frozen=True, slots=True)
class Way:
    """One way: rank-seconds lost ``at_once``, and ``per_s`` for each of ``for_s`` seconds; ``slots`` are the view ranks that go."""

    action: Measure
    at_once: float
    per_s: float
    for_s: float
    ranges: Ranges | None = None
    slots: tuple[int, ...] = ()

    @property
    def cost(self) -> float:
        """Expected lost rank-seconds."""
        return self.at_once + (self.per_s * self.for_s if self.per_s else 0.0)


@dataclass(frozen=True, slots=True)
class Mitigation:
    """The decision, with the cost of every way in its payload; ``ranges`` for rebalance, ``slots`` (view ranks) for replace and evict."""

    decision: Decision
    ranges: Ranges | None = None
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastLoss:
    """Takes the way with the least expected loss.

    Args:
        gain: another way than to tolerate must save at least this share of the cost of tolerating: measured slowness varies.
        changes: view changes that the policy may make in its window; when they are used up it tolerates.
        review_s: how long a decision holds without an event.
    """

    gain: float = USUAL.gain
    changes: int = USUAL.changes
    review_s: float = REVIEW_S
    durations: Mapping[str, Durations] = field(default_factory=lambda: {kind: Durations(mean_s=mean_s) for kind, mean_s in MEAN_S.items()})

    def decide(self, standing: Standing, now_s: float) -> Mitigation:
        """Action ``tolerate`` (no change), ``rebalance``, ``replace`` or ``evict``.

        A rank that is well again has a slowdown of 1: then ``rebalance`` leads back to an even split.
        """
        slow = max(standing.slowdowns) > 1
        left_s = min(self.durations[standing.kind].left_s(standing.elapsed_s) if slow else math.inf, standing.remaining_s)
        ways = ways_out(standing, left_s)
        now, best = ways[0], min(ways, key=lambda way: way.cost)
        waits = _in_words(standing.waiting)
        prices = _prices(standing, ways, left_s)
        until_s = now_s + self.review_s
        if best is now or now.cost - best.cost <= self.gain * now.cost:
            why = "no rank is slow" if now.per_s <= 0 else f"no way saves over {self.gain:.0%} of the {now.cost:.3g} rank-seconds it costs"
            return Mitigation(Decision(TOLERATE, why + waits, prices, until_s))
        if standing.changes >= self.changes:
            why = f"{best.action} would save {now.cost - best.cost:.3g} rank-seconds, but {standing.changes} view changes are used up"
            return Mitigation(Decision(TOLERATE, why, replace(prices, limit=float(self.changes)), until_s))
        reason = f"{best.action} costs {best.cost:.3g} rank-seconds, going on as now {now.cost:.3g}: slow for {left_s:.3g} s more, expected"
        return Mitigation(
            Decision(best.action, reason + waits, replace(prices, saved=now.cost - best.cost), until_s), best.ranges, best.slots
        )


def _in_words(waiting: Sequence[int]) -> str:
    """A clause of a reason; empty where no rank waits for a core."""
    ranks = "one slow rank waits" if len(waiting) == 1 else f"{len(waiting)} slow ranks wait"
    return f"; {ranks} for cores that other programs have: that ends no process" if waiting else ""


def ways_out(standing: Standing, left_s: float) -> list[Way]:
    """All possible ways; the first is to tolerate. ``left_s``: how long the slowness will last."""
    ranks = len(standing.ranges)
    well_s = standing.step_s(ranges(standing.shards, ranks), (1.0,) * ranks)

    def lost(step_s: float) -> float:
        """Rank-seconds lost in a second in which steps take ``step_s``."""
        return ranks * max(0.0, 1 - well_s / step_s)

    now = Way(TOLERATE, 0.0, lost(standing.step_s(standing.ranges, standing.slowdowns)), left_s)
    found = [now, _rebalance(standing, left_s, lost), _replace(standing, lost), _evict(standing, left_s, lost)]
    return [way for way in found if way is not None]


def _rebalance(standing: Standing, left_s: float, lost: _Lost) -> Way | None:
    """None where shards are not the cause of the slowness, or the split would stay the same."""
    split = weighted_ranges(standing.shards, [1 / slow for slow in standing.slowdowns])
    if standing.kind == NETWORK or split == standing.ranges:
        return None
    back = 2 if max(standing.slowdowns) > 1 else 1  # after the slowness, the shards go back
    at_once = back * len(split) * standing.rebalance_s
    return Way(REBALANCE, at_once, lost(standing.step_s(split, standing.slowdowns)), left_s, split)


def _replace(standing: Standing, lost: _Lost) -> Way | None:
    """Replace the slowest ranks by the best spares, as far as that helps. A spare may be slow itself, for as long as the run lasts."""
    slowest = sorted(standing.blamed, key=lambda rank: -standing.slowdowns[rank])
    pairs = zip(slowest, sorted(standing.spares), strict=False)
    swaps = {rank: spare for rank, spare in pairs if standing.slowdowns[rank] > 1 and spare < standing.slowdowns[rank]}
    if not swaps:
        return None
    after = [swaps.get(rank, slow) for rank, slow in enumerate(standing.slowdowns)]
    split = ranges(standing.shards, len(after))
    miss = 1 - math.exp(-standing.spare_rate_per_s * _until_filled_s(standing))
    at_once = len(after) * standing.replace_s + len(swaps) * miss * _until_filled_s(standing)
    return Way(REPLACE, at_once, lost(standing.step_s(split, after)), standing.remaining_s, None, tuple(sorted(swaps)))


def _evict(standing: Standing, left_s: float, lost: _Lost) -> Way | None:
    """Drop the node of the slowest rank. Its ranks are gone: spares take their place at once, and replacements later. When the slowness is
    expected to be over, the ranks themselves come back."""
    worst = max(standing.blamed, key=standing.slowdowns.__getitem__, default=0)
    gone = tuple(rank for rank, node in enumerate(standing.nodes) if node == standing.nodes[worst])
    stay = [slow for rank, slow in enumerate(standing.slowdowns) if rank not in gone]
    after = [*stay, *sorted(standing.spares)[: len(gone)]]
    if worst in standing.waiting or standing.slowdowns[worst] <= 1 or not stay:
        return None
    step_s = standing.step_s(ranges(standing.shards, len(after)), after)
    used = len(after) - len(stay)
    miss = 1 - math.exp(-standing.spare_rate_per_s * _until_filled_s(standing))
    at_once = len(standing.ranges) * standing.evict_s + used * miss * _until_filled_s(standing)
    return Way(EVICT, at_once, lost(step_s), min(_until_filled_s(standing), left_s), None, gone)


def _until_filled_s(standing: Standing) -> float:
    return min(standing.provision_s, standing.remaining_s)


def _prices(standing: Standing, ways: Sequence[Way], left_s: float) -> Prices:
    slow = [rank for rank, slowdown in enumerate(standing.slowdowns) if slowdown > 1]
    return Prices(
        {way.action: way.cost for way in ways}, max(standing.slowdowns), float(len(slow)), left_s, standing.elapsed_s,
        float(len(standing.spares)), float(standing.changes),
    )  # fmt: skip
