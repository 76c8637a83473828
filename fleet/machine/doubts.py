"""Testimonies of ranks that differ, and the states that are not used any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from fleet.protocol.events import Quiesced
from fleet.protocol.ports import CorruptionPolicy
from fleet.protocol.probes import probe
from fleet.protocol.types import Finding, Member, StateId

AGAIN_STEPS = 4
"""Ranks that differ again within so many steps differ for the same reason as before."""


class Doubts:
    """The testimonies of the newest view that ended in a difference, and the states that are not used any more."""

    def __init__(self, policy: CorruptionPolicy | None) -> None:
        self.policy = policy
        self.said: dict[Member, Finding] = {}
        self.tainted: StateId | None = None
        self._judged = -1
        self._last: tuple[int, int] | None = None

    def judged(self, generation: int) -> None:
        """The testimonies of this view are judged. A rank may repeat its testimony before it learns that."""
        self._judged = max(self._judged, generation)

    def note(self, found: int, resumed: int) -> None:
        """The ranks differed at step ``found``, and the run goes on from step ``resumed``."""
        self._last = found, resumed

    def again(self, step: int, said: Mapping[Member, Finding]) -> bool:
        """Whether a difference at ``step`` repeats the last one: soon after it, or soon after a new process took a slot."""
        if self._last is None:
            return False
        [(most, _)] = Counter(known.digest for known in said.values()).most_common(1) or [("", 0)]
        newcomers = any(known.digest != most and not known.witness for known in said.values())
        return newcomers or step == self._last[0] or 0 <= step - self._last[1] <= AGAIN_STEPS

    def receive(self, event: Quiesced) -> None:
        if event.testimony is None or event.testimony.generation <= self._judged:
            if event.testimony is not None:
                probe("a rank tells again what was judged")
            return
        newest = max((known.generation for known in self.said.values()), default=-1)
        if event.testimony.generation > newest:
            self.said.clear()
        if event.testimony.generation >= newest:
            self.said[event.member] = event.testimony

    def floor(self, committed: StateId) -> StateId:
        """The least state that can be the source of a view."""
        return committed if self.tainted is None else max(committed, StateId(self.tainted.history + 1, 0))
