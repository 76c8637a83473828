"""The meaning of a log's columns: from a file, from a mapping that ships with Fleet, or guessed from names and values."""

from __future__ import annotations

import dataclasses
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from fleet.errors import ConfigError
from fleet.planning.traces import components, dates
from fleet.settings import fields

SHIPPED = ("lanl", "sacct", "acme")
NAMES: dict[str, tuple[str, ...]] = {
    "start": ("start", "started", "start time", "begin", "began", "time", "timestamp", "date", "failed at", "occurred", "detected", "at"),
    "end": ("end", "ended", "end time", "fixed", "resolved", "repaired", "restored", "finish", "back", "up at"),
    "duration": ("duration", "down time", "downtime", "repair time", "ttr", "outage", "lasted", "repair"),
    "node": ("node", "host", "hostname", "node id", "nodeid", "node name", "machine", "server", "nodelist"),
    "cause": ("component", "cause", "root cause", "reason", "category", "failure type", "type", "state", "error", "kind"),
}
"""Names of columns in logs, the likeliest first; units and marks in a name do not count."""
ZONE = "--map zone"
SAMPLE = 200
"""Rows that a guess looks at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMapping:
    """Columns of a log by their meaning; "" or () where the log has none.

    Attributes:
        name: of this mapping.
        start, end: the beginning of a fault, and the return of its node. In a log of jobs: the beginning and the end of a job.
        duration, duration_unit: how long the node was away; ``min``, ``h`` ...
        node: columns that name a node together.
        cause: columns with the cause. The first that is not empty counts, and its name is the category.
        dates: the form of times: ``iso``, ``unix``, ``unix_ms``, ``seconds``, or a format of strptime.
        zone: the zone of times without one, such as ``Europe/Berlin``; default UTC.
        nodes: column with the number of nodes of the row's group.
        group: column that names the cluster, where a log has several.
        jobs: each row is a job, faulty or not: a fault is at the job's end, and the hours of all jobs are the exposure.
        width: in a log of jobs, the column with the number of nodes of a job; ``job``: the one with its id.
        components: cause or category, in lower case -> component of the fault catalogue, ``ignore``, or ``unknown``.
    """

    name: str = "guess"
    start: str = ""
    end: str = ""
    duration: str = ""
    duration_unit: str = "s"
    node: tuple[str, ...] = ()
    cause: tuple[str, ...] = ()
    dates: str = ""
    zone: str = ""
    nodes: str = ""
    group: str = ""
    jobs: bool = False
    width: str = ""
    job: str = ""
    components: Mapping[str, str] = field(default_factory=dict)

    @property
    def columns(self) -> tuple[str, ...]:
        """All named columns."""
        single = (self.start, self.end, self.duration, self.group, self.width, self.job, self.nodes)
        return tuple(name for name in (*single, *self.node, *self.cause) if name)


def from_text(text: str, where: str) -> LogMapping:
    """A mapping from TOML. Raises ConfigError: it is no TOML, a name is unknown, or a value is of another kind."""
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError("--map", where, f"it is no TOML: {error}") from error
    one = {name: [data[name]] for name in ("node", "cause") if isinstance(data.get(name), str)}
    found = fields.read(LogMapping, data | one | {"name": where}, "--map ", f"A mapping has {', '.join(fields.keys(LogMapping))}.")
    if not (found.start or found.end):
        raise ConfigError("--map start", found.start, f"no column has the time ({where})", 'Write start = "COLUMN".')
    if found.duration_unit not in dates.UNITS:
        raise ConfigError("--map duration_unit", found.duration_unit, "is no unit of time", f"Known: {', '.join(dates.UNITS)}.")
    dates.zone_of(found.zone, ZONE)
    said = {text.lower(): _component(value, text) for text, value in found.components.items()}
    return dataclasses.replace(found, components=said)


def _component(value: str, said: str) -> str:
    return value if value == "unknown" else components.check(value, f"--map components.{said}")


def load(named: str) -> LogMapping:
    """A mapping that ships with Fleet, by its name, or one from a file. Raises ConfigError."""
    if named in SHIPPED:
        return from_text(files("fleet.planning.traces").joinpath(f"{named}.toml").read_text(encoding="utf-8"), named)
    try:
        text = Path(named).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError("--map", named, f"cannot be read: {reason}", f"Name a file, or one of {', '.join(SHIPPED)}.") from error
    return from_text(text, named)


def understood(mapping: LogMapping | None, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> LogMapping:
    """``mapping`` for a log with these columns, or a guess. Forms of dates are found where the mapping has none.

    Raises:
        ConfigError: a column is missing, or no value in the log looks like a time.
    """
    found = mapping or next((each for each in map(load, SHIPPED) if set(_needed(each)) <= set(columns)), None) or _guess(columns)
    missing = [name for name in _needed(found) if name not in columns]
    if missing:
        raise ConfigError("--map", found.name, f"the log has no column {missing[0]!r}", f"Its columns: {', '.join(columns)}.")
    found = found if found.dates else dataclasses.replace(found, dates=_form(found, columns, rows))
    dates.check_zone(found.dates, found.zone, ZONE)
    return found


def _needed(mapping: LogMapping) -> tuple[str, ...]:
    """Columns that a log of this form must have. The user chooses Slurm's columns, so few of them are needed."""
    if mapping.jobs:
        return tuple(name for name in (mapping.start, mapping.end, *mapping.cause) if name)
    return mapping.columns


def _form(mapping: LogMapping, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    name = mapping.start or mapping.end
    place = columns.index(name)
    spread = rows[:: max(1, len(rows) // SAMPLE)]
    sample = [row[place] for row in spread if place < len(row)]
    alone = [form for text in sample for form in dates.fitting([text])[:1]]
    forms = dates.fitting(sample) or [form for form, count in Counter(alone).most_common(1) if 2 * count >= len(sample)]
    if not forms:
        value = next((text for text in sample if dates.given(text)), "")
        raise ConfigError(f"column {name}", value, "is no time that Fleet knows", 'Set in a mapping: dates = "%d.%m.%Y %H:%M".')
    return forms[0]


def _plain(column: str) -> str:
    """A column's name without units, marks and capitals."""
    return " ".join(column.lower().replace("_", " ").replace("-", " ").partition("(")[0].split())


def _guess(columns: Sequence[str]) -> LogMapping:
    plain = {_plain(column): column for column in reversed(columns)}
    found: dict[str, str] = {}
    for part, names in NAMES.items():
        whole = next((plain[name] for name in names if name in plain), "")
        within = (column for name in names for text, column in plain.items() if name in text.split() and column not in found.values())
        found[part] = whole or next(within, "")
    if not found["start"]:
        raise ConfigError(
            "FILE", ", ".join(columns)[:200], "no column looks like a time", 'Give a mapping: --map FILE with start = "COLUMN".'
        )
    return LogMapping(
        start=found["start"], end=found["end"], duration=found["duration"], duration_unit=_unit(found["duration"]),
        node=(found["node"],) if found["node"] else (), cause=(found["cause"],) if found["cause"] else (),
    )  # fmt: skip


def _unit(column: str) -> str:
    """The unit in a column's name; seconds without one."""
    words = column.lower().replace("(", " ").replace(")", " ").replace("_", " ").split()
    return next((word for word in words if word in dates.UNITS), "s")
