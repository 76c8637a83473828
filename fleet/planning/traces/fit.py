"""From a log to its figures: rates with intervals, laws of lives and of repairs, bursts, repeat offenders, trend."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import chi2

from fleet.laws.law import HOUR_S
from fleet.ledger.report import finite
from fleet.planning.traces import dates, habits
from fleet.planning.traces.faults import ComponentFaults, FittedFaults
from fleet.planning.traces.goodness import distance as distance_of
from fleet.planning.traces.goodness import probability
from fleet.planning.traces.habits import Bursts, Offenders, Trend
from fleet.planning.traces.importing import Log, LogEntry
from fleet.planning.traces.lives import EXPONENTIAL, LAWS, WEIBULL, Floats, interval
from fleet.simulation.rng import derive_seed

LEAST_LIVES = 20
"""No law is fitted to fewer lives with a known end: any law would fit."""
LEAST_SHAPE, MOST_SHAPE = 0.1, 20.0
"""Shapes that chaos draws with."""
MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class ComponentRate:
    """Faults of one component. ``mttf_hours``: node-hours for each. ``low_hours`` and ``high_hours``: its exact 95% interval of a Poisson
    count (Garwood 1936, Biometrika 28). ``share``: of all faults."""

    component: str
    faults: int
    share: float
    mttf_hours: float
    low_hours: float
    high_hours: float


@dataclass(frozen=True, slots=True)
class LawFit:
    """One law by maximum likelihood. ``parameters``: name -> (value, low, high), 95% intervals. ``aic``: Akaike's, the least is best.
    ``distance``: the largest one between the law and the lives. ``p``: how often chance alone gives a larger one; None: not computed."""

    law: str
    parameters: Mapping[str, tuple[float, float, float]]
    mean_s: float
    log_likelihood: float
    aic: float
    distance: float
    p: float | None = None


@dataclass(frozen=True, slots=True)
class Lives:
    """Times and their laws, the best first. ``seen`` of them ended, ``censored`` were still open when the log ended."""

    seen: int
    censored: int
    mean_s: float
    median_s: float
    laws: tuple[LawFit, ...]

    @property
    def best(self) -> LawFit | None:
        """The law with the least AIC; None with too few lives."""
        return self.laws[0] if self.laws else None

    def of(self, law: str) -> LawFit | None:
        """One law."""
        return next((each for each in self.laws if each.law == law), None)


@dataclass(frozen=True, slots=True)
class TraceFit:
    """All figures of a log. ``between``: times between faults of a node, of all components ("all") and of each. Where ``of_nodes`` is
    false, the log names no nodes, and the times are of the whole cluster. ``repairs``: how long nodes were away."""

    source: str
    log: Log
    rates: tuple[ComponentRate, ...]
    total: ComponentRate
    of_nodes: bool
    between: Mapping[str, Lives]
    repairs: Lives | None
    bursts: Bursts | None
    offenders: Offenders
    trend: Trend | None
    dispersion: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; a number that is not finite is None."""
        log, said = self.log, dataclasses.asdict(dataclasses.replace(self, log=None))  # type: ignore[arg-type]
        said["log"] = {
            "rows": log.rows, "faults": len(log.entries), "nodes": log.nodes,
            "began": dates.shown(log.began_s), "ended": dates.shown(log.ended_s), "node_hours": log.exposure_node_s / HOUR_S,
            "exposure": log.exposure_of, "found": log.counts(), "notes": list(log.notes),
        }  # fmt: skip
        if self.trend:
            said["trend"]["verdict"] = self.trend.verdict
        plain = finite(said)
        assert isinstance(plain, dict)
        return plain

    def faults(self) -> FittedFaults:
        """The file for ``--faults``."""
        rates = {rate.component: _component(rate, self.between.get(rate.component) if self.of_nodes else None) for rate in self.rates}
        bursts, log = self.bursts, self.log
        about = {
            "began": dates.shown(log.began_s), "ended": dates.shown(log.ended_s), "exposure": log.exposure_of, "found": log.counts(),
            "repair_law": self.repairs.best.law if self.repairs and self.repairs.best else None,
            "trend": self.trend.verdict if self.trend else None, "offenders": [each.node for each in self.offenders.nodes],
        }  # fmt: skip
        return FittedFaults(
            source=self.source, nodes=log.nodes, node_hours=log.exposure_node_s / HOUR_S, components=rates,
            repair_hours=self.repairs.mean_s / HOUR_S if self.repairs and self.repairs.mean_s > 0 else None,
            burst=bursts.share if bursts and bursts.found else 0.0,
            lemon_share=self.offenders.share, lemon_factor=max(1.0, self.offenders.factor), about=about,
        )  # fmt: skip


def fit(log: Log, source: str = "", seed: int = 0) -> TraceFit:
    """The figures of a log. Pure: the same log and seed give the same figures."""
    counted = Counter(entry.component for entry in log.entries)
    rates = tuple(rate(name, counted[name], log) for name, _ in counted.most_common())
    clusters = habits.by_group(log)
    named = [entry for entry in log.entries if entry.node]
    of_nodes = 2 * len(named) > len(log.entries)
    chosen = named if of_nodes else list(log.entries)
    rng = np.random.Generator(np.random.PCG64(derive_seed(seed, "traces", "fit")))
    between = {"all": _between(chosen, log, of_nodes, rng)}
    for name in counted:
        found = _between([entry for entry in chosen if entry.component == name], log, of_nodes, rng)
        between |= {name: found} if found.laws else {}
    return TraceFit(
        source=source, log=log, rates=rates, total=rate("all", len(log.entries), log), of_nodes=of_nodes, between=between,
        repairs=_repairs(log, rng),
        bursts=habits.bursts(log, clusters), offenders=habits.offenders(log, clusters), trend=habits.trend(log, clusters),
        dispersion=habits.dispersion(log, clusters),
    )  # fmt: skip


