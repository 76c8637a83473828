"""Settings of chaos: catalogue x fleet x compression -> the list of faults of one run, before it starts.

Times are drawn at the rate of the large fleet and divided by ``compression``. Every component draws from its own streams, named
``chaos:COMPONENT...``, so that one more or one less shifts no other. That holds for a given compression. A compression that follows from
``mtbf_s`` changes with the total rate, and scales all times equally.

A fault that stops a job strikes it from anywhere in the fleet: such rows arrive at the rate of the whole fleet. A share of slow nodes stays
a share: a synchronous job with ten slow nodes is as slow as with one. So the small world gets the arrivals of its own nodes.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from chaos.arrivals import arrival_rates, compression_for, in_order, load_trace, poisson_arrivals, units, weibull_arrivals
from chaos.catalogue import ASSUMPTIONS, Catalogue, Component, Topology, check_kinds, fitted, load_catalogue
from chaos.radius import limits_of
from fleet.errors import ConfigError
from fleet.ledger.pace import WINDOW_S
from fleet.planning.traces.faults import FittedFaults, load_faults
from fleet.planning.traces.trace import text_of
from fleet.protocol.fault_kinds import TABLE, Cost, FaultPlace, kind_of
from fleet.protocol.fault_parameters import NOTICE, SEVERITY
from fleet.protocol.types import Coordinate, Fault
from fleet.settings.fields import NONE, build, from_text, keys, seconds, setting, within
from fleet.simulation.rng import stream

LAWS = ("exponential", "weibull")
SOURCES = ("mtbf_s", "compression", "trace", "at")
"""Each gives the number of faults, or their times."""
STORM_KINDS = "+".join(kind.name for kind in TABLE if kind.in_storm)
STORM = f"mtbf=12s,duration=150s,quiet_start=3s,kinds={STORM_KINDS},mean_duration=6s,repair=15s"
"""The settings of ``--chaos storm``: the Llama 3 fleet's mix of faults, one every 12 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosSettings:
    """Faults of a run. Off unless ``mtbf_s``, ``compression``, ``trace`` or ``at`` is given, one of them only."""

    fleet_gpus: int = setting(Topology().gpus, "GPUs of the large fleet that gives the mix of faults.")
    gpus_per_node: int = setting(Topology().gpus_per_node, "GPUs of each of its nodes.")
    mtbf_s: float | None = setting(None, "Mean time between planned faults, such as 60; or set compression, or trace.", above=0)
    compression: float | None = setting(None, "Seconds of the fleet in one second of the run.", above=0)
    trace: str | None = setting(None, "CSV file of recorded faults, which needs no other setting.")
    at: tuple[str, ...] | None = setting(
        None, "Steps at which one fault of each of kinds strikes, as step:500, once it is committed; in place of mtbf."
    )
    faults: str | None = setting(None, "File of fleet experiment fit: the mix of faults of your log, in place of the catalogue's.")
    duration_s: float = setting(600.0, "Faults come until so long after the start of the run's training.", above=0)
    quiet_start_s: float = setting(0.0, "No faults come before.")
    law: str = setting("exponential", "Law of the lifetimes: exponential or weibull.")
    shape: float = setting(0.7, "Shape of the Weibull law: 0.7 falls with age, 1 is exponential.", least=0.1, most=20)
    kinds: tuple[str, ...] | None = setting(None, "Kinds of fault to plan; none: every kind of the catalogue.")
    mean_duration_s: float | None = setting(
        None, "Mean length of hangs and slowdowns; none: the catalogue's, compressed like all times.", above=0
    )
    severity: float | None = setting(None, "Severity of slowdowns (2 = half speed); none: the catalogue's.")
    repair_s: float | None = setting(30.0, "A lost node comes back after so long; none: never.", above=0)
    seed: int | None = setting(None, "Seed of the faults; none: the run's own.")
    floor: float | None = setting(
        None, "Share of the run's pace below which all faults are healed and no more strike; none: never.", above=0, below=1
    )
    floor_window_s: float = setting(WINDOW_S, "Trailing window of the floor; floor=goodput(60s)>=0.9 sets both.", above=0)
    limits: tuple[str, ...] | None = setting(
        None, "Most ranks, nodes and domains (racks) hit at once, as ranks:2, and in an hour, as ranks/h:20; none: no limit."
    )
    burst: float = setting(0.0, "Share of lost nodes that take others of their rack down, each with this probability.", least=0, most=1)
    burst_s: float = setting(5.0, "Mean time until each of those is lost.", above=0)
    rack_nodes: int = setting(4, "Nodes of a rack in a burst: neighbours by their index.", least=1)
    coordinate: tuple[str, ...] | None = setting(
        None, "Coordinate of the ranks that faults of a rank strike, such as tensor:1, with --mesh; none: any rank."
    )
    lose_all: bool = setting(False, "Faults may take all ranks at once, if the run can go on from a copy or a checkpoint.")

    def __post_init__(self) -> None:
        _ = self.fleet  # it checks its own numbers
        if self.law not in LAWS:
            raise ConfigError("chaos.law", self.law, "unknown law of arrivals", f"Known: {', '.join(LAWS)}; or give a trace.")
        if self.kinds is not None:
            check_kinds(self.kinds)
        _ = limits_of(self.limits or ()), self.aim  # they check their own words
        within(self, "chaos.")
        if not 0 <= self.quiet_start_s < self.duration_s:
            raise ConfigError("chaos.quiet_start_s", self.quiet_start_s, f"must lie between 0 and duration_s = {self.duration_s:g}")
        if self.severity is not None and not SEVERITY.holds(self.severity):
            raise ConfigError("chaos.severity", self.severity, f"{SEVERITY.meaning}: must be {SEVERITY.bounds}")
        self._check_source()

    @property
    def on(self) -> bool:
        """Whether the run has any faults."""
        return any(getattr(self, name) is not None for name in SOURCES)

    @property
    def aim(self) -> Coordinate:
        """The setting ``coordinate``. Raises ConfigError."""
        found = [text.partition(":") for text in self.coordinate or ()]
        for axis, colon, number in found:
            if not (axis.strip() and colon and number.strip().isdecimal()):
                raise ConfigError("chaos.coordinate", f"{axis}{colon}{number}", "is no coordinate", "Write an axis and a number: tensor:1.")
        return tuple((axis.strip(), int(number)) for axis, _, number in found)

    def carried(self) -> ChaosSettings:
        """The same settings for another host: contents of files in place of their names. Raises ConfigError when one cannot be read."""
        named = {name: getattr(self, name) for name in ("trace", "faults")}
        named = {name: path for name, path in named.items() if path is not None and "\n" not in path}
        if not named:
            return self
        if "trace" in named:
            load_trace(named["trace"])
        self.catalogue()
        texts: dict[str, Any] = {name: text_of(path, f"chaos.{name}").rstrip("\n") + "\n" for name, path in named.items()}
        return replace(self, **texts)

    def fitted(self) -> FittedFaults | None:
        """The fit of the log in ``faults``. Raises ConfigError when the file cannot be used."""
        return None if self.faults is None else load_faults(self.faults, "chaos.faults")

    def catalogue(self) -> Catalogue:
        """The rates: the catalogue that Fleet ships, or that of ``faults``, without the kinds that no log of faults has."""
        found = self.fitted()
        if found is None:
            return load_catalogue()
        return Catalogue(fitted(found).chosen(found.components))

    def _check_source(self) -> None:
        given = [name for name in SOURCES if getattr(self, name) is not None]
        given += ["faults"] if (self.trace is not None or self.at is not None) and self.faults is not None else []
        if len(given) > 1:
            raise ConfigError(f"chaos.{given[1]}", getattr(self, given[1]), f"contradicts {given[0]}", "Give only one of them.")
        if self.at is not None and self.kinds is None:
            raise ConfigError("chaos.at", ", ".join(self.at), "gives a time, and no kind of fault", "Add kinds, such as kinds=kill_rank.")
        _ = [step_of(text) for text in self.at or ()]  # it checks its own words

    def compression_in(self, nodes: int) -> float:
        """Seconds of the fleet in one second of a run on ``nodes`` worker nodes; 1 without chaos, or with a trace."""
        if self.mtbf_s is None:
            return self.compression or 1.0
        return compression_for(self._components(), self.fleet, nodes, self.mtbf_s)

    @property
    def fleet(self) -> Topology:
        """The large fleet that gives the mix of faults."""
        return Topology(gpus=self.fleet_gpus, gpus_per_node=self.gpus_per_node)

    def _components(self) -> tuple[Component, ...]:
        found = self.catalogue()
        return found.chosen(None if self.faults is None else [component.name for component in found.components], self.kinds)

    def rates_per_s(self, *, world: int, nodes: int) -> dict[str, float]:
        """Expected faults of each kind in a second of the run, from the catalogue or from its trace.

        With chaos on, those of the large fleet, compressed like chaos; without it, those of the ``world`` ranks themselves.
        """
        if self.trace is not None:
            counts = Counter(fault.kind for fault in load_trace(self.trace))
            return {kind: count / self.duration_s for kind, count in counts.items()}
        gpus, each = (self.fleet_gpus, self.gpus_per_node) if self.on and self.at is None else (world, max(1, math.ceil(world / nodes)))
        chosen, factor = self._components(), self.compression_in(nodes)
        found: dict[str, float] = {}
        kinds = {component.name: component.kind for component in chosen}
        for name, rate in arrival_rates(chosen, Topology(gpus=gpus, gpus_per_node=each), nodes).items():
            found[kinds[name]] = found.get(kinds[name], 0.0) + rate * factor
        return found

    def plan(self, *, seed: int, world: int, nodes: int) -> tuple[Fault, ...]:
        """The faults of a run with ``world`` slots on ``nodes`` worker nodes. ``seed`` counts when the settings have none.

        Faults at steps are not among them, as their time is not known: see :meth:`at_steps`.
        """
        if not self.on or self.at is not None:
            return ()
        if self.trace is not None:
            return load_trace(self.trace, seed=seed if self.seed is None else self.seed, world=world, nodes=nodes)
        found = self.fitted()
        chaos = self if self.burst or found is None else replace(self, burst=found.burst)
        seed = seed if self.seed is None else self.seed
        return plan(self._components(), chaos, seed, world=world, nodes=nodes, compression=self.compression_in(nodes))

    def at_steps(self, *, seed: int, world: int, nodes: int) -> tuple[tuple[int, Fault], ...]:
        """(step, fault that strikes once it is committed), by step. Places are drawn as for other faults; ``at_s`` is filled in then."""
        draw = stream(seed if self.seed is None else self.seed, "chaos", "at")
        steps = sorted(step_of(text) for text in self.at or ())
        return tuple((step, _at_step(step, kind, draw, self, world, nodes)) for step in steps for kind in self.kinds or ())


