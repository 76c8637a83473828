"""The model of ``fleet.simulation.fleet_run`` in SimPy. The job and the faults have a process each, and so has each tier and each absent
node.

Every copy is an event, and none is skipped. With the same faults, the model must end with the same shares.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any

import simpy

from fleet.protocol.ports import IntervalPolicy, RecoveryPolicy
from fleet.simulation.fleet_arrivals import Arrivals
from fleet.simulation.fleet_model import HELD, SHARES, FleetModel
from fleet.simulation.fleet_run import ROUNDING_S
from fleet.simulation.questions import FORM, RESTART, Answer, Recovery, schedule

Steps = Generator[Any, Any, None]


class SimpyFleet:
    """A run; without slow spells, crews, lemons, late notice."""

    def __init__(self, model: FleetModel, arrivals: Arrivals, recovery: RecoveryPolicy, intervals: Sequence[IntervalPolicy]) -> None:
        self.model, self.arrivals, self.env = model, arrivals, simpy.Environment()
        self.recovery = Recovery(recovery, model.nodes, model.min_nodes)
        restarting = self.recovery.restarts
        self.needs = [model.needed(fault, restarting) for fault in model.faults]
        self.at = [schedule(policy, model, i, model.tier_rate_per_s(i, restarting)) for i, policy in enumerate(intervals)]
        self.free, self.missing, self.ready, self.coming = model.spares, 0, 0, 0
        self.points, self.kept = [0.0] * len(self.at), [(0.0, 0.0)] * len(self.at)
        self.next = [at.interval_s for at in self.at]
        self.shares = dict.fromkeys(SHARES, 0.0)
        self.work = self.stall = self.begin = 0.0
        self.requests: list[list[float]] = [[] for _ in self.at]
        self.up, self.waiting, self.need = True, False, HELD
        self.down_until = self.since = self.injected = 0.0

    def run(self) -> dict[str, float]:
        """Shares, as ``Outcome.shares``."""
        self.job = self.env.process(self._job())
        self.env.process(self._faults())
        self.env.run(until=self.model.duration_s)
        if self.up:
            self._cut()
        elif self.env.now < self.down_until:
            self.shares["detect"] -= self.down_until - self.env.now
        else:
            self._book()
        self.shares |= {"goodput": self.work, "checkpoint_stall": self.stall}
        return {name: seconds / self.model.duration_s for name, seconds in self.shares.items()}

    # ---- faults --------------------------------------------------------------------------------------------------------------------------

    def _faults(self) -> Steps:
        found = self.arrivals
        for index in range(len(found)):
            yield self.env.timeout(found.times_s[index] - self.env.now)
            fault = self.model.faults[found.kinds[index]]
            if not (fault.nodes and found.chances[index] * self.model.nodes < self.missing):
                self.job.interrupt(index)

    def _away(self, repair_s: float) -> Steps:
        yield self.env.timeout(repair_s)
        if self.missing <= self.ready + self.coming:
            self.free += 1
        else:
            self.ready += 1
            self.job.interrupt(-1)

    def _fetched(self) -> Steps:
        yield self.env.timeout(self.model.replace_s)
        self.coming -= 1
        self.ready += 1
        self.job.interrupt(-1)

    def _take(self, index: int) -> None:
        nodes = min(self.model.faults[self.arrivals.kinds[index]].nodes, self.model.nodes - self.missing)
        self.missing += nodes
        for _ in range(nodes):
            self.env.process(self._away(float(self.arrivals.repairs_s[index])))
            if self.free:
                self.free -= 1
                if self.model.replace_s:
                    self.coming += 1
                    self.env.process(self._fetched())
                else:
                    self.ready += 1

    # ---- the job -------------------------------------------------------------------------------------------------------------------------

    def _job(self) -> Steps:
        index = yield from self._train()
        while True:
            self._stop(index)
            index = yield from self._come_back()
            if index is None:
                index = yield from self._train()

    def _train(self) -> Generator[Any, Any, int]:
        """Train until a fault; returns its number. A node that is ready joins between two steps."""
        while True:
            self.begin, self.requests = self.env.now, [[] for _ in self.at]
            copies = [self.env.process(self._copies(tier)) for tier, at in enumerate(self.at) if at.interval_s < math.inf]
            try:
                yield self.env.event()
            except simpy.Interrupt as interrupt:
                for each in copies:
                    each.interrupt()
                joined = self.recovery.grow(self.missing, self.ready) if interrupt.cause < 0 else 0
                self._cut(self._half_step(interrupt.cause))
                if interrupt.cause >= 0:
                    return int(interrupt.cause)
                self._join(joined)

    def _copies(self, tier: int) -> Steps:
        at = self.at[tier]
        try:
            yield self.env.timeout(max(0.0, self.next[tier] - self.env.now))
            while True:
                request = self.env.now
                self.requests[tier].append(request)
                self.next[tier] = -1.0
                yield self.env.timeout(at.latency_s)
                self.points[tier], self.next[tier] = request, request + at.interval_s
                yield self.env.timeout(at.interval_s - at.latency_s)
        except simpy.Interrupt:
            return

    def _blocked(self, until: float) -> float:
        listed = zip(self.requests, self.at, strict=True)
        total = sum(min(at.blocked_s, until - request) for requests, at in listed for request in requests if request < until)
        return min(total, until - self.begin)

    def _half_step(self, index: int) -> float:
        """Seconds of the step in flight that the fault takes when peers hold the state."""
        kind = self.arrivals.kinds[index]
        held = index >= 0 and self.needs[kind] == HELD and not self.model.faults[kind].announced
        return min(0.5 * self.model.step_s, self.env.now - self.begin) if held else 0.0

    def _cut(self, lost_s: float = 0.0) -> None:
        now, present = self.env.now, 1.0 - min(1.0, self.missing * self.model.replica_nodes / self.model.nodes)
        for tier, at in enumerate(self.at):
            if self.next[tier] < 0.0:
                self.next[tier] = now
            if self.points[tier] >= self.begin and self.requests[tier]:
                until = min(self.points[tier] + at.blocked_s, now - lost_s)
                stall = self._blocked(until)
                self.kept[tier] = self.work + (until - self.begin - stall) * present, self.stall + stall * present
        stall = self._blocked(now - lost_s)
        self.shares["provision"] += (now - self.begin) * (1 - present)
        self.shares["rework"] += lost_s * present
        self.work += (now - lost_s - self.begin - stall) * present
        self.stall += stall * present

    def _join(self, count: int) -> None:
        self.missing -= count
        self.ready -= count

    # ---- recovery ------------------------------------------------------------------------------------------------------------------------

    def _stop(self, index: int) -> None:
        """A fault stops the job, or begins its recovery anew."""
        fault, need = self.model.faults[self.arrivals.kinds[index]], self.needs[self.arrivals.kinds[index]]
        if self.up:
            self.up, self.need = False, HELD
        self._take(index)
        self._lose(fault.announced, max(need, self.need))
        self.injected, self.down_until = self.env.now, self.env.now + fault.detect_s
        self.shares["detect"] += fault.detect_s

    def _lose(self, announced: bool, need: int) -> None:
        self.need = need
        if announced:
            self.points = [self.env.now] * len(self.points)
            self.kept = [(self.work, self.stall)] * len(self.kept)
        elif need != HELD:
            self._roll_back(need)

    def _roll_back(self, need: int) -> None:
        best = max(range(need, len(self.points)), key=lambda tier: self.points[tier])
        point, kept = self.points[best], self.kept[best]
        self.need = best
        self.shares["rework"] += self.work + self.stall - sum(kept)
        self.work, self.stall = kept
        newer = [each > point for each in self.points]
        self.points = [min(each, point) for each in self.points]
        self.kept = [kept if late else each for late, each in zip(newer, self.kept, strict=True)]

    def _come_back(self) -> Generator[Any, Any, int | None]:
        """From a fault until the job trains again: None; or until the next fault: its number."""
        yield from self._notice()
        self.since, self.waiting = self.env.now, False
        answer = self._asked()
        if answer.action == RESTART and self.need == HELD:
            self._roll_back(len(self.points) - 1)
        if self.need != HELD:
            if (fault := (yield from self._pass(self.model.restart_s))) is not None:
                return fault
            answer = self._asked()
        while answer.action != FORM:
            self._book()
            self.waiting = True
            if (fault := (yield from self._pass(answer.wait_s + ROUNDING_S, until_ready=True))) is not None:
                return fault
            answer = self._asked()
        self._book()
        self.waiting = False
        self._join(answer.joined)
        back_s = self.model.reform_s if self.need == HELD else self.model.tiers[self.need].restore_s
        if (fault := (yield from self._pass(back_s + (self.model.join_s if answer.joined else 0.0), join=True))) is not None:
            return fault
        self._book()
        if self.need != HELD:
            self.next = [self.env.now + at.interval_s - at.blocked_s for at in self.at]
        self.up = True
        return None

    def _asked(self) -> Answer:
        return self.recovery.form(self.need == HELD, self.missing, self.ready, self.env.now - self.injected)

    def _notice(self) -> Steps:
        while self.env.now < self.down_until:
            try:
                yield self.env.timeout(self.down_until - self.env.now)
            except simpy.Interrupt as interrupt:
                if interrupt.cause >= 0:
                    kind = self.arrivals.kinds[interrupt.cause]
                    self._take(interrupt.cause)
                    if self.needs[kind] > self.need:
                        self._lose(self.model.faults[kind].announced, self.needs[kind])

    def _pass(self, seconds: float, until_ready: bool = False, join: bool = False) -> Generator[Any, Any, int | None]:
        """Pass time of the recovery; a fault ends it, and is returned."""
        end_s = self.env.now + seconds
        while self.env.now < end_s:
            try:
                yield self.env.timeout(end_s - self.env.now) if end_s < math.inf else self.env.event()
            except simpy.Interrupt as interrupt:
                if interrupt.cause >= 0:
                    self._book()
                    return int(interrupt.cause)
                if join:
                    self._join(min(self.ready, self.missing))
                if until_ready:
                    return None
        return None

    def _book(self) -> None:
        name = "provision" if self.waiting else "reform" if self.need == HELD else "restore"
        self.shares[name] += self.env.now - self.since
        self.since = self.env.now
