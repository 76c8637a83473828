"""The meaning of measured links between nodes: nodes that are slow to all others, and single slow links. Pure.

Nodes are compared with each other, not with a figure. The right figure of a link depends on the hardware, but equal nodes should be equal.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from fleet.ledger.health import Link
from fleet.protocol.decisions import Decision, Figures
from fleet.protocol.domains import Place, shared_levels

SLOWER = {"round trip": 4.0, "bandwidth": 3.0}
"""A node or a link that is so many times slower than the others is named. Racks may be far apart, and a shared core varies."""
MOST_PAIRS = 120
"""All pairs of 16 nodes. With more nodes the pairs are a ring, and a few random others of each node."""
BY_CHANCE = 2
LIKE, ENOUGH = 0.25, 3
SLOWNESS: dict[str, Callable[[Link], float]] = {
    "round trip": lambda link: link.round_trip_s,
    "bandwidth": lambda link: 1 / max(1.0, min(link.there_bytes_per_s, link.back_bytes_per_s)),
}
"""By figure, the slowness of a link: greater is slower. Of the two directions the slower one counts."""
Slowness = dict[tuple[str, str], float]


@dataclass(frozen=True, slots=True)
class Outlier:
    """``nodes``: one that is slow to all others, or the two ends of a slow link. ``times``: how many times slower than the median."""

    nodes: tuple[str, ...]
    figure: str
    times: float
    reason: str


def pairs(nodes: Sequence[str], most: int = MOST_PAIRS, seed: int = 0) -> list[tuple[str, str]]:
    """Links to measure: all of up to ``most``; else a ring, so that each node is measured, and ``BY_CHANCE`` others of each node."""
    every = list(itertools.combinations(nodes, 2))
    if len(every) <= most:
        return every
    rng, count = Random(seed), len(nodes)
    found = {frozenset((at, (at + 1) % count)) for at in range(count)}
    for at in range(count):
        found |= {frozenset((at, (at + 1 + step) % count)) for step in rng.sample(range(1, count - 2), BY_CHANCE)}
    return [(nodes[a], nodes[b]) for a, b in sorted(tuple(sorted(pair)) for pair in found)]


def rounds(chosen: Sequence[tuple[str, str]], at_once: int) -> list[list[tuple[str, str]]]:
    """The pairs in rounds of up to ``at_once``. No node is in two pairs of a round, as each would disturb the other."""
    left, found = list(chosen), list[list[tuple[str, str]]]()
    while left:
        busy, now = set[str](), list[tuple[str, str]]()
        for pair in left:
            if len(now) < at_once and not busy & set(pair):
                now.append(pair)
                busy |= set(pair)
        left = [pair for pair in left if pair not in now]
        found.append(now)
    return found


def judge(links: Iterable[Link], places: Mapping[str, Place] | None = None) -> list[Outlier]:
    """Broken links, then nodes that are slow to all others, then slow links between other nodes; the worst first.

    With two nodes no link counts as slow, as there is no other to compare with.

    Args:
        places: failure domains of the nodes, where they are known. A link to another rack is then compared with others to other racks.
    """
    links = list(links)
    broken = [Outlier(link.ends, "none", math.inf, f"{link.one} and {link.other}: {link.error}") for link in links if link.error]
    measured = [link for link in links if not link.error]
    found = [outlier for figure in SLOWER for outlier in _of_figure(_slowness(measured, figure, places or {}), figure)]
    return [*broken, *sorted(found, key=lambda outlier: (len(outlier.nodes), -outlier.times))]


def _slowness(links: Sequence[Link], figure: str, places: Mapping[str, Place]) -> Slowness:
    """By the ends of each link, its slowness over that of good links (the lower quartile) of the same distance.

    A single node in a rack of its own is far from all others, and its slowness cannot be judged.
    """
    slow = {link.ends: SLOWNESS[figure](link) for link in links}
    alike: dict[int, list[float]] = {}
    for ends, value in slow.items():
        alike.setdefault(_shared(ends, places), []).append(value)
    usual = {width: _good(values) for width, values in alike.items()}
    return {ends: value / usual[_shared(ends, places)] for ends, value in slow.items()}


def _good(values: Sequence[float]) -> float:
    return sorted(values)[int(LIKE * (len(values) - 1))]


def _shared(ends: tuple[str, str], places: Mapping[str, Place]) -> int:
    one, other = (places.get(end, ()) for end in ends)
    return shared_levels(one, other)


def _of_figure(slow: Slowness, figure: str) -> list[Outlier]:
    found: list[Outlier] = []
    while (worst := _slowest_node(slow, figure)) is not None:
        found.append(worst)
        slow = {ends: value for ends, value in slow.items() if worst.nodes[0] not in ends}
    return found + _slow_links(slow, figure)


def _slowest_node(slow: Slowness, figure: str) -> Outlier | None:
    """The node that is slower than all links without it, if one is slower by enough.

    It is judged by one of its best links (the lower quartile): one bad link makes no bad node. The caller leaves a named node out of the
    next round, so that its peers do not look slow because of it.
    """
    best = (0.0, 0.0, "")
    for node in sorted({end for ends in slow for end in ends}):
        mine = [value for ends, value in slow.items() if node in ends]
        others = [value for ends, value in slow.items() if node not in ends]
        if others and len(mine) > 1:
            usual = statistics.median(others)
            best = max(best, (_good(mine) / usual, statistics.median(mine) / usual, node))
    sure, times, node = best
    if sure < SLOWER[figure]:
        return None
    return Outlier((node,), figure, times, f"node {node} is {times:.1f} times slower than the median to all others ({figure})")


def _slow_links(slow: Slowness, figure: str) -> list[Outlier]:
    if len(slow) < ENOUGH:
        return []
    usual, most = statistics.median(slow.values()), SLOWER[figure]
    named = [(ends, value / usual) for ends, value in slow.items() if value >= most * usual]
    return [
        Outlier(ends, figure, times, f"{ends[0]} and {ends[1]} are {times:.1f} times slower than the median ({figure})")
        for ends, times in named
    ]  # fmt: skip


def again(outliers: Sequence[Outlier], links: Iterable[Link]) -> list[tuple[str, str]]:
    """The pairs to measure once more before a node is named: a busy machine has slow moments. All links of a slow node are among them."""
    slow = [set(outlier.nodes) for outlier in outliers]
    return [link.ends for link in links if any(nodes <= set(link.ends) for nodes in slow)]


def best(links: Iterable[Link]) -> list[Link]:
    """One link for each pair, with the best figure of each kind. It has an error only if the pair never worked."""
    found: dict[tuple[str, str], Link] = {}
    for link in links:
        before = found.get(link.ends, link)
        if link.error or before.error:
            found[link.ends] = before if link.error else link
        else:
            there, back = (max(getattr(one, name) for one in (before, link)) for name in ("there_bytes_per_s", "back_bytes_per_s"))
            found[link.ends] = Link(*link.ends, min(before.round_trip_s, link.round_trip_s), there, back)
    return list(found.values())


def admit(node: str, links: Sequence[Link], places: Mapping[str, Place] | None = None) -> Decision:
    """Action ``admit`` or ``keep_out``: a node that is slow to all others, or reaches none, would hold up every step of every rank.

    A slow link between two nodes is the fault of neither, and keeps out none.
    """
    mine = [link for link in links if node in link.ends]
    broken = [link for link in mine if link.error]
    named = [outlier.reason for outlier in judge(links, places) if outlier.nodes == (node,)]
    checked = Figures({"checks": float(len(mine)), "failed": float(len(broken) + len(named))})
    if mine and len(broken) == len(mine):
        return Decision("keep_out", f"node {node} reaches none of the {len(mine)} nodes that it tried: {broken[0].error}", checked)
    return Decision("keep_out", "; ".join(named), checked) if named else Decision("admit", "it is not slow to all others", checked)
