"""A log becomes a trace: every row is a fault, or is counted with the reason and the line. No row is dropped silently."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import tzinfo
from enum import StrEnum
from typing import Any

from fleet.errors import ConfigError
from fleet.planning.traces import components, dates
from fleet.planning.traces.mapping import ZONE, LogMapping, understood
from fleet.planning.traces.trace import FleetTraceRow, Trace, as_text
from fleet.protocol.fault_kinds import KIND_OF_COMPONENT
from fleet.protocol.types import Fault


class FoundKind(StrEnum):
    """Kinds of findings in a log. The second part of each names the effect on the row."""

    UNREADABLE = "unreadable, left out"
    NO_TIME = "no time, left out"
    DUPLICATE = "duplicate, left out"
    STEP = "step of a job, left out"
    NO_FAULT = "no fault, left out"
    OUTSIDE = "outside the window, left out"
    UNKNOWN_CAUSE = "unknown cause, counted as " + components.UNKNOWN
    NEGATIVE = "ends before it begins, counted without a repair"
    OPEN = "no end, counted without a repair"
    TWICE = "its hour came twice, the first counts"
    TWICE_LATE = "its end's hour came twice, the second counts"
    NEVER = "its hour never came, counted on from the one before"
    DISAGREES = "duration and end disagree, the end counts"
    BACKWARDS = "time runs backwards, put in order"
    OVERLAP = "its node was away already, counted"
    GAP = "gap before it, counted as time without faults"


LEFT_OUT = (FoundKind.UNREADABLE, FoundKind.NO_TIME, FoundKind.DUPLICATE, FoundKind.STEP, FoundKind.NO_FAULT, FoundKind.OUTSIDE)
"""Rows that are not faults of the trace. All other rows are."""
GAP_CHANCE = 1e-3
"""A gap is longer than the longest one of a steady log, but for one log in a thousand."""
UNORDERED = 0.05
"""A log with a larger share of rows that go back in time is in no order of time. Then each node's own rows are checked."""
FEW = 3
"""So many rows may go back in a log that is in order."""
DISAGREE_S, DISAGREE_SHARE = 90.0, 0.05
"""Durations that differ from their end by more than both of these disagree: minutes are rounded."""


@dataclass(frozen=True, slots=True)
class LogFinding:
    """A finding about one line of the log."""

    what: FoundKind
    line: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A fault of the log. ``at_s`` in seconds since 1970, ``node`` with its cluster before a slash, "" where it is not named."""

    at_s: float
    node: str
    component: str
    said: str
    repair_s: float | None
    line: int

    @property
    def group(self) -> str:
        """The cluster, where a log has several."""
        return self.node.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class LogCluster:
    """A cluster of the log: its nodes, and the time in which its faults were recorded, in seconds since 1970."""

    nodes: int
    began_s: float
    ended_s: float

    @property
    def node_s(self) -> float:
        """Node-seconds."""
        return self.nodes * (self.ended_s - self.began_s)


@dataclass(frozen=True, slots=True)
class Log:
    """An imported log. ``exposure_node_s``: node-seconds in which the log would have faults; ``exposure_of``: the source of that."""

    entries: tuple[LogEntry, ...]
    findings: tuple[LogFinding, ...]
    rows: int
    mapping: LogMapping
    groups: dict[str, LogCluster]
    exposure_node_s: float
    exposure_of: str
    unused: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def nodes(self) -> int:
        """Nodes of all clusters."""
        return sum(group.nodes for group in self.groups.values())

    @property
    def began_s(self) -> float:
        """The log's first moment."""
        return min(group.began_s for group in self.groups.values())

    @property
    def ended_s(self) -> float:
        """The log's last moment."""
        return max(group.ended_s for group in self.groups.values())

    def group_of(self, node: str) -> str:
        """The cluster of a node, where it is named; else the first."""
        name = node.rpartition("/")[0]
        return name if name in self.groups else next(iter(self.groups))

    def counts(self) -> dict[str, int]:
        """The number of findings of each kind."""
        counted = Counter(finding.what for finding in self.findings)
        return {what.value: counted[what] for what in FoundKind if counted[what]}


