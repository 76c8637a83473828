"""Habits that a rate does not show: bursts, nodes that fail again and again, and a trend."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr
from scipy.stats import poisson

from fleet.planning.traces.importing import Log, LogCluster, LogEntry
from fleet.planning.traces.lives import Floats

SURE = 0.01
"""Significance of every verdict here; for nodes, of all nodes together (Bonferroni)."""
BURST_SHARE, LEAST_BURST_S, MOST_BURST_S = 0.05, 60.0, 3600.0
"""Faults of a burst follow one another within this share of the mean time between faults of their cluster, and within these bounds."""
BLOCKS = 24
"""A log is cut into so many parts of time, so that a busy year does not look like a burst."""


@dataclass(frozen=True, slots=True)
class Bursts:
    """Faults of other nodes soon after a fault.

    Attributes:
        within_s: the longest time between them.
        followed, expected: faults so soon after one of another node of their cluster, and their expected number by chance.
        p: probability of so many by chance.
        share: of faults, or bursts, that are followed by others beyond chance; ``mean_s``: mean time until each of those.
        count: bursts of two nodes or more; ``largest``, ``largest_line``: the nodes and the first line of the largest one.
    """

    within_s: float
    followed: int
    expected: float
    p: float
    share: float
    mean_s: float
    count: int
    largest: int
    largest_line: int

    @property
    def found(self) -> bool:
        """Whether there are more than by chance."""
        return self.p < SURE and self.share > 0


@dataclass(frozen=True, slots=True)
class Offender:
    """A node that failed more often than similar nodes."""

    node: str
    faults: int
    expected: float
    p: float


@dataclass(frozen=True, slots=True)
class Offenders:
    """Repeat offenders. ``share``: of all nodes. ``factor``: how many times as often they fail as the others. ``faults``: their share."""

    nodes: tuple[Offender, ...]
    share: float
    factor: float
    faults: float


@dataclass(frozen=True, slots=True)
class Trend:
    """Whether faults become more (``lewis_robinson`` > 0) or fewer (< 0) with time, and the ``p`` of that.

    It is Laplace's statistic over the spread of the times between faults, so that bursts do not mislead it. For a steady stream it is about
    standard normal.
    """

    lewis_robinson: float
    p: float

    @property
    def verdict(self) -> str:
        """``steady``, ``rising`` or ``falling``."""
        if not self.p < SURE:
            return "steady"
        return "rising" if self.lewis_robinson > 0 else "falling"


Parts = Mapping[str, Sequence[LogEntry]]
"""Faults of each cluster, by time."""


def by_group(log: Log) -> dict[str, list[LogEntry]]:
    """Faults of each cluster that has any."""
    of_node = {node: log.group_of(node) for node in {entry.node for entry in log.entries}}
    found: dict[str, list[LogEntry]] = {}
    for entry in log.entries:
        found.setdefault(of_node[entry.node], []).append(entry)
    return found


# ---- bursts ------------------------------------------------------------------------------------------------------------------------------


def bursts(log: Log, clusters: Parts) -> Bursts | None:
    """Bursts of all clusters together; None where nodes are not named, or faults are too few."""
    parts = [_bursts(entries, log.groups[name]) for name, entries in clusters.items() if len(entries) >= 10]
    named = sum(bool(entry.node) for entry in log.entries)
    if not parts or named < 0.5 * len(log.entries):
        return None
    followed, expected = sum(part.followed for part in parts), sum(part.expected for part in parts)
    leaders = max(1, sum(part.leaders for part in parts))
    delays = sum(part.delay_s for part in parts)
    largest = max(parts, key=lambda part: part.largest)
    return Bursts(
        within_s=max(part.within_s for part in parts), followed=followed, expected=expected,
        p=float(poisson.sf(followed - 1, expected)) if followed else 1.0,
        share=min(1.0, max(0.0, sum(part.count for part in parts) - expected) / leaders), mean_s=delays / max(1, followed),
        count=sum(part.count for part in parts), largest=largest.largest, largest_line=largest.line,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Part:
    within_s: float
    followed: int
    expected: float
    delay_s: float
    leaders: int
    count: int
    largest: int
    line: int


def _bursts(entries: Sequence[LogEntry], group: LogCluster) -> _Part:
    times = np.array([entry.at_s for entry in entries])
    span_s = max(1.0, group.ended_s - group.began_s)
    within_s = min(MOST_BURST_S, max(LEAST_BURST_S, BURST_SHARE * span_s / len(entries)))
    edges = np.linspace(group.began_s, group.ended_s, BLOCKS + 1)
    counts, _ = np.histogram(times, edges)
    rates = counts * BLOCKS / span_s
    expected = float((counts * -np.expm1(-rates * within_s)).sum())
    followed, delay_s, chains = 0, 0.0, list[tuple[set[str], int]]()
    for early, late in itertools.pairwise(entries):
        if not chains:
            chains.append(({early.node}, early.line))
        gap_s = late.at_s - early.at_s
        if gap_s <= within_s:
            if late.node not in chains[-1][0]:
                followed, delay_s = followed + 1, delay_s + gap_s
            chains[-1][0].add(late.node)
        else:
            chains.append(({late.node}, late.line))
    largest = max(chains, key=lambda chain: len(chain[0]))
    several = sum(len(nodes) > 1 for nodes, _ in chains)
    return _Part(within_s, followed, expected, delay_s, len(chains), several, len(largest[0]), largest[1])


# ---- repeat offenders --------------------------------------------------------------------------------------------------------------------


def offenders(log: Log, clusters: Parts) -> Offenders:
    """Nodes with more faults than chance gives any node. Each is compared with the middle node of its cluster, which a few bad nodes do not
    move. Where most nodes of a cluster never failed, it is compared with the cluster's mean."""
    found: list[Offender] = []
    nodes, all_faults = max(1, log.nodes), sum(1 for entry in log.entries if entry.node)
    for name, entries in clusters.items():
        counted = Counter(entry.node for entry in entries if entry.node)
        size = max(log.groups[name].nodes, len(counted), 1)
        expected = _usual(list(counted.values()), size)
        limit = SURE / nodes
        tails = poisson.sf(np.array(list(counted.values()), dtype=float) - 1, expected) if counted else np.zeros(0)
        pairs = zip(counted.items(), tails, strict=True)
        found += [Offender(node, faults, expected, float(p)) for (node, faults), p in pairs if p < limit]
    found.sort(key=lambda each: (-each.faults / each.expected, each.node))
    theirs, share = sum(each.faults for each in found), len(found) / nodes
    others = (all_faults - theirs) / max(1, nodes - len(found))
    factor = (theirs / len(found)) / others if found and others else 1.0
    return Offenders(tuple(found), share if factor > 1 else 0.0, factor, theirs / max(1, all_faults))