def step_of(text: str) -> int:
    """500 of ``step:500``. Raises ConfigError."""
    name, _, step = text.partition(":")
    if name.strip() != "step" or not step.strip().isdecimal():
        raise ConfigError("chaos.at", text, "is no step", "Write at=step:500, or at=step:500+step:900.")
    return int(step)


def _at_step(step: int, kind: str, draw: random.Random, chaos: ChaosSettings, world: int, nodes: int) -> Fault:
    """One fault of this kind, at a drawn place. Length and severity are those of the settings, else those of a fault by hand."""
    place = kind_of(kind).targets[0]
    usual: dict[str, Any] = {each.name: each.default for each in kind_of(kind).parameters}
    fault = Fault(f"{kind}-at-step-{step}", 0.0, "at", kind, **usual)
    slot, node = draw.randrange(world), draw.randrange(nodes)
    fault = replace(fault, slot=slot if place is FaultPlace.RANK else None, node=node if place is FaultPlace.NODE else None)
    lasts = chaos.mean_duration_s if chaos.mean_duration_s is not None and kind_of(kind).lasts else fault.duration_s
    severe = chaos.severity if chaos.severity is not None and SEVERITY in kind_of(kind).parameters else fault.severity
    return replace(fault, duration_s=lasts, severity=severe)


