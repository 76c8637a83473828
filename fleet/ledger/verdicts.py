"""Verdicts on slow ranks, from the journal: evidence, the ways that were weighed, and what the one that was taken saved.

What an action saved is told against doing nothing, ever. That world is computed, not simulated: each step that was committed while the
action held would have taken ``step_even_s``, the closed form ``fixed + shard x (shards of the rank that takes longest, counted as often as
it is slower)`` of an even split and the slowness at the moment of the decision, with the medians that were measured then. From that comes
off what the steps did take, everything included. An action holds until all who were accused are cleared, the next action, or the end. Of
a rank that is gone nobody sees when it would have been well again: there it holds for as long as the slowness was expected to last.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fleet.protocol.decisions import Prices, Suspect
from fleet.protocol.fault_kinds import Cost, Performer, drawn, kind_of
from fleet.protocol.fault_parameters import SEVERITY
from fleet.protocol.records import Committed, DecisionMade, FaultRecord, ProcessLost, Record, RunEnded, ViewPublished
from fleet.protocol.slowness import ACTIONS
from fleet.protocol.types import Member

EVIDENCE = ("relative_score", "individual_score", "robust_z", "impact_ratio", "noise")


@dataclass
class Action:
    """One action and what followed. ``steps`` are those committed while it held; ``saved_rank_s`` is None without the figures for it."""

    at_s: float
    action: str
    reason: str
    costs: dict[str, float]
    without_s: float | None
    ranks: int
    until_s: float
    began: tuple[float, int] | None = None
    last: tuple[float, int] | None = None

    def committed(self, at_s: float, step: int) -> None:
        """A step is committed while it holds."""
        if at_s <= self.until_s:
            self.began = self.began or (at_s, step)
            self.last = (at_s, step)

    @property
    def steps(self) -> int:
        return self.last[1] - self.began[1] if self.last and self.began else 0

    @property
    def saved_rank_s(self) -> float | None:
        if self.without_s is None or not self.last or not self.began:
            return None
        return self.ranks * (self.steps * self.without_s - (self.last[0] - self.began[0]))

    def plain(self) -> dict[str, Any]:
        """For the report."""
        figures = {"step_without_s": self.without_s, "steps": self.steps, "saved_rank_s": self.saved_rank_s}
        return {"at_s": self.at_s, "action": self.action, "reason": self.reason, "costs_rank_s": self.costs, **figures}


class Verdicts:
    """A fold over a run's journal. ``most``: keep only so many verdicts and actions, the newest."""

    def __init__(self, most: int | None = None) -> None:
        self._cases: deque[dict[str, Any]] = deque(maxlen=most)
        self._actions: deque[Action] = deque(maxlen=most)
        self._ranks = 0
        self._holds: Action | None = None

    def apply(self, record: Record) -> None:
        """Take the next record."""
        match record:
            case ViewPublished(view=view):
                self._ranks = len(view.members)
            case Committed(state=state, at_s=at_s):
                if self._holds is not None:
                    self._holds.committed(at_s, state.step)
            case RunEnded():
                self._holds = None
            case DecisionMade(policy="straggler"):
                self._decided(record)

    def _decided(self, record: DecisionMade) -> None:
        payload = record.payload
        if isinstance(payload, Suspect) and record.action == "accuse":
            figures = {name: getattr(payload, name) for name in ("score", "confidence", "since_step", "step")}
            evidence = {name: payload.evidence[name] for name in EVIDENCE if name in payload.evidence}
            case = {
                "rank": _rank(payload),
                "kind": payload.kind,
                "at_s": record.at_s,
                "reason": record.reason,
                **figures,
                "evidence": evidence,
            }
            self._cases.append({**case, "cleared_s": None})
        elif record.action == "unknown":
            self._cases.append({"rank": None, "kind": "", "at_s": record.at_s, "reason": record.reason, "evidence": {}, "cleared_s": None})
        elif isinstance(payload, Suspect) and record.action == "clear":
            self._clear(_rank(payload), payload.kind, record.at_s)
        elif isinstance(payload, Prices):
            acts = record.action in ACTIONS
            without_s = payload.steps.step_even_s if acts and payload.steps is not None and payload.slowdown > 1 else None
            left_s = math.inf if record.action == "rebalance" or payload.expected_left_s is None else payload.expected_left_s
            costs = dict(payload.costs)
            self._actions.append(Action(record.at_s, record.action, record.reason, costs, without_s, self._ranks, record.at_s + left_s))
            self._holds = self._actions[-1] if acts else self._holds

    def _clear(self, rank: str, kind: str, at_s: float) -> None:
        for case in self._cases:
            if (case["rank"], case["kind"]) == (rank, kind) and case["cleared_s"] is None:
                case["cleared_s"] = at_s
        if not any(case["rank"] and case["cleared_s"] is None for case in self._cases):
            self._holds = None

    def plain(self) -> dict[str, Any]:
        """For the report, in order of time."""
        return {"verdicts": [dict(case) for case in self._cases], "actions": [action.plain() for action in self._actions]}


def _rank(suspect: Suspect) -> str:
    return f"{int(suspect.slot)}.{int(suspect.incarnation)}"


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
    """The detectors of slow ranks, held against what this run's chaos has slowed down: were those found, and only those? A fold.

    An injected slowdown is a fault that may cost slower steps, from when it was carried out until it was healed, or its ranks were gone.
    Those of a known severity of 1.5 and above should be found; others, such as a lossy link, only make an accusation right. A slowdown is
    found by the first accusation of one of its ranks in that time, or shortly after. An accusation of anybody else is wrong. In a run
    whose chaos slows nobody down there is no truth to hold them against, and nothing is counted.

    - precision: accusations that are right / all of them
    - recall: slowdowns that were found / all of them
    """

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