def read_log(text: str, mapping: LogMapping | None = None, *, nodes: int = 0, since: str = "", until: str = "") -> Log:
    """The faults of a log.

    Args:
        text: CSV (comma, semicolon, tab or bar between columns, with a line of names), or JSON lines.
        mapping: the meaning of its columns; None: guessed.
        nodes: of the fleet, all clusters together; 0: the log's own number, else the nodes that it names.
        since, until: the time that the log covers, in its zone; "": from its first fault to its last.

    Raises:
        ConfigError: the log has no rows, its columns have no known meaning, or none of its rows is a fault.
    """
    columns, rows, broken = _table(text)
    found = understood(mapping, columns, [cells for _, cells in rows])
    reading = _Reading(found, columns)
    entries = [entry for line, cells in rows if (entry := reading.entry(line, cells)) is not None]
    findings = [*broken, *reading.findings]
    window = _Window(since, until, reading.zone)
    entries, more = window.sifted(entries)
    findings += more
    if not entries:
        most = Counter(finding.what.value for finding in findings).most_common(1)
        reason = "no row of it is a fault" + (f"; of most of them: {most[0][0]}" if most else "")
        raise ConfigError("FILE", f"{len(rows)} rows", reason, "Give a mapping with --map: docs/incidents.md says how.")
    findings += [*_backwards(entries)]
    ordered = sorted(entries, key=lambda entry: (entry.at_s, entry.line))
    ordered, doubles = _single(ordered)
    findings += [*doubles, *_overlaps(ordered), *_gaps(ordered)]
    groups = _groups(ordered, reading, nodes, window.span(reading.span_s))
    node_s, source = reading.exposure() if not (since or until) else (0.0, "")
    if not node_s:
        node_s, source = sum(group.node_s for group in groups.values()), "nodes x time"
    unused = tuple(name for name in columns if name not in found.columns)
    findings.sort(key=lambda finding: (finding.line, finding.what))
    return Log(
        tuple(ordered), tuple(findings), len(rows) + len(broken), found, groups, node_s, source, unused, _notes(found, reading, nodes)
    )


# ---- the table ---------------------------------------------------------------------------------------------------------------------------

Line = tuple[int, Sequence[str]]


def _table(text: str) -> tuple[tuple[str, ...], list[Line], list[LogFinding]]:
    """(columns, rows with their lines, lines that cannot be read)."""
    lines = text.lstrip("\ufeff").split("\n")  # at no other mark: others may stand within a cell
    first = next((line for line in lines if line.strip()), "")
    if not first:
        raise ConfigError("FILE", "", "it is empty", "A log has a line of names, and a row for each fault.")
    if first.lstrip().startswith("{"):
        return _objects(lines)
    if first.lstrip().startswith("["):
        raise ConfigError("FILE", first[:60], "it is one JSON list", "JSON lines are read: one object a line.")
    try:
        return _cells(csv.reader(lines, delimiter=max("|\t;,", key=first.count)))
    except csv.Error as error:
        raise ConfigError("FILE", first[:60], f"it is no CSV: {error}", "Look for a quotation mark that is not closed.") from error


def _cells(reader: Any) -> tuple[tuple[str, ...], list[Line], list[LogFinding]]:
    columns = tuple(name.strip() for name in next(reader))
    if len(set(columns)) < len(columns):
        twice = next(name for name in columns if columns.count(name) > 1)
        raise ConfigError("FILE", twice, "two columns have this name", "Name one of them otherwise.")
    rows: list[Line] = []
    broken = []
    for cells in reader:
        if len(cells) == len(columns):
            rows.append((reader.line_num, cells))
        elif cells:
            broken.append(LogFinding(FoundKind.UNREADABLE, reader.line_num, f"{len(cells)} columns instead of {len(columns)}"))
    return columns, rows, broken


def _objects(lines: Sequence[str]) -> tuple[tuple[str, ...], list[Line], list[LogFinding]]:
    objects: list[tuple[int, dict[str, object]]] = []
    broken, columns = [], dict[str, None]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            objects.append((number, found))
            columns |= dict.fromkeys(found)
        else:
            broken.append(LogFinding(FoundKind.UNREADABLE, number, "no JSON object"))
    rows: list[Line] = [
        (number, ["" if (value := found.get(name)) is None else str(value) for name in columns]) for number, found in objects
    ]
    return tuple(columns), rows, broken


