"""The story of a run: a line for each happening that costs something, in order of cause. Pure: records go in, lines come out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fleet.ledger.report import duration
from fleet.protocol.causes import AgentHungUp, AgentSilent, Evicted, ProcessEnded
from fleet.protocol.decisions import DomainLost
from fleet.protocol.domains import HOST
from fleet.protocol.fault_kinds import kind_of
from fleet.protocol.levels import PEERS, STORE
from fleet.protocol.records import (
    CheckpointRecord,
    Committed,
    DataRead,
    DecisionMade,
    EvidenceKept,
    FaultRecord,
    HistoryBegun,
    LossExplained,
    ProcessLost,
    Record,
    Resumed,
    RunStarted,
    configuration,
    section,
)
from fleet.protocol.topology import asked
from fleet.protocol.types import Fault, Member

PATIENCE_S = 2.0
"""A loss waits so long for the record that its fault was carried out, or for the record of how its process ended."""
BAD, WARN, GOOD = "red", "yellow", "green"
COSTLY = {
    "corruption": ("evict", "recompute", "stop", "go_back", "begin_anew"),
    "straggler": ("rebalance", "promote", "evict"),
    "lemons": ("keep_out",),
    "preflight": ("keep_out",),
    "room": ("warn", "recovered"),
    "placement": ("loosen", "meet"),
    "recovery": ("warn",),
    "nodes": ("ask", "came", "withdraw"),
    "partition": ("wait", "recovered"),
    "floor": ("stop",),
    "budget": ("warn", "stop"),
    "resume": ("warn",),
    "output": ("warn",),
    "settings": ("set",),
}
"""Policy -> decisions that cost something, or change a later cost. All decisions of the policy ``store`` count."""


@dataclass(frozen=True, slots=True)
class Line:
    """``at_s`` is on the run's clock from its start on. ``colour`` is a word of Rich's."""

    at_s: float
    mark: str
    text: str
    colour: str

    def __str__(self) -> str:
        return f"{duration(self.at_s):>9}  {self.mark} {self.text}"


@dataclass(frozen=True, slots=True)
class _Waiting:
    """``unexplained``: the loss of the line, until a record says how its process ended. ``with_node``: the member lost with its node, as
    long as the node may be one of a domain that is lost as a whole."""

    line: Line
    since_s: float
    fault: str | None = None
    unexplained: ProcessLost | None = None
    with_node: Member | None = None


class Narrator:
    """Turns records into lines. A fault's line comes before its effects', though the journal has the effects first."""

    def __init__(self) -> None:
        self._started_s = 0.0
        self._step = self._total = 0
        self._has_domains = False
        self._faults: dict[str, Fault] = {}
        self._injected: set[str] = set()
        self._hung: set[str] = set()
        self._waiting: list[_Waiting] = []

    def take(self, record: Record, now_s: float) -> list[Line]:
        """The lines to show now, at ``now_s`` seconds on any clock that does not go back."""
        if isinstance(record, LossExplained):
            self._explain(record)
            return self._released(now_s)
        if isinstance(record, DecisionMade) and isinstance(record.payload, DomainLost):
            taken = {Member(*member) for member in record.payload.members}
            self._waiting = [waiting for waiting in self._waiting if waiting.with_node not in taken]
        line = self._line(record)
        if isinstance(record, FaultRecord) and record.phase == "executed":
            self._injected.add(record.fault.id)
            return [*([line] if line else []), *self._released(now_s)]
        if line is None:
            return []
        with_node = self._has_domains and isinstance(record, ProcessLost) and isinstance(record.cause, AgentHungUp | AgentSilent)
        self._waiting.append(_Waiting(line, now_s, *self._waits_for(record), getattr(record, "member", None) if with_node else None))
        return self._released(now_s)

    def due(self, now_s: float) -> list[Line]:
        """The lines that have waited long enough."""
        return self._released(now_s)

    def rest(self) -> list[Line]:
        """All lines that still wait, once no more records come."""
        lines, self._waiting = [waiting.line for waiting in self._waiting], []
        return lines

    def _explain(self, record: LossExplained) -> None:
        """Add to a loss that still waits how its process ended."""
        for place, waiting in enumerate(self._waiting):
            if (lost := waiting.unexplained) is not None and lost.member == record.member:
                line = self._line(replace(lost, cause=record.cause)) or waiting.line
                self._waiting[place] = _Waiting(line, waiting.since_s)

    def _released(self, now_s: float) -> list[Line]:
        """All lines wait behind the first one that still waits for its fault, as its effects come after it."""
        lines = []
        while self._waiting and self._ready(self._waiting[0], now_s):
            lines.append(self._waiting.pop(0).line)
        return lines

    @staticmethod
    def _waits_for(record: Record) -> tuple[str | None, ProcessLost | None]:
        """The fault that explains a loss; or the loss, if it is not known yet how its process ended: an end takes a while."""
        if not isinstance(record, ProcessLost):
            return None, None
        return (record.fault, None) if record.fault else (None, record if record.cause == ProcessEnded() else None)

    def _ready(self, waiting: _Waiting, now_s: float) -> bool:
        if now_s - waiting.since_s > PATIENCE_S:
            return True
        return waiting.unexplained is None and waiting.with_node is None and (waiting.fault is None or waiting.fault in self._injected)

    # ---- words ---------------------------------------------------------------------------------------------------------------------------

    def _line(self, record: Record) -> Line | None:
        said = next(self._words(record), None)
        if said is None:
            return None
        at_s = getattr(record, "at_s", self._started_s)
        mark, text, colour = said
        return Line(max(0.0, at_s - self._started_s), mark, " ".join(text.split()), colour)

    def _words(self, record: Record) -> Iterator[tuple[str, str, str]]:
        match record:
            case RunStarted(at_s=at_s, config=config):
                self._started_s = at_s
                settings = section(configuration(config), "settings")
                self._has_domains = asked(settings.get("domains", (HOST,))) or bool(settings.get("mesh"))
            case Committed(state=state):
                self._step = state.step
            case DataRead(total_steps=total):
                self._total = total
            case FaultRecord():
                yield from self._of_fault(record)
            case ProcessLost():
                yield "-", self._of_loss(record), BAD
            case HistoryBegun(history=history, from_state=start, reason=reason) if history > 0:
                back = f", {self._step - start.step} are rolled back" if self._step > start.step else ""
                self._step = start.step
                yield "<", f"goes on from step {start.step}{back}: {reason}", BAD
            case Resumed(cause=cause, gap=gap):
                yield "*", cause if gap else f"{cause}; the ranks trained on", WARN
            case CheckpointRecord():
                yield from self._of_checkpoint(record)
            case DecisionMade(reason=reason, payload=DomainLost()):
                yield "-", reason, BAD
            case DecisionMade(policy=policy, action=action, reason=reason) if policy == "store" or action in COSTLY.get(policy, ()):
                yield "*", f"{policy}: {action.replace('_', ' ')}: {reason}", WARN
            case EvidenceKept(incident=incident, reason=reason, path=path) if incident not in self._hung:
                self._hung.add(incident)
                yield "*", f"{incident}: {reason}; stacks in {path}", WARN

    def _of_fault(self, record: FaultRecord) -> Iterator[tuple[str, str, str]]:
        fault = record.fault
        self._faults[fault.id] = fault
        detail = f"; {record.detail}" if record.detail else ""
        if record.phase == "executed":
            yield "!", f"fault {fault.id}: {operation(fault, record.members)}{detail}", WARN

    def _of_loss(self, record: ProcessLost) -> str:
        where = f" in step {record.step}" if record.step >= 0 else ""
        if record.fault is None:
            return f"rank {record.member.name} is lost{where}: {record.cause}"
        fault = self._faults.get(record.fault)
        how = kind_of(fault.kind).ends if fault is not None and not isinstance(record.cause, Evicted) else ""
        return f"rank {record.member.name} is lost{where}: {how or record.cause} by fault {record.fault}"

    def _of_checkpoint(self, record: CheckpointRecord) -> Iterator[tuple[str, str, str]]:
        what = {STORE: "checkpoint", PEERS: "copy in memory"}.get(record.level, f"checkpoint in the {record.level}")
        if record.phase in ("failed", "skipped", "withdrawn") and not record.view_changed:
            yield "*", f"{what} of step {record.state.step} {record.phase}: {record.detail}", WARN
        elif record.phase == "durable" and record.level == STORE and record.state.step == self._total > 0:
            yield "*", f"final checkpoint: step {record.state.step} is durable", GOOD


SUMMARIZED = ("kind", "node", "severity", "loss", "delay_s")
"""Fields of a fault that the sentences about its kind may have."""


def operation(fault: Fault, members: tuple[Member, ...]) -> str:
    """The fault and its ranks: ``SIGSTOP to rank 1 for 6.0 s (gpu)``."""
    ranks = f"rank{'s' if len(members) > 1 else ''} {', '.join(member.name for member in members) or 'without a process'}"
    lasts = f" for {duration(fault.duration_s)}" if fault.duration_s else ""
    words = kind_of(fault.kind).summary.format(ranks=ranks, lasts=lasts, **{name: getattr(fault, name) for name in SUMMARIZED})
    return f"{words} ({fault.component})"
