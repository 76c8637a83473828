"""A step whose gradients leave the rank while the backward goes on (``gradient_sync = "shard"``).

As soon as a unit's backward is over, its gradient is cut as its parameters are, and each stretch goes to the owner of that chunk, who adds
up all shards' in the order of the tree. The owner brings the mean to the guards of the chunk. So no rank ever has a whole gradient: of a
shard it has one unit's at a time, and of the sum its own chunks' and those that it guards.

What has left a rank cannot be cut anew for other ranks. So a step during which the view changes is computed anew from its first shard,
where :class:`actors.rank.fsdp.engine.FsdpEngine` keeps what its ranks have computed. Which gift belongs to which attempt, says its
:class:`fleet.protocol.chunks.Turn`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from actors.rank.fsdp.engine import FsdpEngine
from actors.rank.fsdp.gathered import Gathered
from actors.rank.fsdp.lending import Keep, Request
from actors.rank.fsdp.sending import SUM, Means, Sender, Stretch, Sums
from actors.rank.membership.process_group import Group, GroupBroken
from actors.rank.step.outcome import Outcome
from fleet.protocol.chunks import LATEST_S, SILENT_S, Loan, Turn, bounds, gift
from fleet.protocol.member import Offer
from fleet.protocol.records import COMM
from fleet.protocol.types import StateId
from fleet.settings.run import RunSettings

log = logging.getLogger("fleet.rank")
NOWHERE = Turn(-1, 0)


class StreamedEngine(FsdpEngine):
    """A :class:`FsdpEngine` that keeps no gradient but its chunks'. See the module."""

    _leave = True

    def _keep(self, settings: RunSettings, called_away: Callable[[], bool]) -> Keep:
        self._sums = Sums(settings.shards, self._reducer.mean)
        self._sender = Sender(called_away, min(SILENT_S, settings.timeouts.collective_s))
        self._turn = self._met_in = NOWHERE
        self._seat = self._met_as = 0
        self._owned, self._copied = list[Stretch](), list[Stretch]()
        self._shard, self._gone, self._early = -1, set[int](), True
        return self

    def close(self) -> None:
        super().close()
        self._sender.close()

    @property
    def broken(self) -> bool:
        return bool(self._missed or self._sender.failed)

    # ---- where this rank stands --------------------------------------------------------------------------------------------------------

    @property
    def _brings(self) -> frozenset[int]:
        """What has left this rank was for the ranks of an earlier view."""
        return frozenset()

    def promise(self, group: Group, shards: tuple[int, ...]) -> None:
        super().promise(group, ())

    def rehearse(self) -> None:
        super().rehearse()
        self._turn = NOWHERE

    def introduce(self, group: Group) -> None:
        super().introduce(group)
        self._met_in, self._met_as = Turn(group.generation, 0), group.rank

    def place(self, state: StateId, guarded: Sequence[Sequence[int]], asked: Sequence[tuple[int, ...]] = ()) -> None:
        super().place(state, guarded, asked)
        self._sender.begin()
        self._turn, self._seat = self._met_in, self._met_as
        chunks = [self._stretches(owner) for owner in range(len(guarded))]
        self._owned = chunks[self._seat]
        self._copied = [one for owner, stretches in enumerate(chunks) if self._seat in guarded[owner] for one in stretches]
        self._begin_step()

    def _stretches(self, owner: int) -> list[Stretch]:
        """The chunk of a rank of the view, in all flat buffers whose gradients leave."""
        spans = [(flat, *bounds(self.chunks.extents[flat], (len(self._guarded), owner))) for flat in sorted(self._gradients.leaving)]
        return [(flat, lo, hi) for flat, lo, hi in spans if lo < hi]

    def _begin_step(self) -> None:
        with self._moved:
            self._sums.begin(self._owned, self._copied)

    def repeat(self) -> None:
        super().repeat()
        with self._moved:
            self._turn = Turn(self._turn.generation, self._turn.attempt + 1)
            self._begin_step()
            self._moved.notify_all()

    # ---- what comes here: from any thread ------------------------------------------------------------------------------------------------

    def room(self, request: Request) -> torch.Tensor:
        if request.flat not in self._gradients.leaving or not 0 <= request.lo < request.hi <= self.chunks.extents[request.flat]:
            raise ConnectionError(f"a gift of elements {request.lo} to {request.hi} of flat buffer {request.flat}, which is none here")
        return torch.empty(request.hi - request.lo, dtype=self._gradients.layout[request.flat].dtype, device="cpu")

    def take(self, request: Request, elements: torch.Tensor) -> bool:
        stretch = (request.flat, request.lo, request.hi)
        with self._moved:
            self._moved.wait_for(lambda: self._fate(request) is not Loan.LATER, LATEST_S)
            known = self._sums.keeps(stretch) if request.shard == SUM else self._sums.owns(stretch)
            if self._fate(request) is not Loan.NOW or not known:
                return False
            self._count(stretch, request.shard, elements)
            self._moved.notify_all()
        return True

    def _fate(self, request: Request) -> Loan:
        return gift((self._state, self._turn), (request.state, request.turn), still=self._still)

    def _count(self, stretch: Stretch, shard: int, elements: torch.Tensor) -> None:
        if shard == SUM:
            self._sums.know(stretch, elements)
        elif (mean := self._sums.add(stretch, shard, elements)) is not None:
            for guard in self._guarded[self._seat]:  # without a wait: whoever waits here takes nothing in
                self._sender.send(self._addresses[guard], self._gift(stretch, SUM), mean, waits=False)

    def _gift(self, stretch: Stretch, shard: int) -> Request:
        assert self._state is not None
        return Request(self._state, *stretch, gift=True, turn=self._turn, shard=shard)

    # ---- a shard -------------------------------------------------------------------------------------------------------------------------

    def begin_shard(self, shard: int) -> None:
        super().begin_shard(shard)
        self._shard, self._gone = shard, set()

    def _behind_backward(self, unit: Gathered) -> None:
        if id(unit) in self._gone:
            self._came_again(unit)
        elif self._early and self._leaves(unit):
            self._send(unit)

    def _leaves(self, unit: Gathered) -> bool:
        return all(flat in self._gradients.leaving for flat in unit.flats)

    def end_shard(self, shard: int, loss: float) -> None:
        for unit in filter(self._leaves, self._gathered):
            if id(unit) not in self._gone:
                self._send(unit)
            elif unit.gradients:
                self._came_again(unit)
        super().end_shard(shard, loss)

    def _came_again(self, unit: Gathered) -> None:
        """A second backward of one shard. What has left is half of it, so this attempt at the step is given up."""
        if self._early:
            log.warning("unit %s has a second gradient in one shard: gradients leave this rank at the end of each shard now", unit.name)
        self._early = False
        self._missed = self._missed or f"unit {unit.name} had a second gradient in a shard when the first one had left the rank"

    def _send(self, unit: Gathered) -> None:
        self._gone.add(id(unit))
        self._change(unit.gradients)
        made = {id(parameter) for parameter in unit.parameters if parameter.grad is not None}
        self._gradients.note(self._shard, [id(parameter) in made for parameter in self._gradients.parameters])
        packed = unit.pack()
        if (times := self.shard_weights.unit) != 1.0 and self._shards > 1:
            for whole in packed.values():
                whole.mul_(times)  # without rounding
        if self._turn is NOWHERE or self.broken:  # a rehearsal; or it was computed with parameters that could not be had
            return
        size = len(self._guarded)
        for flat, whole in packed.items():
            host = whole.cpu()
            for owner in range(size):
                lo, hi = bounds(self.chunks.extents[flat], (size, owner))
                if lo < hi:
                    self._bring(owner, (flat, lo, hi), host[lo:hi])

    def _bring(self, owner: int, stretch: Stretch, elements: torch.Tensor) -> None:
        if owner != self._seat:
            self._sender.send(self._addresses[owner], self._gift(stretch, self._shard), elements)
            return
        with self._moved:
            self._count(stretch, self._shard, elements.clone())  # a part of the whole would keep all its memory
            self._moved.notify_all()

    # ---- the sum -------------------------------------------------------------------------------------------------------------------------

    def reduce(self, offer: Offer, *, early: bool = False) -> Outcome:
        """All that this rank has computed has arrived before it says so."""
        self._recorder.switch(COMM)
        self._missed = self._missed or self._sender.flush()
        return super().reduce(offer, early=early)

    def _finite(self) -> bool:
        self._gradients.bring(self._means())
        return super()._finite()

    def _means(self) -> dict[int, Means]:
        """By flat buffer. All ranks have said that their shards are with the owners; the owners' means are on their way to the guards."""
        error = self._sender.flush()
        with self._moved:
            self._moved.wait_for(lambda: not self._sums.missing or self._sender.failed, LATEST_S)
            missing = self._sums.missing
            if error or missing:
                flat, lo, hi = missing[0] if missing else (0, 0, 0)
                raise GroupBroken(error or f"no mean of elements {lo} to {hi} of flat buffer {flat} has come", self._group.generation)
            found = self._sums.means(self._divisor)
        layout, extents = self._gradients.layout, self.chunks.extents
        return {
            flat: Means(
                extents[flat],
                {(lo, hi): mean.to(self.device) for (number, lo, hi), mean in found.items() if number == flat},
                torch.empty(0, dtype=layout[flat].dtype, device=self.device),
            )
            for flat in sorted(self._gradients.leaving)
        }
