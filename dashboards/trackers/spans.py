"""Views, faults, losses and checkpoints of a run as stretches of time. Pure: records go in, stretches that are over come out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dashboards.trackers.port import Span
from fleet.protocol.fault_kinds import kind_of
from fleet.protocol.records import (
    CheckpointRecord,
    Committed,
    FaultRecord,
    ProcessLost,
    Record,
    Resumed,
    RunEnded,
    RunStarted,
    ViewPublished,
)

RUN, VIEW, FAULT, LOSS, CHECKPOINT = "run", "view", "fault", "loss", "checkpoint"
Attributes = Mapping[str, str | int | float]


@dataclass(slots=True)
class _Open:
    """``lasts``: it ends when somebody says so. Else with the first step that is committed in a view made after it: ``reformed``."""

    name: str
    start_s: float
    attributes: Attributes
    lasts: bool = False
    reformed: bool = False


def _of_view(record: ViewPublished) -> Attributes:
    view = record.view
    members, causes = ",".join(map(str, view.members)), ",".join(record.causes)
    facts: Attributes = {"generation": view.generation, "size": len(view.members), "members": members}
    more: Attributes = {"history": view.state.history, "step": view.state.step, "causes": causes, "reason": record.reason}
    return {**facts, **more, "graceful": record.graceful}


class SpanFold:
    """A view lasts until the next one. A fault that lasts ends when it is healed; others, and losses that no fault explains, end with the
    first step that is committed in a view that was made after them. A checkpoint lasts until it is durable, or is given up.

    What is open when the run ends, or is interrupted, ends with it.
    """

    def __init__(self) -> None:
        self._started: RunStarted | None = None
        self._open: dict[str, _Open] = {}
        self._last_s = 0.0

    def take(self, record: Record) -> Iterator[Span]:
        """Spans that end with ``record``."""
        match record:
            case RunStarted():
                self._started = record
            case Resumed(gap=True):
                yield from self._close_all(self._last_s, "the run was interrupted")
            case ViewPublished(at_s=at_s):
                yield from self._close(VIEW, at_s)
                self._reform()
                self._open[VIEW] = _Open(VIEW, at_s, _of_view(record), lasts=True)
            case FaultRecord() | ProcessLost():
                yield from self._incident(record)
            case Committed(at_s=at_s):
                for key in [key for key, each in self._open.items() if each.reformed and not each.lasts]:
                    yield from self._close(key, at_s)
            case CheckpointRecord():
                yield from self._checkpoint(record)
        self._last_s = max(self._last_s, getattr(record, "at_s", 0.0))

    def close(self, ended: RunEnded) -> Iterator[Span]:
        """All that is open, and the run itself."""
        yield from self._close_all(ended.at_s, "the run ended")
        if self._started is not None:
            start = self._started
            facts: Attributes = {"run": start.run, "status": ended.status, "reason": ended.reason, "world": start.world}
            failed = ended.reason if ended.status == "failed" else ""
            yield Span(RUN, RUN, self._unix_s(start.at_s), self._unix_s(ended.at_s), facts, failed)

    def _incident(self, record: FaultRecord | ProcessLost) -> Iterator[Span]:
        match record:
            case FaultRecord(fault=fault, phase="executed", at_s=at_s):
                facts: Attributes = {"fault": fault.id, "kind": fault.kind, "component": fault.component, "detail": record.detail}
                more: Attributes = {"members": ",".join(map(str, record.members))}
                key = f"fault-{fault.id}"
                self._open[key] = _Open(FAULT, at_s, {**facts, **more}, lasts=kind_of(fault.kind).lasts)
            case FaultRecord(fault=fault, phase="healed", at_s=at_s):
                yield from self._close(f"fault-{fault.id}", at_s)
            case ProcessLost(member=member, fault=None, at_s=at_s):
                facts = {"member": str(member), "cause": str(record.cause), "generation": record.generation, "step": record.step}
                key = f"loss-{member}"
                self._open[key] = _Open(LOSS, at_s, facts)

    def _checkpoint(self, record: CheckpointRecord) -> Iterator[Span]:
        key = f"checkpoint-{record.level}-{record.checkpoint}"
        if record.phase == "requested":
            facts: Attributes = {"checkpoint": record.checkpoint, "level": record.level, "step": record.state.step}
            self._open[key] = _Open(CHECKPOINT, record.at_s, facts, lasts=True)
        elif record.phase != "withdrawn":
            more: Attributes = {"phase": record.phase, "bytes": record.bytes, "blocked_s": record.blocked_s, "detail": record.detail}
            yield from self._close(key, record.at_s, more, "" if record.phase == "durable" else record.detail or record.phase)

    def _reform(self) -> None:
        for each in self._open.values():
            each.reformed = each.name in (FAULT, LOSS)

    def _close_all(self, at_s: float, failed: str) -> Iterator[Span]:
        for key, each in list(self._open.items()):
            yield from self._close(key, at_s, failed=failed if each.name == CHECKPOINT else "")

    def _close(self, key: str, at_s: float, more: Attributes | None = None, failed: str = "") -> Iterator[Span]:
        each = self._open.pop(key, None)
        if each is not None:
            facts = {**each.attributes, **(more or {})}
            name = f"{VIEW}-{each.attributes['generation']}" if key == VIEW else key
            yield Span(name, each.name, self._unix_s(each.start_s), self._unix_s(max(at_s, each.start_s)), facts, failed)

    def _unix_s(self, at_s: float) -> float:
        assert self._started is not None
        return self._started.unix_time_s + at_s - self._started.at_s
