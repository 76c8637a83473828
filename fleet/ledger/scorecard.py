"""The detectors of slow ranks, held against what this run's chaos has slowed down: were those found, and only those? Pure.

An injected slowdown is a fault that may cost slower steps, from when it was carried out until it was healed, or its ranks were gone. Those
of a known severity of 1.5 and above should be found; others, such as a lossy link, only make an accusation right. A slowdown is
found by the first accusation of one of its ranks in that time, or shortly after. An accusation of anybody else is wrong. In a run whose
chaos slows nobody down there is no truth to hold them against, and nothing is counted.

- precision: accusations that are right / all of them
- recall: slowdowns that were found / all of them
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fleet.protocol.decisions import Suspect
from fleet.protocol.fault_kinds import Cost, Performer, drawn, kind_of
from fleet.protocol.fault_parameters import SEVERITY
from fleet.protocol.records import DecisionMade, FaultRecord, ProcessLost, Record
from fleet.protocol.types import Member

LEAST_SEVERITY = 1.5
"""A smaller slowdown need not be found."""
AFTER_S = 10.0
"""What a detector says so soon after a slowdown is about it: it looks at whole windows of steps."""


@dataclass(slots=True)
class Slowdown:
    """One that was injected. ``left``: those of its ranks that live; ``found_s``: when one of them was first accused."""

    fault: str
    kind: str
    severity: float
    members: tuple[Member, ...]
    left: set[Member]
    begin_s: float
    end_s: float = math.inf
    found_s: float | None = None

    @property
    def latency_s(self) -> float | None:
        """From its beginning; None: it was not found."""
        return None if self.found_s is None else self.found_s - self.begin_s

    @property
    def counts(self) -> bool:
        """It should be found: how much slower it makes a step is known, and that is worth a word."""
        return SEVERITY in kind_of(self.kind).parameters and self.severity >= LEAST_SEVERITY

    def plain(self) -> dict[str, Any]:
        """For the report."""
        ranks = [str(member) for member in self.members]
        figures = {"severity": self.severity, "ranks": ranks, "at_s": self.begin_s, "latency_s": self.latency_s}
        return {"fault": self.fault, "kind": self.kind, **figures}

    def explains(self, member: Member, at_s: float) -> bool:
        """Whether an accusation of ``member`` is right for this."""
        meant = member in self.members or kind_of(self.kind).performer is Performer.HOST  # others share the host's cores
        return meant and self.begin_s <= at_s <= self.end_s + AFTER_S


@dataclass(frozen=True, slots=True)
class Score:
    """Counts, how long it took in the middle, and each slowdown that counts, as plain data.

    ``precision`` and ``recall`` are None where nothing was said, or nothing injected.
    """

    injected: int = 0
    found: int = 0
    right: int = 0
    wrong: int = 0
    latency_s: float | None = None
    slowdowns: tuple[Mapping[str, Any], ...] = field(default=(), compare=False)

    @property
    def precision(self) -> float | None:
        said = self.right + self.wrong
        return self.right / said if said else None

    @property
    def recall(self) -> float | None:
        return self.found / self.injected if self.injected else None

    def plain(self) -> dict[str, Any]:
        """For the report."""
        names = ("injected", "found", "right", "wrong", "precision", "recall", "latency_s")
        return {name: getattr(self, name) for name in names} | {"slowdowns": list(self.slowdowns)}


class Scorecard:
    """A fold over a run's journal."""

    def __init__(self) -> None:
        self._slowdowns: list[Slowdown] = []
        self._right = self._wrong = 0
        self._knows = False

    def add(self, record: Record) -> None:
        """Take the next record."""
        match record:
            case FaultRecord(fault=fault) if Cost.SLOW in drawn(fault).may_cost:
                self._knows = True
                self._note_fault(record)
            case ProcessLost(member=member, at_s=at_s):
                self._gone(member, at_s)
            case DecisionMade(policy="straggler", action="accuse", payload=Suspect() as suspect, at_s=at_s) if self._knows:
                self._accused(Member(int(suspect.slot), int(suspect.incarnation)), at_s)

    def now(self) -> Score:
        """The score so far."""
        counted = [slowdown for slowdown in self._slowdowns if slowdown.counts]
        latencies = [slowdown.latency_s for slowdown in counted if slowdown.latency_s is not None]
        middle_s = statistics.median(latencies) if latencies else None
        slowdowns = tuple(slowdown.plain() for slowdown in counted)
        return Score(len(counted), len(latencies), self._right, self._wrong, middle_s, slowdowns)

    def _note_fault(self, record: FaultRecord) -> None:
        fault, same = record.fault, [each for each in self._slowdowns if each.fault == record.fault.id]
        if record.phase == "executed" and record.members and record.at_s not in [each.begin_s for each in same]:
            left = set(record.members)
            self._slowdowns.append(Slowdown(fault.id, fault.kind, fault.severity, record.members, left, record.at_s))
        elif record.phase == "healed" and same:
            same[-1].end_s = min(same[-1].end_s, record.at_s)

    def _gone(self, member: Member, at_s: float) -> None:
        """The time of a slowdown is over when its last rank is gone."""
        for slowdown in self._slowdowns:
            if member in slowdown.left:
                slowdown.left.discard(member)
                slowdown.end_s = slowdown.end_s if slowdown.left else min(slowdown.end_s, at_s)

    def _accused(self, member: Member, at_s: float) -> None:
        reasons = [slowdown for slowdown in self._slowdowns if slowdown.explains(member, at_s)]
        self._right, self._wrong = self._right + bool(reasons), self._wrong + (not reasons)
        for slowdown in reasons:
            slowdown.found_s = at_s if slowdown.found_s is None else slowdown.found_s
