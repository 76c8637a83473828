"""What must hold when hosts are cut off from each other."""

from __future__ import annotations

from fleet.protocol.causes import AgentSilent, DidNotLeave, Evicted, NoHeartbeat, NoProgress, NotReported
from fleet.protocol.records import ProcessLost, Record
from fleet.protocol.types import Member, StateId
from fleet.simulation.checker import Homes, InvariantChecker
from fleet.simulation.links import HEAD
from fleet.simulation.ranks import SimRank
from fleet.simulation.stage import Stage

NOTICED_S = 0.5
"""Words that were on their way, and a tick: by then it is known that a node is silent for too long."""
SETTLED_S = 1.0
"""After a host is reached again, until what it has to say is heard."""


class Silences(Homes):
    """What the truth is about somebody who is not heard."""

    def well(self, member: Member) -> bool:
        """Nothing is wrong with the process itself."""
        rank = self.process(member)
        return rank is not None and rank.alive and rank.responsive and self.world.clock.now_s - rank.still.went_on_s > SETTLED_S

    def away(self, member: Member) -> bool:
        """Its node is cut off from the coordinator, in whatever way, or its agent stands still; or that is over since a moment."""
        name = self.nodes.get(member, HEAD)
        node = next((node for node in self.world.nodes if node.name == name), None)
        gone = node is None or not (node.alive and node.reachable) or node.stood_still(SETTLED_S)
        return gone or self.world.links.was_cut(HEAD, name, SETTLED_S)


class AllWait(Silences):
    """With ``on_partition = stall`` no rank is given up because its host is cut off, in whatever way, before ``stall_s`` is over.

    It is cut off when a link to it passes nothing in one direction; for its agent to stand still is the same to those who listen. What it
    should have done meanwhile counts against it only while nobody can know that it is cut off.
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
    """A coordinator that stood still gives nobody up for what it could not hear meanwhile."""

    name = "excused"

    def record(self, record: Record) -> None:
        super().record(record)
        coordinator = self.world.coordinator
        if not isinstance(record, ProcessLost) or coordinator is None or not coordinator.stood_still(SETTLED_S):
            return
        silent = isinstance(record.cause, AgentSilent) or (isinstance(record.cause, Evicted) and isinstance(record.cause.why, NoHeartbeat))
        sound = self.well(record.member) and not self.away(record.member)
        self.require(not (silent and sound), f"{record.member} is given up by a coordinator that stood still: {record.cause}")


class OneHistory(InvariantChecker):
    """Never two histories with a step each: once a later one has taken a step, no rank takes one in the one that it left behind."""

    name = "one history"

    def __init__(self, world: Stage) -> None:
        super().__init__(world)
        self._newest = 0

    def commit(self, rank: SimRank, state: StateId) -> None:
        self.require(state.history >= self._newest, f"{rank} takes step {state}, and history {self._newest} has steps of its own")
        self._newest = max(self._newest, state.history)
