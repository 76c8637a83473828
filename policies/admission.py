"""The runs that start, and the runs that give way: whole gangs, real room on each node, quotas of teams, priorities that rise by waiting.

It guarantees, for a queue that follows its decisions:

- A run has all of its slots or none, on nodes that have room for them; a team never has more than its quota.
- No run overtakes the first one in the line that has no room. A run that waits for its team's quota blocks that team alone. A run that is
  larger than the whole queue blocks no run.
- A run gives way only to one of a greater priority. That run must be able to start once all runs that were told to end have ended.
- A run that has waited ``(TOP - priority) * ageing_s`` in all gives way to no run, and no later run overtakes it.
- From then on it starts within ``2 * D * (k + 1)``, with k earlier runs ahead of it, and no run that takes longer than D. Each of these
  runs waits for its team's runs to end, and then for the runs that have the room.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fleet.protocol.queueing import ONE_SLOT, TOP, Asked, Decision, Node, Preempt, Rules, Running, Start
from fleet.settings.per_rank import meets, room


def rank(one: Asked, ageing_s: float) -> int:
    """The run's priority, and one more for each ``ageing_s`` that it has waited, up to ``TOP``."""
    return min(TOP, one.priority + int(one.waited_s // ageing_s)) if ageing_s > 0 else one.priority


def in_turn(waiting: Iterable[Asked], ageing_s: float = 0.0) -> list[Asked]:
    """The runs in the order in which they will start: by rank, then by age."""
    return sorted(waiting, key=lambda one: (-rank(one, ageing_s), one.since_s, one.name))


def decide(waiting: Sequence[Asked], running: Sequence[Running], nodes: Sequence[Node], rules: Rules) -> list[Decision]:
    """The runs that start now, with their nodes, and the runs that give way, each to another."""
    line, found = _Line(running, nodes, rules), list[Decision]()
    kept_back = set[str]()
    for one in in_turn(waiting, rules.ageing_s):
        if one.team in kept_back or line.too_large(one):
            continue
        if (placed := line.place(one)) is not None:
            line.start(one, placed)
            found.append(Start(one.name, placed, _why(one, placed)))
            continue
        leaving = line.who_leaves(one)
        if leaving is None and line.over_quota(one):
            kept_back.add(one.team)
            continue
        found += [Preempt(each.asked.name, one.name, _why_not(each.asked, one)) for each in leaving or ()]
        break
    return found


def never(one: Asked, nodes: Sequence[Node], rules: Rules) -> tuple[str, str]:
    """(why this run can never start, what to do about it); empty texts when it can."""
    if one.slots > rules.quota(one.team):
        allowed = f"team {one.team} may have {rules.quota(one.team):g} slots at once, and this run needs {one.slots}"
        return allowed, "Ask for fewer ranks and spares, or for another quota: fleet cluster up --quota."
    most = sum(room(node.resources, one.shape) for node in nodes if meets(node.labels, one.selector))
    if one.slots > most:
        return f"more than the {most} that this service has for all runs{_of_kind(one)}", "See fleet cluster up --slots."
    return "", ""


class _Line:
    """The state of the queue while decisions are made, one after the other."""

    def __init__(self, running: Sequence[Running], nodes: Sequence[Node], rules: Rules) -> None:
        self._running, self._nodes, self._rules = list(running), nodes, rules

    def start(self, one: Asked, placed: Mapping[str, int]) -> None:
        """From here on the run counts as running; no later run of this line makes it give way."""
        self._running.append(Running(asked=one, placed=placed))

    def too_large(self, one: Asked) -> bool:
        """Whether the run would have no room even alone, or alone exceeds its team's quota."""
        return self._placed(one, ()) is None or one.slots > self._rules.quota(one.team)

    def over_quota(self, one: Asked) -> bool:
        """Whether the run's team has too much already."""
        return self._over(one, self._running)

    def place(self, one: Asked) -> dict[str, int] | None:
        """The number of the run's slots that each node gets now; None: it cannot start."""
        return None if self._over(one, self._running) else self._placed(one, self._running)

    def who_leaves(self, one: Asked) -> list[Running] | None:
        """The runs that must give way so that it can start: none beside those that leave already, some more, or None: no choice helps."""
        staying = [each for each in self._running if not each.leaving]
        if self._fits(one, staying):
            return []
        chosen: list[Running] = []
        for each in self._may_leave(one, staying):
            chosen.append(each)
            if self._fits(one, _without(staying, chosen)):
                return self._needed(one, staying, chosen)
        return None

    def _may_leave(self, one: Asked, staying: Sequence[Running]) -> list[Running]:
        """Runs of lower priority that did not rise above it by waiting; the lowest first, of those the youngest."""
        ageing_s = self._rules.ageing_s
        mine = rank(one, ageing_s)
        lower = [each for each in staying if each.asked.priority < one.priority and rank(each.asked, ageing_s) < mine]
        return sorted(lower, key=lambda each: (each.asked.priority, -each.began_s, each.asked.name)) if self._rules.preempts else []

    def _needed(self, one: Asked, staying: Sequence[Running], chosen: Sequence[Running]) -> list[Running]:
        """The runs of ``chosen`` that are needed; the run chosen last is spared first."""
        needed = list(chosen)
        for each in reversed(chosen):
            fewer = _without(needed, [each])
            if self._fits(one, _without(staying, fewer)):
                needed = fewer
        return needed

    def _fits(self, one: Asked, staying: Sequence[Running]) -> bool:
        return not self._over(one, staying) and self._placed(one, staying) is not None

    def _over(self, one: Asked, running: Iterable[Running]) -> bool:
        has = sum(each.asked.slots for each in running if each.asked.team == one.team)
        return has + one.slots > self._rules.quota(one.team)

    def _placed(self, one: Asked, running: Iterable[Running]) -> dict[str, int] | None:
        free = self._free(running)
        placed, left = dict[str, int](), one.slots
        for node in self._nodes:
            fits = room(free[node.name], one.shape) if meets(node.labels, one.selector) else 0
            if (here := min(left, fits)) > 0:
                placed[node.name] = here
                left -= here
        return placed if left == 0 else None

    def _free(self, running: Iterable[Running]) -> dict[str, dict[str, float]]:
        """The free resources of each node; the slots placed on a node that is gone do not count."""
        free = {node.name: dict(node.resources) for node in self._nodes}
        for each in running:
            for name in each.placed.keys() & free.keys():
                for resource, amount in each.asked.shape.items():
                    free[name][resource] = free[name].get(resource, 0.0) - amount * each.placed[name]
        return free


def _of_kind(one: Asked) -> str:
    """Words on the slots that this run needs, where not any slot will do."""
    if not one.selector and one.shape == ONE_SLOT:
        return ""
    takes = " and ".join(f"{amount:g} {name}" for name, amount in one.shape.items())
    where = "".join(f", on nodes with {key} = {condition}" for key, condition in one.selector.items())
    return f", each with {takes}{where}"


def _without(running: Iterable[Running], those: Iterable[Running]) -> list[Running]:
    names = {each.asked.name for each in those}
    return [each for each in running if each.asked.name not in names]


def _why(one: Asked, placed: Mapping[str, int]) -> str:
    where = ", ".join(f"{slots} on {node}" for node, slots in placed.items())
    return f"there is room for all of its {one.slots} slots: {where}"


def _why_not(leaving: Asked, one: Asked) -> str:
    return f"{one.name} has priority {one.priority}, and this one {leaving.priority}"
