"""Seeded arrivals: catalogue x fleet x compression -> the list of faults of one run, before it starts.

Time is drawn at the rate of the large fleet and divided by ``compression``. Every component draws from streams of its own, named
``chaos:COMPONENT...``, so that adding or removing one shifts no other (with a stated compression; one that follows from ``mtbf_s`` changes
with the total rate, and scales all times alike).

What stops a job strikes it wherever in the fleet it happens: those rows arrive at the rate of the whole fleet. A share of slow nodes is
kept as a share instead: a synchronous job with ten slow nodes is as slow as with one, so the small world gets its own nodes' arrivals.
"""

from __future__ import annotations

import functools
import heapq
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from chaos.catalogue import ASSUMPTIONS, Component, Topology
from fleet.errors import ConfigError
from fleet.laws.reliability import weibull_scale_s
from fleet.planning.traces.trace import FleetTraceRow, as_text, read_trace
from fleet.protocol.fault_kinds import KINDS, Cost, FaultKind, FaultPlace, kind_of
from fleet.protocol.fault_parameters import DURATION, NOTICE, SEVERITY
from fleet.protocol.types import Fault
from fleet.simulation.rng import stream

LAWS = ("exponential", "weibull")
TRACE = "chaos.trace"


class FaultMix(Protocol):
    """For how long faults come, by which law, and how far they spread: ``chaos.settings.ChaosSettings`` says of each what it means."""

    @property
    def fleet(self) -> Topology: ...

    @property
    def duration_s(self) -> float: ...

    @property
    def quiet_start_s(self) -> float: ...

    @property
    def law(self) -> str: ...

    @property
    def shape(self) -> float: ...

    @property
    def mean_duration_s(self) -> float | None: ...

    @property
    def severity(self) -> float | None: ...

    @property
    def burst(self) -> float: ...

    @property
    def burst_s(self) -> float: ...

    @property
    def rack_nodes(self) -> int: ...


def poisson_arrivals(draw: random.Random, rate_per_s: float, horizon_s: float) -> Iterator[float]:
    """Arrival times in 0..horizon of a Poisson process."""
    at_s = draw.expovariate(rate_per_s)
    while at_s < horizon_s:
        yield at_s
        at_s += draw.expovariate(rate_per_s)


def weibull_arrivals(draw: random.Random, units: int, mean_s: float, shape: float, horizon_s: float) -> Iterator[float]:
    """Arrival times in 0..horizon of ``units`` superposed renewal processes with Weibull lifetimes of mean ``mean_s``.

    Only the part that failed is renewed. The fleet is in balance at the start (parts of all ages), so that the rate is units / mean_s
    throughout: the first failure of a part comes after a uniform share of a length-biased lifetime, (L/eta)^k ~ Gamma(1 + 1/k).
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
    """Arrivals a second of fleet time at a world of ``nodes`` nodes, by component: what stops a job comes from all over the fleet."""
    return {c.name: _units(c, fleet, nodes) / c.mean_s(fleet) for c in components}


def plan(
    components: Iterable[Component], chaos: FaultMix, seed: int, *, world: int, nodes: int, compression: float
) -> tuple[Fault, ...]:  # fmt: skip
    """All faults of one run, by time. Pure: the same arguments give the same faults on any machine. Settings have checked them.

    Args:
        components: what fails.
        chaos: for how long, by which law, and how far it spreads.
        seed: the run's seed.
        world, nodes: slots and worker nodes of the small world; targets are drawn uniformly from them.
        compression: how many seconds of the fleet pass in one of the run.
    """
    horizon_s = (chaos.duration_s - chaos.quiet_start_s) * compression
    faults: list[Fault] = []
    for component in components:
        times = _arrivals(component, chaos, nodes, horizon_s, stream(seed, "chaos", component.name))
        aim = _Aim(component, chaos, seed, world, nodes, compression)
        injected = [aim.fault(number, chaos.quiet_start_s + at_s / compression) for number, at_s in enumerate(times)]
        if chaos.burst and Cost.NODE in kind_of(component.kind).may_cost:
            draw = stream(seed, "chaos", component.name, "burst")
            injected += [other for fault in injected for other in _burst(fault, nodes, draw, chaos)]
        faults += [fault for fault in injected if fault.at_s < chaos.duration_s]
    return in_order(faults)


def burst_of(name: str) -> str:
    """The id of the first fault of the burst that a fault of this id belongs to; of a burst of its own, itself."""
    return name.partition("+")[0]


def _burst(fault: Fault, nodes: int, draw: random.Random, chaos: FaultMix) -> Iterator[Fault]:
    """The nodes of its rack that a lost node takes along. As many numbers are drawn whether or not they do."""
    assert fault.node is not None
    first, spreads = fault.node - fault.node % chaos.rack_nodes, draw.random() < chaos.burst
    for node in range(first, first + chaos.rack_nodes):
        hit, later_s = draw.random() < chaos.burst, draw.expovariate(1.0 / chaos.burst_s)
        if spreads and hit and node != fault.node and node < nodes:
            yield replace(fault, id=f"{fault.id}+{node}", at_s=fault.at_s + later_s, node=node)


def in_order(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """By time, then id."""
    return tuple(sorted(faults, key=lambda fault: (fault.at_s, fault.id)))


class _Aim:
    """Draws what one component's faults hit, and for how long, from streams apart from their times."""

    def __init__(self, component: Component, chaos: FaultMix, seed: int, world: int, nodes: int, compression: float) -> None:
        self._component, self._world, self._nodes = component, world, nodes
        self._target = stream(seed, "chaos", component.name, "target")
        self._length = stream(seed, "chaos", component.name, "duration")
        assumed, mean_s, severity = ASSUMPTIONS.get(component.name), chaos.mean_duration_s, chaos.severity
        kind = kind_of(component.kind)
        self._only_nodes = kind.targets == (FaultPlace.NODE,)
        self._notice_s = NOTICE.default if kind.announced else 0.0
        self._mean_s = (assumed.duration_s / compression if mean_s is None else mean_s) if assumed and kind.lasts else 0.0
        self._severity = (assumed.severity if severity is None else severity) if assumed and SEVERITY in kind.parameters else 1.0

    def fault(self, number: int, at_s: float) -> Fault:
        on_node = self._only_nodes or self._component.per_unit_share
        place = self._target.randrange(self._nodes if on_node else self._world)
        duration_s = self._length.expovariate(1.0 / self._mean_s) if self._mean_s else self._notice_s
        return Fault(
            id=f"{self._component.name}-{number:04d}",
            at_s=at_s,
            component=self._component.name,
            kind=self._component.kind,
            slot=None if on_node else place,
            node=place if on_node else None,
            duration_s=duration_s,
            severity=self._severity,
        )


