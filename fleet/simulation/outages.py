"""Invariants under troubles other than a lost rank: the store does not answer, bits flip, hosts are cut off from each other.

The other invariants leave out ranks that the simulator knows to be corrupt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleet.protocol.causes import AgentSilent, DidNotLeave, Evicted, NoHeartbeat, NoProgress, NotReported
from fleet.protocol.levels import STORE
from fleet.protocol.records import CheckpointRecord, ProcessLost, Record
from fleet.protocol.types import Member, StateId, View
from fleet.simulation.checker import Homes, InvariantChecker
from fleet.simulation.links import HEAD
from fleet.simulation.ranks import SimRank
from fleet.simulation.stage import Stage

OF_THE_STORE = frozenset({"store", "store_gone", "store_refuses", "store_slow"})


class Durable(InvariantChecker):
    """A checkpoint that is called durable is in the store, and is right, at that moment and at the end of the run."""

    name = "durable"

    def __init__(self, world: Stage) -> None:
        super().__init__(world)
        self._durable: dict[str, CheckpointRecord] = {}

    def record(self, record: Record) -> None:
        if not isinstance(record, CheckpointRecord) or record.level != STORE:
            return
        if record.phase == "durable":
            self._durable[record.checkpoint] = record
            self._look(record)
        elif record.phase == "withdrawn":
            self._durable.pop(record.checkpoint, None)

    def end(self) -> None:
        for record in self._durable.values():
            self._look(record)

    def _look(self, record: CheckpointRecord) -> None:
        held = self.world.store.holds(record.checkpoint)
        self.require(held is not None, f"{record.checkpoint} is called durable, and the store does not have it")
        right = self.world.flipped or held == self.world.chain.weights(record.state.step)
        self.require(right, f"{record.checkpoint} is called durable, and does not hold the state of {record.state}")


class SavesAlone(InvariantChecker):
    """A store that fails costs checkpoints, and no rank: without other troubles, no rank is lost.

    A network that loses messages is another trouble: heartbeats are not sent again.
    """

    name = "saves alone"

    def record(self, record: Record) -> None:
        if isinstance(record, ProcessLost) and self.world.plan.troubles:
            others = {trouble.kind for trouble in self.world.plan.troubles} - OF_THE_STORE
            unheard = isinstance(record.cause, Evicted) and isinstance(record.cause.why, NoHeartbeat) and self.world.plan.loss > 0
            self.require(bool(others) or unheard, f"{record.member} is lost, and nothing but the store fails: {record.cause}")


class Corruption(InvariantChecker):
    """A wrong value in one replica never gets into a sum that is used, nor into another rank's state, if another replica could tell.

    A rank does not know of its flipped bit. The simulator alone knows that the rank is ``corrupt``.
    """

    name = "corruption"

    def commit(self, rank: SimRank, state: StateId) -> None:
        excused = not self.world.flipped or rank.layout.corrupt  # without a flip, ``Identical`` checks this
        right = excused or self.fault_free(rank.layout.weights, state)
        self.require(right, f"{rank}, which is sound, commits {state} with a value of a corrupt rank")

    def completed(self, view: View, values: Mapping[Member, Any]) -> None:
        state = next(iter(values.values()))[0]
        reported = [value[1] for value in values.values() if value[1] is not None]
        if self.world.flipped and len(reported) == 1 and reported[0] != self.world.chain.weights(state.step):
            self._undecidable(state, alone=len(values) == 1)
        held = {value[1] for value in values.values()}
        unseen = len(values) > 1 and len(held) == 1 and self.world.chain.weights(state.step) not in held  # ranks that differ will see it
        excused = not self.world.flipped or self.excused(state)  # keepers of the chunk will see it
        self.require(excused or not unseen, f"all of generation {view.generation} go on from {state} with a wrong value")

    def save(self, rank: SimRank, view: View, request: int, state: StateId) -> None:
        if rank.layout.corrupt and len(view.members) == 1:
            self._undecidable(state, alone=True)

    def _undecidable(self, state: StateId, alone: bool) -> None:
        """No other rank compares ``state``: there is none, or all others are newcomers, which do not compare in their first step."""
        if alone:
            self.world.excused = True
        else:
            self.world.unseen.add(StateId(state.history, state.step + 1))


NOTICED_S = 0.5
"""Seconds for messages on their way, and a tick: then the coordinator knows that a node is silent for too long."""
SETTLED_S = 1.0
"""Seconds from the moment that a host is reachable again until its messages are there."""

LEAVES_S = 1.2
"""Seconds without an answer after which no rank of a node steps: the lease of simulated agents, a beat, and one agreed step."""


class Silences(Homes):
    """A checker that knows the true state of a silent rank."""

    def well(self, member: Member) -> bool:
        """Whether the process itself is well."""
        rank = self.process(member)
        return rank is not None and rank.alive and rank.responsive and self.world.clock.now_s - rank.still.went_on_s > SETTLED_S

    def away(self, member: Member) -> bool:
        """Whether the rank's node is cut off from the coordinator, or its agent stands still, or was so a moment ago."""
        name = self.nodes.get(member, HEAD)
        node = next((node for node in self.world.nodes if node.name == name), None)
        gone = node is None or not (node.alive and node.reachable) or node.stood_still(SETTLED_S)
        return gone or self.world.links.was_cut(HEAD, name, SETTLED_S)


