"""Settings of chaos, and the text form that the command line takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from chaos.arrivals import arrival_rates, check_law, compression_for, load_trace, plan
from chaos.catalogue import Catalogue, Component, Topology, check_kinds, fitted, load_catalogue
from fleet.errors import ConfigError
from fleet.planning.traces.faults import FittedFaults, load_faults
from fleet.planning.traces.trace import text_of
from fleet.protocol.fault_kinds import TABLE
from fleet.protocol.fault_parameters import SEVERITY
from fleet.protocol.types import Fault
from fleet.settings.fields import setting, within

STORM_KINDS = "+".join(kind.name for kind in TABLE if kind.in_storm)
STORM = f"mtbf=12s,duration=150s,quiet_start=3s,kinds={STORM_KINDS},lasts=6s,repair=15s"
"""What ``--chaos storm`` stands for: the Llama 3 fleet's mix of faults, one every 12 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosSettings:
    """Which faults a run meets. Off unless ``mtbf_s``, ``compression`` or ``trace`` is given, one of them only."""

    fleet_gpus: int = setting(Topology().gpus, "GPUs of the large fleet whose mix of faults is wanted.")
    gpus_per_node: int = setting(Topology().gpus_per_node, "GPUs of each of its nodes.")
    mtbf_s: float | None = setting(None, "Mean time between planned faults of the run; or compression, or trace.", above=0)
    compression: float | None = setting(None, "Seconds of the fleet in one second of the run.", above=0)
    trace: str | None = setting(None, "CSV file of recorded faults, which needs none of the rest.")
    faults: str | None = setting(None, "File of fleet traces fit: the mix of faults of a log of yours, in place of the catalogue's.")
    duration_s: float = setting(600.0, "Faults come until then, counted from the start of the run's training.", above=0)
    quiet_start_s: float = setting(0.0, "None come before.")
    law: str = setting("exponential", "Law of the lifetimes: exponential or weibull.")
    shape: float = setting(0.7, "Shape of the Weibull law.")
    kinds: tuple[str, ...] | None = setting(None, "Kinds of fault to plan; none: every kind that the catalogue has.")
    mean_duration_s: float | None = setting(
        None, "Mean length of hangs and slowdowns; none: the catalogue's, compressed as all is.", above=0
    )
    severity: float | None = setting(None, "Of slowdowns (2 = half speed); none: the catalogue's.")
    repair_s: float | None = setting(30.0, "A lost node comes back after that long; none: never.", above=0)
    seed: int | None = setting(None, "Seed of the faults; none: the run's own.")
    floor: float | None = setting(
        None, "Share of the run's pace over 30 s below which all faults are healed and no more strike; none: never.", above=0, below=1
    )
    burst: float = setting(0.0, "Share of lost nodes that take others of their rack along, each with this probability.", least=0, most=1)
    burst_s: float = setting(5.0, "Mean time until each of those is lost.", above=0)
    rack_nodes: int = setting(4, "Nodes of a rack there: neighbours by their index.", least=1)
    lose_all: bool = setting(False, "Faults may take all ranks at once, where a copy or a checkpoint is there to go on from.")

    def __post_init__(self) -> None:
        _ = self.fleet  # it checks its own numbers
        check_law(self.law, self.shape)
        if self.kinds is not None:
            check_kinds(self.kinds)
        within(self, "chaos.")
        if not 0 <= self.quiet_start_s < self.duration_s:
            raise ConfigError("chaos.quiet_start_s", self.quiet_start_s, f"must lie between 0 and duration_s = {self.duration_s:g}")
        if self.severity is not None and not SEVERITY.holds(self.severity):
            raise ConfigError("chaos.severity", self.severity, f"{SEVERITY.meaning}: must be {SEVERITY.bounds}")
        self._check_source()

    @property
    def on(self) -> bool:
        """Whether any fault is wanted."""
        return self.mtbf_s is not None or self.compression is not None or self.trace is not None

    def carried(self) -> ChaosSettings:
        """The same for another host: files themselves in place of their names. Raises ConfigError when one cannot be read."""
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
        """What the log of ``faults`` came to. Raises ConfigError when the file cannot be used."""
        return None if self.faults is None else load_faults(self.faults, "chaos.faults")

    def catalogue(self) -> Catalogue:
        """What fails, and how often: the catalogue that Fleet ships, or that of ``faults``, without what no log of faults has."""
        found = self.fitted()
        if found is None:
            return load_catalogue()
        return Catalogue(fitted(found).chosen(found.components))

    def _check_source(self) -> None:
        given = [name for name in ("mtbf_s", "compression", "trace") if getattr(self, name) is not None]
        given += ["faults"] if self.trace is not None and self.faults is not None else []
        if len(given) > 1:
            raise ConfigError(f"chaos.{given[1]}", getattr(self, given[1]), f"contradicts {given[0]}", "Give only one of them.")

    def compression_in(self, nodes: int) -> float:
        """How many seconds of the fleet pass in one of a run on ``nodes`` worker nodes; 1 where no chaos is on, or a trace."""
        if self.mtbf_s is None:
            return self.compression or 1.0
        return compression_for(self._components(), self.fleet, nodes, self.mtbf_s)

    @property
    def fleet(self) -> Topology:
        """The large fleet whose mix of faults is wanted."""
        return Topology(gpus=self.fleet_gpus, gpus_per_node=self.gpus_per_node)

    def _components(self) -> tuple[Component, ...]:
        found = self.catalogue()
        return found.chosen(None if self.faults is None else [component.name for component in found.components], self.kinds)

    def rates_per_s(self, *, world: int, nodes: int) -> dict[str, float]:
        """How many faults of each kind a second of a run should bring, by the catalogue, or by the trace that it is to meet.

        With chaos on, those of the large fleet, compressed as chaos is; without it, those of the ``world`` ranks themselves.
        """
        if self.trace is not None:
            counts = Counter(fault.kind for fault in load_trace(self.trace))
            return {kind: count / self.duration_s for kind, count in counts.items()}
        gpus, each = (self.fleet_gpus, self.gpus_per_node) if self.on else (world, max(1, math.ceil(world / nodes)))
        chosen, factor = self._components(), self.compression_in(nodes)
        found: dict[str, float] = {}
        kinds = {component.name: component.kind for component in chosen}
        for name, rate in arrival_rates(chosen, Topology(gpus=gpus, gpus_per_node=each), nodes).items():
            found[kinds[name]] = found.get(kinds[name], 0.0) + rate * factor
        return found

    def plan(self, *, seed: int, world: int, nodes: int) -> tuple[Fault, ...]:
        """The faults of a run with ``world`` slots on ``nodes`` worker nodes. ``seed`` counts when the settings have none."""
        if not self.on:
            return ()
        if self.trace is not None:
            return load_trace(self.trace, seed=seed if self.seed is None else self.seed, world=world, nodes=nodes)
        found = self.fitted()
        chaos = self if self.burst or found is None else replace(self, burst=found.burst)
        seed = seed if self.seed is None else self.seed
        return plan(self._components(), chaos, seed, world=world, nodes=nodes, compression=self.compression_in(nodes))


