"""Warnings of ``FleetMachine`` while durable checkpoints fail, with the steps at risk, and the message that the store works again."""

from __future__ import annotations

import math

from fleet.ledger.report import duration
from fleet.machine.checkpoints import Checkpoints
from fleet.protocol.decisions import StoreOutage
from fleet.protocol.records import DecisionMade, Record
from fleet.protocol.types import StateId

POLICY = "store"


class Outage:
    """An outage begins with the request of the first failed checkpoint, and ends with the next durable one.

    The user gets a warning after ``timeouts.store_s``, and again each time the outage has lasted twice as long. With
    ``checkpoint.on_store_failure`` = stop the run ends at the first warning.
    """

    def __init__(self) -> None:
        self.since_s = self._next_s = 0.0
        self.reported = False

    def tick(self, store: Checkpoints, committed: StateId, now_s: float) -> DecisionMade | None:
        """The decision for the journal, if there is one: action warn, stop or recovered. The reason is a sentence for the user."""
        if store.failures.since_s is None:
            return self._over(store, now_s) if self.reported else None
        if not self.reported:
            self.since_s, self._next_s = store.failures.since_s, store.failures.since_s + store.settings.timeouts.store_s
        if now_s < self._next_s:
            return None
        self.reported, self._next_s = True, now_s + (now_s - self.since_s)
        steps = max(0, committed.step - store.newest_state.step)
        outage = StoreOutage(self.since_s, now_s - self.since_s, now_s - store.durable_s, float(steps))
        if store.settings.checkpoint.on_store_failure == "stop":
            self._next_s = math.inf  # the run ends now, with or without its last checkpoint
            return DecisionMade(POLICY, "stop", self._why_it_stops(store, steps, now_s), outage, now_s)
        return DecisionMade(POLICY, "warn", self._what_is_at_risk(store, steps, now_s), outage, now_s)

    def _what_is_at_risk(self, store: Checkpoints, steps: int, now_s: float) -> str:
        age = f"{duration(now_s - store.durable_s)}{'' if store.kept else ' since the start'}"
        risk = f"if the cluster were lost now, {count(steps)} would be lost"
        return f"no durable checkpoint for {age}: {risk}; the store says: {store.failures.last}"

    def _why_it_stops(self, store: Checkpoints, steps: int, now_s: float) -> str:
        lasted = f"durable checkpoints have failed for {duration(now_s - self.since_s)}, and the run was told to stop then"
        newest = f"the newest durable one was {count(steps)} old" if store.kept else "there was none yet"
        return f"{lasted} (checkpoint.on_store_failure=stop): {newest}; the store says: {store.failures.last}"

    def _over(self, store: Checkpoints, now_s: float) -> DecisionMade:
        self.reported = False
        reason = f"the store works again after {duration(now_s - self.since_s)}: step {store.newest_state.step} is durable"
        return DecisionMade(POLICY, "recovered", reason, StoreOutage(self.since_s, now_s - self.since_s), now_s)

    def replay(self, record: Record, store: Checkpoints) -> None:
        """Restore an outage that was journalled before the coordinator restarted."""
        if not isinstance(record, DecisionMade) or not isinstance(record.payload, StoreOutage):
            return
        self.reported = record.action != "recovered"
        self.since_s = record.payload.since_s
        self._next_s = record.at_s + (record.payload.outage_s if record.action == "warn" else 0.0)
        store.failures.since_s = self.since_s if self.reported else None

    def forget(self, store: Checkpoints, now_s: float) -> None:
        """The run goes on in another cluster, whose store was tried: earlier failures do not count."""
        self.reported, store.failures.since_s, store.durable_s = False, None, now_s


def count(steps: int) -> str:
    """``1 step``, ``812 steps``."""
    return f"{steps:,} step{'' if steps == 1 else 's'}"
