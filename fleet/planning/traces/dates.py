"""Times of logs, as seconds since 1970. A time without a zone has the zone of the log's mapping, else UTC.

When clocks are put back, an hour comes twice: its times count as the first one. When clocks are put forward, an hour never comes: its times
count on from the hour before, so that 02:30 is 03:30. Both are ``fold=0`` of PEP 495, and the findings on a log's times name them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, tzinfo
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from fleet.errors import ConfigError

ISO, UNIX, UNIX_MS, SECONDS = "iso", "unix", "unix_ms", "seconds"
FORMATS = (
    "%m/%d/%Y %H:%M", "%m/%d/%Y %H:%M:%S", "%m/%d/%y %H:%M", "%m/%d/%y %H:%M:%S", "%d/%m/%Y %H:%M", "%d/%m/%Y %H:%M:%S", "%d.%m.%Y %H:%M",
    "%d.%m.%Y %H:%M:%S", "%d-%b-%Y %H:%M", "%d-%b-%Y %H:%M:%S", "%b %d %Y %H:%M:%S", "%Y/%m/%d %H:%M", "%Y/%m/%d %H:%M:%S",
    "%m/%d/%Y", "%d/%m/%Y", "%d.%m.%Y",
)  # fmt: skip
"""Forms to try, in this order, after ISO 8601 and numbers. Month first, as in the published logs."""
NEVER = ("", "unknown", "none", "null", "n/a", "nan", "-", "current")
"""Words in logs for a missing time."""
UNITS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "min": 60.0, "minutes": 60.0, "h": 3600.0, "hours": 3600.0, "days": 86_400.0, "ms": 1e-3}
_NUMBERS = (UNIX, UNIX_MS, SECONDS)
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d\d)(?::(\d\d(?:\.\d+)?))?")


class LogTime(NamedTuple):
    """A time of a log. ``at_s``: seconds since 1970. ``other_s``: its other possible meaning, else ``at_s`` itself.

    For a time that came twice it is the second one. For a time that never came it is the one before the clock's jump.
    """

    at_s: float
    other_s: float

    @property
    def came_twice(self) -> bool:
        """Whether its zone had this time of day twice on that day."""
        return self.other_s > self.at_s

    @property
    def never_came(self) -> bool:
        """Whether its zone left this time of day out on that day."""
        return self.other_s < self.at_s


NO_LOG_TIME = LogTime(math.nan, math.nan)
"""The value where a log has no time."""


def reader(form: str, zone: tzinfo = UTC) -> Callable[[str], LogTime]:
    """A function from a text to a moment since 1970 (``seconds``: since the log's own beginning). It raises ValueError."""
    if form == ISO:
        return lambda text: _in_zone(datetime.fromisoformat(text), zone)
    if form in _NUMBERS:
        return lambda text: _number(_finite(float(text)) * (1e-3 if form == UNIX_MS else 1.0))
    return lambda text: _in_zone(datetime.strptime(text, form), zone)  # noqa: DTZ007 - the zone is added


def _in_zone(when: datetime, zone: tzinfo) -> LogTime:
    if when.tzinfo is not None:
        return _number(when.timestamp())
    return LogTime(*(when.replace(tzinfo=zone, fold=fold).timestamp() for fold in (0, 1)))


def _number(at_s: float) -> LogTime:
    return LogTime(at_s, at_s)


def zone_of(name: str, where: str) -> tzinfo:
    """The zone with this name in the IANA's database; "": UTC. Raises ConfigError."""
    if not name:
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        way_out = 'Write one such as zone = "Europe/Berlin".'
        if not available_timezones():
            way_out = "This host has no database of zones: install tzdata, from the system or from PyPI."
        raise ConfigError(where, name, "is no zone that this host knows", way_out) from error


def check_zone(form: str, zone: str, where: str) -> None:
    """Raises ConfigError when times of this form have no zone."""
    if zone and form in _NUMBERS:
        raise ConfigError(where, zone, f"the log's times are numbers ({form}), which have no zone", "Leave the zone out.")


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is no time")
    return value


def given(text: str) -> bool:
    """Whether there is a time at all."""
    return text.strip().lower() not in NEVER


def fitting(texts: Iterable[str]) -> list[str]:
    """The forms that fit all ``texts``, the likeliest first."""
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
    """Seconds of a duration: a number in ``unit`` seconds, or Slurm's [days-]hours:minutes:seconds. Raises ValueError."""
    found = _CLOCK.fullmatch(text)
    if found is None:
        return _finite(float(text)) * unit
    days, hours, minutes, seconds = found.groups()
    if seconds is None:  # minutes and seconds
        return float(hours) * 60.0 + float(minutes)
    return float(days or 0) * 86_400.0 + float(hours) * 3600.0 + float(minutes) * 60.0 + float(seconds)


def moment(text: str, where: str, zone: tzinfo = UTC) -> float:
    """A user's time, in the form of a log. Raises ConfigError, also when its hour came twice or never: the user can name its zone."""
    try:
        found = reader(ISO, zone)(text)
    except (ValueError, OverflowError) as error:
        raise ConfigError(where, text, "is no date", "Write it as 2003-06-01, or 2003-06-01T14:23.") from error
    if found.at_s != found.other_s:
        reason = f"this hour {'came twice' if found.came_twice else 'never came'} in {zone}"
        meant = datetime.fromtimestamp(found.at_s, zone).isoformat(timespec="minutes")
        raise ConfigError(where, text, reason, f"Write it with its distance from UTC, such as {meant}.")
    return found.at_s


def shown(at_s: float) -> str:
    """``2003-06-01 14:23``, in UTC; seconds where the log counts from its own beginning."""
    if at_s < 1e8:
        return f"{at_s:.0f} s"
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M")
