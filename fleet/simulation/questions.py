"""The live policies, asked about a whole fleet.

Policies look at candidates one by one; a fleet of 12,500 nodes has 12,500. All nodes that train are alike to a policy, so one of them
stands for all: with m places empty the question is put about a world of 1 + m, of which one is in it. A test holds the two to the same
answer. A policy is a pure function and its answers hold until ``valid_until_s``, so what was asked once is not asked again: times in a
question count from the moment of the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from fleet.protocol.ports import IntervalPolicy, RecoveryPolicy
from fleet.protocol.types import Candidate, Formation, Member, Situation, StateId
from fleet.simulation.fleet_model import FleetModel

FORM, WAIT, RESTART = "form", "wait", "restart"
SURVIVOR = Member(0, 0)


@dataclass(frozen=True, slots=True)
class Answer:
    """``joined`` of the nodes that were ready take empty places. A wait lasts ``wait_s`` from the moment of asking, if nothing happens."""

    action: str
    joined: int
    wait_s: float


@dataclass(slots=True)
class Recovery:
    """Puts questions to a ``RecoveryPolicy`` and remembers the answers. ``asked`` counts what had to be asked.

    Args:
        policy: the live one.
        nodes, min_nodes: of the whole world.
    """

    policy: RecoveryPolicy
    nodes: int
    min_nodes: int = 1
    asked: int = 0
    _form: dict[tuple[bool, int, int, float], Answer] = field(default_factory=dict)
    _grow: dict[tuple[int, int], int] = field(default_factory=dict)

    def form(self, held: bool, missing: int, ready: int, waited_s: float) -> Answer:
        """Who goes on after a loss? ``missing`` places are empty, ``ready`` nodes could fill them. ``held``: those who are left trained in
        the last view, and hold its state; if not, they are fresh processes.

        Who joins at the first step boundary counts as joined: a step is short against all that a loss takes.
        """
        key = (held, missing, min(ready, missing), waited_s)
        answer = self._form.get(key)
        if answer is None:
            self.asked += 1
            formation = self.policy.form(self.situation(*key[:3]), waited_s)
            answer = _answer(formation, missing < self.nodes, waited_s)
            if answer.action == FORM:
                later = self.grow(missing - answer.joined, min(ready, missing) - answer.joined)
                answer = replace(answer, joined=answer.joined + later)
            self._form[key] = answer
        return answer

    def grow(self, missing: int, ready: int) -> int:
        """How many of the ``ready`` nodes join while the job runs."""
        key = (missing, min(ready, missing))
        joined = self._grow.get(key)
        if joined is None:
            self.asked += 1
            formation = self.policy.grow(self.situation(True, *key), math.inf)
            joined = self._grow[key] = len(formation.members) - 1 if formation.decision.action == "grow" else 0
        return joined

    @property
    def restarts(self) -> bool:
        """Whether the policy starts all processes anew although survivors hold the state."""
        return self.form(True, 1, 1, 0.0).action == RESTART

    def situation(self, held: bool, missing: int, ready: int) -> Situation:
        """The question: one survivor for all who are left, the empty places, and who could fill them."""
        left = self.nodes - missing
        survivor = (Candidate(SURVIVOR, "n0", StateId(0, 1) if held else None, False, held),) if left else ()
        newcomers = tuple(Candidate(Member(place, 1), f"n{place}", None, False, False) for place in range(1, ready + 1))
        world = missing + len(survivor)
        least = max(1, self.min_nodes - left + 1) if left else min(self.min_nodes, world)
        return Situation(survivor + newcomers, world, least, 0.0, 0, "a checkpoint")


def _answer(formation: Formation, survivors: bool, waited_s: float) -> Answer:
    decision = formation.decision
    joined = len(formation.members) - survivors if decision.action == FORM else 0
    return Answer(decision.action, joined, decision.valid_until_s - waited_s)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Copies to one tier: the next is asked for ``interval_s`` after the last one was."""

    blocked_s: float
    latency_s: float
    interval_s: float


def schedule(policy: IntervalPolicy, model: FleetModel, tier: int, rate_per_s: float) -> Schedule:
    """When the next copy is due. The live machine holds its inputs fixed, and an interval policy sees times only as differences, so that
    one question stands for all of a run. A tier that no fault needs gets no copies: the interval is infinite.
    """
    at = model.tiers[tier]
    if rate_per_s <= 0.0:
        return Schedule(at.blocked_s, at.latency_s, math.inf)
    decision = policy.due(0.0, 0.0, at.blocked_s, at.latency_s, rate_per_s)
    return Schedule(at.blocked_s, at.latency_s, decision.valid_until_s)