def rate(component: str, faults: int, log: Log) -> ComponentRate:
    """Node-hours for each fault, with the exact interval of a Poisson count."""
    hours = log.exposure_node_s / HOUR_S
    low, high = count_interval(faults)
    return ComponentRate(component, faults, faults / len(log.entries), hours / faults, hours / high, hours / low if low else math.inf)


def count_interval(count: int, sure: float = 0.95) -> tuple[float, float]:
    """Bounds of the mean of a Poisson count (Garwood 1936)."""
    rest = (1 - sure) / 2
    return (float(chi2.ppf(rest, 2 * count)) / 2 if count else 0.0), float(chi2.isf(rest, 2 * count + 2)) / 2


def _repairs(log: Log, rng: np.random.Generator) -> Lives | None:
    """How long nodes were away, from faults that have it. Logs count in minutes, so that 0 stands for half a minute."""
    lasted = np.array([entry.repair_s for entry in log.entries if entry.repair_s is not None])
    if not len(lasted):
        return None
    return _lives(np.maximum(lasted, 0.5 * MINUTE_S), np.ones(len(lasted)), np.full(len(lasted), math.inf), rng)


def _component(rate: ComponentRate, lives: Lives | None) -> ComponentFaults:
    weibull, plain = (lives.of(law) if lives else None for law in (WEIBULL, EXPONENTIAL))
    shape = weibull.parameters["shape"][0] if weibull and plain and weibull.aic < plain.aic else None
    return ComponentFaults(
        faults=rate.faults, mttf_hours=rate.mttf_hours, low_hours=rate.low_hours,
        high_hours=None if math.isinf(rate.high_hours) else rate.high_hours,
        shape=None if shape is None else min(MOST_SHAPE, max(LEAST_SHAPE, shape)),
    )  # fmt: skip


# ---- lives -------------------------------------------------------------------------------------------------------------------------------


def _between(entries: Sequence[LogEntry], log: Log, of_nodes: bool, rng: np.random.Generator) -> Lives:
    lives, seen, limits = times_between(entries, log, of_nodes)
    return _lives(lives, seen, limits, rng)


def times_between(entries: Sequence[LogEntry], log: Log, of_nodes: bool) -> tuple[Floats, Floats, Floats]:
    """(times between faults of a node or a cluster, whether each ended, how long the log could have shown it).

    A node's first time begins at its first fault: its age before that is unknown. Its last time is cut off by the log's end.
    """
    if not entries:
        return np.zeros(0), np.zeros(0), np.zeros(0)
    names = {name: number for number, name in enumerate(dict.fromkeys(entry.node for entry in entries))}
    groups = {name: log.group_of(name) for name in names}
    if not of_nodes:
        clusters = list(log.groups)
        names = {name: clusters.index(group) for name, group in groups.items()}
    owner = np.array([names[entry.node] for entry in entries])
    times = np.array([entry.at_s for entry in entries])
    until_s = {name: log.groups[group].ended_s for name, group in groups.items()}
    ends = np.array([until_s[entry.node] for entry in entries])
    order = np.lexsort((times, owner))
    owner, times, ends = owner[order], times[order], ends[order]
    seen = np.concatenate((owner[1:] == owner[:-1], [False]))
    until = np.where(seen, np.concatenate((times[1:], [0.0])), ends)
    least = 0.5 * (MINUTE_S if np.all(times % MINUTE_S == 0) else 1.0)  # two faults in one minute were about half a minute apart
    lives, limits = until - times, ends - times
    kept = seen | (lives > least)
    return np.maximum(lives[kept], least), seen[kept].astype(float), np.maximum(limits[kept], least)


def _lives(lives: Floats, seen: Floats, limits: Floats, rng: np.random.Generator) -> Lives:
    ended = int(seen.sum())
    mean_s = float(lives.sum() / ended) if ended else math.nan
    median_s = float(np.median(lives[seen > 0])) if ended else math.nan
    laws: list[LawFit] = []
    if ended >= LEAST_LIVES and float(np.ptp(np.log(lives[seen > 0]))) > 0:
        laws = sorted((_law(name, lives, seen) for name in LAWS), key=lambda each: each.aic)
        laws[0] = dataclasses.replace(laws[0], p=probability(laws[0].law, lives, seen, limits, rng))
    return Lives(ended, len(lives) - ended, mean_s, median_s, tuple(laws))


def _law(name: str, lives: Floats, seen: Floats) -> LawFit:
    law = LAWS[name]
    first, second = law.fit(lives, seen)
    height = law.log_likelihood(lives, seen, first, second)
    ranges = interval(law, lives, seen, first, second)
    parameters = {
        parameter: (value, low, high)
        for parameter, value, (low, high) in zip(law.parameters, (first, second), ranges, strict=True)
        if parameter
    }
    far = distance_of(name, lives, seen, first, second)
    return LawFit(name, parameters, law.mean(first, second), height, 2 * law.free - 2 * height, far)
