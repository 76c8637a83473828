"""The progress time-out of ``FleetMachine``, which follows the measured steps: how long a rank may take without a step."""

from __future__ import annotations

from collections.abc import Iterable

from fleet.protocol.decisions import TimeOut
from fleet.protocol.instructions import Instruction, Write
from fleet.protocol.ports import ProgressPolicy
from fleet.protocol.records import DecisionMade, Record

REVIEW_S = 5.0


class ProgressLimit:
    """``limit_s`` is the present time-out. It follows the steps, and is never above ``ceiling_s``. Rebuilt from the journal."""

    def __init__(self, policy: ProgressPolicy | None, ceiling_s: float, now_s: float) -> None:
        self.policy, self.ceiling_s, self.limit_s = policy, ceiling_s, ceiling_s
        self._review_s = now_s

    def tick(self, steps_s: Iterable[float], now_s: float) -> list[Instruction]:
        """While a view runs: review the time-out now and then. ``steps_s`` are the seconds of the last steps, newest last."""
        if self.policy is None or now_s < self._review_s:
            return []
        self._review_s = now_s + REVIEW_S
        decision = self.policy.decide(tuple(steps_s), self.limit_s)
        if decision.action != "set" or not isinstance(decision.payload, TimeOut):
            return []
        self.limit_s = min(decision.payload.progress_s, self.ceiling_s)
        return [Write(DecisionMade("progress", decision.action, decision.reason, decision.payload, now_s))]

    def replay(self, record: Record) -> None:
        """Restore the time-out from a journalled decision."""
        if isinstance(record, DecisionMade) and isinstance(record.payload, TimeOut):
            self.limit_s = min(record.payload.progress_s, self.ceiling_s)
