"""One run of a whole fleet, from fault to fault.

Between two events nothing changes but the time: checkpoints in a quiet stretch are counted, not stepped through, and nothing is kept for
each node or step. The loop is handed the live policies (see :mod:`fleet.simulation.questions`); their answers hold until something happens.

What a fault costs: ``detect`` (nothing runs, so nothing else can stop the job); then the way back, ``reform`` where peers hold the state,
else ``restore`` with the start of all processes, which another fault begins anew; ``provision``, while the policy waits for nodes; and
``rework``, the steps since the copy that is gone back to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush

from fleet.protocol.ports import IntervalPolicy, RecoveryPolicy
from fleet.simulation.fleet_arrivals import Arrivals
from fleet.simulation.fleet_model import HELD, FaultClass, FleetModel, FleetOutcome, LemonPolicy, Partial
from fleet.simulation.fleet_tally import TallyStretches, shares_of
from fleet.simulation.questions import FORM, RESTART, Recovery, schedule

REPAIRED, READY, NOTICED, ASK = range(4)
ROUNDING_S = 1e-6
"""Times late in a run are rounded: a wait that is over must not seem to have a moment left."""


class FleetRun:
    """A simulated run.

    Args:
        model, arrivals: what it is, and what strikes it.
        recovery, intervals: live policies; one interval policy for each tier of the model.
        lemons: whether repeat offenders stay out; None: nobody does.
        partial: set its ``stop`` to end at the next fault.

    Attributes:
        injected: indices of the arrivals that found somebody in their place.
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
        self.model, self.arrivals, self.partial, self.lemons = model, arrivals, partial, lemons
        self.recovery = Recovery(recovery, model.nodes, model.min_nodes)
        restarting = self.recovery.restarts
        self.needs = [model.needed(fault, restarting) for fault in model.faults]
        rates = [model.tier_rate_per_s(tier, restarting) for tier in range(len(intervals))]
        self.schedules = [schedule(policy, model, tier, rates[tier]) for tier, policy in enumerate(intervals)]
        self.stretches = TallyStretches(self.schedules)
        self.points = [(0.0, 0.0)] * len(self.schedules)  # of each tier: the newest safe copy was asked for, and what is kept until
        self.next_s = [at.interval_s for at in self.schedules]
        self.missing, self.ready, self.coming, self.free = 0, 0, 0, model.spares
        self.running, self.waiting, self.restarted = True, False, False
        self.from_s = self.injected_s = self.down_until_s = 0.0
        self.up_s = math.inf
        self.need = HELD
        self.heap: list[tuple[float, int, int, float]] = []
        self.crews = [0.0] * (model.crews or 0)
        self.lost = dict.fromkeys(("rework", "detect", "reform", "restore", "provision"), 0.0)
        self.counts = [0] * len(model.faults)
        self.injected: list[int] = []
        self.recoveries = self.rollbacks = self.events = 0
        self.failures: dict[int, list[float]] = {}
        self.kept_out: set[int] = set()

    def run(self) -> FleetOutcome:
        """From 0 to the end of the run, or to where it was interrupted."""
        found, model, heap, partial = self.arrivals, self.model, self.heap, self.partial
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
            if fault.nodes and (chance * model.nodes < self.missing or node in self.kept_out):
                continue  # it would have struck a place where nobody is
            self.events += 1
            self.counts[kind] += 1
            self.injected.append(index)
            if fault.notice_s:
                heappush(heap, (now_s + fault.notice_s, NOTICED, index, now_s))
            else:
                self._inject(index, now_s, math.inf)
        while heap and heap[0][0] < end_s:
            self._happen(*heappop(heap))
        return self._outcome(end_s)

    # ---- what happens --------------------------------------------------------------------------------------------------------------------

    def _happen(self, now_s: float, what: int, index: int, since_s: float) -> None:
        """A node is repaired, a spare has arrived, a corruption is noticed, or a recovery policy is to be asked."""
        self.events += 1
        if what == REPAIRED:
            if self.missing <= self.ready + self.coming:
                self.free += 1
            else:
                self._offer(now_s)
        elif what == ASK:
            if since_s == self.injected_s and not self.running and self.up_s == math.inf:
                self._ask(now_s)
        elif what == READY:
            self.coming -= 1
            self._offer(now_s)
        else:
            self._inject(index, now_s, since_s)

    def _offer(self, now_s: float) -> None:
        """A node can take an empty place: at a step boundary, with the others who are on their way, or because it was waited for."""
        self.ready += 1
        self._settle(now_s)
        if self.running:
            joined = self.recovery.grow(self.missing, self.ready)
            if joined:
                self._cut(now_s)
                self._join(joined)
        elif self.up_s < math.inf:
            self._join(min(self.ready, self.missing))
        elif self.waiting:
            self._ask(now_s)

    def _join(self, count: int) -> None:
        self.missing -= count
        self.ready -= count

    def _take(self, count: int, index: int, now_s: float) -> None:
        """Nodes go to repair; spares are called for them. A node that stays out is never back."""
        model, node, repair_s = self.model, int(self.arrivals.nodes[index]), float(self.arrivals.repairs_s[index])
        count = min(count, model.nodes - self.missing)
        self.missing += count
        stays_out = self._judged(node, now_s)
        for _ in range(count):
            begin_s = now_s
            if self.crews:
                begin_s = max(now_s, heappop(self.crews))
                heappush(self.crews, begin_s + repair_s)
            if not stays_out:
                heappush(self.heap, (begin_s + repair_s, REPAIRED, 0, 0.0))
            if self.free:
                self.free -= 1
                if model.replace_s:
                    self.coming += 1
                    heappush(self.heap, (now_s + model.replace_s, READY, 0, 0.0))
                else:
                    self.ready += 1

    def _judged(self, node: int, now_s: float) -> bool:
        if self.lemons is None or node < 0:
            return False
        failures = self.failures.setdefault(node, [])
        failures.append(now_s)
        if self.lemons.judge(node, failures, now_s).action != "keep_out":
            return False
        self.kept_out.add(node)
        return True

    def _inject(self, index: int, now_s: float, since_s: float) -> None:
        """The job stops. ``since_s``: its state is wrong since then, infinite when it is not."""
        self._settle(now_s)
        kind = int(self.arrivals.kinds[index])
        fault, need = self.model.faults[kind], self.needs[kind]
        if self.running:
            self._cut(now_s)
        if fault.nodes:
            self._take(fault.nodes, index, now_s)
        if now_s < self.down_until_s:  # it is down already: nothing stops, but the state may be gone now
            if need > self.need:
                self._lose(fault, need, now_s, since_s)
            return
        if self.running:
            self.running, self.need = False, HELD
            if need == HELD and not fault.announced:
                self.lost["rework"] += self.stretches.shorten(0.5 * self.model.step_s)
        else:
            self._book(now_s)
        self.recoveries += 1
        self.injected_s, self.down_until_s, self.up_s = now_s, now_s + fault.detect_s, math.inf
        self.from_s, self.waiting, self.restarted = self.down_until_s, False, False
        self.lost["detect"] += fault.detect_s
        self._lose(fault, max(need, self.need), now_s, since_s)
        heappush(self.heap, (self.down_until_s, ASK, 0, now_s))

    def _lose(self, fault: FaultClass, need: int, now_s: float, since_s: float) -> None:
        """Go back to the newest copy that is left, unless peers hold the state, or the fault waited until a copy was made."""
        self.need = need
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
        self.rollbacks += 1
        self.need = best
        self.lost["rework"] += self.stretches.cut_back(found[1])
        self.points = [point if point[0] < found[0] else found for point in self.points]

    # ---- the way back --------------------------------------------------------------------------------------------------------------------

    def _ask(self, now_s: float) -> None:
        """Ask the recovery policy who goes on. When the state is lost all processes start again first."""
        answer = self.recovery.form(self.need == HELD, self.missing, self.ready, now_s - self.injected_s)
        if answer.action == RESTART and self.need == HELD:
            self._roll_back(len(self.points) - 1, math.inf)
        if self.need != HELD and not self.restarted:
            self.restarted = True
            heappush(self.heap, (now_s + self.model.restart_s, ASK, 0, self.injected_s))
        elif answer.action == FORM:
            self._book(now_s)
            self.waiting = False
            back_s = self.model.reform_s if self.need == HELD else self.model.tiers[self.need].restore_s
            self.up_s = now_s + back_s + (self.model.join_s if answer.joined else 0.0)
            self._join(answer.joined)
        else:
            self._book(now_s)
            self.waiting = True
            if answer.wait_s < math.inf:
                heappush(self.heap, (now_s + answer.wait_s + ROUNDING_S, ASK, 0, self.injected_s))

    def _book(self, now_s: float) -> None:
        """The job was on its way back, or waited, until now."""
        name = "provision" if self.waiting else "reform" if self.need == HELD else "restore"
        self.lost[name] += now_s - self.from_s
        self.from_s = now_s

    def _settle(self, now_s: float) -> None:
        """Training has gone on if that was due by now. A state that came from a copy counts as just copied."""
        if self.running or now_s < self.up_s:
            return
        self._book(self.up_s)
        if self.need != HELD:
            self.next_s = [self.up_s + at.interval_s - at.blocked_s for at in self.schedules]
        self.running, self.from_s, self.up_s = True, self.up_s, math.inf

    def _cut(self, now_s: float) -> None:
        """End a stretch of training. A copy that is not safe yet is given up, and asked for again at once."""
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
        absent = min(1.0, self.missing * self.model.replica_nodes / self.model.nodes)
        self.stretches.add(begin_s, now_s, 1.0 - absent, tuple(firsts))
        self.from_s = now_s

    def _outcome(self, end_s: float) -> FleetOutcome:
        self._settle(end_s)
        if self.running:
            self._cut(end_s)
        elif end_s < self.down_until_s:
            self.lost["detect"] -= self.down_until_s - end_s
        else:
            self._book(end_s)
        found, names = self.arrivals, [fault.name for fault in self.model.faults]
        slow = (found.slow_from_s, found.slow_until_s, found.slow_severity)
        shares, saves = shares_of(self.stretches, self.lost, slow, end_s or 1.0)
        return FleetOutcome(
            shares=shares,
            counts=dict(zip(names, self.counts, strict=True)),
            saves={tier.name: count for tier, count in zip(self.model.tiers, saves, strict=True)},
            recoveries=self.recoveries,
            rollbacks=self.rollbacks,
            events=self.events,
            asked=self.recovery.asked + len(self.schedules),
            kept_out=tuple(sorted(self.kept_out)),
            complete_s=end_s,
        )
