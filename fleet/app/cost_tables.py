"""What a slot costs by name: rows of a file of prices and sites, for the settings ``cost.*`` that nobody has given a value."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleet.errors import ConfigError

HOURS = 24
BY_HOUR = "g_co2_per_kwh"
"""May be a list of 24 numbers, one for each hour of the day in UTC."""
PRICES = ("usd_per_rank_hour", "usd_per_gb_month", "usd_per_gb_read")
SITES = ("pue", "usd_per_kwh", BY_HOUR, "embodied_g_co2_per_rank_hour")
ABOUT = ("source", "note")
"""What a row may say beside numbers."""


def with_rows(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flat settings, with what the rows that ``cost.price`` and ``cost.site`` name have for those that are not set.

    Raises ConfigError: there is no file or no such row, or a row is not as it should be: the numbers that it has, none below zero, and all
    hours of the day.
    """
    wanted = {table: str(values[f"cost.{one}"]) for one, table in (("price", "prices"), ("site", "sites")) if values.get(f"cost.{one}")}
    if not wanted:
        return dict(values)
    file = str(values.get("cost.tables") or "")
    tables = _read(file, wanted)
    found: dict[str, Any] = {}
    for table, name in wanted.items():
        found |= _row(file, tables, table, name)
    return {f"cost.{name}": value for name, value in found.items()} | dict(values)


def _read(file: str, wanted: Mapping[str, str]) -> dict[str, Any]:
    if not file:
        names = " and ".join(f"cost.{table.removesuffix('s')}={name}" for table, name in wanted.items())
        raise ConfigError(
            "cost.tables", "", f"{names} name rows of a file, and there is none", "Set cost.tables to a file, as docs/cost.md has it."
        )
    try:
        return tomllib.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError("cost.tables", file, f"it cannot be read: {error}", "It is TOML: see docs/cost.md.") from error


def _row(file: str, tables: Mapping[str, Any], table: str, name: str) -> dict[str, Any]:
    rows = tables.get(table, {})
    if name not in rows:
        one = table.removesuffix("s")
        raise ConfigError(f"cost.{one}", name, f"{file} has no row [{table}.{name}]", f"It has {', '.join(sorted(rows)) or 'none at all'}.")
    known, found = PRICES if table == "prices" else SITES, dict[str, Any]()
    for key, value in rows[name].items():
        where = f"{table}.{name}.{key}"
        if key in ABOUT:
            continue
        if key not in known:
            raise ConfigError(where, value, f"a row of {table} has no such number (in {file})", f"It has {', '.join((*known, *ABOUT))}.")
        found |= _by_hour(where, value) if key == BY_HOUR and isinstance(value, list) else {key: _number(where, value)}
    return found


def _by_hour(where: str, value: list[Any]) -> dict[str, Any]:
    if len(value) != HOURS:
        reason = f"it has {len(value)} hours, and a day has {HOURS}"
        raise ConfigError(where, value, reason, "Give one number for each hour in UTC, from 0 on; or one for all.")
    hours = [_number(f"{where}[{hour}]", each) for hour, each in enumerate(value)]
    return {BY_HOUR: sum(hours) / HOURS, f"{BY_HOUR}_by_hour": tuple(map(repr, hours))}


def _number(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(where, value, "must be a finite number, at least 0", "Leave it out where it is not known.")
    return float(value)
