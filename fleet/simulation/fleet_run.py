"""One run of a whole fleet, from fault to fault.

Between two events only time passes. Checkpoints in a quiet stretch are counted, and not simulated one by one. The run keeps no data for
each node or step. The loop gets the live policies (see :mod:`fleet.simulation.questions`). Their answers hold until the next event.

A fault has these costs:

- ``detect``: the job does not run, so no other fault can stop it;
- ``reform``: the way back where peers hold the state;
- ``restore``: else, the way back with the start of all processes. Another fault begins it again;
- ``provision``: the policy waits for nodes;
- ``rework``: the steps since the copy from which the job goes on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from fleet.protocol.ports import IntervalPolicy, RecoveryPolicy
from fleet.simulation.fleet_arrivals import Arrivals, Floats
from fleet.simulation.fleet_model import HELD, FaultClass, FleetModel, FleetOutcome, LemonPolicy, Partial
from fleet.simulation.questions import FORM, RESTART, Recovery, Schedule, schedule

REPAIRED, READY, NOTICED, ASK = range(4)
ROUNDING_S = 1e-6
"""Times late in a run are rounded: this margin makes sure that a wait is over."""


@dataclass(slots=True)
class Places:
    """The job's empty places (``missing``), nodes that are ``ready`` for one, spares on their way (``coming``), and ``free`` spares."""

    free: int
    missing: int = 0
    ready: int = 0
    coming: int = 0

    def join(self, count: int) -> None:
        """``count`` ready nodes take a place."""
        self.missing -= count
        self.ready -= count


class RepeatOffenders:
    """Nodes that have failed, and failed nodes that stay out."""

    def __init__(self, lemons: LemonPolicy | None) -> None:
        self.out: set[int] = set()
        self._lemons = lemons
        self._failures: dict[int, list[float]] = {}

    def stays_out(self, node: int, now_s: float) -> bool:
        """Whether a node that fails now stays out for good."""
        if self._lemons is None or node < 0:
            return False
        failures = self._failures.setdefault(node, [])
        failures.append(now_s)
        if self._lemons.judge(node, failures, now_s).action != "keep_out":
            return False
        self.out.add(node)
        return True


@dataclass(slots=True)
class WayBack:
    """The way from a fault back to training.

    ``fault_s``: the fault. ``down_until_s``: the job knows of it. ``up_s``: training goes on; infinite while not known. ``need``: the tier
    from which the state comes. ``waiting``: for nodes. ``restarted``: all processes have started again.
    """

    fault_s: float = 0.0
    down_until_s: float = 0.0
    up_s: float = math.inf
    need: int = HELD
    waiting: bool = False
    restarted: bool = False


@dataclass(slots=True)
class RunCounts:
    """Counts of a run: faults by kind, lost seconds by category, and the arrivals that hit a node in its place (``injected``)."""

    faults: list[int]
    lost: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("rework", "detect", "reform", "restore", "provision"), 0.0))
    injected: list[int] = field(default_factory=list)
    recoveries: int = 0
    rollbacks: int = 0
    events: int = 0


