"""A queue without processes: the live policy decides at every tick, runs come, take their time, give way and end, and all is checked."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fleet.protocol.queueing import TOP, Asked, Decision, Node, Preempt, Rules, Running, Start
from fleet.settings.per_rank import meets
from policies import admission


@dataclass(frozen=True)
class Comes:
    """A run: when it is handed in, how many ticks it trains, and how many it takes to keep its state when it has to give way."""

    asked: Asked
    lasts: int
    leaves_in: int = 1


@dataclass
class Reported:
    """What became of a run."""

    began: list[int] = field(default_factory=list)
    gave_way: list[int] = field(default_factory=list)
    top: int | None = None
    """The first tick at which it waited with the highest rank there is, and could run on the queue's nodes."""
    ahead: int = 0
    """How many that were handed in earlier had not ended then."""
    ended: int | None = None


class Broken(AssertionError):
    """The policy has not kept what it promises; ``promise`` names it."""

    def __init__(self, promise: str, detail: str) -> None:
        super().__init__(f"{promise}: {detail}")
        self.promise = promise


@dataclass
class Twin:
    """``runs`` on ``nodes`` by ``rules``, for as many ticks as it takes, ``limit`` at most."""

    runs: Sequence[Comes]
    nodes: Sequence[Node]
    rules: Rules
    limit: int = 5_000

    def __post_init__(self) -> None:
        self.reported = {each.asked.name: Reported() for each in self.runs}
        self._by_name = {each.asked.name: each for each in self.runs}
        self._left = {each.asked.name: each.lasts for each in self.runs}
        self._waiting: dict[str, Asked] = {}
        self._running: dict[str, Running] = {}
        self._leaves: dict[str, int] = {}
        self._known = {each.asked.name for each in self.runs if not admission.never(each.asked, self.nodes, self.rules)[0]}

    def play(self) -> dict[str, Reported]:
        """To the end. Raises Broken."""
        now = 0
        while any(reported.ended is None for name, reported in self.reported.items() if name in self._known):
            if now > self.limit:
                raise Broken("starvation", f"{sorted(self._waiting)} still wait after {now} ticks")
            self._tick(now)
            now += 1
        return self.reported

    def _tick(self, now: int) -> None:
        for name in self._known:
            if self._by_name[name].asked.since_s == now:
                self._waiting[name] = self._by_name[name].asked
        self._end(now)
        while decisions := admission.decide(list(self._waiting.values()), list(self._running.values()), self.nodes, self.rules):
            self._check_order(decisions)
            for one in decisions:
                self._carry_out(one, now)
            self._check_room()
            self._check_purpose(decisions)
        self._note_top(now)
        self._check_bound(now)
        self._waiting = {name: dataclasses.replace(one, waited_s=one.waited_s + 1) for name, one in self._waiting.items()}

    def _end(self, now: int) -> None:
        for name, each in list(self._running.items()):
            self._left[name] -= 0 if each.leaving else 1
            if self._left[name] <= 0:
                self.reported[name].ended = now
                del self._running[name]
                self._leaves.pop(name, None)
            elif each.leaving and self._leaves[name] <= now:
                del self._running[name], self._leaves[name]
                self._waiting[name] = each.asked

    def _carry_out(self, decision: Decision, now: int) -> None:
        if isinstance(decision, Start):
            asked = self._waiting.pop(decision.name)
            if sum(decision.placed.values()) != asked.slots:
                raise Broken("gang", f"{asked.name} has {decision.placed} of {asked.slots} slots")
            self._running[asked.name] = Running(asked=asked, placed=decision.placed, began_s=now)
            self.reported[asked.name].began.append(now)
            return
        leaving, to = self._running[decision.name], self._waiting[decision.to]
        if leaving.leaving or leaving.asked.priority >= to.priority:
            raise Broken("preemption", f"{decision.name} gives way to {decision.to}")
        self._running[decision.name] = dataclasses.replace(leaving, leaving=True)
        self._leaves[decision.name] = now + self._by_name[decision.name].leaves_in
        self.reported[decision.name].gave_way.append(now)

    # ---- what is promised --------------------------------------------------------------------------------------------------------------

    def _check_room(self) -> None:
        used: dict[str, Counter[str]] = {node.name: Counter() for node in self.nodes}
        teams, labels = Counter[str](), {node.name: node.labels for node in self.nodes}
        for each in self._running.values():
            teams[each.asked.team] += each.asked.slots
            for node, slots in each.placed.items():
                if not meets(labels[node], each.asked.selector):
                    raise Broken("labels", f"{each.asked.name} wants {each.asked.selector}, and is on {node}")
                used[node].update({name: amount * slots for name, amount in each.asked.shape.items()})  # type: ignore[misc]
        for node in self.nodes:
            if any(amount > node.resources.get(name, 0.0) + 1e-6 for name, amount in used[node.name].items()):
                raise Broken("capacity", f"{node.name} has {dict(node.resources)}, and {dict(used[node.name])} are used")
        for team, slots in teams.items():
            if slots > self.rules.quota(team):
                raise Broken("quota", f"team {team} has {slots} slots")

    def _check_order(self, decisions: Iterable[Decision]) -> None:
        """Nothing starts before one that comes first, unless that one starts too, or the quota of its team, another one, keeps that back:
        the team's first that waits is above it, and the others of the team wait behind that."""
        started = {one.name for one in decisions if isinstance(one, Start)}
        kept_back = set[str]()
        passed: list[Asked] = []
        for one in admission.in_turn(self._waiting.values(), self.rules.ageing_s):
            if one.name not in started:
                passed.append(one)
                if self._team_has(one.team, started) + one.slots > self.rules.quota(one.team):
                    kept_back.add(one.team)
            elif any(before.team == one.team or before.team not in kept_back for before in passed):
                raise Broken("order", f"{one.name} overtakes {[each.name for each in passed]}")

    def _team_has(self, team: str, started: set[str]) -> int:
        there = [each.asked for each in self._running.values()] + [each for each in self._waiting.values() if each.name in started]
        return sum(each.slots for each in there if each.team == team)

    def _check_purpose(self, decisions: Sequence[Decision]) -> None:
        """With all gone who were told to, the run for which that was done starts at once."""
        for to in {one.to for one in decisions if isinstance(one, Preempt)}:
            staying = [each for each in self._running.values() if not each.leaving]
            then = admission.decide(list(self._waiting.values()), staying, self.nodes, self.rules)
            if not any(isinstance(one, Start) and one.name == to for one in then):
                raise Broken("purpose", f"{to} does not start after {decisions}")

    def _note_top(self, now: int) -> None:
        for name, one in self._waiting.items():
            reported = self.reported[name]
            if reported.top is None and admission.rank(one, self.rules.ageing_s) == TOP:
                reported.top = now
                older = [each for each in self.runs if (each.asked.since_s, each.asked.name) < (one.since_s, name)]
                reported.ahead = sum(self.reported[each.asked.name].ended is None for each in older if each.asked.name in self._known)

    def _check_bound(self, now: int) -> None:
        longest = max(each.lasts + each.leaves_in for each in self.runs)
        for name in self._waiting:
            reported = self.reported[name]
            if reported.top is not None and now > reported.top + 2 * longest * (reported.ahead + 1):
                raise Broken("starvation", f"{name} is at the top since {reported.top}, with {reported.ahead} ahead, and waits at {now}")
        for name in self._running:
            reported = self.reported[name]
            if reported.top is not None and any(at > reported.top for at in reported.gave_way):
                raise Broken("starvation", f"{name} was at the top, and gives way")
