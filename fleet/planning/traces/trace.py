"""The one format of traces: faults with their times, as CSV. Chaos and the simulator read it; ``fleet experiment import`` writes it.

A trace *of a run* names the slots and nodes of that run. A trace *of a fleet* begins with lines ``# name = value``; ``nodes`` gives its
number of nodes. Its rows name nodes of the fleet, or none, and may have the time for which a node was away.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fleet.errors import ConfigError
from fleet.protocol.fault_kinds import KIND_OF_COMPONENT, kind_of
from fleet.protocol.fault_parameters import DURATION, SEVERITY
from fleet.protocol.types import Fault

COLUMNS = ("id", "at_s", "component", "kind", "slot", "node", "duration_s", "severity", "loss", "delay_s", "bytes_per_s", "jitter_s")
OF_A_FLEET = (*COLUMNS, "repair_s", "name", "said")
SLOW = "slow"


@dataclass(frozen=True, slots=True)
class FleetTraceRow:
    """One row. ``repair_s``: how long the place of the fault was away; None: unknown. ``name``, ``said``: the node and the cause in the
    words of the original log. ``where`` is file and line."""

    fault: Fault
    repair_s: float | None = None
    name: str = ""
    said: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """All rows, in the order of the file, and the values of its first lines. ``of_fleet``: its places are a fleet's, not a run's."""

    rows: tuple[FleetTraceRow, ...]
    head: Mapping[str, str] = field(default_factory=dict)
    of_fleet: bool = False


def as_text(rows: Iterable[FleetTraceRow], head: Mapping[str, object] | None = None) -> str:
    """CSV that :func:`read_trace` gives back exactly; with a ``head``, the trace of a fleet."""
    text = io.StringIO()
    text.writelines(f"# {name} = {value}\n" for name, value in (head or {}).items())
    columns = COLUMNS if head is None else OF_A_FLEET
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        said = {"repair_s": row.repair_s, "name": row.name, "said": row.said}
        values = (said[column] if column in said else getattr(row.fault, column) for column in columns)
        writer.writerow(["" if value is None else repr(value) if isinstance(value, float) else value for value in values])
    return text.getvalue()


def text_of(path: Path | str, setting: str = "trace") -> str:
    """The text of the file. Text of more than one line is the trace itself, which needs no file on the host that reads it."""
    if isinstance(path, str) and "\n" in path:
        return path
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(setting, str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(setting, str(path), f"cannot be read: {error}") from error


def is_trace(text: str) -> bool:
    """Whether a text is a trace of Fleet's own form, and not a log of another."""
    first = next((line for line in text.splitlines() if not line.startswith("#")), "")
    return {"at_s", "component", "kind"} <= set(first.split(","))


def read_trace(path: Path | str, setting: str = "trace") -> Trace:
    """The trace in a file, or in a text of more than one line.

    Raises:
        ConfigError: the file cannot be read, it has no columns of a trace, or a row is malformed; names setting, file, line and column.
    """
    text = text_of(path, setting)
    named = "trace" if text == path else str(path)
    lines = text.splitlines()
    marks = 0
    while marks < len(lines) and lines[marks].startswith("#"):
        marks += 1
    head = {name.strip(): value.strip() for name, _, value in (line[1:].partition("=") for line in lines[:marks])}
    reader = csv.reader(lines[marks:])
    columns = tuple(next(reader, []))
    if not {"at_s", "component"} <= set(columns):
        reason = f"the columns of {named} are {', '.join(columns) or 'missing'}"
        raise ConfigError(setting, str(path)[:200], reason, f"A trace has at_s, component and more of {', '.join(COLUMNS)}. "
                          "A log of another form becomes one with fleet experiment import.")  # fmt: skip
    of_fleet = "nodes" in head
    rows = (_Cells(setting, f"{named}:{marks + reader.line_num}", marks + reader.line_num, columns, cells) for cells in reader if cells)
    return Trace(tuple(cells.row(of_fleet) for cells in rows), head, of_fleet)


@dataclass(frozen=True, slots=True)
class _Cells:
    """One line, and the error about it."""

    setting: str
    where: str
    line: int
    columns: tuple[str, ...]
    cells: list[str]

    def row(self, of_fleet: bool) -> FleetTraceRow:
        if of_fleet and len(self.cells) != len(self.columns):
            reason = f"{len(self.columns)} columns are needed: {', '.join(self.columns)} ({self.where})"
            raise ConfigError(self.setting, len(self.cells), reason)
        component = self.text("component")
        kind = self.text("kind") or KIND_OF_COMPONENT.get(component, "")
        slot, node = self.whole("slot"), self.whole("node")
        given = self._numbers(kind)
        if given.get(SEVERITY.name, 1.0) < 1:
            raise self.wrong("severity", "1 is full speed, 2 half of it")
        fault = Fault(self._id(), self.number("at_s"), component or kind, kind, slot, node, **given)
        repair_s = self.number("repair_s") if self.text("repair_s") else None
        return FleetTraceRow(fault, repair_s, self.text("name"), self.text("said"), self.where)

    def _numbers(self, kind: str) -> dict[str, float]:
        """Parameters of a kind. Parameters that the kind does not have keep their defaults; any row may have severity and duration."""
        usual = {each.name: each.default for each in kind_of(kind).parameters} | {DURATION.name: 0.0, SEVERITY.name: 1.0}
        return {name: self.number(name, default) for name, default in usual.items()}

    def _id(self) -> str:
        return self.text("id") or f"trace-{self.line:04d}"

    def _place(self, name: str) -> int:
        """The column's index, or -1."""
        return self.columns.index(name) if name in self.columns else -1

    def text(self, name: str) -> str:
        place = self._place(name)
        return self.cells[place].strip() if 0 <= place < len(self.cells) else ""

    def number(self, name: str, empty: float | None = None) -> float:
        text = self.text(name)
        if not text and empty is not None:
            return empty
        try:
            value = float(text)
        except ValueError as error:
            raise self.wrong(name, "not a number") from error
        if not 0 <= value < math.inf:
            raise self.wrong(name, "must be finite and at least 0")
        return value

    def whole(self, name: str) -> int | None:
        if not self.text(name):
            return None
        value = self.number(name)
        if not value.is_integer():
            raise self.wrong(name, "must be a whole number")
        return int(value)

    def wrong(self, name: str, reason: str) -> ConfigError:
        place = self._place(name)
        shown, column = (self.columns[place], f", column {place + 1}") if place >= 0 else (name, "")
        return ConfigError(f"{self.setting}.{shown}", self.text(name), f"{reason} ({self.where}{column})")
