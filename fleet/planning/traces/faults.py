"""The file that ``fleet traces fit`` writes, and that plan, simulate, run and rehearse take as ``--faults``: how often what fails. JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleet.errors import ConfigError
from fleet.planning.traces.trace import text_of
from fleet.protocol.fault_kinds import KIND_OF_COMPONENT

VERSION = 1
MARK = "fleet_faults"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentFaults:
    """Faults of one component.

    ``mttf_hours``: node-hours for each fault, with its 95% interval ``low_hours`` .. ``high_hours``; ``faults``: how many were counted.
    ``shape``: of a Weibull law of a node's times between them, where that law is better than the exponential one; None: exponential.
    """

    faults: int
    mttf_hours: float
    low_hours: float
    high_hours: float
    shape: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedFaults:
    """What a log came to. ``repair_hours``: until a node is back, the mean; None: the log does not say. ``burst``: share of faults that
    draw others along. ``lemon_share``, ``lemon_factor``: of nodes that fail that many times as often as the others."""

    source: str
    nodes: int
    node_hours: float
    components: Mapping[str, ComponentFaults]
    repair_hours: float | None = None
    burst: float = 0.0
    lemon_share: float = 0.0
    lemon_factor: float = 1.0
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mttf_hours(self) -> float:
        """Node-hours for each fault of any component."""
        return 1.0 / sum(1.0 / each.mttf_hours for each in self.components.values())

    def to_json(self) -> str:
        """The file."""
        parts = {
            name: {
                "faults": each.faults, "mttf_hours": each.mttf_hours, "low_hours": each.low_hours,
                "high_hours": None if math.isinf(each.high_hours) else each.high_hours, "shape": each.shape,
            } for name, each in self.components.items()
        }  # fmt: skip
        data = {
            MARK: VERSION, "source": self.source, "nodes": self.nodes, "node_hours": self.node_hours, "components": parts,
            "repair_hours": self.repair_hours, "burst": self.burst, "lemon_share": self.lemon_share, "lemon_factor": self.lemon_factor,
            "about": dict(self.about),
        }  # fmt: skip
        return json.dumps(data, indent=2, allow_nan=False) + "\n"


def load_faults(path: Path | str, setting: str = "--faults") -> FittedFaults:
    """What a file says, or its text (of more than one line).

    Raises:
        ConfigError: it cannot be read, is no such file or one of a newer version, or a number in it is impossible.
    """
    text = text_of(path, setting)
    named = "faults" if text == path else str(path)
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(setting, named, f"it is no JSON: {error}", "fleet traces fit LOG --output FILE writes one.") from error
    if not isinstance(data, dict) or MARK not in data:
        raise ConfigError(setting, named, f"it has no {MARK}", "fleet traces fit LOG --output FILE writes such a file.")
    if data[MARK] != VERSION:
        raise ConfigError(setting, data[MARK], f"is no version of {named} that this Fleet reads: {VERSION}", "Fit the log again.")
    return _Reader(setting, data).faults()


@dataclass(frozen=True, slots=True)
class _Reader:
    setting: str
    data: Mapping[str, Any]

    def faults(self) -> FittedFaults:
        parts = self.data.get("components")
        if not isinstance(parts, dict) or not parts:
            raise ConfigError(f"{self.setting} components", parts, "names no component that fails", "Fit a log with a fault at least.")
        repair = self.data.get("repair_hours")
        return FittedFaults(
            source=str(self.data.get("source", "")), nodes=int(self._number("nodes", 1.0)), node_hours=self._number("node_hours", 0.0),
            components={name: self._component(name, each) for name, each in parts.items()},
            repair_hours=None if repair is None else self._number("repair_hours", 0.0, above=True),
            burst=self._number("burst", 0.0, 1.0), lemon_share=self._number("lemon_share", 0.0, 1.0),
            lemon_factor=self._number("lemon_factor", 1.0), about=self.data.get("about", {}),
        )  # fmt: skip

    def _component(self, name: str, said: Any) -> ComponentFaults:
        where = f"components.{name}"
        if name not in KIND_OF_COMPONENT:
            known = ", ".join(KIND_OF_COMPONENT)
            raise ConfigError(f"{self.setting} {where}", name, "is no component of the fault catalogue", f"Known: {known}.")
        if not isinstance(said, dict):
            raise ConfigError(f"{self.setting} {where}", said, "must be an object with mttf_hours")
        inside = _Reader(f"{self.setting} {where}", said)
        mttf = inside._number("mttf_hours", 0.0, above=True)
        high = said.get("high_hours")
        shape = None if said.get("shape") is None else inside._number("shape", 0.1, 20.0)
        return ComponentFaults(
            faults=int(inside._number("faults", 0.0, empty=0.0)), mttf_hours=mttf, low_hours=inside._number("low_hours", 0.0, empty=mttf),
            high_hours=math.inf if high is None else inside._number("high_hours", 0.0), shape=shape,
        )  # fmt: skip

    def _number(self, name: str, least: float, most: float = math.inf, *, above: bool = False, empty: float | None = None) -> float:
        value = self.data.get(name, least if empty is None and not above else empty)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{self.setting} {name}", value, "must be a number")
        if not (least < value if above else least <= value) or value > most or math.isinf(value):
            bound = f"above {least:g}" if above else f"at least {least:g}"
            raise ConfigError(
                f"{self.setting} {name}", value, f"must be finite, {bound}" + (f" and at most {most:g}" if most < math.inf else "")
            )
        return float(value)
