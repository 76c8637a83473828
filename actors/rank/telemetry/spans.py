"""Ring rows -> ``Spans`` records. Used by the node agent; pure."""

from __future__ import annotations

from actors.rank.telemetry.recorder import OWN, Row
from fleet.protocol.records import ABANDON, COMMIT, HOLD, Spans
from fleet.protocol.types import Member

MARKS = (COMMIT, ABANDON, HOLD)


class SpanBuilder:
    """Turns one process's rows into ``Spans`` without gaps. The open span is kept back until it ends, is cut, or the process dies."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self._open: Row | None = None
        self._code = ""

    def add(self, rows: list[Row]) -> list[Spans]:
        """Add rows in order of time. Returns the spans that they close, one record for each stretch of equal (generation, history)."""
        out: list[_Draft] = []
        for row in rows:
            if row.code == OWN:
                continue
            if self._open is None:
                self._open, self._code = row, row.code
                continue
            at_us = max(row.at_us, self._open.at_us)
            self._close(out, at_us)
            if row.code in MARKS:
                self._draft(out).mark(row.code)
                self._open = row._replace(at_us=at_us, step=row.step + (row.code == COMMIT))
            else:
                self._open, self._code = row._replace(at_us=at_us), row.code
        return [draft.record(self.member) for draft in out if draft.codes]

    def cut(self, at_us: int) -> list[Spans]:
        """Close the open span at ``at_us`` and begin a new one of the same code: for live figures, and at the end."""
        if self._open is None or at_us <= self._open.at_us:
            return []
        out: list[_Draft] = []
        self._close(out, at_us)
        self._open = self._open._replace(at_us=at_us)
        return [draft.record(self.member) for draft in out]

    @property
    def open_since_us(self) -> int | None:
        return None if self._open is None else self._open.at_us

    def _close(self, out: list[_Draft], at_us: int) -> None:
        assert self._open is not None
        if at_us > self._open.at_us:
            self._draft(out).span(self._code, at_us - self._open.at_us)

    def _draft(self, out: list[_Draft]) -> _Draft:
        assert self._open is not None
        if not out or not out[-1].takes(self._open):
            out.append(_Draft(self._open))
        return out[-1]


class _Draft:
    def __init__(self, first: Row) -> None:
        self.generation, self.history, self.step, self.start_us = first.generation, first.history, first.step, first.at_us
        self.next_step = first.step
        self.durations: list[int] = []
        self.codes: list[str] = []

    def takes(self, row: Row) -> bool:
        return (row.generation, row.history, row.step) == (self.generation, self.history, self.next_step)

    def span(self, code: str, duration_us: int) -> None:
        self.codes.append(code)
        self.durations.append(duration_us)

    def mark(self, code: str) -> None:
        self.codes.append(code)
        self.durations.append(0)
        self.next_step += code == COMMIT

    def record(self, member: Member) -> Spans:
        return Spans(member, self.generation, self.history, self.step, self.start_us, tuple(self.durations), "".join(self.codes))
