"""The file that ``fleet experiment fit`` writes, and that ``--faults`` of other commands reads: rates of faults, as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleet.errors import ConfigError
from fleet.planning.traces.trace import text_of
from fleet.protocol.fault_kinds import KIND_OF_COMPONENT
from fleet.settings import fields

VERSION = 1
MARK = "fleet_faults"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentFaults:
    """Faults of one component."""

    mttf_hours: float = fields.setting(0.0, "Node-hours for each fault.", above=0)
    faults: int = fields.setting(0, "The number of counted faults.")
    low_hours: float = fields.setting(0.0, "The low end of the 95% interval of mttf_hours.", least=0)
    high_hours: float | None = fields.setting(None, "Its high end; None: it has none.")
    shape: float | None = fields.setting(
        None, "Shape of the Weibull law of times between faults, where it fits better; None: exponential.", least=0.1, most=20
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedFaults:
    """The rates that a log gave."""

    components: Mapping[str, ComponentFaults]
    source: str = ""
    nodes: int = fields.setting(1, "Nodes of the fleet.", least=1)
    node_hours: float = fields.setting(0.0, "Node-hours in which the log would have faults.", least=0)
    repair_hours: float | None = fields.setting(None, "Mean time until a node is back; None: the log does not have it.", above=0)
    burst: float = fields.setting(0.0, "Share of faults that are followed by others.", least=0, most=1)
    lemon_share: float = fields.setting(0.0, "Share of nodes that fail more often than the others.", least=0, most=1)
    lemon_factor: float = fields.setting(1.0, "How many times as often they fail.", least=1)
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mttf_hours(self) -> float:
        """Node-hours for each fault of any component."""
        return 1.0 / sum(1.0 / each.mttf_hours for each in self.components.values())

    def to_json(self) -> str:
        """The file."""
        return json.dumps({MARK: VERSION} | dataclasses.asdict(self), indent=2, allow_nan=False) + "\n"


def load_faults(path: Path | str, setting: str = "--faults") -> FittedFaults:
    """The rates of a file, or of its text (of more than one line).

    Raises:
        ConfigError: the file cannot be read, is of another kind or of a newer version, or has an impossible number.
    """
    text = text_of(path, setting)
    named = "faults" if text == path else str(path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(setting, named, f"it is no JSON: {error}", "fleet experiment fit LOG --output FILE writes one.") from error
    if not isinstance(data, dict) or MARK not in data:
        raise ConfigError(setting, named, f"it has no {MARK}", "fleet experiment fit LOG --output FILE writes such a file.")
    if data[MARK] != VERSION:
        raise ConfigError(setting, data[MARK], f"is no version of {named} that this Fleet reads: {VERSION}", "Fit the log again.")
    parts = data.get("components")
    if not isinstance(parts, dict) or not parts:
        raise ConfigError(f"{setting} components", parts, "names no component that fails", "Fit a log with at least one fault.")
    known = {name: _component(f"{setting} components.{name}", name, each) for name, each in parts.items()}
    given = {name: value for name, value in data.items() if name != MARK} | {"components": known}
    return fields.read(FittedFaults, given, f"{setting} ")


def _component(where: str, name: str, said: Any) -> ComponentFaults:
    if name not in KIND_OF_COMPONENT:
        raise ConfigError(where, name, "is no component of the fault catalogue", f"Known: {', '.join(KIND_OF_COMPONENT)}.")
    if not isinstance(said, dict):
        raise ConfigError(where, said, "must be an object with mttf_hours")
    return fields.read(ComponentFaults, said, f"{where} ")