# ---- rows --------------------------------------------------------------------------------------------------------------------------------


class _Reading:
    """Rows of one log, and the findings in them."""

    def __init__(self, mapping: LogMapping, columns: Sequence[str]) -> None:
        place = {name: number for number, name in enumerate(columns)}
        self.findings: list[LogFinding] = []
        self.sizes: dict[str, int] = {}
        self.mapping, self.zone = mapping, dates.zone_of(mapping.zone, ZONE)
        self._time = dates.reader(mapping.dates, self.zone)
        self._at = {part: place.get(getattr(mapping, part), -1) for part in ("start", "end", "duration", "group", "width", "job", "nodes")}
        self._node = [place[name] for name in mapping.node if name in place]
        self._list = place.get("NodeList", -1) if mapping.jobs else -1
        self._cause = [(name, place[name]) for name in mapping.cause]
        self._unit = dates.UNITS[mapping.duration_unit]
        self._known: dict[tuple[str, str], str] = {}
        self._job_node_s, self._jobs, self._well = 0.0, 0, 0
        self.span_s: tuple[float, float] | None = None

    def entry(self, line: int, cells: Sequence[str]) -> LogEntry | None:
        """The fault of a row, or None."""
        if self.mapping.jobs and "." in self._text(cells, "job"):
            self._note(FoundKind.STEP, line)
            return None
        name, said = self._said(cells)
        component = self._component(name, said)
        begin_s, end_s, doubts = self._times(line, cells)
        if self.mapping.jobs or component != components.IGNORE:
            self.findings += doubts
        if self.mapping.jobs:
            self._count_job(cells, component, begin_s, end_s)
        if component == components.IGNORE:
            self._note(FoundKind.NO_FAULT, line, said)
            return None
        at_s = end_s if self.mapping.jobs or not self.mapping.start else begin_s
        if at_s is None:
            return None
        if math.isnan(at_s):
            self._note(FoundKind.NO_TIME, line)
            return None
        if component in ("", "unknown"):
            self.findings.append(LogFinding(FoundKind.UNKNOWN_CAUSE, line, said))
        repair_s = None if self.mapping.jobs else self._repair(line, cells, at_s, end_s)
        self._size(cells)
        shown = said if name in ("", said) or len(self._cause) == 1 else f"{name}: {said}"
        return LogEntry(at_s, self._name(cells), component if component in KIND_OF_COMPONENT else components.UNKNOWN, shown, repair_s, line)

    def exposure(self) -> tuple[float, str]:
        """Node-seconds of all jobs, where the log also has jobs that went well."""
        return (self._job_node_s, "hours of all jobs") if self._well and self._job_node_s else (0.0, "")

    @property
    def failed_jobs_only(self) -> bool:
        """Whether it is a log of jobs without any that went well."""
        return self.mapping.jobs and self._jobs > 0 and not self._well

    def _note(self, what: FoundKind, line: int, detail: str = "") -> None:
        self.findings.append(LogFinding(what, line, detail))

    def _text(self, cells: Sequence[str], part: str) -> str:
        return cells[self._at[part]].strip() if self._at[part] >= 0 else ""

    def _times(self, line: int, cells: Sequence[str]) -> tuple[float | None, float | None, list[LogFinding]]:
        """(beginning, end, doubts about them). An end whose first hour would be before its beginning was in the second."""
        begin, end = self._moment(line, cells, "start"), self._moment(line, cells, "end")
        late = begin is not None and end is not None and end.came_twice and end.at_s < begin.at_s
        doubts = (self._doubt(line, cells, "start", begin, False), self._doubt(line, cells, "end", end, late))
        end_s = None if end is None else end.other_s if late else end.at_s
        return None if begin is None else begin.at_s, end_s, [doubt for doubt in doubts if doubt is not None]

    def _doubt(self, line: int, cells: Sequence[str], part: str, found: dates.LogTime | None, late: bool) -> LogFinding | None:
        """The finding on a time whose hour came twice or never. ``late``: the second hour counts."""
        if found is None or not (found.came_twice or found.never_came):
            return None
        twice = FoundKind.TWICE_LATE if late else FoundKind.TWICE
        return LogFinding(twice if found.came_twice else FoundKind.NEVER, line, self._text(cells, part))

    def _moment(self, line: int, cells: Sequence[str], part: str) -> dates.LogTime | None:
        """The time in a column; NaN where there is none; None where it cannot be read, and a finding counts the row."""
        text = self._text(cells, part)
        if not dates.given(text):
            return dates.NO_LOG_TIME
        try:
            return self._time(text)
        except (ValueError, OverflowError):
            self.findings.append(LogFinding(FoundKind.UNREADABLE if part == self._when else FoundKind.OPEN, line, f"{text!r} is no time"))
            return None

    @property
    def _when(self) -> str:
        return "end" if self.mapping.jobs or not self.mapping.start else "start"

    def _said(self, cells: Sequence[str]) -> tuple[str, str]:
        """(column, text) of the cause: the first column that is not empty."""
        return next(((name, cells[place].strip()) for name, place in self._cause if cells[place].strip()), ("", ""))

    def _component(self, name: str, said: str) -> str:
        """The component, looked up once for each cause: first the mapping's entry for it, then that for its category, then its words."""
        if (name, said) not in self._known:
            known = self.mapping.components
            exact = known.get(said.lower()) or known.get(said.lower().partition(" ")[0]) or known.get(name.lower())
            several = len(self._cause) > 1
            words = components.component_of(said) or (components.component_of(name) if several else "")
            self._known[name, said] = exact or words
        return self._known[name, said]

    def _repair(self, line: int, cells: Sequence[str], at_s: float, end_s: float | None) -> float | None:
        text = self._text(cells, "duration")
        try:
            lasted_s = dates.lasting(text, self._unit) if dates.given(text) else None
        except ValueError:
            self.findings.append(LogFinding(FoundKind.OPEN, line, f"{text!r} is no length of time"))
            lasted_s = None
        found = end_s - at_s if end_s is not None and not math.isnan(end_s) and self.mapping.start else lasted_s
        if found is None:
            if self.mapping.end or self.mapping.duration:
                self.findings += [LogFinding(FoundKind.OPEN, line)] if end_s is not None else []
            return None
        if found < 0 or (lasted_s is not None and lasted_s < 0):
            self._note(FoundKind.NEGATIVE, line, f"{min(found, lasted_s if lasted_s is not None else found):,.0f} s")
            return None
        if lasted_s is not None and abs(lasted_s - found) > max(DISAGREE_S, DISAGREE_SHARE * found):
            self.findings.append(LogFinding(FoundKind.DISAGREES, line, f"{lasted_s:,.0f} s and {found:,.0f} s"))
        return found

    def _name(self, cells: Sequence[str]) -> str:
        parts = [cells[place].strip() for place in self._node]
        if all(parts) and parts:
            return "/".join(parts)
        alone = cells[self._list].strip() if self._list >= 0 else ""
        return alone if alone and not set(alone) & set("[,") and alone != "None assigned" else ""

    def _size(self, cells: Sequence[str]) -> None:
        """Take the row's number of nodes of its cluster."""
        if self._at["nodes"] >= 0:
            text, group = self._text(cells, "nodes"), self._text(cells, "group")
            self.sizes[group] = max(self.sizes.get(group, 0), int(text) if text.isdigit() else 0)

    def _count_job(self, cells: Sequence[str], component: str, begin_s: float | None, end_s: float | None) -> None:
        self._jobs += 1
        width = self._text(cells, "width")
        if begin_s is None or end_s is None or math.isnan(begin_s) or math.isnan(end_s) or end_s < begin_s:
            return
        self._well += component == components.IGNORE
        nodes = int(width) if width.isdigit() else 0
        self._job_node_s += nodes * (end_s - begin_s)
        self.sizes[""] = max(self.sizes.get("", 0), nodes)
        before = self.span_s or (begin_s, end_s)
        self.span_s = min(before[0], begin_s), max(before[1], end_s)