class FleetRun:
    """A simulated run.

    Args:
        model, arrivals: the fleet, and its faults.
        recovery, intervals: live policies; one interval policy for each tier of the model.
        lemons: decides whether repeat offenders stay out; None: no node does.
        partial: set its ``stop`` to end at the next fault.
    """

    def __init__(
        self,
        model: FleetModel,
        arrivals: Arrivals,
        recovery: RecoveryPolicy,
        intervals: Sequence[IntervalPolicy],
        lemons: LemonPolicy | None = None,
        partial: Partial | None = None,
    ) -> None:
        self.model, self.arrivals, self.partial = model, arrivals, partial
        self.recovery = Recovery(recovery, model.nodes, model.min_nodes)
        restarting = self.recovery.restarts
        self.needs = [model.needed(fault, restarting) for fault in model.faults]
        rates = [model.tier_rate_per_s(tier, restarting) for tier in range(len(intervals))]
        self.schedules = [schedule(policy, model, tier, rates[tier]) for tier, policy in enumerate(intervals)]
        self.stretches = TallyStretches(self.schedules)
        self.points = [(0.0, 0.0)] * len(self.schedules)  # by tier: when the newest safe copy was requested, and until when work is kept
        self.next_s = [at.interval_s for at in self.schedules]
        self.places, self.offenders = Places(model.spares), RepeatOffenders(lemons)
        self.running, self.from_s, self.way = True, 0.0, WayBack()
        self.heap: list[tuple[float, int, int, float]] = []
        self.crews = [0.0] * (model.crews or 0)
        self.counts = RunCounts([0] * len(model.faults))

    def run(self) -> FleetOutcome:
        """Simulate from 0 to the end of the run, or until it is interrupted."""
        found, model, heap, partial, counts = self.arrivals, self.model, self.heap, self.partial, self.counts
        columns = (found.times_s, found.kinds, found.nodes, found.repairs_s, found.chances)
        end_s = model.duration_s
        for index, (now_s, kind, node, _, chance) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            if now_s >= end_s:
                break
            while heap and heap[0][0] <= now_s:
                self._happen(*heappop(heap))
            if partial is not None and partial.stop:
                end_s = now_s
                break
            fault = model.faults[kind]
            if fault.nodes and (chance * model.nodes < self.places.missing or node in self.offenders.out):
                continue  # the fault's place is empty
            counts.events += 1
            counts.faults[kind] += 1
            counts.injected.append(index)
            if fault.notice_s:
                heappush(heap, (now_s + fault.notice_s, NOTICED, index, now_s))
            else:
                self._inject(index, now_s, math.inf)
        while heap and heap[0][0] < end_s:
            self._happen(*heappop(heap))
        return self._outcome(end_s)

    # ---- events --------------------------------------------------------------------------------------------------------------------------

    def _happen(self, now_s: float, what: int, index: int, since_s: float) -> None:
        """A node is repaired, a spare has arrived, a corruption is noticed, or it is time to ask the recovery policy."""
        places = self.places
        self.counts.events += 1
        if what == REPAIRED:
            if places.missing <= places.ready + places.coming:
                places.free += 1
            else:
                self._offer(now_s)
        elif what == ASK:
            if since_s == self.way.fault_s and not self.running and self.way.up_s == math.inf:
                self._ask(now_s)
        elif what == READY:
            places.coming -= 1
            self._offer(now_s)
        else:
            self._inject(index, now_s, since_s)

    def _offer(self, now_s: float) -> None:
        """A node can take an empty place at a step boundary, on the way back, or in a job that waits for nodes."""
        places = self.places
        places.ready += 1
        self._settle(now_s)
        if self.running:
            joined = self.recovery.grow(places.missing, places.ready)
            if joined:
                self._cut(now_s)
                places.join(joined)
        elif self.way.up_s < math.inf:
            places.join(min(places.ready, places.missing))
        elif self.way.waiting:
            self._ask(now_s)

    def _take(self, count: int, index: int, now_s: float) -> None:
        """Nodes go to repair, and spares are called for them. A node that stays out never comes back."""
        model, node, repair_s = self.model, int(self.arrivals.nodes[index]), float(self.arrivals.repairs_s[index])
        places = self.places
        count = min(count, model.nodes - places.missing)
        places.missing += count
        stays_out = self.offenders.stays_out(node, now_s)
        for _ in range(count):
            begin_s = now_s
            if self.crews:
                begin_s = max(now_s, heappop(self.crews))
                heappush(self.crews, begin_s + repair_s)
            if not stays_out:
                heappush(self.heap, (begin_s + repair_s, REPAIRED, 0, 0.0))
            if places.free:
                places.free -= 1
                if model.replace_s:
                    places.coming += 1
                    heappush(self.heap, (now_s + model.replace_s, READY, 0, 0.0))
                else:
                    places.ready += 1

    def _inject(self, index: int, now_s: float, since_s: float) -> None:
        """A fault stops the job. ``since_s``: since when the state is wrong; infinite when it is not."""
        self._settle(now_s)
        kind = int(self.arrivals.kinds[index])
        fault, need = self.model.faults[kind], self.needs[kind]
        if self.running:
            self._cut(now_s)
        if fault.nodes:
            self._take(fault.nodes, index, now_s)
        if now_s < self.way.down_until_s:  # the job is down already, but its state may be lost now
            if need > self.way.need:
                self._lose(fault, need, now_s, since_s)
            return
        held = HELD if self.running else self.way.need
        if self.running:
            self.running = False
            if need == HELD and not fault.announced:
                self.counts.lost["rework"] += self.stretches.shorten(0.5 * self.model.step_s)
        else:
            self._book(now_s)
        self.counts.recoveries += 1
        self.from_s = now_s + fault.detect_s
        self.way = WayBack(now_s, self.from_s)
        self.counts.lost["detect"] += fault.detect_s
        self._lose(fault, max(need, held), now_s, since_s)
        heappush(self.heap, (self.from_s, ASK, 0, now_s))

    def _lose(self, fault: FaultClass, need: int, now_s: float, since_s: float) -> None:
        """Go back to the newest copy that is left, unless peers hold the state, or an announced fault waited for a copy."""
        self.way.need = need
        if fault.announced:
            self.points = [(now_s, now_s)] * len(self.points)
        elif need != HELD:
            self._roll_back(need, since_s)

    def _roll_back(self, need: int, since_s: float) -> None:
        best, found = need, (-1.0, 0.0)
        for tier in range(need, len(self.points)):
            point = self.points[tier]
            if point[0] > since_s:
                made_s = self.stretches.point(tier, since_s)
                point = (made_s, made_s + self.schedules[tier].blocked_s if made_s > 0.0 else 0.0)
            if point[0] > found[0]:
                best, found = tier, point
        self.counts.rollbacks += 1
        self.way.need = best
        self.counts.lost["rework"] += self.stretches.cut_back(found[1])
        self.points = [point if point[0] < found[0] else found for point in self.points]

    # ---- the way back --------------------------------------------------------------------------------------------------------------------

    def _ask(self, now_s: float) -> None:
        """Ask the recovery policy for the next members. When the state is lost, all processes start again first."""
        way, places = self.way, self.places
        answer = self.recovery.form(way.need == HELD, places.missing, places.ready, now_s - way.fault_s)
        if answer.action == RESTART and way.need == HELD:
            self._roll_back(len(self.points) - 1, math.inf)
        if way.need != HELD and not way.restarted:
            way.restarted = True
            heappush(self.heap, (now_s + self.model.restart_s, ASK, 0, way.fault_s))
        elif answer.action == FORM:
            self._book(now_s)
            way.waiting = False
            back_s = self.model.reform_s if way.need == HELD else self.model.tiers[way.need].restore_s
            way.up_s = now_s + back_s + (self.model.join_s if answer.joined else 0.0)
            places.join(answer.joined)
        else:
            self._book(now_s)
            way.waiting = True
            if answer.wait_s < math.inf:
                heappush(self.heap, (now_s + answer.wait_s + ROUNDING_S, ASK, 0, way.fault_s))

    def _book(self, now_s: float) -> None:
        """Book the time until now: the job was on its way back, or waited."""
        name = "provision" if self.way.waiting else "reform" if self.way.need == HELD else "restore"
        self.counts.lost[name] += now_s - self.from_s
        self.from_s = now_s

    def _settle(self, now_s: float) -> None:
        """Let training go on if that was due by now. A state from a copy counts as just copied."""
        way = self.way
        if self.running or now_s < way.up_s:
            return
        self._book(way.up_s)
        if way.need != HELD:
            self.next_s = [way.up_s + at.interval_s - at.blocked_s for at in self.schedules]
        self.running, self.from_s, way.up_s = True, way.up_s, math.inf

    def _cut(self, now_s: float) -> None:
        """End a stretch of training. A copy that is not safe yet is given up, and requested again at once."""
        begin_s, firsts = self.from_s, []
        for tier, at in enumerate(self.schedules):
            first_s = max(self.next_s[tier], begin_s)
            firsts.append(first_s)
            if first_s < now_s:
                last_s = first_s + (math.ceil((now_s - first_s) / at.interval_s) - 1) * at.interval_s
                safe = math.floor((now_s - at.latency_s - first_s) / at.interval_s)
                if safe >= 0:
                    point_s = first_s + safe * at.interval_s
                    self.points[tier] = point_s, point_s + at.blocked_s
                self.next_s[tier] = last_s + at.interval_s if last_s + at.latency_s <= now_s else now_s
        absent = min(1.0, self.places.missing * self.model.replica_nodes / self.model.nodes)
        self.stretches.add(begin_s, now_s, 1.0 - absent, tuple(firsts))
        self.from_s = now_s

    def _outcome(self, end_s: float) -> FleetOutcome:
        self._settle(end_s)
        if self.running:
            self._cut(end_s)
        elif end_s < self.way.down_until_s:
            self.counts.lost["detect"] -= self.way.down_until_s - end_s
        else:
            self._book(end_s)
        found, counts, names = self.arrivals, self.counts, [fault.name for fault in self.model.faults]
        slow = (found.slow_from_s, found.slow_until_s, found.slow_severity)
        shares, saves = shares_of(self.stretches, counts.lost, slow, end_s or 1.0)
        return FleetOutcome(
            shares=shares,
            counts=dict(zip(names, counts.faults, strict=True)),
            saves={tier.name: count for tier, count in zip(self.model.tiers, saves, strict=True)},
            recoveries=counts.recoveries,
            rollbacks=counts.rollbacks,
            events=counts.events,
            asked=self.recovery.asked + len(self.schedules),
            kept_out=tuple(sorted(self.offenders.out)),
            complete_s=end_s,
        )