# ---- the plan ----------------------------------------------------------------------------------------------------------------------------


def plan(
    components: Iterable[Component], chaos: ChaosSettings, seed: int, *, world: int, nodes: int, compression: float
) -> tuple[Fault, ...]:  # fmt: skip
    """All faults of one run, by time. Pure: the same arguments give the same faults on any machine. Settings have checked them.

    Args:
        components: the components that fail.
        chaos: the settings with duration, law and spread.
        seed: the run's seed.
        world, nodes: slots and worker nodes of the small world; targets are drawn uniformly from them.
        compression: seconds of the fleet in one second of the run.
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


def _burst(fault: Fault, nodes: int, draw: random.Random, chaos: ChaosSettings) -> Iterator[Fault]:
    """The nodes of its rack that are lost with a lost node. It draws the same number of random values in any case."""
    assert fault.node is not None
    first, spreads = fault.node - fault.node % chaos.rack_nodes, draw.random() < chaos.burst
    for node in range(first, first + chaos.rack_nodes):
        hit, later_s = draw.random() < chaos.burst, draw.expovariate(1.0 / chaos.burst_s)
        if spreads and hit and node != fault.node and node < nodes:
            yield replace(fault, id=f"{fault.id}+{node}", at_s=fault.at_s + later_s, node=node)


class _Aim:
    """Draws the places of one component's faults, and their lengths, from other streams than their times."""

    def __init__(self, component: Component, chaos: ChaosSettings, seed: int, world: int, nodes: int, compression: float) -> None:
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


