"""Gradients of simulated ranks on their way to the ranks that add them up, where no rank has the whole model.

Like live ranks in :mod:`actors.rank.fsdp.exchange`. A message has the gradient of one shard, for all chunks that its receiver adds up.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from fleet.protocol.adding import GRACE_S, Adders
from fleet.protocol.chunks import LATEST_S, Chunk, Readiness, StateCut, Turn, can_accept
from fleet.protocol.types import Column, StateId
from fleet.simulation.clockwork import Steps
from fleet.simulation.groups import Broken
from fleet.simulation.model import SPOILED, gradient
from fleet.simulation.ranks import SimLayout

HOP_S = (0.0002, 0.002)
"""Seconds of a request or a contribution to its receiver, and of the answer back: (least, most)."""
LOOK_S = 0.05
"""Interval at which a rank that waits checks whether it is called away."""


@dataclass(frozen=True, eq=False, slots=True)
class SentGradient:
    """The gradient ``value`` of ``shard``, on its way from ``sender``. In one chunk ``value`` may not be finite. The others
    have the ``right`` one.
    """

    sender: SimContributions
    state: StateId
    turn: Turn
    shard: int
    value: int
    right: int

    def of(self, chunk: Chunk) -> int:
        """Its part of ``chunk``."""
        size, index = chunk
        return self.right if self.value == SPOILED and self.shard % size != index else self.value


class SimContributions:
    """Gradients that one rank sends, and those that it adds up.

    Args:
        hops: draws the times of messages. ``still``: whether the rank's chunks stay as they are.

    Attributes:
        sums: by chunk that this rank adds up, the gradients by shard.
        failed: why a contribution has not arrived, or was of no use; empty without an error.
    """

    def __init__(self, layout: SimLayout, hops: random.Random, still: Callable[[], bool]) -> None:
        self.layout, self.rank, self._hops, self._still = layout, layout.rank, hops, still
        self.adders = Adders(self.rank.world.settings.shards)
        self.sums: dict[Chunk, dict[int, int]] = {}
        self.failed = ""
        self._under_way: set[SentGradient] = set()
        self._early: list[SentGradient] = []

    # ---- a view, a step ------------------------------------------------------------------------------------------------------------------

    def place(self, column: Column, cut: StateCut, *, inherited: bool) -> None:
        """This rank has its chunks of a view. Then call :meth:`count`."""
        me, size, before = column.rank_of(self.rank.member), len(column.members), self.sums
        self.failed, self._under_way = "", set()
        goes_on = self.adders.place(cut, me, size, column.generation, self.layout.kept.at, inherited=inherited)
        self._empty()
        if goes_on:
            self.sums |= {chunk: before[chunk] for chunk in self.sums.keys() & before.keys()}

    def _empty(self) -> None:
        self.sums = {(self.adders.cut.size, index): {} for index in self.adders.added}

    def begin_step(self) -> None:
        """The state is that of the next step."""
        self.adders.begin_step(self.layout.kept.at)
        self._empty()
        self.look_again()

    def repeat(self) -> None:
        """All ranks compute the step once more."""
        self.adders.repeat()
        self.begin_step()

    @property
    def there(self) -> Collection[int]:
        """The shards whose gradients this rank has, of all chunks that it owns."""
        found = set(range(self.rank.world.settings.shards))
        for chunk in self._owned:
            found &= self.sums[chunk].keys()
        return found

    @property
    def _owned(self) -> list[Chunk]:
        return [(self.adders.cut.size, index) for index in self.adders.owned]

    def count(self, shards: Collection[int]) -> None:
        """These shards of the present step count in the view."""
        if not shards:
            self.begin_step()
        self.adders.agree(shards)
        self.look_again()

    # ---- a rank that sends ---------------------------------------------------------------------------------------------------------------

    def send(self, peers: Sequence[SimContributions], shard: int, value: int, right: int) -> None:
        """Send the gradient of a shard to all ranks that add up some chunk of it. ``peers``: by rank of the column. ``right``: see
        :class:`SentGradient`."""
        state = self.layout.kept.at
        assert state is not None
        for adder in sorted({adder for keepers in self.adders.cut.keepers for adder in self.adders.of(keepers)}):
            sent, peer = SentGradient(self, state, self.adders.turn, shard, value, right), peers[adder]
            if peer is self:
                self._add(sent)
            else:
                self._under_way.add(sent)
                self._travel(peer, lambda sent=sent, peer=peer: peer.come(sent))  # type: ignore[misc]

    def _travel(self, to: SimContributions, arrive: Callable[[], None]) -> None:
        world, end, start = self.rank.world, to.rank.end, self.rank.end
        world.clock.after(self._hops.uniform(*HOP_S), lambda: world.links.carry(end, {start}, arrive))

    def answered(self, contribution: SentGradient, error: str) -> None:
        if contribution in self._under_way:
            self._under_way.remove(contribution)
            self.failed = self.failed or error

    def flush(self) -> Steps:
        """Wait until all contributions have arrived. Raises Broken."""
        clock, patience_s = self.rank.world.clock, self.rank.world.settings.timeouts.collective_s
        until_s = clock.now_s + patience_s
        while self._under_way and not self.failed:
            if self.rank.rank_machine.wanted:
                until_s = min(until_s, clock.now_s + GRACE_S)
            if clock.now_s > until_s:
                break
            yield LOOK_S / 10
        if self._under_way or self.failed:
            raise Broken(self.failed or "not all gradients have arrived")

    def leave(self) -> Steps:
        """This rank leaves its view: its contributions have a moment to arrive."""
        until_s = self.rank.world.clock.now_s + GRACE_S
        while self.adders.twice and self._under_way and self.rank.world.clock.now_s < until_s:
            yield LOOK_S

    # ---- a rank that adds up, in separate threads ----------------------------------------------------------------------------------------

    def come(self, contribution: SentGradient) -> None:
        """A contribution has come to this process. If the process is dead and its host lives, the host refuses the connection."""
        rank = self.rank
        if rank.alive:
            rank.world.clock.after(LATEST_S, lambda: rank.gate(lambda: self._give_up(contribution)))
            rank.gate(lambda: self._take(contribution))
        elif rank.node.alive:
            self._answer(contribution, f"{rank} is gone")

    def _take(self, contribution: SentGradient) -> None:
        still = self._still() and self.adders.agreed
        match can_accept((self.layout.kept.at, self.adders.turn), (contribution.state, contribution.turn), still=still):
            case Readiness.LATER:
                self._early.append(contribution)
            case Readiness.NOW:
                self._add(contribution)
                self._answer(contribution, "")
            case _:
                self._answer(contribution, f"{self.rank} is at another step")

    def _add(self, contribution: SentGradient) -> None:
        for chunk, sums in self.sums.items():
            sums.setdefault(contribution.shard, contribution.of(chunk))

    def look_again(self) -> None:
        early, self._early = self._early, []
        for contribution in early:
            self._take(contribution)

    def _give_up(self, contribution: SentGradient) -> None:
        if contribution in self._early:
            self._early.remove(contribution)
            self._answer(contribution, f"{self.rank} has not come to that step")

    def _answer(self, contribution: SentGradient, error: str) -> None:
        sender = contribution.sender
        self._travel(sender, lambda: sender.rank.gate(lambda: sender.answered(contribution, error)))

    # ---- the sums ------------------------------------------------------------------------------------------------------------------------

    def summed(self, merged: Mapping[int, int]) -> dict[int, int]:
        """All contributions to the step, as this rank has added them up. ``merged``: those of the ranks that report the shards."""
        for chunk in self._owned:
            self.rank.world.watch.summed(self.rank, chunk, self.sums[chunk], merged)
        if not self._owned:  # it takes the step if the owners have all of it, as they may from an earlier computation of the shard
            kept = self.layout.kept
            return {shard: gradient(kept.value, kept.at.step, shard) if value == SPOILED else value for shard, value in merged.items()}
        spoiled = {shard for chunk in self._owned for shard, value in self.sums[chunk].items() if value == SPOILED}
        return {**self.sums[self._owned[0]], **dict.fromkeys(spoiled, SPOILED)}
