"""Checkers of what is done about slow ranks."""

from __future__ import annotations

from fleet.protocol.causes import Evicted, TooSlow
from fleet.protocol.records import DecisionMade, ProcessLost, Record
from fleet.protocol.slowness import ACTIONS
from fleet.settings.run import WINDOW_S
from fleet.simulation.checker import InvariantChecker
from fleet.simulation.ranks import SimRank
from fleet.simulation.stage import Stage


class HealthyStay(InvariantChecker):
    """No rank is evicted as slow unless it was slow at some time. Of an evicted node, at least one rank was."""

    name = "healthy stay"

    def __init__(self, world: Stage) -> None:
        super().__init__(world)
        self._action = ""

    def record(self, record: Record) -> None:
        if isinstance(record, DecisionMade) and record.policy == "straggler":
            self._action = record.action
        elif isinstance(record, ProcessLost) and isinstance(record.cause, Evicted) and isinstance(record.cause.why, TooSlow):
            rank = self.process(record.member)
            self.require(rank is not None and self._guilty(rank), f"{record.member} was never slow and is lost: {record.cause}")

    def _guilty(self, rank: SimRank) -> bool:
        beside = [other for other in self.world.train.processes if other.node is rank.node] if self._action == "evict" else [rank]
        return any(other.pace.slow for other in beside)


class ChangesBounded(InvariantChecker):
    """The view changes because of slow ranks no more often than the settings allow."""

    name = "changes bounded"

    def __init__(self, world: Stage) -> None:
        super().__init__(world)
        self._acted_s: list[float] = []

    def record(self, record: Record) -> None:
        if not isinstance(record, DecisionMade) or record.policy != "straggler" or record.action not in ACTIONS:
            return
        limits = self.world.settings.straggler
        self._acted_s = [at_s for at_s in [*self._acted_s, record.at_s] if record.at_s - at_s < WINDOW_S]
        often = f"{len(self._acted_s)} view changes for slow ranks in {WINDOW_S:g} s"
        self.require(len(self._acted_s) <= limits.changes, f"{often}, limit {limits.changes}")
