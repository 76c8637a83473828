"""What to do about slow ranks: bear them, give them fewer shards, put a spare in their place, or drop their node.

Each way is priced in lost rank-seconds, against a world in which every rank is well, and the cheapest is taken. A way costs something at
once (a view change, a transfer of state, a spare that the next fault will miss) and something for as long as the slowness lasts. How long
that is nobody knows; it is estimated from how long earlier ones lasted (:class:`Durations`), and grows while this one goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from fleet.protocol.decisions import Decision, Prices
from fleet.settings.fields import setting, within
from fleet.settings.run import StragglerSettings
from policies.placement import Ranges, ranges, weighted_ranges
from policies.straggler.detectors import KINDS, NETWORK

Measure = Literal["tolerate", "rebalance", "replace", "evict"]
TOLERATE: Final = "tolerate"
REBALANCE: Final = "rebalance"
REPLACE: Final = "replace"
EVICT: Final = "evict"

SHAPE = 2.0
"""Of the prior of :class:`Durations`."""

_Lost = Callable[[float], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """How long slowness lasts: exponential, with a rate that is Gamma(shape, (shape - 1) x mean) before anything is seen.

    ``mean_s`` is the prior mean: about 10 minutes for slow compute, 24 to 72 for a slow network (published for Greyhound). ``seen_s`` are
    the lengths of those that ended. With n of them, and this one lasting for e so far, the rate is Gamma(shape + n, ... + sum + e), and the
    mean time left ((shape - 1) mean + sum(seen) + e) / (shape + n - 1): it grows with e, as it should when nobody knows the cause.
    """

    mean_s: float
    seen_s: tuple[float, ...] = ()

    def left_s(self, elapsed_s: float) -> float:
        """Expected seconds that it still lasts."""
        return ((SHAPE - 1) * self.mean_s + sum(self.seen_s) + elapsed_s) / (SHAPE + len(self.seen_s) - 1)


@dataclass(frozen=True, kw_only=True)
class WaysSettings:
    """What the choice among the ways can be told."""

    review_s: float = setting(10.0, "How long a decision holds while nothing happens.", above=0)
    compute_mean_s: float = setting(600.0, "How long slow compute lasts on average, before anything is seen.", above=0)
    network_mean_s: float = setting(2880.0, "The same for a slow network.", above=0)
    data_mean_s: float = setting(600.0, "The same for slow data.", above=0)

    def __post_init__(self) -> None:
        within(self, "straggler.settings.")

    def priors(self) -> dict[str, Durations]:
        """By kind of slowness."""
        return {kind: Durations(mean_s=getattr(self, f"{kind}_mean_s")) for kind in KINDS}


USUAL = StragglerSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What is known when the decision is due. Sequences are by view rank.

    Attributes:
        shards, ranges: the batch shards, and who computes which at present.
        slowdowns: own time / the others' (``1 / Verdict.score``) of the ranks that are guilty, 1 for all others.
        kind: what is slow: compute, network or data.
        nodes: the node of each rank.
        shard_s: seconds that a well rank takes for one shard; ``fixed_s`` what a step takes besides. For a slow network the fixed part is
            what is slow.
        elapsed_s: how long it has been slow.
        remaining_s: how long the run still lasts.
        spares: slowdown of each spare that is ready, 1 for one that is well or was never measured.
        changes: how many view changes the policy made within its window.
        rebalance_s, replace_s, evict_s: what the view change of each way stalls all ranks for.
        provision_s: until a lost slot is filled again; infinite when there is no room for a replacement.
        spare_rate_per_s: rate of the faults that would need a spare.
        waiting: ranks that are slow only as they wait for cores. Their machine is busy, which is no reason to end a process.
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
        """Ranks whose slowness, if they are slow, is not that of a busy machine."""
        return [rank for rank in range(len(self.slowdowns)) if rank not in self.waiting]

    def step_s(self, split: Ranges, slowdowns: Sequence[float]) -> float:
        """Seconds of a step: as long as the slowest rank takes."""
        if self.kind == NETWORK:
            return max(end - begin for begin, end in split) * self.shard_s + self.fixed_s * max(slowdowns)
        busiest = max((end - begin) * slow for (begin, end), slow in zip(split, slowdowns, strict=True))
        return busiest * self.shard_s + self.fixed_s


@dataclass(frozen=True, slots=True)
class Way:
    """One way out: rank-seconds lost ``at_once``, and ``per_s`` for each of ``for_s`` seconds; ``slots`` are the view ranks that go."""

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
        gain: another way than to go on as now must save at least this share of what going on costs: measured slowness wavers.
        changes: view changes that the policy may make in its window; when they are used up it tolerates.
        review_s: how long a decision holds while nothing happens.
    """

    gain: float = USUAL.gain
    changes: int = USUAL.changes
    review_s: float = WaysSettings().review_s
    durations: Mapping[str, Durations] = field(default_factory=WaysSettings().priors)

    def decide(self, standing: Standing, now_s: float) -> Mitigation:
        """Action ``tolerate`` (go on as now), ``rebalance``, ``replace`` or ``evict``.

        A rank that is well again shows in ``slowdowns`` as 1: then an even split is what ``rebalance`` leads back to.
        """
        slow = max(standing.slowdowns) > 1
        left_s = min(self.durations[standing.kind].left_s(standing.elapsed_s) if slow else math.inf, standing.remaining_s)
        ways = ways_out(standing, left_s)
        now, best = ways[0], min(ways, key=lambda way: way.cost)
        waits = _in_words(standing.waiting)
        prices = _prices(standing, ways, left_s)
        until_s = now_s + self.review_s
        if best is now or now.cost - best.cost <= self.gain * now.cost:
            why = "nothing is slow" if now.per_s <= 0 else f"no way saves over {self.gain:.0%} of the {now.cost:.3g} rank-seconds it costs"
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
    return f"; {ranks} for cores that other programs have: no process is ended for that" if waiting else ""


def ways_out(standing: Standing, left_s: float) -> list[Way]:
    """All ways that exist here; first of all to go on as now. ``left_s``: for how long it will be slow."""
    ranks = len(standing.ranges)
    well_s = standing.step_s(ranges(standing.shards, ranks), (1.0,) * ranks)

    def lost(step_s: float) -> float:
        """Rank-seconds lost in a second in which steps take ``step_s``."""
        return ranks * max(0.0, 1 - well_s / step_s)

    now = Way(TOLERATE, 0.0, lost(standing.step_s(standing.ranges, standing.slowdowns)), left_s)
    found = [now, _rebalance(standing, left_s, lost), _replace(standing, lost), _evict(standing, left_s, lost)]
    return [way for way in found if way is not None]


def _rebalance(standing: Standing, left_s: float, lost: _Lost) -> Way | None:
    """None where shards are not what is slow, or the split would stay what it is."""
    split = weighted_ranges(standing.shards, [1 / slow for slow in standing.slowdowns])
    if standing.kind == NETWORK or split == standing.ranges:
        return None
    back = 2 if max(standing.slowdowns) > 1 else 1  # when it is over, the shards go back
    at_once = back * len(split) * standing.rebalance_s
    return Way(REBALANCE, at_once, lost(standing.step_s(split, standing.slowdowns)), left_s, split)


def _replace(standing: Standing, lost: _Lost) -> Way | None:
    """The slowest ranks by the best spares, as far as that helps. A spare may be slow itself, for as long as the run lasts."""
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
    """The node of the slowest rank: its ranks are gone; spares take their place at once, replacements later, or they themselves when the
    slowness is expected to be over."""
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
