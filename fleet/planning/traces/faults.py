"""The file that ``fleet traces fit`` writes, and that plan, simulate, run and rehearse take as ``--faults``: how often what fails. JSON."""

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
    faults: int = fields.setting(0, "How many were counted.")
    low_hours: float = fields.setting(0.0, "From where on the 95% interval of mttf_hours is.", least=0)
    high_hours: float | None = fields.setting(None, "Its end; None: it has none.")
    shape: float | None = fields.setting(
        None, "Of the Weibull law of times between them, where it is better; None: exponential.", least=0.1, most=20
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedFaults:
    """What a log came to."""

    components: Mapping[str, ComponentFaults]
    source: str = ""
    nodes: int = fields.setting(1, "Of the fleet.", least=1)
    node_hours: float = fields.setting(0.0, "In which faults would have been seen.", least=0)
    repair_hours: float | None = fields.setting(None, "Until a node is back, the mean; None: the log does not say.", above=0)
    burst: float = fields.setting(0.0, "Share of faults that draw others along.", least=0, most=1)
    lemon_share: float = fields.setting(0.0, "Of nodes that fail more often than the others.", least=0, most=1)
    lemon_factor: float = fields.setting(1.0, "How many times as often.", least=1)
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mttf_hours(self) -> float:
        """Node-hours for each fault of any component."""
        return 1.0 / sum(1.0 / each.mttf_hours for each in self.components.values())

    def to_json(self) -> str:
        """The file."""
        return json.dumps({MARK: VERSION} | dataclasses.asdict(self), indent=2, allow_nan=False) + "\n"


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
    parts = data.get("components")
    if not isinstance(parts, dict) or not parts:
        raise ConfigError(f"{setting} components", parts, "names no component that fails", "Fit a log with a fault at least.")
    known = {name: _component(f"{setting} components.{name}", name, each) for name, each in parts.items()}
    given = {name: value for name, value in data.items() if name != MARK} | {"components": known}
    return fields.read(FittedFaults, given, f"{setting} ")


def _component(where: str, name: str, said: Any) -> ComponentFaults:
    if name not in KIND_OF_COMPONENT:
        raise ConfigError(where, name, "is no component of the fault catalogue", f"Known: {', '.join(KIND_OF_COMPONENT)}.")
    if not isinstance(said, dict):
        raise ConfigError(where, said, "must be an object with mttf_hours")
    return fields.read(ComponentFaults, said, f"{where} ")