class AllWait(Silences):
    """With ``on_partition = stall`` no rank is given up because its host is cut off, in any way, before ``stall_s`` is over.

    A host is cut off when a link to it passes no message in one direction. An agent that stands still looks the same to the coordinator. A
    rank's missing answers count against it only until the coordinator can know of the cut.
    """

    name = "all wait"

    def record(self, record: Record) -> None:
        super().record(record)
        if isinstance(record, ProcessLost) and self.world.settings.on_partition == "stall":
            wrong = self.well(record.member) and self._because_of_a_cut(record)
            self.require(not wrong, f"{record.member} is given up, and is only cut off: {record.cause}")

    def _because_of_a_cut(self, record: ProcessLost) -> bool:
        timeouts, name = self.world.settings.timeouts, self.nodes.get(record.member, HEAD)
        match record.cause:
            case AgentSilent(silence_s=silence_s):
                return silence_s < timeouts.stall_s and self.away(record.member)
            case Evicted(why=DidNotLeave() | NoProgress()):
                return self.world.links.was_cut(HEAD, name, for_s=timeouts.node_s + NOTICED_S)
            case NotReported() | Evicted(why=NoHeartbeat()):
                return self.away(record.member)
        return False


class Excused(Silences):
    """A coordinator that stood still gives no rank up for messages that it could not receive meanwhile."""

    name = "excused"

    def record(self, record: Record) -> None:
        super().record(record)
        coordinator = self.world.coordinator
        if not isinstance(record, ProcessLost) or coordinator is None or not coordinator.stood_still(SETTLED_S):
            return
        silent = isinstance(record.cause, AgentSilent) or (isinstance(record.cause, Evicted) and isinstance(record.cause.why, NoHeartbeat))
        sound = self.well(record.member) and not self.away(record.member)
        self.require(not (silent and sound), f"{record.member} is given up by a coordinator that stood still: {record.cause}")


class OneHistory(Silences):
    """Once a history has a step, no rank takes a step in an older history.

    A process that stood still takes the step that it had agreed to. Ranks of a node that is cut off step until its lease is over.
    """

    name = "one history"

    def __init__(self, world: Stage) -> None:
        super().__init__(world)
        self._newest = 0

    def commit(self, rank: SimRank, state: StateId) -> None:
        knows = self.well(rank.member) and not (self.away(rank.member) and rank.node.unanswered_s() < LEAVES_S)
        wrong = knows and state.history < self._newest
        self.require(not wrong, f"{rank} takes step {state}, and history {self._newest} has steps")
        self._newest = max(self._newest, state.history)