def _usual(counts: Sequence[int], size: int) -> float:
    """Faults of an ordinary node: the mean of the rest when the highest counts are taken away, until it does not change."""
    values = np.sort(np.concatenate((np.array(counts, dtype=float), np.zeros(max(0, size - len(counts))))))
    mean = max(float(values.mean()), 1e-12)
    for _ in range(20):
        kept = values[values <= poisson.isf(SURE / size, mean)]
        fresh = max(float(kept.mean()), 1e-12) if len(kept) else mean
        if fresh == mean:
            break
        mean = fresh
    return mean


# ---- trend -------------------------------------------------------------------------------------------------------------------------------


def trend(log: Log, clusters: Parts) -> Trend | None:
    """The trend of all clusters together, each in its own time; None with fewer than ten faults.

    Laplace's statistic adds up over clusters: it is the sum of (t - T/2) over sqrt(n T^2 / 12).
    """
    above, counted, gaps = 0.0, 0, list[Floats]()
    for name, entries in clusters.items():
        group = log.groups[name]
        span_s = max(1.0, group.ended_s - group.began_s)
        share = (np.array([entry.at_s for entry in entries]) - group.began_s) / span_s
        above += float((share - 0.5).sum())
        counted += len(share)
        between = np.diff(share)
        gaps += [between / between.mean()] if len(between) > 1 and between.mean() > 0 else []
    if counted < 10:
        return None
    together = np.concatenate(gaps) if gaps else np.ones(1)
    robust = above / math.sqrt(counted / 12) / max(1e-9, float(together.std()))
    return Trend(robust, float(2 * ndtr(-abs(robust))))


def dispersion(log: Log, clusters: Parts) -> float:
    """Variance over mean of the counts of equal stretches of time, each with some faults: 1 for independent faults."""
    ratios: list[tuple[float, int]] = []
    for name, entries in clusters.items():
        group = log.groups[name]
        parts = min(1000, len(entries) // 4)
        if parts >= 5:
            counts, _ = np.histogram([entry.at_s for entry in entries], np.linspace(group.began_s, group.ended_s, parts + 1))
            ratios.append((float(counts.var(ddof=1) / counts.mean()), len(entries)))
    total = sum(weight for _, weight in ratios)
    return sum(ratio * weight for ratio, weight in ratios) / total if total else 1.0
