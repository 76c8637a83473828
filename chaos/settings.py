"""Settings of chaos, and the text form that the command line takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from chaos.arrivals import check_law, load_trace, plan
from chaos.catalogue import Catalogue, Topology, check_kinds, load_catalogue
from fleet.errors import ConfigError
from fleet.protocol.fault_kinds import SEVERITY, TABLE
from fleet.protocol.types import Fault
from fleet.settings.fields import setting

LEAST_STEPS_BETWEEN_FAULTS = 2.0
"""With a fault in nearly every step nothing commits, and the run measures only its own recovery."""


STORM_KINDS = "+".join(kind.name for kind in TABLE if kind.in_storm)
STORM = f"mtbf=12s,duration=150s,quiet_start=3s,kinds={STORM_KINDS},lasts=6s,repair=15s"
"""What ``--chaos storm`` stands for: the Llama 3 fleet's mix of faults, one every 12 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosSettings:
    """Which faults a run meets. Off unless ``mtbf_s``, ``compression`` or ``trace`` is given, one of them only."""

    fleet_gpus: int = setting(Topology().gpus, "GPUs of the large fleet whose mix of faults is wanted.")
    gpus_per_node: int = setting(Topology().gpus_per_node, "GPUs of each of its nodes.")
    mtbf_s: float | None = setting(None, "Mean time between planned faults of the run; or compression, or trace.")
    compression: float | None = setting(None, "Seconds of the fleet in one second of the run.")
    trace: str | None = setting(None, "CSV file of recorded faults, which needs none of the rest.")
    duration_s: float = setting(600.0, "Faults come until then, counted from the start of the run's training.")
    quiet_start_s: float = setting(0.0, "None come before.")
    law: str = setting("exponential", "Law of the lifetimes: exponential or weibull.")
    shape: float = setting(0.7, "Shape of the Weibull law.")
    kinds: tuple[str, ...] | None = setting(None, "Kinds of fault to plan; none: every kind that the catalogue has.")
    mean_duration_s: float | None = setting(None, "Mean length of hangs and slowdowns; none: the catalogue's, compressed as all is.")
    severity: float | None = setting(None, "Of slowdowns (2 = half speed); none: the catalogue's.")
    repair_s: float | None = setting(30.0, "A lost node comes back after that long; none: never.")
    step_s: float | None = setting(None, "Estimate of a step, to refuse a rate at which nothing could commit.")
    seed: int | None = setting(None, "Seed of the faults; none: the run's own.")
    lose_all: bool = setting(False, "Faults may take all ranks at once, where a copy or a checkpoint is there to go on from.")

    def __post_init__(self) -> None:
        Topology(gpus=self.fleet_gpus, gpus_per_node=self.gpus_per_node)
        check_law(self.law, self.shape)
        if self.kinds is not None:
            check_kinds(self.kinds)
        for name in ("mtbf_s", "compression", "duration_s", "mean_duration_s", "repair_s", "step_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"chaos.{name}", value, "must be greater than 0", "Use --chaos off for no faults.")
        if not 0 <= self.quiet_start_s < self.duration_s:
            raise ConfigError("chaos.quiet_start_s", self.quiet_start_s, f"must lie between 0 and duration_s = {self.duration_s:g}")
        if self.severity is not None and not SEVERITY.holds(self.severity):
            raise ConfigError("chaos.severity", self.severity, f"{SEVERITY.meaning}: must be {SEVERITY.bounds}")
        self._check_source()
        self._check_rate()

    @property
    def on(self) -> bool:
        """Whether any fault is wanted."""
        return self.mtbf_s is not None or self.compression is not None or self.trace is not None

    def _check_source(self) -> None:
        given = [name for name in ("mtbf_s", "compression", "trace") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"chaos.{given[1]}", getattr(self, given[1]), f"contradicts {given[0]}", "Give only one of them.")

    def _check_rate(self) -> None:
        if self.step_s is None or self.mtbf_s is None:
            return
        if self.mtbf_s < LEAST_STEPS_BETWEEN_FAULTS * self.step_s:
            least = LEAST_STEPS_BETWEEN_FAULTS * self.step_s
            reason = f"with steps of {self.step_s:g} s there would be a fault in nearly every step and nothing could commit"
            raise ConfigError("chaos.mtbf_s", self.mtbf_s, reason, f"Set it to {least:g} s or more.")

    def plan(self, *, seed: int, world: int, nodes: int, catalogue: Catalogue | None = None) -> tuple[Fault, ...]:
        """The faults of a run with ``world`` slots on ``nodes`` worker nodes. ``seed`` counts when the settings have none."""
        if not self.on:
            return ()
        if self.trace is not None:
            return load_trace(self.trace)
        return plan(
            load_catalogue() if catalogue is None else catalogue,
            Topology(gpus=self.fleet_gpus, gpus_per_node=self.gpus_per_node),
            seed if self.seed is None else self.seed,
            duration_s=self.duration_s,
            world=world,
            nodes=nodes,
            compression=self.compression,
            mtbf_s=self.mtbf_s,
            kinds=self.kinds,
            law=self.law,
            shape=self.shape,
            quiet_start_s=self.quiet_start_s,
            mean_duration_s=self.mean_duration_s,
            severity=self.severity,
        )


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
    "step": ("step_s", seconds, "a time such as 50ms"),
    "seed": ("seed", int, "a whole number"),
    "lose_all": ("lose_all", _yes, "yes or no"),
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