# ---- the whole ---------------------------------------------------------------------------------------------------------------------------


class _Window:
    """The time that a log covers, as far as the user gives it: dates in ``zone``. Raises ConfigError."""

    def __init__(self, since: str, until: str, zone: tzinfo) -> None:
        self._begin_s = dates.moment(since, "--since", zone) if since else -math.inf
        self._end_s = dates.moment(until, "--until", zone) if until else math.inf
        if not self._begin_s < self._end_s:
            raise ConfigError("--until", until, f"it is not after --since {since}")

    def sifted(self, entries: Sequence[LogEntry]) -> tuple[list[LogEntry], list[LogFinding]]:
        """(entries inside, findings of the others)."""
        inside = [entry for entry in entries if self._begin_s <= entry.at_s <= self._end_s]
        outside = [entry for entry in entries if not self._begin_s <= entry.at_s <= self._end_s]
        return inside, [LogFinding(FoundKind.OUTSIDE, entry.line, dates.shown(entry.at_s)) for entry in outside]

    def span(self, jobs_s: tuple[float, float] | None) -> tuple[float | None, float | None]:
        """The time that the log covers, if it is known: the user's, else from the first job to the last."""
        begin_s, end_s = jobs_s or (None, None)
        return self._begin_s if math.isfinite(self._begin_s) else begin_s, self._end_s if math.isfinite(self._end_s) else end_s


