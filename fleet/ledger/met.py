"""The faults that a run has met while it trained, planned or not, and how well it has foretold them. A part of the ledger's fold.

A run makes a forecast of how many faults come whenever its training time has doubled, for as long again, and scores it when that time is
over: a handful in an hour, a dozen in a month.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from fleet.ledger.rates import Rate, count_interval, prior, together
from fleet.protocol.causes import AgentHungUp, AgentSilent, Cause, incident
from fleet.protocol.records import FaultRecord, ProcessLost

FIRST_S = 30.0
"""The first forecast that is scored is made after so much training."""
TOGETHER_S = 1.0
"""Ranks of a node that are lost within this time of each other are one fault."""
LIKE = {"hang": "hang", "corruption": "flip_weight"}
"""The kind of fault that a loss which nobody planned looks like, by the kind of its incident."""
UNKNOWN = "kill_rank"
"""What may come where nothing is known before the run: the commonest kind."""
NODE_GONE = (AgentHungUp, AgentSilent)


def looks_like(cause: Cause) -> str:
    """The kind of fault whose cost and whose count a loss has that no fault explains."""
    return "lose_node" if isinstance(cause, NODE_GONE) else LIKE.get(incident(cause), UNKNOWN)


@dataclass(slots=True)
class Met:
    """``before`` are rates by kind, faults a second, as they were written down when the run started; ``events`` what has come since.

    ``inside`` of ``scored`` forecasts of the number of faults held the truth.
    """

    before: Mapping[str, float] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    inside: int = 0
    scored: int = 0
    _seen: set[str] = field(default_factory=set)
    _node_lost_s: float = float("-inf")
    _due_s: float = FIRST_S
    """Training time at which the forecast that is open is scored, and the next one made."""
    _bounds: tuple[int, int] | None = None
    """The least and the most faults in all by then."""

    def rates(self, exposure_s: float) -> dict[str, Rate]:
        """What is believed of each kind after so much training."""
        kinds = dict.fromkeys([*self.before, *self.events]) or {UNKNOWN: None}
        return {kind: prior(self.before.get(kind, 0.0)).after(self.events[kind], exposure_s) for kind in kinds}

    def fault(self, record: FaultRecord) -> None:
        """Chaos has struck, or an operator; each fault once."""
        if record.phase == "executed" and record.fault.id not in self._seen:
            self._seen.add(record.fault.id)
            self.events[record.fault.kind] += 1

    def lost(self, record: ProcessLost) -> None:
        """A process was lost. It counts when no fault explains it, and nobody wanted it gone for another reason than its own."""
        if record.fault is not None or not incident(record.cause):
            return
        kind = looks_like(record.cause)
        if kind == "lose_node":
            with_others, self._node_lost_s = record.at_s - self._node_lost_s < TOGETHER_S, record.at_s
            if with_others:
                return
        self.events[kind] += 1

    def trained(self, exposure_s: float) -> None:
        """So much training is done, before what comes next is counted: score the forecast that is due, and make the next one.

        It is due at times that do not depend on when this is asked: a journal whose old part is folded comes to the same score.
        """
        while exposure_s >= self._due_s:
            count = self.events.total()
            if self._bounds is not None:
                self.inside, self.scored = self.inside + (self._bounds[0] <= count <= self._bounds[1]), self.scored + 1
            few, many = count_interval(together(self.rates(self._due_s).values()), self._due_s)
            self._bounds, self._due_s = (count + few, count + many), 2 * self._due_s
