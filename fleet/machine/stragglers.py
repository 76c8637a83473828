"""The straggler part of ``FleetMachine``: gathers what ranks measured, asks the policy, and performs what it answers."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from fleet.decisions import Decision
from fleet.events import StepsTimed
from fleet.machine.proposals import reshare
from fleet.ports import StragglerPolicy
from fleet.records import DecisionMade, Record
from fleet.slowness import ACTIONS, Circumstances, RankTimes, Remedy, StepTime, Timings
from fleet.types import Formation, Member, View

if TYPE_CHECKING:
    from fleet.machine.core import FleetMachine

LATE_S = 1.0
"""A step that not all ranks have reported is judged without the others after so long."""

STEPS_KEPT = 256
REVIEW_S = 10.0
_SPEED, _SHUN = "speed ", "shun "


class Stragglers:
    """Times of the present view's steps until the policy has seen them, and what it decided before.

    ``speeds`` are those of ranks that are not of full speed, as of the last decision to rebalance; ``shunned`` are nodes that were evicted,
    and until when their processes stay out: as long as the slowness was expected to last. Both are rebuilt from the journal. What the
    policy learned of the times is not: it learns anew after a restart. ``steps_s`` are how long the last steps took.
    """

    def __init__(self, policy: StragglerPolicy | None) -> None:
        self.policy = policy
        self.speeds: dict[Member, float] = {}
        self.shunned: dict[str, float] = {}
        self.steps_s: deque[float] = deque(maxlen=STEPS_KEPT)
        self._generation = self._judged = -1
        self._steps: dict[int, tuple[float, dict[Member, StepTime]]] = {}
        self._total = 0
        self._acted_s: list[float] = []
        self._review_s = 0.0
        self._said: tuple[str, bool] = ("", False)

    # ---- what ranks measured -------------------------------------------------------------------------------------------------------------

    def take(self, event: StepsTimed, view: View | None, now_s: float) -> None:
        """Note one node's report. What is of another view is of no use: its ranks had other shards."""
        if self.policy is None or view is None or event.generation != view.generation:
            return
        if self._generation != view.generation:
            self._generation, self._steps, self._judged = view.generation, {}, -1
        self._total = event.total
        for times in event.ranks:
            for step, time in _by_step(times):
                if step > self._judged:
                    self._steps.setdefault(step, (now_s, {}))[1][times.member] = time

    def timings(self, view: View, now_s: float) -> Timings | None:
        """The steps that are complete, or old; each is given once."""
        if self._generation != view.generation:
            return None
        due: list[int] = []
        for step in sorted(self._steps):
            first_s, known = self._steps[step]
            if len(known) < len(view.members) and now_s - first_s < LATE_S:
                break
            due.append(step)
        if not due:
            return None
        self._judged = due[-1]
        columns = [self._steps.pop(step)[1] for step in due]
        self.steps_s.extend(max(time.own_s for time in known.values()) for known in columns)
        rows = tuple(tuple(known.get(member) for known in columns) for member in view.members)
        return Timings(view.generation, tuple(due), view.members, rows)

    # ---- what is done about it -----------------------------------------------------------------------------------------------------------

    def tick(self, machine: FleetMachine, now_s: float) -> None:
        """While a view runs: ask the policy about new times, or when its last answer is no longer valid."""
        view = machine.view
        if self.policy is None or view is None:
            return
        timings = self.timings(view, now_s)
        if timings is None and now_s < self._review_s:
            return
        self._acted_s = [at_s for at_s in self._acted_s if now_s - at_s < machine.settings.straggler.window_s]
        remedy = self.policy.look(timings, self._circumstances(machine, view, now_s), now_s)
        self._review_s = now_s + REVIEW_S if remedy.decision is None else remedy.decision.valid_until_s
        self._write(machine, remedy, now_s)
        if remedy.decision is not None and remedy.decision.action in ACTIONS:
            self._perform(machine, view, remedy, remedy.decision, now_s)

    def _circumstances(self, machine: FleetMachine, view: View, now_s: float) -> Circumstances:
        roster, seated = machine.roster, set(view.members)
        nodes = tuple(roster.by_slot[member.slot].process.node for member in view.members)
        standby = (rank for rank in roster.in_order() if rank.phase == "standby" and rank.member not in seated)
        spares = tuple((rank.member, rank.process.node) for rank in standby if self.admits(rank.process.node, now_s))
        left = max(0, self._total - machine.committed.step) if self._total else float("inf")
        rate_per_s = len(machine.losses.all) / max(now_s - machine.started_s, 1.0)
        return Circumstances(view, nodes, machine.settings.shards, spares, left, len(self._acted_s), rate_per_s)

    def _write(self, machine: FleetMachine, remedy: Remedy, now_s: float) -> None:
        """What was found out, and what follows from it; to bear what is known already is not said again."""
        for finding in remedy.findings:
            machine._write(DecisionMade("straggler", finding.action, finding.reason, dict(finding.fields), now_s))
        decision = remedy.decision
        if decision is None or decision.action in ACTIONS:
            return
        said = (decision.action, "limit" in decision.fields)
        if remedy.findings or said != self._said:
            machine._write(DecisionMade("straggler", decision.action, decision.reason, dict(decision.fields), now_s))
        self._said = said

    def _perform(self, machine: FleetMachine, view: View, remedy: Remedy, decision: Decision, now_s: float) -> None:
        """The one place where a view changes for a slow rank's sake. A checkpoint that is being written is waited for."""
        if machine.checkpoints.pending:
            self._review_s = now_s
            return
        self._said = (decision.action, False)
        self._acted_s.append(now_s)
        fields = dict(decision.fields)
        if decision.action == "rebalance":
            self.speeds = dict(remedy.speeds)
            fields |= {f"{_SPEED}{member}": speed for member, speed in remedy.speeds}
        ranks = [rank for member in remedy.members if (rank := machine.roster.current(member)) is not None]
        if decision.action == "evict":
            left_s = fields.get("expected_left_s", REVIEW_S)
            self.shunned |= {rank.process.node: now_s + left_s for rank in ranks}
            fields |= {f"{_SHUN}{rank.process.node}": now_s + left_s for rank in ranks}
        machine._write(DecisionMade("straggler", decision.action, decision.reason, fields, now_s))
        if decision.action == "rebalance":
            reshare(machine, remedy.ranges, Formation(Decision("reshare", decision.reason), view.members), now_s)
        for rank in ranks:
            machine._evict(rank, f"it is slow: {decision.reason}", now_s)

    def admits(self, node: str, now_s: float) -> bool:
        """Whether processes of ``node`` may be in the next view, if there are enough others."""
        return now_s >= self.shunned.get(node, now_s)

    # ---- after a restart -----------------------------------------------------------------------------------------------------------------

    def replay(self, record: Record) -> None:
        """Take up what was decided before."""
        if not isinstance(record, DecisionMade) or record.policy != "straggler" or record.action not in ACTIONS:
            return
        self._acted_s.append(record.at_s)
        self.shunned |= {name.removeprefix(_SHUN): until_s for name, until_s in record.fields.items() if name.startswith(_SHUN)}
        if record.action == "rebalance":
            named = {name.removeprefix(_SPEED): value for name, value in record.fields.items() if name.startswith(_SPEED)}
            self.speeds = {Member(*map(int, name.split("."))): speed for name, speed in named.items()}


def _by_step(times: RankTimes) -> list[tuple[int, StepTime]]:
    columns = (times.compute_us, times.data_us, times.network_us, times.fixed_us)
    seconds = zip(*([us / 1e6 for us in column] for column in columns), strict=True)
    return [(step, StepTime(shards, *each)) for step, shards, each in zip(times.steps, times.shards, seconds, strict=True)]
