"""The budget of a run: the user gets a warning at nine tenths, and the run ends in order when all of it is spent."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from fleet.ledger.bill import Stored, store_bill, tariff
from fleet.ledger.health import HOUR_S
from fleet.protocol.decisions import Figures
from fleet.protocol.records import DecisionMade, Record
from fleet.settings.cost import CostSettings
from fleet.settings.run import RunSettings

POLICY = "budget"
WARNED_AT = 0.9
"""Share of the budget at which the user gets a warning."""


@functools.cache
def usd_per_s(cost: CostSettings) -> float:
    """The price of a slot; 0 where no price is set."""
    found = tariff(_plain(cost))
    return found.per_s.get("usd", 0.0) if found is not None else 0.0


@functools.cache
def _plain(cost: CostSettings) -> dict[str, Any]:
    return dataclasses.asdict(cost)


class BudgetWatch:
    """The last warning, and the bytes in the store. A restarted coordinator rebuilds both from the journal."""

    def __init__(self, keep: int = 1) -> None:
        self._reported: float | None = None
        self._stored = Stored(keep)

    def tick(self, settings: RunSettings, held_s: float, now_s: float) -> DecisionMade | None:
        """The decision for the journal, if there is one: action warn or stop. ``held_s``: how long the run has had its machines."""
        budget = settings.cost.budget_usd
        if budget is None:
            return None
        spent = settings.slots * held_s * usd_per_s(settings.cost) + self._store_usd(settings, now_s)
        figures = Figures({"spent_usd": spent, "budget_usd": budget})
        if spent >= budget:
            return DecisionMade(POLICY, "stop", f"it has cost {spent:.4g} USD, and cost.budget_usd is {budget:g}", figures, now_s)
        if spent < WARNED_AT * budget or self._reported == budget:
            return None
        self._reported = budget
        left_s = (budget - spent) / (spent / held_s)
        reason = f"{spent:.4g} of {budget:g} USD are spent: it ends in {left_s / HOUR_S:.3g} h unless fleet runs set raises cost.budget_usd"
        return DecisionMade(POLICY, "warn", reason, figures, now_s)

    def _store_usd(self, settings: RunSettings, now_s: float) -> float:
        found = store_bill(_plain(settings.cost), self._stored.byte_s(now_s), self._stored.read_bytes)
        return found["usd"] if found is not None else 0.0

    def note(self, record: Record) -> None:
        """Take in a record of the journal: when it is written, and again after a restart of the coordinator."""
        self._stored.add(record)
        if isinstance(record, DecisionMade) and record.policy == POLICY and record.action == "warn" and isinstance(record.payload, Figures):
            self._reported = record.payload.values.get("budget_usd")
