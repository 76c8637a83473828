"""The category of each slot over time, in a bounded number of pieces: for pictures, not for sums. ``fleet.ledger.goodput`` fills it."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.ledger.slots import INDEX, NAMES, STEP_KINDS
from fleet.protocol.records import Spans

STEP = "step"
SHOWN_SHARE = 0.1
"""A bucket shows its largest loss when that is at least this share of it. So a stall of a tenth of a pixel stays visible."""
MAX_MARKS = 2_000
MAX_CELLS = 400_000
FIRST_WIDTH_US = 1_000


@dataclass(frozen=True, slots=True)
class Segment:
    """A slot's time in category ``name`` (or ``step``) from ``start_s`` to ``end_s`` on the run's clock."""

    start_s: float
    end_s: float
    name: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A happening at ``at_s``. ``kind``: loss, view, fault-executed, fault-healed, fault-suppressed."""

    at_s: float
    kind: str
    text: str
    slot: int | None


class Timeline:
    """Per slot, at most ``buckets`` buckets of equal width; the width doubles as the run grows.

    Args:
        buckets: the most buckets of a slot; with many slots fewer, so that all slots together stay within ``MAX_CELLS``.
    """

    def __init__(self, buckets: int = 1_000) -> None:
        self.buckets = buckets
        self.width_us = FIRST_WIDTH_US
        self.start_us = 0
        self.rows: list[dict[int, dict[int, int]]] = []
        self.marks: list[Mark] = []
        self.marks_left_out = 0

    def start(self, slots: int, start_us: int) -> None:
        self.start_us = start_us
        self.buckets = max(50, min(self.buckets, MAX_CELLS // max(1, slots)))
        self.rows = [{} for _ in range(slots)]

    def add(self, slot: int, record: Spans) -> None:
        """A rank's own time. The four parts of a step are one here. Steps count as such until ``recolour`` changes them."""
        time_us = begin_us = record.start_us
        running = 0
        for code, duration in zip(record.codes, record.durations_us, strict=True):
            index = INDEX[code]
            if index >= len(NAMES):
                continue
            shown = 0 if index < STEP_KINDS else index
            if shown != running:
                self.paint(slot, begin_us, time_us - begin_us, running)
                begin_us, running = time_us, shown
            time_us += duration
        self.paint(slot, begin_us, time_us - begin_us, running)

    def paint(self, slot: int, start_us: int, duration_us: int, index: int) -> None:
        """A slot spent time on one category."""
        for bucket, part in self._spread(start_us, duration_us):
            cell = self.rows[slot].setdefault(bucket, {})
            cell[index] = cell.get(index, 0) + part

    def recolour(self, slot: int, start_us: int, duration_us: int, index: int) -> None:
        """Give time that counted as steps another category."""
        for bucket, part in self._spread(start_us, duration_us):
            cell = self.rows[slot].setdefault(bucket, {})
            moved = min(part, cell.get(0, 0))
            cell[0] = cell.get(0, 0) - moved
            cell[index] = cell.get(index, 0) + moved

    def mark(self, at_s: float, kind: str, text: str, slot: int | None) -> None:
        if len(self.marks) < MAX_MARKS:
            self.marks.append(Mark(at_s, kind, text, slot))
        else:
            self.marks_left_out += 1

    def _spread(self, start_us: int, duration_us: int) -> list[tuple[int, int]]:
        """(bucket, microseconds) of an interval."""
        if duration_us <= 0:
            return []
        begin, end = start_us - self.start_us, start_us - self.start_us + duration_us
        while end > self.buckets * self.width_us:
            self._double()
        first, last = begin // self.width_us, (end - 1) // self.width_us
        if first == last:
            return [(first, duration_us)]
        width = self.width_us
        return [(b, min(end, (b + 1) * width) - max(begin, b * width)) for b in range(first, last + 1)]

    def _double(self) -> None:
        self.width_us *= 2
        self.rows = [_coarsen(row, 2) for row in self.rows]

    def segments(self, slot: int, together: int = 1) -> list[Segment]:
        """The slot's buckets, ``together`` at a time, neighbours that show the same merged. At most ``buckets / together`` pieces."""
        width_us = self.width_us * together
        coarse = _coarsen(self.rows[slot], together) if together > 1 else self.rows[slot]
        out: list[Segment] = []
        for bucket, cell in sorted(coarse.items()):
            name = _shown(cell, width_us)
            start_s = (self.start_us + bucket * width_us) / 1e6
            end_s = start_s + sum(cell.values()) / 1e6
            if out and out[-1].name == name and abs(out[-1].end_s - start_s) < 5e-7:
                out[-1] = Segment(out[-1].start_s, end_s, name)
            else:
                out.append(Segment(start_s, end_s, name))
        return out

    def shares(self) -> list[tuple[float, float, float]]:
        """(start_s, rank-seconds in steps, rank-seconds of anything) of each bucket. Time without a report is in neither."""
        sums: dict[int, list[int]] = {}
        for bucket, cell in (item for row in self.rows for item in row.items()):
            into = sums.setdefault(bucket, [0, 0])
            into[0] += cell.get(0, 0)
            into[1] += sum(cell.values())
        start_s, width_s = self.start_us / 1e6, self.width_us / 1e6
        return [(start_s + bucket * width_s, steps / 1e6, all_us / 1e6) for bucket, (steps, all_us) in sorted(sums.items())]


def _coarsen(row: dict[int, dict[int, int]], together: int) -> dict[int, dict[int, int]]:
    coarse: dict[int, dict[int, int]] = {}
    for bucket, cell in row.items():
        into = coarse.setdefault(bucket // together, {})
        for index, duration in cell.items():
            into[index] = into.get(index, 0) + duration
    return coarse


def _shown(cell: dict[int, int], width_us: int) -> str:
    index = max(cell, key=lambda i: (cell[i], -i))
    losses = {i: duration for i, duration in cell.items() if i and duration >= SHOWN_SHARE * width_us}
    if index == 0 and losses:
        index = max(losses, key=lambda i: (losses[i], -i))
    return STEP if index == 0 else NAMES[index]
