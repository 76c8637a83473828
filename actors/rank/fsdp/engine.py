"""A step of a model that ``fully_shard`` has cut (``optimizer_sharding = "fsdp"``).

Chunks have the parameters beside the optimizer's state, and move, are guarded and are stepped as in :mod:`actors.rank.zero1.sharded`. What
differs is that nobody has the whole: a rank gathers a unit of the parameters for its forward, and again for its backward, from whoever
keeps the chunks. So a step is over when all have stepped their chunks; nothing is sent behind it.

Until a step is applied, all that is gathered is of the state that it begins from, and every chunk of it is with its owner and its guards.
When an owner is lost meanwhile, its guards are asked, and the forward goes on. When nobody can be asked, what this rank computes is of no
use (:attr:`FsdpEngine.broken`): its shard counts as not computed, and the loop comes to the next view.

Gradients leave the rank in the backward. As soon as a unit's backward is over, its gradient is cut as its parameters are, and each stretch
goes to the owner of that chunk, who adds up all shards' in the order of the tree. The owner brings the mean to the guards of the chunk. So
no rank ever has a whole gradient: of a shard it has one unit's at a time, and of the sum its own chunks' and those that it guards.

Gradients that have left a rank cannot be cut anew for other ranks. So a step is computed anew from its first shard when the view changes
during it.
Which contribution belongs to which attempt, says its :class:`fleet.protocol.chunks.Turn`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from actors.rank.fsdp.chunks import ChunkedModel
from actors.rank.fsdp.copies import Unread
from actors.rank.fsdp.gathered import Gathered
from actors.rank.fsdp.sending import SUM, Means, Sender, Stretch, Sums
from actors.rank.fsdp.serving import Address, FetchRequest, PeerFetcher, PeerRequest, PeerServer, Served
from actors.rank.fsdp.taken import Precision, Unit
from actors.rank.membership.process_group import Group, GroupBroken
from actors.rank.state.tracked import TrackedState
from actors.rank.step.outcome import ReductionOutcome
from actors.rank.tags import Tag
from actors.rank.telemetry.recorder import Recorder
from actors.rank.zero1.sharded import Routes, ShardedEngine
from fleet.errors import ConfigError, FleetError
from fleet.protocol.chunks import LATEST_S, SILENT_S, Readiness, Turn, bounds, can_accept, can_serve
from fleet.protocol.member import Offer
from fleet.protocol.records import COMM
from fleet.protocol.types import StateId
from fleet.settings.run import RunSettings

log = logging.getLogger("fleet.rank")
ADDRESS_BYTES = 96
NOWHERE = Turn(-1, 0)


class FsdpEngine(ShardedEngine):
    """A :class:`ShardedEngine` whose parameters are spread over the ranks, too. It keeps no gradient but its chunks'. See the module.

    Args:
        units: what is gathered together. Trained parameters that are in none are gathered for the whole of a shard.
        host: at which this rank serves.
        called_away: whether the view is about to change.
    """

    chunks: ChunkedModel
    _gathers = False
    _leave = True

    def __init__(
        self,
        state: TrackedState,
        settings: RunSettings,
        recorder: Recorder,
        clip_norm: float | None,
        units: Sequence[Unit],
        host: str,
        called_away: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(state, settings, recorder, clip_norm)
        self._moved = threading.Condition()
        self._addresses: list[Address] = []
        self._asked: Sequence[tuple[int, ...]] = ()
        self._missed = ""
        self._in_shard, self._still, self._changes = False, True, 0
        self._met: list[Address] = []
        self._loop = threading.get_ident()
        self._turn = self._met_in = NOWHERE
        self._joined_as = self._met_as = 0
        self._owned, self._copied = list[Stretch](), list[Stretch]()
        self._shard, self._gone, self._early = -1, set[int](), True
        patience_s = min(SILENT_S, settings.timeouts.collective_s)
        self._sums, self._sender = Sums(settings.shards, self._reducer.mean), Sender(called_away, patience_s)
        self._server, self._fetcher = PeerServer(host, self._serve, self), PeerFetcher(lambda: self._in_shard and called_away(), patience_s)
        state.apart = self.body.apart = frozenset(map(id, self._gradients.parameters))
        state.load_parameter, state.free = self.chunks.load_parameter, self._free
        self._gathered = [self._gathering(unit) for unit in self._with_rest(units)]
        cast = [unit for unit in units if unit.precision.parameters is not None]
        self._uncast = [self._gathering(dataclasses.replace(unit, modules=(), precision=Precision())) for unit in cast]

    def _cut(self) -> ChunkedModel:
        gradients, readers = self._gradients, self.state.readers
        read = [readers[id(parameter)] for parameter in gradients.parameters] if readers else []
        return ChunkedModel(self._optimizer, gradients.parameters, gradients.places, gradients.extents, read)

    def _with_rest(self, units: Sequence[Unit]) -> list[Unit]:
        inside = {id(parameter) for unit in units for parameter in unit.parameters}
        rest = tuple(parameter for parameter in self._gradients.parameters if id(parameter) not in inside)
        return [*units, *([Unit("what is in no unit", (), rest, keeps=True)] if rest else [])]

    def _gathering(self, unit: Unit) -> Gathered:
        gradients = self._gradients
        where = {id(parameter): place for parameter, place in zip(gradients.parameters, gradients.places, strict=True)}
        places = [(parameter, *where[id(parameter)]) for parameter in unit.parameters if id(parameter) in where]
        flats = dict.fromkeys(flat for _, flat, _ in places)
        return Gathered(unit, [(flat, gradients.extents[flat]) for flat in flats], places, self._fill, self._behind_backward)

    def close(self) -> None:
        """Nothing is served, fetched or contributed any more."""
        self._server.close()
        self._fetcher.close()
        self._sender.close()

    # ---- where this rank stands --------------------------------------------------------------------------------------------------------

    @property
    def weights(self) -> list[torch.Tensor]:
        return self.chunks.weights

    @property
    def broken(self) -> bool:
        return bool(self._missed or self._sender.failed)

    @property
    def _contributes(self) -> frozenset[int]:
        """Gradients that have left this rank were for the ranks of an earlier view."""
        return frozenset()

    def promise(self, group: Group, shards: tuple[int, ...]) -> None:
        super().promise(group, ())

    def rehearse(self) -> None:
        super().rehearse()
        self._turn = NOWHERE

    def begin(self, state: StateId) -> None:
        with self.moving():
            self.chunks.settle()
            super().begin(state)

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """The parts held here, or their state, change meanwhile: a fetch waits."""
        self._stand(still=False)
        try:
            yield
        finally:
            self._stand(still=True)

    def introduce(self, group: Group) -> None:
        rows = torch.zeros(group.size, ADDRESS_BYTES, dtype=torch.uint8, device="cpu")
        mine = self._server.address.packed().ljust(ADDRESS_BYTES, b"\0")
        group.all_gather(rows, torch.frombuffer(bytearray(mine), dtype=torch.uint8), Tag.CLAIM)
        self._met = [Address.unpacked(row.numpy().tobytes()) for row in rows]
        self._met_in, self._met_as = Turn(group.generation, 0), group.rank

    def place(self, state: StateId, guarded: Sequence[Sequence[int]], asked: Sequence[tuple[int, ...]] = ()) -> None:
        super().place(state, guarded, asked)
        self._addresses, self._asked, self._missed = self._met, asked, ""
        self._sender.begin()
        self._turn, self._joined_as = self._met_in, self._met_as
        chunks = [self._stretches(owner) for owner in range(len(guarded))]
        self._owned = chunks[self._joined_as]
        self._copied = [one for owner, stretches in enumerate(chunks) if self._joined_as in guarded[owner] for one in stretches]
        self._begin_step()

    def _stretches(self, owner: int) -> list[Stretch]:
        """The chunk of a rank of the view, in all flat buffers whose gradients leave."""
        spans = [(flat, *bounds(self.chunks.extents[flat], (len(self._guarded), owner))) for flat in sorted(self._gradients.leaving)]
        return [(flat, lo, hi) for flat, lo, hi in spans if lo < hi]

    def apply(self) -> None:
        with self.moving():
            super().apply()
            self._begin_step()

    def _begin_step(self) -> None:
        """The state is that of the next step, and nobody has brought anything yet."""
        with self._moved:
            self._sums.begin(self._owned, self._copied)

    def repeat(self) -> None:
        super().repeat()
        with self._moved:
            self._turn = Turn(self._turn.generation, self._turn.attempt + 1)
            self._begin_step()
            self._moved.notify_all()

    def gather(self, group: Group, routes: Routes) -> None:
        """Nothing is behind a step that was taken: nobody has the parameters whole."""

    def _stand(self, *, still: bool) -> None:
        """Whether what is here stays as it is: whoever waits for a fetch looks again."""
        with self._moved:
            self._still = still
            self._changes += not still
            self._moved.notify_all()

    # ---- a shard -----------------------------------------------------------------------------------------------------------------------

    def begin_shard(self, shard: int) -> None:
        self._free()  # what something beside the steps has gathered may be of an earlier state
        super().begin_shard(shard)
        self._missed, self._in_shard = "", True
        for each in self._gathered:
            if not each.modules:
                each.gather()
        self._shard, self._gone = shard, set()

    def end_shard(self, shard: int, loss: float) -> None:
        for unit in filter(self._leaves, self._gathered):
            if id(unit) not in self._gone:
                self._send(unit)
            elif unit.gradients:
                self._came_again(unit)
        self._free()
        if math.isnan(loss) and not self.broken:
            self._check_used()
        if not self.broken:
            super().end_shard(shard, loss)

    def _check_used(self) -> None:
        """A loss that is no number comes from parameters that were read where they had been let go, if they were never gathered."""
        for unit in self._gathered:
            if not unit.used:
                reason = "its forward was not called, and the loss is not a number: its parameters are gathered around its forward alone"
                way_out = "Call the module itself, not another of its methods; or leave it to the unit around it."
                raise ConfigError("fully_shard", unit.name, reason, way_out)

    def reset(self) -> None:
        self._free()
        super().reset()

    def hold(self) -> None:
        self._free()
        super().hold()

    def _free(self) -> None:
        self._in_shard = False
        for each in self._gathered:
            each.free()

    def reduce(self, offer: Offer, *, early: bool = False) -> ReductionOutcome:
        """All that this rank has computed has arrived before it says so, and its means are here before there is a vote on them."""
        self._recorder.switch(COMM)
        missed, self._missed = self._missed or self._sender.flush(), ""
        if missed:
            raise GroupBroken(missed, self._group.generation)
        reduced = super().reduce(offer, early=early)
        if reduced.doubt is None and not reduced.disputed:
            self._gradients.put_means(self._means())
        return reduced

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        whole = [*self._uncast, *(each for each in self._gathered if not each.casts)]
        for each in whole:
            each.gather()
        try:
            yield
        finally:
            for each in whole:
                each.free()

    def unread(self) -> Unread:
        named = {id(one): f"{root}.{name}" for root, module in self.state.modules.items() for name, one in module.named_parameters()}
        units = {id(one): each for each in (*self._gathered, *self._uncast) for one in each.parameters}
        return Unread({each: (named[each], unit) for each, unit in units.items() if each in named})

    # ---- fetches -------------------------------------------------------------------------------------------------------------------------

    def _serve(self, wanted: StateId, flat: int, lo: int, hi: int) -> Served | None:
        """From any thread. In its view, what is served does not change until the fetcher has it: the step that changes it waits for its
        gradients. A rank that is no longer in the view may ask while a step is taken: it is told that what it got is of no use."""
        with self._moved:
            self._moved.wait_for(lambda: can_serve(self._state, wanted, still=self._still) is not Readiness.LATER, LATEST_S)
            if can_serve(self._state, wanted, still=self._still) is not Readiness.NOW:
                return None
            found, changes = self.chunks.elements(flat, lo, hi), self._changes
        return None if found is None else Served(found, lambda: self._changes == changes)

    def _fill(self, flat: int, memory: torch.Tensor) -> None:
        timed = threading.get_ident() == self._loop
        before = self._recorder.code
        if timed:
            self._recorder.switch(COMM)
        self._gather_flat(flat, memory)
        if timed:
            self._recorder.switch(before)

    def _gather_flat(self, flat: int, memory: torch.Tensor) -> None:
        """From this rank's own chunks, and from those who serve the others."""
        size, extent = len(self._guarded), self.chunks.extents[flat]
        host = memory if memory.is_cpu else torch.empty(memory.shape, dtype=memory.dtype, pin_memory=True, device="cpu")
        wanted: list[tuple[tuple[int, ...], FetchRequest]] = []
        for owner in range(size):
            lo, hi = bounds(extent, (size, owner))
            mine = self.chunks.elements(flat, lo, hi)
            if mine is not None:
                memory[lo:hi].copy_(mine)
            elif lo < hi:
                wanted.append((self._asked[owner], FetchRequest(flat, lo, hi, host[lo:hi])))
        self._fetch(wanted)
        for _, request in wanted if host is not memory else ():
            memory[request.lo : request.hi].copy_(request.into)

    def _fetch(self, wanted: Sequence[tuple[tuple[int, ...], FetchRequest]]) -> None:
        """Each stretch from the first server that has it. Zeros when nobody has: what is computed with them is of no use."""
        while wanted and not self._missed:
            assert self._state is not None, "before its first view a rank has all parameters"
            requests = [(self._addresses[keepers[0]], request) for keepers, request in wanted]
            wanted = [(wanted[number][0][1:], wanted[number][1]) for number in self._fetcher.fetch(self._state, requests)]
            if any(not keepers for keepers, _ in wanted):
                self._miss(wanted)
        for _, request in wanted:
            request.into.zero_()

    def _miss(self, wanted: Sequence[tuple[tuple[int, ...], FetchRequest]]) -> None:
        _, request = next((keepers, request) for keepers, request in wanted if not keepers)
        reason = f"no rank of the view gives elements {request.lo} to {request.hi} of flat buffer {request.flat} of the parameters"
        if not self._in_shard:
            raise FleetError(f"{reason}, which something outside of a step needs")
        self._missed = reason

    # ---- gradients that leave: behind each unit's backward -------------------------------------------------------------------------------

    def _behind_backward(self, unit: Gathered) -> None:
        """All gradients of ``unit`` are there."""
        if id(unit) in self._gone:
            self._came_again(unit)
        elif self._early and self._leaves(unit):
            self._send(unit)

    def _leaves(self, unit: Gathered) -> bool:
        return all(flat in self._gradients.leaving for flat in unit.flats)

    def _came_again(self, unit: Gathered) -> None:
        """A second backward of one shard. Half of its gradient has left already, so this attempt at the step is given up."""
        if self._early:
            log.warning("unit %s has a second gradient in one shard: gradients leave this rank at the end of each shard now", unit.name)
        self._early = False
        self._missed = self._missed or f"unit {unit.name} had a second gradient in a shard when the first one had left the rank"

    def _send(self, unit: Gathered) -> None:
        self._gone.add(id(unit))
        self._change(unit.gradients)
        given = set(map(id, unit.given))
        self._gradients.note(self._shard, [id(parameter) in given for parameter in self._gradients.parameters])
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
                    self._contribute(owner, (flat, lo, hi), host[lo:hi])

    def _contribute(self, owner: int, stretch: Stretch, elements: torch.Tensor) -> None:
        if owner != self._joined_as:
            self._sender.send(self._addresses[owner], self._contribution(stretch, self._shard), elements)
            return
        with self._moved:
            self._count(stretch, self._shard, elements.clone())  # a part of the whole would keep all its memory
            self._moved.notify_all()

    # ---- what comes here: from any thread ------------------------------------------------------------------------------------------------

    def room(self, request: PeerRequest) -> torch.Tensor:
        if request.flat not in self._gradients.leaving or not 0 <= request.lo < request.hi <= self.chunks.extents[request.flat]:
            raise ConnectionError(
                f"a contribution of elements {request.lo} to {request.hi} of flat buffer {request.flat}, which is none here"
            )
        return torch.empty(request.hi - request.lo, dtype=self._gradients.layout[request.flat].dtype, device="cpu")

    def take(self, request: PeerRequest, elements: torch.Tensor) -> bool:
        stretch = (request.flat, request.lo, request.hi)
        with self._moved:
            self._moved.wait_for(lambda: self._fate(request) is not Readiness.LATER, LATEST_S)
            known = self._sums.keeps(stretch) if request.shard == SUM else self._sums.owns(stretch)
            if self._fate(request) is not Readiness.NOW or not known:
                return False
            self._count(stretch, request.shard, elements)
            self._moved.notify_all()
        return True

    def _fate(self, request: PeerRequest) -> Readiness:
        return can_accept((self._state, self._turn), (request.state, request.turn), still=self._still)

    def _count(self, stretch: Stretch, shard: int, elements: torch.Tensor) -> None:
        if shard == SUM:
            self._sums.know(stretch, elements)
        elif (mean := self._sums.add(stretch, shard, elements)) is not None:
            for guard in self._guarded[self._joined_as]:  # without a wait: whoever waits here takes nothing in
                self._sender.send(self._addresses[guard], self._contribution(stretch, SUM), mean, waits=False)

    def _contribution(self, stretch: Stretch, shard: int) -> PeerRequest:
        assert self._state is not None
        return PeerRequest(self._state, *stretch, contribution=True, turn=self._turn, shard=shard)

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
