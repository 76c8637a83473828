"""Invariants at the end of every simulated run: the last state is kept, and the code behind the loop has run on it."""

from __future__ import annotations

from fleet.protocol.records import COMPLETED, STOPPED, CheckpointRecord, Committed, Record, RunEnded, ViewPublished
from fleet.protocol.types import StateId, View
from fleet.simulation.checker import InvariantChecker
from fleet.simulation.links import HEAD
from fleet.simulation.ranks import SimRank
from fleet.simulation.stage import Stage

LATELY_S = 30.0
"""Seconds by which a cut may delay messages."""


class FinalKept(InvariantChecker):
    """A completed run has its final checkpoint, and had it before any rank went on behind the loop."""

    name = "kept"

    def __init__(self, world: Stage) -> None:
        super().__init__(world)
        self._durable: set[StateId] = set()
        self._withdrawn: set[StateId] = set()

    def record(self, record: Record) -> None:
        if isinstance(record, CheckpointRecord) and record.level == "store" and record.phase in ("durable", "withdrawn"):
            (self._durable if record.phase == "durable" else self._withdrawn).add(record.state)
        elif isinstance(record, RunEnded) and record.status == COMPLETED:
            steps = [state.step for state in self._durable - self._withdrawn]
            self.require(self.world.plan.last in steps, f"the run is completed, and its durable checkpoints are of {sorted(steps)}")

    def behind(self, rank: SimRank) -> None:
        state = rank.protocol.state
        self.require(state is not None and state.step == self.world.plan.last, f"{rank} goes on behind the loop with {state}")
        assert state is not None
        right = rank.layout.corrupt or self.fault_free(rank.layout.weights, state)
        self.require(right and not rank.protocol.dirty, f"{rank} goes on behind the loop with other weights than the fault-free run's")


class InOrder(InvariantChecker):
    """A stopped run ends with a checkpoint of its last commit, or of a later step, unless no rank could have written that.

    The last commit is the last step that all members of its view have taken, whether or not the coordinator has noted it. An untrained
    state does not have to be kept. A loop that hangs does not prevent its process from writing the rank's state.
    """

    name = "in order"

    def __init__(self, world: Stage) -> None:
        super().__init__(world)
        self._durable: set[StateId] = set()
        self._last: StateId | None = None
        self._view: View | None = None

    def _taken(self) -> StateId | None:
        """The last step that all members of the view have taken, if all are there."""
        members = self._view.members if self._view is not None else ()
        there = [rank for rank in self.world.train.processes if rank.alive and rank.named]
        held = [rank.protocol.state for rank in there if rank.member in members]
        states = [state for state in held if state is not None]
        return min(states) if len(states) == len(members) > 0 else None

    def _can_be_written(self) -> bool:
        """Whether a rank with the last commit is reachable at each coordinate, and was for a while; with sharded state, all ranks.

        The store worked, too.
        """
        since_s, store = self.world.faults.asked_s, self.world.store
        ill = max(store.failing_until_s, store.refusing_until_s, store.slow_until_s) >= since_s
        members = self._view.members if self._view is not None else ()
        there = [
            rank for rank in self.world.train.processes if rank.alive and rank.named and rank.member in members and self._answers(rank)
        ]
        clean = [rank for rank in there if not rank.protocol.dirty and rank.protocol.state is not None]
        holders = [
            rank for rank in clean if rank.protocol.state is not None and self._last is not None and rank.protocol.state >= self._last
        ]
        if self.world.settings.spread:
            return not ill and len({rank.protocol.state for rank in holders}) == 1 and len(holders) == len(members)
        return not ill and {rank.member.coordinate for rank in holders} == {member.coordinate for member in members}

    def _answers(self, rank: SimRank) -> bool:
        """Whether the rank can report its state. A loop that hangs within its commit cannot, since the user's code may change the state."""
        still = not rank.still.stopped and rank.still.went_on_s < self.world.faults.asked_s and (rank.protocol.detached or not rank.hung)
        return still and rank.node.alive and rank.node.reachable and not self.world.links.was_cut(rank.end, HEAD, within_s=LATELY_S)

    def record(self, record: Record) -> None:
        match record:
            case CheckpointRecord(level="store", phase="durable", state=state):
                self._durable.add(state)
            case Committed(state=state):
                self._last = state
            case ViewPublished(view=view):
                self._view = view
            case RunEnded(status=status) if status == STOPPED and self._last is not None and self._last.step > 0:
                self._last = max(self._last, self._taken() or self._last)
                newest = max(self._durable, default=StateId(-1, -1))
                kept = f"its last commit is {self._last}, and of its checkpoints {newest} is the last"
                self.require(newest >= self._last or not self._can_be_written(), f"the run was stopped in order; {kept}")


class DoneOnce(InvariantChecker):
    """A completed run has done its task for all ranks: a rank has written the model."""

    name = "done once"

    def __init__(self, world: Stage) -> None:
        super().__init__(world)
        self._did: set[str] = set()

    def did(self, rank: SimRank, key: str) -> None:
        self._did.add(key)

    def record(self, record: Record) -> None:
        if isinstance(record, RunEnded) and record.status == COMPLETED:
            self.require("end/save" in self._did, "the run is completed, and no rank has written the model")
