"""What a run may cost: told when nine tenths are spent, and ended in order when all is."""

from __future__ import annotations

import dataclasses
import functools

from fleet.ledger.bill import tariff
from fleet.ledger.health import HOUR_S
from fleet.protocol.decisions import Figures
from fleet.protocol.records import DecisionMade, Record
from fleet.settings.cost import CostSettings
from fleet.settings.run import RunSettings

POLICY = "budget"
WARNED_AT = 0.9
"""So much of the budget is spent when the user is told that it ends."""


@functools.cache
def usd_per_s(cost: CostSettings) -> float:
    """Of a slot; 0 where nobody has said what it costs."""
    found = tariff(dataclasses.asdict(cost))
    return found.per_s.get("usd", 0.0) if found is not None else 0.0


class Budget:
    """What was told of it. A coordinator that was restarted takes it from the journal."""

    def __init__(self) -> None:
        self._told_of: float | None = None

    def tick(self, settings: RunSettings, held_s: float, now_s: float) -> DecisionMade | None:
        """What is to be journalled, if anything: action warn or stop. ``held_s``: for how long the run has had its machines."""
        budget = settings.cost.budget_usd
        if budget is None:
            return None
        spent = settings.slots * held_s * usd_per_s(settings.cost)
        figures = Figures({"spent_usd": spent, "budget_usd": budget})
        if spent >= budget:
            return DecisionMade(POLICY, "stop", f"it has cost {spent:.4g} USD, and cost.budget_usd is {budget:g}", figures, now_s)
        if spent < WARNED_AT * budget or self._told_of == budget:
            return None
        self._told_of = budget
        left_s = (budget - spent) / (settings.slots * usd_per_s(settings.cost))
        reason = (
            f"{spent:.4g} of {budget:g} USD are spent: it ends in {left_s / HOUR_S:.3g} h, unless cost.budget_usd is raised (fleet set)"
        )
        return DecisionMade(POLICY, "warn", reason, figures, now_s)

    def replay(self, record: Record) -> None:
        """Take up what was told before the coordinator restarted."""
        if isinstance(record, DecisionMade) and record.policy == POLICY and record.action == "warn" and isinstance(record.payload, Figures):
            self._told_of = record.payload.values.get("budget_usd")