def _arrivals(component: Component, chaos: ChaosSettings, nodes: int, horizon_s: float, draw: random.Random) -> Iterator[float]:
    count, mean_s = units(component, chaos.fleet, nodes), component.mean_s(chaos.fleet)
    if component.shape is not None:
        return weibull_arrivals(draw, count, mean_s, component.shape, horizon_s)
    # An MTTF is a part's lifetime. A share does not give the law of the time between two faults, so that stays exponential.
    if chaos.law == "weibull" and component.prevalence is None:
        return weibull_arrivals(draw, count, mean_s, chaos.shape, horizon_s)
    return poisson_arrivals(draw, count / mean_s, horizon_s)


# ---- as text -----------------------------------------------------------------------------------------------------------------------------

KNOWN = keys(ChaosSettings, "chaos.")
"""By name. A time may be written without the ``_s`` of its setting."""
LISTS = ("chaos.kinds", "chaos.limits", "chaos.at", "chaos.coordinate")
"""Settings with several values, joined by + in a text, as commas stand between settings."""


_FLOOR = re.compile(r"goodput\((?P<window>[^()]*)\)\s*>=\s*(?P<share>.+)")


def floor_of(text: str, where: str = "chaos.floor") -> dict[str, float]:
    """``floor``, and ``floor_window_s`` where it is named, of ``0.3`` or ``goodput(60s) >= 0.9``. Raises ConfigError."""
    found = _FLOOR.fullmatch(text.strip())
    try:
        floor = {"floor": float(found["share"] if found else text)}
    except ValueError:
        raise ConfigError(where, text, "is no floor", "Write a share such as 0.3, or goodput(60s)>=0.9.") from None
    return floor | ({"floor_window_s": seconds(found["window"], where)} if found else {})


def parse_chaos(text: str) -> ChaosSettings:
    """``off``, ``storm``, or ``key=value,...``, such as ``mtbf=15s,kinds=kill_rank+lose_node,law=weibull``, or ``trace=faults.csv``.

    Raises:
        ConfigError: a key is unknown or doubled, a value is of another kind, or the settings contradict each other.
    """
    if text.strip() in ("", "off"):
        return ChaosSettings()
    text = STORM if text.strip() == "storm" else text
    values: dict[str, object] = {}
    for item in text.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        name = f"chaos.{key}" if f"chaos.{key}" in KNOWN else f"chaos.{key}_s"
        if not equals or name not in KNOWN:
            known = ", ".join(each.removeprefix("chaos.") for each in KNOWN)
            raise ConfigError(
                "chaos", item, "is neither off, nor storm, nor a setting of chaos", f"Write storm, or key=value with one of: {known}."
            )
        if name in values:
            raise ConfigError(f"chaos.{key}", value, "is given twice")
        if name == "chaos.floor" and value != NONE:
            values |= {f"chaos.{part}": each for part, each in floor_of(value).items()}
        elif name.endswith("_s") and value != NONE:
            values[name] = seconds(value, f"chaos.{key}")
        else:
            values |= from_text(KNOWN, name, value.replace("+", ",") if name in LISTS else value)
    settings = build(ChaosSettings, values, "chaos.")
    if not settings.on:
        way_out = "Add mtbf=..., compression=..., trace=... or at=step:...; or write off."
        raise ConfigError("chaos", text, "names kinds of faults but no number of them", way_out)
    return settings
