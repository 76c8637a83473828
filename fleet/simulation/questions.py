"""The live policies, asked about a whole fleet.

Policies look at candidates one by one, and a fleet of 12,500 nodes has 12,500. All nodes that train are alike to a policy, so one of them
stands for all. With m empty places, the question is about a world of 1 + m with one member. A test checks that both questions get the same
answer. A policy is a pure function, and its answers hold until ``valid_until_s``. So the simulator remembers answers, and asks no question
twice. Times in a question count from the moment of the loss.
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
    """``joined`` ready nodes take empty places. Without a further event, a wait lasts ``wait_s`` from the question on."""

    action: str
    joined: int
    wait_s: float


@dataclass(slots=True)
class Recovery:
    """Asks a ``RecoveryPolicy``, and remembers the answers. ``asked``: number of questions without a remembered answer.

    Args:
        policy: the live policy.
        nodes, min_nodes: those of the whole world.
    """

    policy: RecoveryPolicy
    nodes: int
    min_nodes: int = 1
    asked: int = 0
    _form: dict[tuple[bool, int, int, float], Answer] = field(default_factory=dict)
    _grow: dict[tuple[int, int], int] = field(default_factory=dict)

    def form(self, held: bool, missing: int, ready: int, waited_s: float) -> Answer:
        """Which nodes go on after a loss? ``missing`` places are empty, ``ready`` nodes could fill them. ``held``: the remaining nodes
        trained in the last view, and hold its state; if not, they have fresh processes.

        A node that joins at the first step boundary counts as joined: a step is short against the time of a loss.
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
        """Whether the policy starts all processes again although survivors hold the state."""
        return self.form(True, 1, 1, 0.0).action == RESTART

    def situation(self, held: bool, missing: int, ready: int) -> Situation:
        """The question: one survivor for all remaining nodes, the empty places, and the nodes that could fill them."""
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
    """Copies to one tier: each is requested ``interval_s`` after the request of the last one."""

    blocked_s: float
    latency_s: float
    interval_s: float


def schedule(policy: IntervalPolicy, model: FleetModel, tier: int, rate_per_s: float) -> Schedule:
    """The schedule of copies to a tier. The live machine holds its inputs fixed, and an interval policy uses differences of times alone.
    So one question is enough for a whole run. A tier that no fault needs gets no copies: the interval is infinite.
    """
    at = model.tiers[tier]
    if rate_per_s <= 0.0:
        return Schedule(at.blocked_s, at.latency_s, math.inf)
    decision = policy.due(0.0, 0.0, at.blocked_s, at.latency_s, rate_per_s)
    return Schedule(at.blocked_s, at.latency_s, decision.valid_until_s)
