"""Arrivals of one component's faults: Poisson, Weibull, or those of a trace; drawn from the given stream."""

from __future__ import annotations

import functools
import heapq
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from chaos.catalogue import Component, Topology
from fleet.errors import ConfigError
from fleet.laws.reliability import weibull_scale_s
from fleet.planning.traces.trace import FleetTraceRow, as_text, read_trace
from fleet.protocol.fault_kinds import KINDS, FaultKind, FaultPlace
from fleet.protocol.fault_parameters import DURATION, SEVERITY
from fleet.protocol.types import Fault
from fleet.simulation.rng import stream

TRACE = "chaos.trace"


def poisson_arrivals(draw: random.Random, rate_per_s: float, horizon_s: float) -> Iterator[float]:
    """Arrival times in 0..horizon of a Poisson process."""
    at_s = draw.expovariate(rate_per_s)
    while at_s < horizon_s:
        yield at_s
        at_s += draw.expovariate(rate_per_s)


def weibull_arrivals(draw: random.Random, units: int, mean_s: float, shape: float, horizon_s: float) -> Iterator[float]:
    """Arrival times in 0..horizon of ``units`` superposed renewal processes with Weibull lifetimes of mean ``mean_s``.

    Only the part that failed is renewed. The fleet is in balance at the start (parts of all ages), so that the rate is units / mean_s
    throughout. The first failure of a part comes after a uniform share of a length-biased lifetime, (L/eta)^k ~ Gamma(1 + 1/k).
    """
    scale_s = weibull_scale_s(mean_s, shape)
    ahead = [draw.random() * scale_s * draw.gammavariate(1 + 1 / shape, 1) ** (1 / shape) for _ in range(units)]
    pending = [at_s for at_s in ahead if at_s < horizon_s]
    heapq.heapify(pending)
    while pending and pending[0] < horizon_s:
        at_s = pending[0]
        yield at_s
        heapq.heapreplace(pending, at_s + draw.weibullvariate(scale_s, shape))


def compression_for(components: Iterable[Component], fleet: Topology, nodes: int, mtbf_s: float) -> float:
    """The factor by which fleet time must run faster for a planned fault every ``mtbf_s`` on a world of ``nodes`` nodes."""
    return 1.0 / (mtbf_s * sum(arrival_rates(components, fleet, nodes).values()))


def arrival_rates(components: Iterable[Component], fleet: Topology, nodes: int) -> dict[str, float]:
    """Arrivals a second of fleet time for ``nodes`` nodes, by component: faults that stop a job come from the whole fleet."""
    return {c.name: units(c, fleet, nodes) / c.mean_s(fleet) for c in components}


def burst_of(name: str) -> str:
    """The id of the first fault in the burst of the fault ``name``; the fault itself where it begins a burst."""
    return name.partition("+")[0]


def in_order(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """By time, then id."""
    return tuple(sorted(faults, key=lambda fault: (fault.at_s, fault.id)))


def units(component: Component, fleet: Topology, nodes: int) -> int:
    """The number of units of a component for which arrivals are drawn."""
    return nodes if component.per_unit_share else fleet.units(component.per)


def save_trace(faults: Iterable[Fault], path: Path | str) -> None:
    """Write ``faults`` as CSV, exactly: :func:`load_trace` gives back equal ones."""
    Path(path).write_text(as_trace(faults), encoding="utf-8")


def as_trace(faults: Iterable[Fault]) -> str:
    """The CSV of :func:`save_trace`, as text."""
    return as_text(map(FleetTraceRow, faults))


def load_trace(path: Path | str, *, seed: int = 0, world: int = 1, nodes: int = 1) -> tuple[Fault, ...]:
    """Faults of a trace, see :mod:`fleet.planning.traces.trace`: a file, or a text of more than one line.

    The trace of a run names the places of the run. That of a fleet does not: ``seed`` draws a slot of ``world`` for a fault of a rank, and
    node i of the fleet stands for node i modulo ``nodes``.

    Raises:
        ConfigError: the file cannot be read, or a row is not a fault; names file and line.
    """
    trace = read_trace(path, TRACE)
    place = functools.partial(_placed, seed=seed, world=world, nodes=nodes) if trace.of_fleet else _checked
    faults = in_order(place(row) for row in trace.rows)
    if len({fault.id for fault in faults}) < len(faults):
        raise ConfigError(TRACE, str(path)[:200], "two faults have the same id")
    return faults


def _placed(row: FleetTraceRow, seed: int, world: int, nodes: int) -> Fault:
    """A fault of a fleet, at a place of the run. Durations that a log does not have are those of a fault by hand."""
    fault, kind = row.fault, _kind(row)
    draw = stream(seed, "chaos", "trace", fault.id)
    slot = node = None
    if FaultPlace.NODE in kind.targets and (fault.node is not None or FaultPlace.RANK not in kind.targets):
        node = draw.randrange(nodes) if fault.node is None else fault.node % nodes
    elif FaultPlace.RANK in kind.targets:
        slot = draw.randrange(world)
    lasts_s = fault.duration_s or (DURATION.default if kind.lasts else 0.0)
    return replace(fault, slot=slot, node=node, duration_s=lasts_s)


def _checked(row: FleetTraceRow) -> Fault:
    """A fault of a run, which must name its place and have all numbers within bounds."""
    fault, kind = row.fault, _kind(row)
    named = [name for name, place in (("slot", fault.slot), ("node", fault.node)) if place is not None] or [""]
    if named not in ([place.field] for place in kind.targets):
        raise ConfigError(f"{TRACE}.slot", fault.slot, f"a {kind.name} needs {kind.asks_for}, and only that ({row.where})")
    for each in kind.parameters:
        value = getattr(fault, each.name)
        if each not in (DURATION, SEVERITY) and not each.holds(value) and (value or each.name != DURATION.name):
            raise ConfigError(f"{TRACE}.{each.name}", value, f"{each.meaning}: must be {each.bounds} ({row.where})")
    return fault


def _kind(row: FleetTraceRow) -> FaultKind:
    if row.fault.kind not in KINDS:
        raise ConfigError(f"{TRACE}.kind", row.fault.kind, f"unknown kind of fault ({row.where})", f"Known: {', '.join(KINDS)}.")
    return KINDS[row.fault.kind]
