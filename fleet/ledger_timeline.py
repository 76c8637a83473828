"""What each slot did when, in a bounded number of pieces: for pictures, not for sums. Filled by ``fleet.goodput.Ledger``."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.ledger_slots import INDEX, NAMES, STEP_KINDS
from fleet.records import Spans

STEP = "step"
SHOWN_SHARE = 0.1
"""A bucket is shown as its largest loss when that is at least this share of it: a stall of a tenth of a pixel stays visible."""
MAX_MARKS = 2_000
MAX_CELLS = 400_000
FIRST_WIDTH_US = 1_000


@dataclass(frozen=True, slots=True)
class Segment:
    """A slot did ``name`` (a ledger category, or ``step``) from ``start_s`` to ``end_s`` on the run's clock."""

    start_s: float
    end_s: float
    name: str


@dataclass(frozen=True, slots=True)
class Mark:
    """Something happened at ``at_s``. ``kind``: loss, view, fault-executed, fault-healed, fault-suppressed."""

    at_s: float
    kind: str
    text: str
    slot: int | None


class Timeline:
    """Per slot, at most ``buckets`` buckets of equal width; the width doubles as the run grows.

    Args:
        buckets: the most that a slot has; fewer when there are many slots, so that all slots together stay within ``MAX_CELLS``.
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
        """A rank's own time. The four parts of a step are one here; steps count as such until ``recolour`` says otherwise."""
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
        row = self.rows[slot]
        for bucket, part in self._spread(start_us, duration_us):
            cell = row.setdefault(bucket, {})
            cell[index] = cell.get(index, 0) + part

    def recolour(self, slot: int, start_us: int, duration_us: int, index: int) -> None:
        """What looked like steps was something else."""
        row = self.rows[slot]
        for bucket, part in self._spread(start_us, duration_us):
            cell = row.setdefault(bucket, {})
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
        for number, row in enumerate(self.rows):
            coarse: dict[int, dict[int, int]] = {}
            for bucket, cell in row.items():
                into = coarse.setdefault(bucket // 2, {})
                for index, duration in cell.items():
                    into[index] = into.get(index, 0) + duration
            self.rows[number] = coarse

    def segments(self, slot: int) -> list[Segment]:
        """The slot's buckets, neighbours that show the same merged. At most ``buckets`` pieces."""
        out: list[Segment] = []
        for bucket, cell in sorted(self.rows[slot].items()):
            name = self._shown(cell)
            start_s = (self.start_us + bucket * self.width_us) / 1e6
            end_s = start_s + self.width_us / 1e6
            if out and out[-1].name == name and abs(out[-1].end_s - start_s) < 1e-9:
                out[-1] = Segment(out[-1].start_s, end_s, name)
            else:
                out.append(Segment(start_s, end_s, name))
        return out

    def _shown(self, cell: dict[int, int]) -> str:
        index = max(cell, key=lambda i: (cell[i], -i))
        losses = {i: duration for i, duration in cell.items() if i and duration >= SHOWN_SHARE * self.width_us}
        if index == 0 and losses:
            index = max(losses, key=lambda i: (losses[i], -i))
        return STEP if index == 0 else NAMES[index]