@dataclass(slots=True)
class TallyStretches:
    """Stretches [begin, end) by time that still count. ``present``: the share of the nodes that trained in each. Copies to tier j were
    requested at ``firsts[j]`` and after every interval from then on.
    """

    schedules: Sequence[Schedule]
    begin: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    present: list[float] = field(default_factory=list)
    firsts: list[tuple[float, ...]] = field(default_factory=list)
    absent: float = 0.0

    def add(self, begin_s: float, end_s: float, present: float, firsts: tuple[float, ...]) -> None:
        """The job ran from ``begin_s`` to ``end_s``. The time of missing ranks is lost whether the stretch is kept or not."""
        self.begin.append(begin_s)
        self.end.append(end_s)
        self.present.append(present)
        self.firsts.append(firsts)
        self.absent += (end_s - begin_s) * (1.0 - present)

    def shorten(self, lost_s: float) -> float:
        """Drop ``lost_s`` at the end of the last stretch. Returns the loss in seconds of the whole fleet."""
        if not self.end:
            return 0.0
        lost_s = min(lost_s, self.end[-1] - self.begin[-1])
        self.end[-1] -= lost_s
        return lost_s * self.present[-1]

    def cut_back(self, until_s: float) -> float:
        """Drop all stretches after ``until_s``. Returns the loss in seconds of the whole fleet."""
        lost = 0.0
        while self.end and self.begin[-1] >= until_s:
            self.firsts.pop()
            lost += (self.end.pop() - self.begin.pop()) * self.present.pop()
        if self.end and self.end[-1] > until_s:
            lost += (self.end[-1] - until_s) * self.present[-1]
            self.end[-1] = until_s
        return lost

    def point(self, tier: int, limit_s: float) -> float:
        """The request time, at most ``limit_s``, of the newest copy to ``tier`` that became safe; 0 when there is none."""
        at = self.schedules[tier]
        for end_s, firsts in zip(reversed(self.end), reversed(self.firsts), strict=True):
            last_s = min(limit_s, end_s - at.latency_s)
            if firsts[tier] <= last_s:
                return firsts[tier] + math.floor((last_s - firsts[tier]) / at.interval_s) * at.interval_s
        return 0.0

    def blocked(self) -> tuple[Floats, list[float]]:
        """(seconds for which copies stopped each stretch, [stretches]; number of copies, by tier). The first never exceed the stretch."""
        begin, end = np.array(self.begin), np.array(self.end)
        total, counts = np.zeros(len(begin)), []
        firsts = np.array(self.firsts).reshape(len(begin), len(self.schedules))
        for tier, at in enumerate(self.schedules):
            first = firsts[:, tier]
            with np.errstate(invalid="ignore"):
                number = np.where(first < end, np.ceil((end - first) / at.interval_s), 0.0)
                last = first + (number - 1) * at.interval_s
            late = np.where(number > 0, np.maximum(0.0, last + at.blocked_s - end), 0.0)
            total += number * at.blocked_s - late
            counts.append(float(number.sum()))
        return np.minimum(total, end - begin), counts

    def slowed(self, begin_s: Floats, end_s: Floats, severity: Floats) -> Floats:
        """Share of each stretch that is lost to slow spells [begin_s, end_s). A step ``severity`` times as long loses 1 - 1 / severity."""
        begin, end = np.array(self.begin), np.array(self.end)
        if not len(begin_s) or not len(begin):
            return np.zeros(len(begin))
        loss = 1.0 - 1.0 / severity
        lengths = np.concatenate(([0.0], np.cumsum((end_s - begin_s) * loss)))
        edges, values = np.empty(2 * len(begin_s)), np.empty(2 * len(begin_s))
        edges[0::2], edges[1::2], values[0::2], values[1::2] = begin_s, end_s, lengths[:-1], lengths[1:]
        lost = np.interp(end, edges, values) - np.interp(begin, edges, values)
        return np.asarray(np.divide(lost, end - begin, out=np.zeros(len(begin)), where=end > begin))


def shares_of(
    stretches: TallyStretches, lost: dict[str, float], slow: tuple[Floats, Floats, Floats], span_s: float
) -> tuple[dict[str, float], list[float]]:
    """(shares of the wall clock x nodes that add up to 1, copies by tier) of a run of ``span_s``."""
    blocked, saves = stretches.blocked()
    length, present = np.array(stretches.end) - np.array(stretches.begin), np.array(stretches.present)
    slowed = stretches.slowed(*slow)
    work = (length - blocked) * present
    found = {
        "goodput": float(work @ (1.0 - slowed)),
        "straggler_wait": float(work @ slowed),
        "checkpoint_stall": float(blocked @ present),
        **lost,
    }
    found["provision"] += stretches.absent
    return {name: seconds / span_s for name, seconds in found.items()}, saves
