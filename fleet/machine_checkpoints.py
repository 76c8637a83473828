"""The durable-checkpoint half of ``FleetMachine``: when one is due, whose parts are in, which is the newest."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleet.config import RunSettings
from fleet.events import CheckpointDurable, PartWritten
from fleet.instructions import CommitCheckpoint, Instruction, SaveCheckpoint, Write
from fleet.ports import IntervalPolicy
from fleet.records import CheckpointRecord, DecisionMade, Record
from fleet.types import Member, StateId, View


@dataclass(slots=True)
class Request:
    """One checkpoint that was asked for: which members' parts are in, and whether its manifest is being put."""

    number: int
    at_s: float
    sent_s: float
    parts: dict[Member, PartWritten] = field(default_factory=dict)
    committing: bool = False


class Checkpoints:
    """At most one request is pending; it dies with its view and is asked for again."""

    def __init__(
        self, settings: RunSettings, interval: IntervalPolicy, newest: tuple[str, StateId] | None, rate_per_s: float, now_s: float
    ) -> None:
        self.settings, self.interval, self.rate_per_s = settings, interval, rate_per_s
        self.newest_id = newest[0] if newest else None
        self.newest_state = newest[1] if newest else StateId(0, 0)
        self.blocked_s = self.latency_s = 0.0
        self.interval_s = 0.0
        self._request: Request | None = None
        self._number = 0
        self._last_s = now_s
        self._ask_again_s = now_s
        self._reason = ""

    @property
    def pending(self) -> bool:
        return self._request is not None

    def configure(self, settings: RunSettings) -> None:
        """New settings hold from now on."""
        self.settings, self.interval = settings, self.interval.configured(settings.checkpoint)
        self._ask_again_s = self._last_s

    def tick(self, view: View, now_s: float) -> list[Instruction]:
        """While a view runs: ask for a checkpoint when the policy says so, repeat the request, or give it up."""
        request = self._request
        if request is None:
            return self._when_due(view, now_s) if now_s >= self._ask_again_s else []
        if now_s - request.at_s > self.settings.timeouts.checkpoint_s:
            return self.failed(f"not durable after {now_s - request.at_s:.1f} s", now_s)
        if not request.committing and now_s - request.sent_s >= self.settings.timeouts.resend_s:
            request.sent_s = now_s
            return [SaveCheckpoint(view.members, view.generation, request.number)]
        return []

    def _when_due(self, view: View, now_s: float) -> list[Instruction]:
        decision = self.interval.due(now_s, self._last_s, self.blocked_s, self.latency_s, self.rate_per_s)
        self.interval_s = decision.fields.get("interval_s", 0.0)
        out: list[Instruction] = []
        if decision.reason != self._reason:
            self._reason = decision.reason
            out.append(Write(DecisionMade("interval", decision.action, decision.reason, dict(decision.fields), now_s)))
        if decision.action == "save":
            return out + self.request(view, now_s)
        self._ask_again_s = min(decision.valid_until_s, now_s + 60.0)
        return out

    def request(self, view: View, now_s: float) -> list[Instruction]:
        if self._request is not None:
            return []
        self._number += 1
        self._request = Request(self._number, now_s, now_s)
        asked = CheckpointRecord(f"request-{self._number}", "requested", self.newest_state, now_s)
        return [Write(asked), SaveCheckpoint(view.members, view.generation, self._number)]

    def part(self, event: PartWritten, view: View) -> list[Instruction]:
        """A member's part is written; with the last one the manifest can be put in place."""
        request = self._request
        if request is None or event.request != request.number or request.committing:
            return []
        request.parts[event.member] = event
        if len(request.parts) < len(view.members):
            return []
        request.committing = True
        parts = [request.parts[member] for member in view.members]
        blocked_s = max(part.blocked_s for part in parts)
        meta = next((part.meta for part in parts if part.meta), "")
        return [CommitCheckpoint(event.checkpoint, event.state, tuple(part.part for part in parts), meta, blocked_s, request.at_s)]

    def durable(self, event: CheckpointDurable, now_s: float) -> list[Instruction]:
        if self.newest_id is None or event.state > self.newest_state:
            self.newest_id, self.newest_state = event.checkpoint, event.state
        self.blocked_s, self.latency_s = event.blocked_s, event.latency_s
        self._settle(now_s)
        return [
            Write(
                CheckpointRecord(event.checkpoint, "durable", event.state, now_s, event.bytes, event.blocked_s, event.latency_s)
            )
        ]  # fmt: skip

    def failed(self, reason: str, now_s: float) -> list[Instruction]:
        if self._request is None:
            return []
        number = self._request.number
        self._settle(now_s)
        return [Write(CheckpointRecord(f"request-{number}", "failed", self.newest_state, now_s, detail=reason))]

    def abandoned(self, now_s: float, reason: str) -> list[Instruction]:
        """The view changed under the request. It is asked for again at once: its time had come."""
        if self._request is None or self._request.committing:
            return []
        number, self._request = self._request.number, None
        return [Write(CheckpointRecord(f"request-{number}", "failed", self.newest_state, now_s, detail=reason))]

    def _settle(self, now_s: float) -> None:
        self._request = None
        self._last_s = self._ask_again_s = now_s

    def restarted(self, now_s: float) -> None:
        """After a replay: the next one is due an interval from now."""
        self._last_s = self._ask_again_s = now_s

    def replay(self, record: Record) -> None:
        if not isinstance(record, CheckpointRecord):
            return
        if record.phase == "requested":  # numbers are never used twice: no rank may take a new request for an old one
            self._number += 1
        elif record.phase == "durable":
            if self.newest_id is None or record.state > self.newest_state:
                self.newest_id, self.newest_state = record.checkpoint, record.state
            self.blocked_s, self.latency_s = record.blocked_s, record.latency_s