def _backwards(entries: Sequence[LogEntry]) -> Iterator[LogFinding]:
    """Rows that go back in time: from one row to the next, or within a node where the log has another order. Newest first is an order."""
    if sum(late.at_s < early.at_s for early, late in itertools.pairwise(entries)) > len(entries) / 2:
        entries = [*reversed(entries)]
    back = [*_back(entries)]
    if len(back) > max(FEW, UNORDERED * len(entries)):
        of_node: dict[str, list[LogEntry]] = {}
        for entry in entries:
            of_node.setdefault(entry.node, []).append(entry)
        back = [entry for each in of_node.values() for entry in _back(each)]
    return (LogFinding(FoundKind.BACKWARDS, late.line, f"{dates.shown(late.at_s)} after {dates.shown(early.at_s)}") for early, late in back)


def _back(entries: Sequence[LogEntry]) -> Iterator[tuple[LogEntry, LogEntry]]:
    return ((early, late) for early, late in itertools.pairwise(entries) if late.at_s < early.at_s)


def _single(ordered: Sequence[LogEntry]) -> tuple[list[LogEntry], list[LogFinding]]:
    """Entries without duplicates: the same node, time and cause. Where nodes are not named, equal rows may be faults of two nodes."""
    seen: dict[tuple[str, float, str], int] = {}
    kept, doubles = [], []
    for entry in ordered:
        key = (entry.node, entry.at_s, entry.said)
        if entry.node and key in seen:
            doubles.append(LogFinding(FoundKind.DUPLICATE, entry.line, f"as line {seen[key]}"))
        else:
            seen[key] = entry.line
            kept.append(entry)
    return kept, doubles


def _overlaps(ordered: Iterable[LogEntry]) -> Iterator[LogFinding]:
    away: dict[str, float] = {}
    for entry in ordered:
        if not entry.node:
            continue
        until_s = away.get(entry.node, -math.inf)
        if entry.at_s < until_s:
            yield LogFinding(FoundKind.OVERLAP, entry.line, f"{entry.node} was away until {dates.shown(until_s)}")
        away[entry.node] = max(until_s, entry.at_s + (entry.repair_s or 0.0))


def _gaps(ordered: Sequence[LogEntry]) -> Iterator[LogFinding]:
    """Stretches without a row that a steady log has once in a thousand logs: P(longest of n > x) ~ n exp(-x / mean)."""
    count = len(ordered) - 1
    if count < 10:
        return
    least_s = (ordered[-1].at_s - ordered[0].at_s) / count * math.log(count / GAP_CHANCE)
    for early, late in itertools.pairwise(ordered):
        if late.at_s - early.at_s > least_s:
            yield LogFinding(FoundKind.GAP, late.line, f"{(late.at_s - early.at_s) / 86_400:,.1f} days after line {early.line}")


