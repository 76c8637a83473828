"""Times as logs write them, as seconds since 1970. A time that names no zone is taken for UTC."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from fleet.errors import ConfigError

ISO, UNIX, UNIX_MS, SECONDS = "iso", "unix", "unix_ms", "seconds"
FORMATS = (
    "%m/%d/%Y %H:%M", "%m/%d/%Y %H:%M:%S", "%m/%d/%y %H:%M", "%m/%d/%y %H:%M:%S", "%d/%m/%Y %H:%M", "%d/%m/%Y %H:%M:%S", "%d.%m.%Y %H:%M",
    "%d.%m.%Y %H:%M:%S", "%d-%b-%Y %H:%M", "%d-%b-%Y %H:%M:%S", "%b %d %Y %H:%M:%S", "%Y/%m/%d %H:%M", "%Y/%m/%d %H:%M:%S",
    "%m/%d/%Y", "%d/%m/%Y", "%d.%m.%Y",
)  # fmt: skip
"""What is tried, in this order, after ISO 8601 and numbers. Month first, as the published logs have it."""
NEVER = ("", "unknown", "none", "null", "n/a", "nan", "-", "current")
"""How logs write that there is no time."""
UNITS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "min": 60.0, "minutes": 60.0, "h": 3600.0, "hours": 3600.0, "days": 86_400.0, "ms": 1e-3}
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d\d)(?::(\d\d(?:\.\d+)?))?")


def reader(form: str) -> Callable[[str], float]:
    """A function from a text to seconds since 1970 (``seconds``: since the log's own beginning). It raises ValueError."""
    if form == ISO:
        return _iso
    if form in (UNIX, SECONDS, UNIX_MS):
        return lambda text: _finite(float(text)) * (1e-3 if form == UNIX_MS else 1.0)
    return lambda text: _utc(datetime.strptime(text, form))  # noqa: DTZ007 - UTC is added


def _iso(text: str) -> float:
    return _utc(datetime.fromisoformat(text))


def _utc(when: datetime) -> float:
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is no time")
    return value


def given(text: str) -> bool:
    """Whether there is a time at all."""
    return text.strip().lower() not in NEVER


def fitting(texts: Iterable[str]) -> list[str]:
    """The forms that all ``texts`` have, the likeliest first."""
    sample = [text.strip() for text in texts if given(text)]
    if not sample:
        return []
    numbers = [float(text) for text in sample if _reads(SECONDS, text)]
    if len(numbers) == len(sample):
        return [UNIX_MS if min(numbers) > 1e11 else UNIX if min(numbers) > 1e8 else SECONDS]
    return [form for form in (ISO, *FORMATS) if all(_reads(form, text) for text in sample)]


def _reads(form: str, text: str) -> bool:
    try:
        reader(form)(text)
    except (ValueError, OverflowError):
        return False
    return True


def lasting(text: str, unit: float) -> float:
    """Seconds of a length: a number in ``unit`` seconds, or Slurm's [days-]hours:minutes:seconds. Raises ValueError."""
    found = _CLOCK.fullmatch(text)
    if found is None:
        return _finite(float(text)) * unit
    days, hours, minutes, seconds = found.groups()
    if seconds is None:  # minutes and seconds
        return float(hours) * 60.0 + float(minutes)
    return float(days or 0) * 86_400.0 + float(hours) * 3600.0 + float(minutes) * 60.0 + float(seconds)


def moment(text: str, where: str) -> float:
    """A time that a user gives. Raises ConfigError."""
    try:
        return _iso(text)
    except ValueError as error:
        raise ConfigError(where, text, "is no date", "Write it as 2003-06-01, or 2003-06-01T14:23.") from error


def shown(at_s: float) -> str:
    """``2003-06-01 14:23``, in UTC; seconds where the log counts from a beginning of its own."""
    if at_s < 1e8:
        return f"{at_s:.0f} s"
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M")