def _units(component: Component, fleet: Topology, nodes: int) -> int:
    return nodes if component.per_unit_share else fleet.units(component.per)


def _arrivals(component: Component, chaos: FaultMix, nodes: int, horizon_s: float, draw: random.Random) -> Iterator[float]:
    units, mean_s = _units(component, chaos.fleet, nodes), component.mean_s(chaos.fleet)
    if component.shape is not None:
        return weibull_arrivals(draw, units, mean_s, component.shape, horizon_s)
    # An MTTF is a part's lifetime. Shares say nothing about the law between two onsets, so those stay exponential.
    if chaos.law == "weibull" and component.prevalence is None:
        return weibull_arrivals(draw, units, mean_s, chaos.shape, horizon_s)
    return poisson_arrivals(draw, units / mean_s, horizon_s)


def check_law(law: str, shape: float) -> None:
    """Raises ConfigError unless ``law`` is known and ``shape`` a shape."""
    if law not in LAWS:
        raise ConfigError("chaos.law", law, "unknown law of arrivals", f"Known: {', '.join(LAWS)}; or give a trace.")
    if not 0.1 <= shape <= 20:
        raise ConfigError(
            "chaos.shape", shape, "a Weibull shape of a part's life lies between 0.1 and 20", "0.7 falls with age, 1 is exponential."
        )


def save_trace(faults: Iterable[Fault], path: Path | str) -> None:
    """Write ``faults`` as CSV, exactly: :func:`load_trace` gives back equal ones."""
    Path(path).write_text(as_trace(faults), encoding="utf-8")


def as_trace(faults: Iterable[Fault]) -> str:
    """The CSV of :func:`save_trace`, as text."""
    return as_text(map(FleetTraceRow, faults))


def load_trace(path: Path | str, *, seed: int = 0, world: int = 1, nodes: int = 1) -> tuple[Fault, ...]:
    """Faults of a trace, see :mod:`fleet.planning.traces.trace`: a file, or a text of more than one line.

    The trace of a run names the places of the run. That of a fleet does not: ``seed`` draws a slot of ``world`` where a rank is struck, and
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
    """A fault of a fleet, at a place of the run. Lengths that a log does not have are those of a fault by hand."""
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
    """A fault of a run, which must name its place, and no number out of bounds."""
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
