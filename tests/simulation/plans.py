"""Plans of simulated runs as JSON: a run that broke something once is kept as its plan, since a seed draws another one once a generator
changes."""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.simulation.plan import Plan

KEPT = Path(__file__).with_name("plans")
SHOW = Path(__file__).with_name("mutations")
"""Plans whose runs show a mutation of ``test_mutations.py``, by its name."""


@dataclass(frozen=True)
class Kept:
    """``found``: what the run showed when it broke; ``of``: the family and the seed that drew it then."""

    found: str
    of: str
    plan: Plan


def to_json(value: Any) -> Any:
    """Dataclasses as objects with all their fields, so that a default that changes later changes no plan."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    return value.value if isinstance(value, enum.Enum) else value


def from_json(hint: Any, value: Any) -> Any:
    """The value annotated ``hint``. A field that the plan does not know yet has its default; one that is gone is a TypeError."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else from_json(next(one for one in arguments if one is not type(None)), value)
    if origin is tuple and arguments[-1] is Ellipsis:
        return tuple(from_json(arguments[0], item) for item in value)
    if origin is tuple:
        return tuple(from_json(one, item) for one, item in zip(arguments, value, strict=True))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(value)
    if not dataclasses.is_dataclass(hint):
        return value
    hints = typing.get_type_hints(hint)
    return typing.cast("type", hint)(**{name: from_json(hints.get(name), item) for name, item in value.items()})


def write(path: Path, kept: Kept) -> None:
    parts = [f"{json.dumps(name)}: {json.dumps(part)}" for name, part in to_json(kept).items()]
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def read(path: Path) -> Kept:
    return typing.cast("Kept", from_json(Kept, json.loads(path.read_text())))
