"""Verdicts on slow ranks, from the journal: evidence, the possible actions, and the time that the chosen action saved.

The savings of an action compare with a world without any action. That world is computed, not simulated. Each step committed under the
action would have taken ``step_even_s``, from the medians measured at the decision. It is the closed form for an even split and the slowness
at the decision: ``fixed + shard x (shards of the rank that takes longest, times its slowness)``. The savings are that time less the real
time of the steps, with all that they include.

An action holds until all accused ranks are cleared, the next action, or the end. When a rank is gone, no measurement shows its recovery.
Then the action holds for the expected length of the slowness.
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
    """One action and its effects. ``steps``: those committed under it. ``saved_rank_s`` is None without the figures for it."""

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
        """Take a step that is committed under the action."""
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
    """A fold over a run's journal. ``most``: keep only so many of the newest verdicts and actions."""

    def __init__(self, most: int | None = None) -> None:
        self._cases: deque[dict[str, Any]] = deque(maxlen=most)
        self._actions: deque[Action] = deque(maxlen=most)
        self._ranks = 0
        self._holds: Action | None = None

    def apply(self, record: Record) -> None:
        """Take the next record."""
        match record:
            case ViewPublished(view=view):
                self._ranks = len(view.computing)
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
"""Detectors need not find a smaller slowdown."""
AFTER_S = 10.0
"""An accusation within this time after a slowdown is about it: detectors look at whole windows of steps."""


@dataclass(slots=True)
class Slowdown:
    """An injected slowdown. ``left``: its live ranks; ``found_s``: the time of the first accusation of one of them."""

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
        """Seconds from its beginning; None: no accusation found it."""
        return None if self.found_s is None else self.found_s - self.begin_s

    @property
    def counts(self) -> bool:
        """Whether detectors should find it: its effect on a step is known, and large enough."""
        return SEVERITY in kind_of(self.kind).parameters and self.severity >= LEAST_SEVERITY

    def plain(self) -> dict[str, Any]:
        """For the report."""
        ranks = [str(member) for member in self.members]
        figures = {"severity": self.severity, "ranks": ranks, "at_s": self.begin_s, "latency_s": self.latency_s}
        return {"fault": self.fault, "kind": self.kind, **figures}

    def explains(self, member: Member, at_s: float) -> bool:
        """Whether this slowdown makes an accusation of ``member`` right."""
        meant = member in self.members or kind_of(self.kind).performer is Performer.HOST  # others share the host's cores
        return meant and self.begin_s <= at_s <= self.end_s + AFTER_S


@dataclass(frozen=True, slots=True)
class Score:
    """Counts, the median latency, and each slowdown that counts, as plain data.

    ``precision`` is None without accusations, ``recall`` without injected slowdowns.
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
    """Compares the accusations by detectors of slow ranks with the slowdowns that this run's chaos injected. A fold.

    An injected slowdown is a fault that may cost slower steps. It lasts from its execution until it is healed, or its ranks are gone. Those
    of a known severity of 1.5 and above should be found; others, such as a lossy link, only make an accusation right. The first accusation
    of one of its ranks in that time, or shortly after, finds a slowdown. An accusation of any other rank is wrong. Without injected
    slowdowns there is no truth to compare with, and the scorecard counts nothing.

    - precision: right accusations / all accusations
    - recall: slowdowns that were found / all slowdowns
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
        """A slowdown ends when its last rank is gone."""
        for slowdown in self._slowdowns:
            if member in slowdown.left:
                slowdown.left.discard(member)
                slowdown.end_s = slowdown.end_s if slowdown.left else min(slowdown.end_s, at_s)

    def _accused(self, member: Member, at_s: float) -> None:
        reasons = [slowdown for slowdown in self._slowdowns if slowdown.explains(member, at_s)]
        self._right, self._wrong = self._right + bool(reasons), self._wrong + (not reasons)
        for slowdown in reasons:
            slowdown.found_s = at_s if slowdown.found_s is None else slowdown.found_s
