"""A step of a model that ``fully_shard`` has cut (``optimizer_sharding = "fsdp"``).

Chunks hold the parameters beside the optimizer's state, and move, are guarded and are stepped as in :mod:`actors.rank.zero1.layout`. The
difference: no rank has the whole. A rank gathers a unit of the parameters for its forward, and again for its backward, from the ranks that
keep the chunks. So a step is over when all ranks have stepped their chunks; no parameters are sent after it.

Until a step is applied, ranks gather parameters of the state that it begins from. The owner and the guards of each chunk have that state.
When an owner is lost meanwhile, ranks ask its guards, and the forward goes on. When no rank has the chunk, the computation is of no use
(:attr:`FsdpLayout.useless`): the shard counts as not computed, and the loop comes to the next view.

Gradients leave the rank in the backward. As soon as a unit's backward is over, the rank cuts its gradient in the same way as its
parameters. Each stretch goes to the owner of that chunk, which adds up those of all shards in the order of the tree. The owner sends the
mean to the guards of the chunk. So no rank has a whole gradient. It has one unit's gradient of a shard at a time, and the sums of chunks
that it owns or guards.

Gradients that have left a rank cannot be cut again for other ranks. With one shard a rank, a view change during a step means to compute it
again: a lost shard takes as long. With more shards than ranks, gradients go to a guard, too. In the next view those shards count whose
gradients are with all owners, and whose rank is there. The :class:`fleet.protocol.chunks.Turn` of a contribution says to which attempt it
belongs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import cast

import torch

from actors.rank.fsdp.chunks import ChunkedModel
from actors.rank.fsdp.copies import Unread
from actors.rank.fsdp.exchange import PeerExchange
from actors.rank.fsdp.gathered import Gathered
from actors.rank.fsdp.taken import Precision, Unit
from actors.rank.membership.process_group import Group
from actors.rank.state.saving import Share
from actors.rank.step.layout import LayoutInputs, OwnWord, StateLayout
from actors.rank.zero1.chunked import check_tracked
from actors.rank.zero1.kept import FIXED, KeptChunks
from actors.rank.zero1.layout import ShardedReducer, cut_gradients
from fleet.errors import ConfigError
from fleet.host.linux import give_large_blocks_back
from fleet.protocol.chunks import StateCut
from fleet.protocol.types import StateId

log = logging.getLogger("fleet.rank")


class FsdpLayout(StateLayout):
    """The parameters are spread over the ranks, too. A rank keeps the gradient of its chunks alone. See the module.

    Attributes:
        units: parameters that are gathered together. Trained parameters in no unit are gathered for the whole of a shard.
        uncast: units that compute in another type, here with the parameters as they are kept.
    """

    kept: KeptChunks
    reducer: ShardedReducer
    fixed, leave, sums = FIXED, True, ShardedReducer
    spares_newcomers = False

    def __init__(self, given: LayoutInputs) -> None:
        state = given.state
        check_tracked(state, given.settings.threads_per_rank)
        give_large_blocks_back()
        super().__init__(given)
        cut_gradients(self)
        chunks = self._cut()
        self.kept, self.exchange = KeptChunks(given, self.gradients, chunks), PeerExchange(given, self.gradients, chunks, self.reducer.mean)
        self.kept.adding = lambda: self.exchange.adding
        self._shard, self._gone, self._early = -1, set[int](), True
        state.apart = frozenset(map(id, self.gradients.parameters))
        state.load_parameter, state.free = chunks.load_parameter, self.free
        self.units = [self._gathering(unit) for unit in self._with_rest(state.units)]
        casting = [unit for unit in state.units if unit.precision.parameters is not None]
        self.uncast = [self._gathering(dataclasses.replace(unit, modules=(), precision=Precision())) for unit in casting]

    @property
    def _model(self) -> ChunkedModel:
        return cast(ChunkedModel, self.kept.chunks)

    def _cut(self) -> ChunkedModel:
        gradients, readers = self.gradients, self.given.state.readers
        read = [readers[id(parameter)] for parameter in gradients.parameters] if readers else []
        return ChunkedModel(self.given.update.optimizers, gradients.parameters, gradients.layout.places, gradients.layout.extents, read)

    def _with_rest(self, units: Sequence[Unit]) -> list[Unit]:
        inside = {id(parameter) for unit in units for parameter in unit.parameters}
        rest = tuple(parameter for parameter in self.gradients.parameters if id(parameter) not in inside)
        return [*units, *([Unit("what is in no unit", (), rest, keeps=True)] if rest else [])]

    def _gathering(self, unit: Unit) -> Gathered:
        gradients = self.gradients
        where = {id(parameter): place for parameter, place in zip(gradients.parameters, gradients.layout.places, strict=True)}
        places = [(parameter, *where[id(parameter)]) for parameter in unit.parameters if id(parameter) in where]
        flats = dict.fromkeys(flat for _, flat, _ in places)
        return Gathered(
            unit,
            [(flat, gradients.layout.extents[flat]) for flat in flats],
            places,
            self.exchange.fill,
            self._behind_backward,
            self._changed,
        )

    def close(self) -> None:
        """End all serving, fetching and contributing."""
        self.exchange.close()

    @property
    def weights(self) -> list[torch.Tensor]:
        """See :class:`StateLayout`, here and below."""
        return self._model.weights

    @property
    def elements(self) -> list[torch.Tensor]:
        return self._model.stretches

    @property
    def useless(self) -> str:
        return self.exchange.useless

    @property
    def there(self) -> Collection[int]:
        return self.exchange.there

    def drop(self) -> None:
        self.exchange.begin_step()

    def count(self, shards: Collection[int]) -> None:
        self.exchange.count(shards)

    def begin(self, state: StateId) -> None:
        with self.exchange.moving():
            self._model.settle()
            self.kept.begin(state)

    # ---- a shard -------------------------------------------------------------------------------------------------------------------------

    def begin_shard(self, shard: int) -> None:
        self.exchange.missed, self.exchange.in_shard = "", True
        self.exchange.order.begin()
        for each in self.units:
            if not each.modules:
                each.gather()
        self._shard, self._gone = shard, set()

    def end_shard(self, shard: int, loss: float) -> None:
        for unit in filter(self._leaves, self.units):
            if id(unit) not in self._gone:
                self._send(unit)
            elif unit.gradients:
                self._came_again(unit)
        self.exchange.order.end()
        self.free()
        if math.isnan(loss) and not self.useless:
            self._check_used()

    def _changed(self, unit: Gathered) -> None:
        """A unit of this rank's shard is gathered, or its memory is free. While one unit is gathered, the next one is asked for."""
        if not self.exchange.in_shard:
            return
        if unit.here:
            self.exchange.order.came(self.units.index(unit))
        if self.exchange.order.next is None or not self.given.state.ahead:
            return
        following = self.units[self.exchange.order.next]
        if following.here or any(each.asked for each in self.units):
            return
        if sum(each.here and each.passes for each in self.units) <= 1:  # else a unit whose backward ends is still here
            following.asked = True
            self.exchange.ask(following.room())

    def _check_used(self) -> None:
        """Raises ConfigError if a unit was never gathered: a NaN loss then comes from its freed parameters."""
        for unit in self.units:
            if not unit.used:
                reason = "its forward was not called, and the loss is not a number: its parameters are gathered around its forward alone"
                way_out = "Call the module itself, not another of its methods; or leave it to the unit around it."
                raise ConfigError("fully_shard", unit.name, reason, way_out)

    def free(self) -> None:
        """Free the memory of all gathered parameters."""
        self.exchange.drop()
        self.exchange.in_shard = False
        for each in self.units:
            each.free()

    def repeat(self) -> None:
        self.exchange.repeat()

    def reset(self) -> None:
        self.free()
        self.kept.sums.forget()

    def hold(self) -> None:
        self.free()
        self.exchange.leave()
        self.kept.sums.hold()

    # ---- gradients that leave: after each unit's backward --------------------------------------------------------------------------------

    def _behind_backward(self, unit: Gathered) -> None:
        """All gradients of ``unit`` are there."""
        if id(unit) in self._gone:
            self._came_again(unit)
        elif self._early and self._leaves(unit):
            self._send(unit)

    def _leaves(self, unit: Gathered) -> bool:
        return all(flat in self.gradients.layout.leaving for flat in unit.flats)

    def _came_again(self, unit: Gathered) -> None:
        """A second backward of one shard: a part of its gradient has left already, so the rank gives up this attempt at the step."""
        if self._early:
            log.warning("unit %s has a second gradient in one shard: gradients leave this rank at the end of each shard now", unit.name)
        self._early = False
        self.exchange.missed = (
            self.exchange.missed or f"unit {unit.name} had a second gradient in a shard when the first one had left the rank"
        )

    def _send(self, unit: Gathered) -> None:
        self._gone.add(id(unit))
        self.given.injections.apply(unit.gradients)
        there = set(map(id, unit.given))
        self.gradients.note(self._shard, [id(parameter) in there for parameter in self.gradients.parameters])
        packed = unit.pack()
        if self.useless:  # also where the ranks that compute with this one have lost one of them
            return
        if (times := self.given.weights.unit) != 1.0 and self.given.settings.shards > 1:
            for whole in packed.values():
                whole.mul_(times)  # without rounding
        self.exchange.send(self._shard, packed)

    # ---- a step --------------------------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until all gradients of this rank have arrived at their owners. The means come before the vote on them."""
        self.exchange.flush(self.group)

    def settle(self, divisor: float, *, late: bool) -> None:
        means, whole = self.exchange.means(self.group, divisor), self.gradients.mean.flats
        for flat, mean in means.items():
            whole[flat] = mean
        self.kept.arrive(lambda flat, lo, hi: means[flat].room(lo, hi) if flat in means else whole[flat][lo:hi], late=late)

    def word(self) -> OwnWord:
        return self.kept.word(self.group)

    @contextlib.contextmanager
    def stepping(self, *, turns: bool) -> Iterator[list[torch.Tensor]]:
        with self.exchange.moving():
            with self.kept.stepping(complete=True) as gradients:
                yield gradients
            if turns and (moved := self.kept.turn(self.group.rank)) is not None:
                self.reducer.cut = self.kept.cut
                self.exchange.turn_to(self.kept.cut, moved.asked)
            self.exchange.begin_step()

    def publish(self, then: Callable[[], None]) -> None:
        """Send no parameters after the step, as no rank has them whole."""
        self.kept.afterwards(then)
        self.kept.conclude()

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        whole = [*self.uncast, *(each for each in self.units if not each.casts)]
        for each in whole:
            each.gather()
        try:
            yield
        finally:
            for each in whole:
                each.free()

    def unread(self) -> Unread:
        named = {id(one): f"{root}.{name}" for root, module in self.given.state.modules.items() for name, one in module.named_parameters()}
        units = {id(one): each for each in (*self.units, *self.uncast) for one in each.parameters}
        return Unread({each: (named[each], unit) for each, unit in units.items() if each in named})

    def digest(self, step: int) -> str:
        return self.kept.digest(self.group, step)

    def share(self) -> Share:
        return self.kept.share(self.state_part)

    # ---- a view begins -------------------------------------------------------------------------------------------------------------------

    def moving(self) -> contextlib.AbstractContextManager[None]:
        return self.exchange.moving()

    def introduce(self, group: Group) -> None:
        self.exchange.introduce(group)

    def place(self, state: StateId, cut: StateCut, group: Group, asked: Sequence[tuple[int, ...]], *, inherited: bool) -> None:
        self.kept.place(state, cut, group.rank)
        self.reducer.cut = cut
        self.exchange.place(cut, asked, inherited=inherited)
