"""The ranks' measured times, collected until the policy has seen them, and the earlier decisions on slow ranks."""

from __future__ import annotations

from collections import deque

from fleet.protocol.decisions import Prices
from fleet.protocol.events import StepsTimed
from fleet.protocol.ports import StragglerPolicy
from fleet.protocol.records import DecisionMade, Record
from fleet.protocol.slowness import ACTIONS, RankTimes, StepTime, Timings
from fleet.protocol.types import Member, View

LATE_S = 1.0
"""Seconds after which a step is judged without the ranks that have not reported it."""

STEPS_KEPT = 256
REVIEW_S = 10.0


class Stragglers:
    """Times of the present view's steps until the policy has seen them, and the policy's earlier decisions.

    ``speeds``: those of ranks below full speed, by the last decision to rebalance. ``shunned``: evicted nodes, and until when their
    processes stay out: as long as the slowness was expected to last. Both are rebuilt from the journal. The policy's knowledge of times is
    not: it learns again after a restart. ``steps_s``: seconds of the last steps.
    """

    def __init__(self, policy: StragglerPolicy | None) -> None:
        self.policy = policy
        self.speeds: dict[Member, float] = {}
        self.shunned: dict[str, float] = {}
        self.steps_s: deque[float] = deque(maxlen=STEPS_KEPT)
        self._generation = self._judged = -1
        self._steps: dict[int, tuple[float, dict[Member, StepTime]]] = {}
        self.total = 0
        self.acted_s: list[float] = []
        self.review_s = 0.0
        self.said: tuple[str, bool] = ("", False)

    # ---- measured times ------------------------------------------------------------------------------------------------------------------

    def take(self, event: StepsTimed, view: View | None, now_s: float) -> None:
        """Note one node's report. Times of another view are useless, since its ranks had other shards."""
        if self.policy is None or view is None or event.generation != view.generation:
            return
        if self._generation != view.generation:
            self._generation, self._steps, self._judged = view.generation, {}, -1
        self.total = event.total
        for times in event.ranks:
            for step, time in _by_step(times):
                if step > self._judged:
                    self._steps.setdefault(step, (now_s, {}))[1][times.member] = time

    def timings(self, view: View, now_s: float) -> Timings | None:
        """The steps that are complete, or old. Each step is returned once."""
        if self._generation != view.generation:
            return None
        ready: list[int] = []
        for step in sorted(self._steps):
            first_s, known = self._steps[step]
            if len(known) < len(view.members) and now_s - first_s < LATE_S:
                break
            ready.append(step)
        if not ready:
            return None
        self._judged = ready[-1]
        columns = [self._steps.pop(step)[1] for step in ready]
        self.steps_s.extend(max(time.own_s for time in known.values()) for known in columns)
        rows = tuple(tuple(known.get(member) for known in columns) for member in view.members)
        return Timings(view.generation, tuple(ready), view.members, rows)

    def admits(self, node: str, now_s: float) -> bool:
        """Whether processes of ``node`` may be in the next view, if there are enough others."""
        return now_s >= self.shunned.get(node, now_s)

    # ---- after a restart -----------------------------------------------------------------------------------------------------------------

    def replay(self, record: Record) -> None:
        """Restore a journalled decision."""
        if not isinstance(record, DecisionMade) or record.policy != "straggler" or record.action not in ACTIONS:
            return
        self.acted_s.append(record.at_s)
        prices = record.payload if isinstance(record.payload, Prices) else Prices({})
        self.shunned |= dict(prices.shunned)
        if record.action == "rebalance":
            self.speeds = {Member(*names): speed for names, speed in prices.speeds}


def _by_step(times: RankTimes) -> list[tuple[int, StepTime]]:
    waited_us = times.waited_us or (0,) * len(times.steps)
    columns = (times.compute_us, times.data_us, times.network_us, times.fixed_us, waited_us)
    seconds = zip(*([us / 1e6 for us in column] for column in columns), strict=True)
    return [(step, StepTime(shards, *each)) for step, shards, each in zip(times.steps, times.shards, seconds, strict=True)]