def seconds(text: str) -> float:
    """``15``, ``15s``, ``250ms``, ``5m``, ``2h`` in seconds. Raises ValueError."""
    for unit, factor in (("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0)):
        if text.endswith(unit):
            return float(text[: -len(unit)]) * factor
    return float(text)


def _repair(text: str) -> float | None:
    return None if text == "never" else seconds(text)


def _yes(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError(text)
    return text == "yes"


_KEYS: dict[str, tuple[str, Callable[[str], object], str]] = {
    "mtbf": ("mtbf_s", seconds, "a time such as 15s or 5m"),
    "compression": ("compression", float, "a number"),
    "trace": ("trace", str, "a file"),
    "faults": ("faults", str, "a file"),
    "fleet": ("fleet_gpus", int, "a number of GPUs"),
    "gpus_per_node": ("gpus_per_node", int, "a number of GPUs"),
    "duration": ("duration_s", seconds, "a time such as 10m"),
    "quiet_start": ("quiet_start_s", seconds, "a time such as 5s"),
    "law": ("law", str, "exponential or weibull"),
    "shape": ("shape", float, "a number"),
    "kinds": ("kinds", lambda text: tuple(text.split("+")), "kinds of fault, joined by +"),
    "lasts": ("mean_duration_s", seconds, "a time such as 20s"),
    "severity": ("severity", float, "a number"),
    "repair": ("repair_s", _repair, "a time such as 30s, or never"),
    "seed": ("seed", int, "a whole number"),
    "burst": ("burst", float, "a share such as 0.3"),
    "burst_within": ("burst_s", seconds, "a time such as 5s"),
    "rack_nodes": ("rack_nodes", int, "a number of nodes"),
    "lose_all": ("lose_all", _yes, "yes or no"),
    "floor": ("floor", float, "a share such as 0.3"),
}


def parse_chaos(text: str) -> ChaosSettings:
    """``off``, ``storm``, or ``key=value,...``, such as ``mtbf=15s,kinds=kill_rank+lose_node,law=weibull``, or ``trace=faults.csv``.

    Raises:
        ConfigError: a key is unknown or doubled, a value is not what the key takes, or the settings contradict each other.
    """
    if text.strip() in ("", "off"):
        return ChaosSettings()
    text = STORM if text.strip() == "storm" else text
    values: dict[str, object] = {}
    for item in text.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or key not in _KEYS:
            raise ConfigError("chaos", item, "is not a setting of chaos", f"Write key=value with one of: {', '.join(_KEYS)}; or off.")
        name, read, takes = _KEYS[key]
        if name in values:
            raise ConfigError(f"chaos.{key}", value, "is given twice")
        try:
            values[name] = read(value)
        except ValueError as error:
            raise ConfigError(f"chaos.{key}", value, f"is not {takes}") from error
    settings = ChaosSettings(**values)  # type: ignore[arg-type]
    if not settings.on:
        raise ConfigError("chaos", text, "says which faults but not how many", "Add mtbf=..., compression=... or trace=...; or write off.")
    return settings
