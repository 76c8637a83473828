"""The common base of the simulator's checkers."""

from __future__ import annotations

from fleet.protocol.records import ProcessUp, Record
from fleet.protocol.types import Member, StateId
from fleet.simulation.ranks import SimRank
from fleet.simulation.stage import Stage


class Violation(Exception):
    """An invariant does not hold."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(name, text)
        self.name, self.text = name, text


class InvariantChecker:
    """One invariant. A checker defines the hooks that it needs, and ``Watch`` calls these.

    Hooks: ``record(record)``, ``truncated(journal)``, ``sent(machine, instruction)``, ``told(event)``, ``checkpoint(order, parts)``,
    ``end()``; of one rank: ``restored(rank, view, weights)``, ``joining(rank, view)``, ``joined(rank, view, state)``,
    ``contribute(rank, view, state, dirty)``, ``begins(rank, view, cut, state, value)``, ``placed(rank, view, cut, state, value)``,
    ``served(rank, server, state, fetched, chunk)``, ``missed(rank, state, keepers, chunk)``, ``cut(rank, generation, view)``,
    ``computed_together(rank, met)``, ``unit(rank, view, attempt, stage, shard)``, ``reduced(rank, view, number, values)``,
    ``agreed(rank, view, number, enter, save)``,
    ``commit(rank, state)``, ``save(rank, view, request, state)``, ``behind(rank)``, ``did(rank, key)``; of a
    group: ``meet(view, view)``, ``completed(view, values)`` once for each reduction.
    """

    name = ""

    def __init__(self, world: Stage) -> None:
        self.world = world

    def require(self, holds: bool, text: str) -> None:
        if not holds:
            raise Violation(self.name, text)

    def fault_free(self, weights: int, state: StateId) -> bool:
        """Whether these are the weights of the run without faults at ``state``, or no rank could tell that they are not."""
        return self.excused(state) or weights == self.world.chain.weights(state.step)

    def excused(self, state: StateId) -> bool:
        """Whether no rank could tell that a value at ``state`` is wrong."""
        return self.world.excused or state in self.world.unseen

    def process(self, member: Member) -> SimRank | None:
        """The process with the name ``member``."""
        ranks = (rank for rank in reversed(self.world.train.processes) if rank.named and rank.member == member)
        return next(ranks, None)


class Homes(InvariantChecker):
    """A checker that knows the node of each process."""

    def __init__(self, world: Stage) -> None:
        super().__init__(world)
        self.nodes: dict[Member, str] = {}

    def record(self, record: Record) -> None:
        if isinstance(record, ProcessUp):
            self.nodes[record.member] = record.process.node
