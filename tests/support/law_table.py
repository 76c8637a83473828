"""The table of laws for the docs: what each computes, in which unit, and its worked example."""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np

import fleet.laws
from fleet.laws.law import REGISTRY, Law

UNITS = {
    "flop_per_byte": "FLOP/B", "flop_per_s": "FLOP/s", "bytes_per_s": "B/s", "bytes_per_flop": "B/FLOP", "tokens_per_s": "tokens/s",
    "m3_per_s": "m³/s", "per_s": "1/s", "s": "s", "bytes": "B", "flop": "FLOP", "tokens": "tokens", "w": "W", "j": "J", "kwh": "kWh",
    "kg": "kg CO2", "usd": "USD", "ranks": "ranks", "gpus": "GPUs",
}  # fmt: skip
"""End of a name -> unit, longest first where one contains another."""


def table() -> str:
    """All laws as a Markdown table, by module and in the order of definition."""
    for module in pkgutil.iter_modules(fleet.laws.__path__):
        import_module(f"fleet.laws.{module.name}")
    rows = ["| law | formula | unit | worked example | source |", "|---|---|---|---|---|"]
    for entry in sorted(REGISTRY.values(), key=lambda each: each.name.partition(".")[0]):
        call = ", ".join(f"{name}={shown(value)}" for name, value in entry.example.items())
        example = f"`({call})` gives {shown(worked(entry))}"
        unit = unit_of(entry.function.__name__)
        rows.append("| " + " | ".join(map(_cell, (f"`{entry.name}`", formula(entry), unit, example, entry.source))) + " |")
    return "\n".join(rows) + "\n"


def formula(entry: Law) -> str:
    """The first paragraph of the docstring, on one line."""
    text = " ".join((inspect.getdoc(entry.function) or "").split("\n\n", maxsplit=1)[0].split())
    return text.replace(":func:", "").replace("``", "`")


def worked(entry: Law) -> Any:
    """The result of the worked example."""
    return entry.function(**entry.example)


def unit_of(name: str) -> str:
    """The unit that a name ends in; "1" for ratios and counts."""
    return next((unit for suffix, unit in UNITS.items() if name.endswith(f"_{suffix}")), "1")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def shown(value: Any) -> str:
    """A value as a reader wants it: four digits."""
    if isinstance(value, bool) or not isinstance(value, (float, np.floating, int)):
        return _shown_many(value)
    return f"{value:,}" if isinstance(value, int) and abs(value) < 1e9 else f"{float(value):.4g}"


def _shown_many(value: Any) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return getattr(value, "name", None) or ", ".join(f"{f.name} {shown(getattr(value, f.name))}" for f in dataclasses.fields(value))
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {shown(each)}" for name, each in value.items())
    if isinstance(value, (tuple, list, np.ndarray)):
        return f"({', '.join(shown(each) for each in value)})"
    return str(value)
