"""A rank's comparisons of values that all ranks should hold alike. Pure: live ranks and simulated ranks use this same object."""

from __future__ import annotations

from collections.abc import Collection

from fleet.protocol.types import Finding, StateId

WEIGHTS = "weights"
"""The beginning of a finding's ``what`` on the state that all ranks hold."""
UNCOMPARED = ", chunks uncompared"
"""The end of it, where owners may have given other ranks wrong parameters: a majority proves nothing."""


class ReplicaCheck:
    """Follows the comparisons of one rank's views, and makes its testimony.

    The compared state may be cut into parts, which take turns by step. ``cleared`` is the newest state of which every part was found alike
    since. It is one step after the oldest of the parts' last comparisons, since the step after a comparison builds on the compared state.

    Attributes:
        open: this rank's finding of a comparison that it entered, and that has not ended with success. The rank reports it when it leaves
            its group for any reason. A peer that saw a difference may break the group before this rank sees it.
    """

    def __init__(self) -> None:
        self.cleared = StateId(0, 0)
        self.witness = True
        self.generation = -1
        self.parts = 1
        self.open: Finding | None = None
        self._turns: dict[int, StateId] = {}

    def join(self, generation: int, here: StateId, receiver: bool) -> None:
        """A view begins, at state ``here``. ``receiver``: this rank receives that state in it."""
        self.generation, self.open = generation, None
        self.witness = self.witness and not receiver
        if receiver or here.history != self.cleared.history:
            self.cleared = here
        self.cut(1)

    def cut(self, parts: int) -> None:
        """Cut the compared state into ``parts`` parts from the next step on."""
        self.parts = parts
        self._turns.clear()

    def enter(self, here: StateId, digest: str, *, uncompared: bool = False) -> None:
        """Note this rank's digest, before the step from ``here`` is summed. ``uncompared``: chunks are not compared in this step."""
        turn = here.step % self.parts
        what = WEIGHTS if self.parts == 1 else f"{WEIGHTS} (part {turn} of {self.parts})"
        what += UNCOMPARED if uncompared else ""
        self.open = Finding(what, self.generation, here, digest, self.cleared, self.witness)

    def differ(self, digests: Collection[object]) -> bool:
        """Whether the ranks' digests of the same part differ. Then the step must not be applied."""
        if len(set(digests)) > 1:
            return True
        if self.open is None:
            return False  # this rank has given no digest
        here, self.open = self.open.state, None
        if len(digests) > 1:
            self._turns[here.step % self.parts] = here
        if len(self._turns) == self.parts:
            oldest = min(self._turns.values())
            self.cleared, self.witness = StateId(oldest.history, oldest.step + 1), True
        return False