def _groups(ordered: Sequence[LogEntry], reading: _Reading, nodes: int, span: tuple[float | None, float | None]) -> dict[str, LogCluster]:
    """Clusters with their nodes and their time. Nodes that never failed are in no row: the caller has to give the number of nodes."""
    begin_s, end_s = span
    of_group: dict[str, list[LogEntry]] = {}
    for entry in ordered:
        of_group.setdefault(entry.group, []).append(entry)
    found = {}
    for name, inside in of_group.items():
        named = len({entry.node for entry in inside if entry.node})
        size = max(reading.sizes.get(name, 0), named, 1)
        first_s = inside[0].at_s if begin_s is None else begin_s
        found[name] = LogCluster(size, first_s, max(inside[-1].at_s if end_s is None else end_s, first_s + 1.0))
    if not nodes:
        return found
    if nodes < (least := sum(len({entry.node for entry in inside if entry.node}) for inside in of_group.values())):
        raise ConfigError("--nodes", nodes, f"the log names {least} nodes", f"The nearest valid value is {least}.")
    if len(found) > 1:
        reason = f"the log has {len(found)} clusters, and this does not give the number of nodes of each"
        raise ConfigError("--nodes", nodes, reason, "Name the column in a mapping: nodes = COLUMN, group = COLUMN.")
    return {name: replace(group, nodes=nodes) for name, group in found.items()}


def _notes(mapping: LogMapping, reading: _Reading, nodes: int) -> tuple[str, ...]:
    """Sentences on the way in which the log was read."""
    said = []
    if not nodes and not reading.sizes and not reading.exposure()[0]:
        said.append("The log does not have the number of nodes: only those that failed are counted. Give --nodes.")
    if reading.failed_jobs_only:
        said.append("The log has failed jobs only, so that the hours of all jobs are unknown: rates are for each of --nodes.")
    if mapping.dates.startswith("%m/%d/"):
        said.append(f"Dates are read with the month first ({mapping.dates}). Set dates in a mapping if that is wrong.")
    if not mapping.cause:
        said.append("No column names the failed part: every cause is unknown.")
    return tuple(said)


# ---- the trace ---------------------------------------------------------------------------------------------------------------------------


def as_trace(log: Log) -> str:
    """The log in Fleet's own format; :func:`from_trace` gives back the same faults. Times count from the log's beginning."""
    began_s = log.began_s
    numbers = {name: number for number, name in enumerate(sorted({entry.node for entry in log.entries if entry.node}))}
    head: dict[str, object] = {"nodes": log.nodes, "began": repr(began_s), "exposure_node_s": repr(log.exposure_node_s),
                               "exposure": log.exposure_of}  # fmt: skip
    for name, group in log.groups.items():
        head[f"cluster {name}".strip()] = f"{group.nodes} nodes from {group.began_s!r} to {group.ended_s!r}"
    rows = (
        FleetTraceRow(
            Fault(f"line-{each.line}", each.at_s - began_s, each.component, KIND_OF_COMPONENT[each.component], node=numbers.get(each.node)),
            each.repair_s, each.node, each.said,
        )
        for each in log.entries
    )  # fmt: skip
    return as_text(rows, head)


def from_trace(trace: Trace) -> Log:
    """A log that was imported before. Raises ConfigError for the trace of a run, or of the simulator."""
    head = trace.head
    if "exposure_node_s" not in head or not trace.rows:
        reason = "it is a trace, and does not give the time and the nodes that it covers"
        raise ConfigError("FILE", "trace", reason, "Fit a log, or the output of fleet experiment import.")
    try:
        began_s, node_s = float(head["began"]), float(head["exposure_node_s"])
        groups = {
            name.partition(" ")[2]: LogCluster(int(words[0]), float(words[3]), float(words[5]))
            for name, words in ((name, text.split()) for name, text in head.items() if name.split()[0] == "cluster")
        }
    except (ValueError, LookupError) as error:
        raise ConfigError("FILE", "trace", f"the lines before its rows were changed: {error}", "Import the log again.") from error
    entries = (
        LogEntry(began_s + row.fault.at_s, row.name, row.fault.component, row.said, row.repair_s, number)
        for number, row in enumerate(trace.rows, len(head) + 2)
    )
    return Log(tuple(entries), (), len(trace.rows), LogMapping(name="trace"), groups, node_s, head.get("exposure", ""))
