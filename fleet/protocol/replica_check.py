"""What one rank knows from comparing what all ranks should hold alike. Pure: live ranks and simulated ones use this very object."""

from __future__ import annotations

from collections.abc import Collection

from fleet.protocol.types import Finding, StateId

WEIGHTS = "weights"
"""What a finding begins with that is about the state which all ranks hold."""


class ReplicaCheck:
    """Follows the comparisons of one rank's views, and makes its testimony.

    What is compared may be cut in parts that take turns by step. ``cleared`` is the newest state of which every part was found alike since:
    one step after the oldest of the parts' last comparisons, as the step that follows a comparison is built on what was compared.

    Attributes:
        open: what this rank has to say of a comparison that it entered and that did not end well; whatever the reason, it tells this when
            it leaves its group: a peer that saw a difference may be quicker than the word of it.
    """

    def __init__(self) -> None:
        self.cleared = StateId(0, 0)
        self.witness = True
        self.generation = -1
        self.parts = 1
        self.open: Finding | None = None
        self._turns: dict[int, StateId] = {}

    def join(self, generation: int, here: StateId, receiver: bool) -> None:
        """A view begins, at state ``here``. ``receiver``: this rank is given that state in it."""
        self.generation, self.open = generation, None
        self.witness = self.witness and not receiver
        if receiver or here.history != self.cleared.history:
            self.cleared = here
        self.cut(1)

    def cut(self, parts: int) -> None:
        """From the next step on there are so many parts."""
        self.parts = parts
        self._turns.clear()

    def enter(self, here: StateId, digest: str) -> None:
        """This rank's digest, before the step from ``here`` is summed."""
        turn = here.step % self.parts
        what = WEIGHTS if self.parts == 1 else f"{WEIGHTS} (part {turn} of {self.parts})"
        self.open = Finding(what, self.generation, here, digest, self.cleared, self.witness)

    def differ(self, digests: Collection[object]) -> bool:
        """Whether the digests that ranks have told, of the same part, are not alike. Then the step must not be applied."""
        if len(set(digests)) > 1:
            return True
        if self.open is None:
            return False  # this rank has told nothing
        here, self.open = self.open.state, None
        if len(digests) > 1:
            self._turns[here.step % self.parts] = here
        if len(self._turns) == self.parts:
            oldest = min(self._turns.values())
            self.cleared, self.witness = StateId(oldest.history, oldest.step + 1), True
        return False
