"""Verdicts on slow ranks, from the journal: evidence, the ways that were weighed, and what the one that was taken saved.

What an action saved is told against doing nothing, ever. That world is computed, not simulated: each step that was committed while the
action held would have taken ``step_even_s``, the closed form ``fixed + shard x (shards of the rank that takes longest, counted as often as
it is slower)`` of an even split and the slowness at the moment of the decision, with the medians that were measured then. From that comes
off what the steps did take, everything included. An action holds until all who were accused are cleared, the next action, or the end. Of
a rank that is gone nobody sees when it would have been well again: there it holds for as long as the slowness was expected to last.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from fleet.protocol.decisions import Prices, Suspect
from fleet.protocol.records import Committed, DecisionMade, Record, RunEnded, ViewPublished
from fleet.protocol.slowness import ACTIONS

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
