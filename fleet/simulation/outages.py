"""What must hold when the store is out of reach, refuses, or is slow."""

from __future__ import annotations

from fleet.protocol.levels import STORE
from fleet.protocol.records import CheckpointRecord, ProcessLost, Record
from fleet.simulation.checker import InvariantChecker
from fleet.simulation.stage import Stage

OF_THE_STORE = frozenset({"store", "store_gone", "store_refuses", "store_slow"})


class Durable(InvariantChecker):
    """What is called durable is in the store, and is right: when it is said, and at the end of the run."""

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
    """A store that fails costs checkpoints, and no rank: where nothing else goes wrong, nobody is lost."""

    name = "saves alone"

    def record(self, record: Record) -> None:
        if isinstance(record, ProcessLost) and self.world.plan.troubles:
            others = {trouble.kind for trouble in self.world.plan.troubles} - OF_THE_STORE
            self.require(bool(others), f"{record.member} is lost, and nothing but the store fails: {record.cause}")
