"""The simulated memory of a node: what other nodes' ranks keep there, as bounded and as fenced as the live one."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleet.protocol.types import Copy, StateId


@dataclass(slots=True)
class Held:
    """What is here of one checkpoint: parts by their number, and how many there must be once it is committed."""

    state: StateId
    generation: int
    parts: dict[int, int] = field(default_factory=dict)
    count: int = 0


class SimMemory:
    """Two checkpoints at most: the newest committed one, and the one being written."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.checkpoints: dict[str, Held] = {}
        self._fence = (-1, -1)

    def put(self, name: str, state: StateId, generation: int, part: int, weights: int) -> bool:
        """False for a writer that was overtaken."""
        if (state.history, generation) < self._fence:
            return False
        self._fence = (state.history, generation)
        if name not in self.checkpoints:
            self._make_room()
            self.checkpoints[name] = Held(state, generation)
        self.checkpoints[name].parts[part] = weights
        return True

    def _make_room(self) -> None:
        order = sorted(self.checkpoints, key=lambda name: (self.checkpoints[name].state, self.checkpoints[name].generation))
        committed = [name for name in order if self.checkpoints[name].count]
        spared = committed[-1:] or order[-1:]
        self.checkpoints = {name: self.checkpoints[name] for name in spared}

    def commit(self, name: str, state: StateId, generation: int, count: int) -> None:
        self.checkpoints.setdefault(name, Held(state, generation)).count = count

    def held(self) -> tuple[Copy, ...]:
        return tuple(
            Copy(name, held.state, tuple(sorted(held.parts)), held.count) for name, held in sorted(self.checkpoints.items())
        )  # fmt: skip
