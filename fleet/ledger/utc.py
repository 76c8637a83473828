"""Moments of a run on the calendar, in UTC. The run's own clock begins anew with each machine, and is no use in a post-mortem."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

MOMENTS = ("at_s", "cleared_s")
"""Fields of a report that are moments on the run's clock."""


def stamp(unix_s: float) -> str:
    """``2026-11-29 06:13:38 UTC``."""
    return f"{_date(unix_s):%Y-%m-%d %H:%M:%S} UTC"


def clock(unix_s: float, *, day: bool = False) -> str:
    """``06:13:38Z``, or ``11-29 06:13:38Z`` with the ``day``."""
    return f"{_date(unix_s):{'%m-%d ' if day else ''}%H:%M:%S}Z"


def iso(unix_s: float) -> str:
    """``2026-11-29T06:13:38.123Z``."""
    return _date(unix_s).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def with_utc(value: Any, zero_unix_s: float) -> Any:
    """A copy of plain data in which ``at_utc`` stands beside each ``at_s``, and so on.

    Args:
        zero_unix_s: the time at which the run's clock was 0, in seconds since 1970.
    """
    if isinstance(value, Mapping):
        found: dict[str, Any] = {}
        for name, each in value.items():
            found[name] = with_utc(each, zero_unix_s)
            if name in MOMENTS and isinstance(each, int | float):
                found[f"{name.removesuffix('_s')}_utc"] = iso(zero_unix_s + each)
        return found
    if isinstance(value, list | tuple):
        return [with_utc(each, zero_unix_s) for each in value]
    return value


def _date(unix_s: float) -> datetime:
    return datetime.fromtimestamp(unix_s, UTC)
