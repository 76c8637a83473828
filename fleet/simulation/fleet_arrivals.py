"""The faults of a fleet by time: drawn from the rates of a model, or read from a trace of real faults.

Every component draws from its own streams, so a new component changes no other. Memory grows with the number of faults.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigError
from fleet.planning.traces.trace import SLOW, FleetTraceRow, as_text, read_trace
from fleet.protocol.fault_kinds import KIND_OF_COMPONENT
from fleet.protocol.types import Fault
from fleet.simulation.fleet_model import FaultClass, FleetModel, SlowClass
from fleet.simulation.rng import derive_seed

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
ALWAYS_SLOW = 30.0
"""With so many slow spells at a time, no moment is without one (probability exp(-30)), so they are not drawn one by one."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Faults by time, [faults] each, and the stretches [begin, end) in which the job is slow, with their severity.

    ``kinds``: indices of ``FleetModel.faults``. ``nodes``: the node of each fault (-1: none). ``repairs_s``: seconds of its repair.
    ``chances``: uniform numbers that decide whether the fault's place is empty.
    """

    times_s: Floats
    kinds: Ints
    nodes: Ints
    repairs_s: Floats
    chances: Floats
    slow_from_s: Floats
    slow_until_s: Floats
    slow_severity: Floats

    def __len__(self) -> int:
        return len(self.times_s)

    def only(self, indices: Sequence[int]) -> Arrivals:
        """These faults alone, and the slow stretches."""
        kept = np.array(indices, dtype=np.int64)
        return replace(
            self, times_s=self.times_s[kept], kinds=self.kinds[kept], nodes=self.nodes[kept], repairs_s=self.repairs_s[kept],
            chances=self.chances[kept],
        )  # fmt: skip


def draw_arrivals(model: FleetModel, seed: int) -> Arrivals:
    """Poisson arrivals of every fault class of ``model`` in its duration. The same seed gives the same on any machine."""
    parts = [_drawn(model, fault, index, seed) for index, fault in enumerate(model.faults)]
    return _merged(parts, *_slow_spells(model, seed))


Part = tuple[Floats, Ints, Ints, Floats, Floats]


def _drawn(model: FleetModel, fault: FaultClass, index: int, seed: int) -> Part:
    rng = np.random.Generator(np.random.PCG64(derive_seed(seed, "fleet", fault.name)))
    count = int(rng.poisson(fault.rate_per_s * model.duration_s))
    times, chances = rng.random(count) * model.duration_s, rng.random(count)
    repair_s = model.repair_s if fault.repair_s is None else fault.repair_s
    repairs = rng.standard_exponential(count) * repair_s
    return times, np.full(count, index), _targets(model, fault, rng, count), repairs, chances


def _targets(model: FleetModel, fault: FaultClass, rng: np.random.Generator, count: int) -> Ints:
    """The node of each fault. The first ``lemon_share`` of the nodes are the lemons."""
    if not fault.nodes:
        return np.full(count, -1)
    lemons = round(model.lemon_share * model.nodes)
    if not lemons:
        return rng.integers(0, model.nodes, count)
    sour = rng.random(count) < model.lemon_probability
    return np.where(sour, rng.integers(0, lemons, count), rng.integers(lemons, model.nodes, count))


def _merged(parts: Sequence[Part], begin: Floats, end: Floats, severity: Floats) -> Arrivals:
    times, kinds, nodes, repairs, chances = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(times, kind="stable")
    return Arrivals(times[order], kinds[order], nodes[order], repairs[order], chances[order], begin, end, severity)


# ---- slow spells -------------------------------------------------------------------------------------------------------------------------


def _slow_spells(model: FleetModel, seed: int) -> tuple[Floats, Floats, Floats]:
    spells = [spell for slow in model.slow for spell in _spells_of(slow, model.duration_s, seed)]
    return slowest(spells)


Spell = tuple[Floats, Floats, float]


def _spells_of(slow: SlowClass, duration_s: float, seed: int) -> list[Spell]:
    """Merged stretches of one class: at full severity until the policy acts, then at the mitigated severity."""
    rest = slow.severity if slow.mitigated is None else slow.mitigated
    if slow.rate_per_s * slow.duration_s > ALWAYS_SLOW:
        busy = -math.expm1(-slow.rate_per_s * slow.unnoticed_s)  # share of time in which some spell is too young to be noticed
        severity = rest if slow.mitigated is not None else slow.severity
        mean = 1.0 / (busy / slow.severity + (1 - busy) / severity)
        return [(np.zeros(1), np.array([duration_s]), mean)]
    rng = np.random.Generator(np.random.PCG64(derive_seed(seed, "fleet", "slow", slow.name)))
    count = int(rng.poisson(slow.rate_per_s * duration_s))
    begin = np.sort(rng.random(count)) * duration_s
    end = np.minimum(begin + rng.standard_exponential(count) * slow.duration_s, duration_s)
    if slow.mitigated is None:
        return [(*merged_spells(begin, end), slow.severity)]
    noticed = np.minimum(begin + slow.notice_s, end)
    return [(*merged_spells(begin, end), rest), (*merged_spells(begin, noticed), slow.severity)]


def merged_spells(begin: Floats, end: Floats) -> tuple[Floats, Floats]:
    """The union of the intervals [begin, end), disjoint and in order; ``begin`` is sorted."""
    if not len(begin):
        return begin, end
    latest = np.maximum.accumulate(end)
    fresh = np.concatenate(([True], begin[1:] > latest[:-1]))
    return begin[fresh], latest[np.concatenate((np.flatnonzero(fresh)[1:] - 1, [len(begin) - 1]))]


def slowest(spells: Sequence[Spell]) -> tuple[Floats, Floats, Floats]:
    """One severity at a time: the greatest at that moment. A job that waits for the slowest rank is as slow as that rank."""
    edges = np.unique(np.concatenate([np.zeros(0), *(each for begin, end, _ in spells for each in (begin, end))]))
    if len(edges) < 2:
        return np.zeros(0), np.zeros(0), np.zeros(0)
    severity, middles = np.ones(len(edges) - 1), (edges[1:] + edges[:-1]) / 2
    for begin, end, factor in spells:
        inside = np.searchsorted(begin, middles, "right") > np.searchsorted(end, middles, "right")
        severity = np.where(inside, np.maximum(severity, factor), severity)
    slow = severity > 1
    return edges[:-1][slow], edges[1:][slow], severity[slow]


# ---- traces ------------------------------------------------------------------------------------------------------------------------------


def write_trace(model: FleetModel, arrivals: Arrivals, path: Path | str) -> None:
    """Write the faults by time, as the trace of a fleet. Slow spells are rows of the kind ``slow`` that name no place."""
    names = [fault.name for fault in model.faults]
    faults = zip(arrivals.times_s, arrivals.kinds, arrivals.nodes, arrivals.repairs_s, strict=True)
    rows = [_written(float(at_s), names[kind], int(node), float(repair_s)) for at_s, kind, node, repair_s in faults]
    spells = zip(arrivals.slow_from_s, arrivals.slow_until_s, arrivals.slow_severity, strict=True)
    rows += [
        FleetTraceRow(Fault("", float(begin), SLOW, SLOW, duration_s=float(end - begin), severity=float(severity)))
        for begin, end, severity in spells
    ]
    rows.sort(key=lambda row: (row.fault.at_s, row.fault.component))
    numbered = (replace(row, fault=replace(row.fault, id=f"fleet-{number:06d}")) for number, row in enumerate(rows))
    Path(path).write_text(as_text(numbered, {"nodes": model.nodes}), encoding="utf-8")


def _written(at_s: float, component: str, node: int, repair_s: float) -> FleetTraceRow:
    fault = Fault("", at_s, component, KIND_OF_COMPONENT.get(component, ""), node=None if node < 0 else node)
    return FleetTraceRow(fault, repair_s if node >= 0 else 0.0)


def read_arrivals(model: FleetModel, path: Path | str, seed: int = 0) -> Arrivals:
    """The faults of a trace, see :mod:`fleet.planning.traces.trace`. A repair time that the trace lacks is drawn from the model. In the
    trace of a run, the rank in slot i stands for node i.

    Raises:
        ConfigError: the file cannot be read, a row is malformed, or the model has no such component or node; names file and line.
    """
    parsed = [_parsed(model, row) for row in read_trace(path).rows]
    faults = [row for row in parsed if row[1] >= 0]
    spells = [(np.array([at_s]), np.array([at_s + lasts_s]), severity) for at_s, kind, _, lasts_s, severity in parsed if kind < 0]
    rng = np.random.Generator(np.random.PCG64(derive_seed(seed, "trace")))
    return _merged([_from_rows(model, faults, rng)], *slowest(spells))


TraceRow = tuple[float, int, int, float, float]


def _from_rows(model: FleetModel, rows: Sequence[TraceRow], rng: np.random.Generator) -> Part:
    times, kinds, nodes = (np.array([row[place] for row in rows], dtype=dtype) for place, dtype in enumerate((float, np.int64, np.int64)))
    drawn = rng.standard_exponential(len(rows)) * model.repair_s
    repairs = np.array([row[3] for row in rows], dtype=float)
    return times, kinds, nodes, np.where(np.isnan(repairs), drawn, repairs), np.ones(len(rows))


def _parsed(model: FleetModel, row: FleetTraceRow) -> TraceRow:
    """A row for ``model``: (time, kind or -1 for a slow spell, node or -1, seconds of its repair or NaN, severity)."""

    def wrong(column: str, value: object, reason: str, way_out: str = "") -> ConfigError:
        return ConfigError(f"trace.{column}", value, f"{reason} ({row.where})", way_out)

    fault = row.fault
    if fault.kind == SLOW:
        if not fault.duration_s:
            raise wrong("duration_s", "", "a slow spell needs one")
        return fault.at_s, -1, -1, fault.duration_s, fault.severity
    names = [each.name for each in model.faults]
    if fault.component not in names:
        raise wrong("component", fault.component, "unknown", f"Known: {', '.join(names)}, and rows of the kind {SLOW}.")
    kind = names.index(fault.component)
    node = fault.slot if fault.node is None else fault.node
    if node is None and model.faults[kind].nodes:
        raise wrong("node", "", f"{fault.component} takes a node: which?")
    if node is not None and node >= model.nodes:
        raise wrong("node", node, f"nodes are 0 to {model.nodes - 1}", "Simulate a fleet of that size.")
    return fault.at_s, kind, -1 if node is None else node, math.nan if row.repair_s is None else row.repair_s, 1.0
