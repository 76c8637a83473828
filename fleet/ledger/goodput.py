"""The goodput ledger: the fold of a run's journal (``ledger_fold.py``), and what it comes to at any moment (``ledger_moment.py``)."""

from __future__ import annotations

import copy

from fleet.errors import LedgerError
from fleet.ledger.fold import LedgerFold, to_us
from fleet.ledger.moment import summary_of
from fleet.ledger.summary import LedgerSummary
from fleet.ledger.timeline import Timeline


class Ledger(LedgerFold):
    """Folds records, in the journal's order, into rank-seconds by category: :meth:`apply` each record, ask :meth:`summary` at any time."""

    def summary(self, now_s: float | None = None) -> LedgerSummary:
        """The ledger at ``now_s`` (default: the last record's time; an ended run's end). Rank-seconds by category, faults and their cost.

        Raises LedgerError when there is no record yet, or when time was recorded after the end of the run.
        """
        if self.started is None:
            raise LedgerError("no RunStarted yet: there is nothing to sum up")
        if self.ended is None:
            now_us = max(self.last_us, to_us(now_s) if now_s is not None else 0)
            return summary_of(self, self, now_us)
        if self._closed is None:
            self._closed = self._close()
        return summary_of(self, self._closed, max(slot.cursor_us for slot in self._closed.slots))

    def closed_timeline(self) -> Timeline | None:
        """What each slot did when, up to the end of a run that has ended."""
        if self.ended is not None and self._closed is None:
            self._closed = self._close()
        return self._closed.timeline if self._closed is not None else self.timeline

    def _close(self) -> LedgerFold:
        """A copy that is filled up to the run's end; late spans may still come in, so this ledger stays open."""
        assert self.ended is not None
        closed = copy.copy(self)
        for name in ("slots", "book", "undone"):
            setattr(closed, name, copy.deepcopy(getattr(self, name)))
        if self.timeline is not None:
            closed.timeline = copy.deepcopy(self.timeline)
        closed.resolve_all()
        closed.close_slots(to_us(self.ended.at_s))
        return closed
