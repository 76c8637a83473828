"""Flat gradient buffers: what backward leaves in ``.grad`` is added up there, one pass over memory for each shard.

Buffers of the model that a forward changes (BatchNorm's statistics) start each shard from their committed value. What each shard changed is
summed with the gradients, in the same order, and its mean is added to the committed value; so such models train bit-identically, too. With
one shard there is no mean: a buffer is what the forward has left, since a difference that is added again may round.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from actors.rank.step.ahead import Ahead
from actors.rank.step.early import Early
from actors.rank.step.flats import ALL, FlatPlace, GradientSet, Key, collect
from actors.rank.step.habits import BucketOrder, Habits
from actors.rank.step.reduction import Reducer
from actors.rank.step.sums import ShardSums
from fleet.errors import ConfigError
from fleet.protocol.shards import Block

log = logging.getLogger("fleet.rank")

ALIGNMENT = 64
"""Elements; each parameter's part of a flat buffer begins at a multiple of it. No vector register is longer, so a stretch of a parameter
between two multiples is computed by the same instructions as in the whole: in 16-bit types what is left over at an end rounds otherwise."""

AVERAGED_BUFFER_LIMIT = 1 << 16
"""Elements; floating-point buffers up to this size are averaged over shards. Larger ones (masks, tables) have to stay constant."""

PLACED, NEVER = 2, 4
"""Of a parameter's mark; see :meth:`GradientBuffers.marks`."""


@dataclass
class _Buffer:
    """One buffer of a module; looked up anew each time, as a forward may replace it."""

    name: str
    module: nn.Module
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        found = self.module._buffers[self.key]
        assert found is not None
        return found


def _named_buffers(modules: Mapping[str, nn.Module]) -> Iterator[_Buffer]:
    seen: set[int] = set()
    for root, module in modules.items():
        for path, child in module.named_modules():
            for key, tensor in child._buffers.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield _Buffer(".".join(filter(None, (root, path, key))), child, key)


class GradientBuffers:
    """Gradients of ``modules`` by shard, and their mean.

    For each step: :meth:`begin_step`, then :meth:`begin_shard` and :meth:`end_shard` around each shard's forward and backward, in any
    order, then :meth:`summed` and :meth:`commit`. When the reduction breaks, what was computed stays: compute what else is needed, and
    sum up again; or :meth:`abandon` it all.

    A loop may freeze and thaw parameters between steps. One that has required a gradient once keeps its place here. A parameter without a
    gradient in any shard of a step has None for its gradient, as in plain PyTorch: the optimizer leaves it alone.

    Args:
        modules: by name, for messages; all parameters that require a gradient are taken, in order.
        shards: number of shards of the run.
        units: by ``id`` of a parameter, the unit that it belongs to, where that is not the first one, 0.
        leave: gradients of units leave the rank in the backward: they are summed elsewhere, and are not kept here.
        watched: whether it is watched when gradients come, for :meth:`overlap`; see :meth:`watch`.
        fixed: why no other parameter than these and ``known`` ones may require a gradient later; empty where one may.
        known: by ``id``, parameters that are taken, too, though they require no gradient now.

    Attributes:
        parameters: that have required a gradient once.
        layout: what the flat buffers look like, without memory.
        leaving: the flat buffers whose gradients are summed elsewhere.
        stepped: the parameters that have had a gradient in a step, as bits; all before the first step.
        times: what the gradients of the shard at hand are multiplied with as they are added up; see :meth:`end_shard`.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        shards: int,
        units: Mapping[int, int] | None = None,
        *,
        leave: bool = False,
        watched: bool = False,
        fixed: str = "",
        known: Collection[int] = (),
    ) -> None:
        self._modules, self._shards, self._units, self._leave, self._watched = modules, shards, units or {}, leave, watched
        self._fixed, self._placed, self.stepped = fixed, set(known), ALL
        self._present: dict[int, int] = {}  # by shard, which parameters have a gradient in it
        self._mean: GradientSet | None = None
        self._ahead: Ahead | None = None  # the shard at hand, or the one that was computed last: its exchange has begun
        self._in_shard = False
        self._hooks: list[Any] = []
        self.begun, self.times = False, 1.0
        self._reshape()
        self._first = self._marks()

    def _reshape(self) -> None:
        named = {f"{root}.{name}": p for root, module in self._modules.items() for name, p in module.named_parameters()}
        for name, parameter in named.items():
            if nn.parameter.is_lazy(parameter):
                raise ConfigError("model", name, "this parameter has no shape yet", "Run the model once before it is tracked.")
        unique = {id(parameter): parameter for parameter in named.values()}
        self._names = {id(parameter): name for name, parameter in reversed(named.items())}
        self._all_parameters = list(unique.values())
        self._flags = [parameter.requires_grad for parameter in self._all_parameters]
        self._placed |= {id(parameter) for parameter in self._all_parameters if parameter.requires_grad}
        self.parameters = [parameter for parameter in self._all_parameters if id(parameter) in self._placed]
        self._sort_buffers()
        self._lengths: dict[Key, int] = {}
        self._places = [self._place(parameter, self._units.get(id(parameter), 0)) for parameter in self.parameters]
        self._extents = list(self._lengths.values())
        self._change_places = [self._place(buffer.tensor) for buffer in self._averaged]
        self.leaving = frozenset(flat for flat, (*_, unit) in enumerate(self._lengths) if self._leave and unit)
        self.layout = [torch.empty(length, dtype=dtype, device="meta") for (dtype, *_), length in self._lengths.items()]
        self._tainted: GradientSet | None = None  # what a lost group was to bring may still be written there
        self._sums = ShardSums(self._shards, lambda: GradientSet(self._lengths, self._places, self._change_places, self.leaving))
        self._watch()

    def _watch(self) -> None:
        """Other parameters train: what was learnt of when gradients come is forgotten."""
        self.habits, self._orders = Habits(len(self.parameters)), dict[tuple[int, int], BucketOrder]()
        self._hook()

    def watch(self, watched: bool) -> None:
        """From the next shard on it is watched when gradients come, or not: a hook of each parameter costs each backward a little."""
        if watched != self._watched:
            self._watched = watched
            self._hook()

    def _hook(self) -> None:
        """Be told when a backward has left a gradient, where that is watched."""
        for hook in self._hooks:
            hook.remove()
        own = weakref.ref(self)

        def hook_of(number: int) -> Callable[[torch.Tensor], None]:
            return lambda _: _report(own(), number)

        watched = [(number, one) for number, one in enumerate(self.parameters) if one.requires_grad] if self._watched else []
        self._hooks = [one.register_post_accumulate_grad_hook(hook_of(number)) for number, one in watched]

    def _came(self, number: int) -> None:
        if not self._in_shard:
            return
        self.habits.came(number)
        if self._ahead is not None:
            self._ahead.came(number)

    def _sort_buffers(self) -> None:
        found = list(_named_buffers(self._modules))
        floating = [buffer for buffer in found if buffer.tensor.is_floating_point()]
        # Batch norm's kernels change its statistics without counting up their version, so no check would see it: always averaged.
        averaged = [isinstance(b.module, nn.modules.batchnorm._NormBase) or b.tensor.numel() <= AVERAGED_BUFFER_LIMIT for b in floating]
        self._averaged = [buffer for buffer, yes in zip(floating, averaged, strict=True) if yes]
        self._constant = [buffer for buffer, yes in zip(floating, averaged, strict=True) if not yes]
        self._counted = [buffer for buffer in found if not buffer.tensor.is_floating_point()]
        self._first_count: list[torch.Tensor] = []
        self._left: list[torch.Tensor] | None = None  # of one shard, what its forward has left of them

    def _place(self, like: torch.Tensor, unit: int = 0) -> FlatPlace:
        key = (like.dtype, like.device, unit)
        start = self._lengths.get(key, 0)
        self._lengths[key] = start + -(-like.numel() // ALIGNMENT) * ALIGNMENT
        return FlatPlace(list(self._lengths).index(key), start, like.shape, torch.empty_like(like, device="meta").stride())

    @property
    def places(self) -> list[tuple[int, int]]:
        """By parameter: (flat buffer, element) at which its gradient begins, in the order of its memory."""
        return [(place.flat, place.start) for place in self._places]

    @property
    def extents(self) -> list[int]:
        """By flat buffer, how many of its first elements are gradients; what comes after them are changes of buffers."""
        return self._extents + [0] * (len(self._lengths) - len(self._extents))

    @property
    def constant(self) -> bool:
        """True when no forward changes any buffer of the modules, as far as is known: then the state is as committed between commits."""
        return not self._averaged and not self._counted

    @property
    def bytes(self) -> int:
        """Size of one set of buffers: what a rank exchanges in a step."""
        return sum(length * dtype.itemsize for (dtype, *_), length in self._lengths.items())

    @property
    def trained(self) -> int:
        """Names the parameters that have a place here, so that two ranks can compare theirs: a loop body may change that."""
        return zlib.crc32(bytes(id(parameter) in self._placed for parameter in self._all_parameters))

    def marks(self) -> str | None:
        """By parameter, whether it requires a gradient, whether it has done so once, and whether it alone had none in any step yet: for
        :meth:`mark`. None while all are as at first."""
        marks = self._marks()
        return None if marks == self._first else marks

    def _marks(self) -> str:
        numbers = {id(one): number for number, one in enumerate(self.parameters)}
        never = [id(one) in numbers and not self.stepped >> numbers[id(one)] & 1 for one in self._all_parameters]
        found = zip(self._all_parameters, never, strict=True)
        return "".join(str(one.requires_grad + PLACED * (id(one) in self._placed) + NEVER * no) for one, no in found)

    def mark(self, marks: str | None) -> None:
        """Another rank's parameters, or those of a checkpoint, were so. Call it between steps. Raises ConfigError: it was another model."""
        marks = self._first if marks is None else marks
        if marks == self._marks():
            return
        if len(marks) != len(self._all_parameters):
            raise ConfigError(
                "model", f"{len(self._all_parameters)} parameters", f"the state to load is of {len(marks)}", "Load one of the same model."
            )
        found = [(one, int(mark)) for one, mark in zip(self._all_parameters, marks, strict=True)]
        for one, mark in found:
            one.requires_grad_(bool(mark & 1))
        before, self._placed = self._placed, {id(one) for one, mark in found if mark & PLACED}
        if self._placed == before:
            self._flags = [one.requires_grad for one, _ in found]
            self._watch()
        else:
            self._reshape()
        never = {id(one) for one, mark in found if mark & NEVER}
        self.stepped = ALL & ~sum(1 << number for number, one in enumerate(self.parameters) if id(one) in never)

    def begin_step(self) -> None:
        """A step begins unless one has. The modules' buffers hold their committed values."""
        if self.begun:
            return
        self._look_at_flags()
        self._committed = [buffer.tensor.clone() for buffer in self._averaged]
        self._committed_counts = [buffer.tensor.clone() for buffer in self._counted]
        self._versions = [(id(buffer.tensor), buffer.tensor._version) for buffer in self._constant]
        self._first_count, self._left = [], None
        self.begun = True

    def _look_at_flags(self) -> None:
        """The loop body may have frozen parameters, or thawed them."""
        flags = [parameter.requires_grad for parameter in self._all_parameters]
        if flags == self._flags:
            return
        new = [one for one in self._all_parameters if one.requires_grad and id(one) not in self._placed]
        if new and self._fixed:
            way_out = 'Let it require a gradient at run.track, and freeze it right behind that; or set optimizer_sharding = "none".'
            raise ConfigError("requires_grad", self._names[id(new[0])], self._fixed, way_out)
        if new:
            self._reshape()
        else:
            self._flags = flags
            self._watch()

    def as_committed(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Within a step, the buffers that a forward changes, and what each was when the step began. From any thread."""
        if not self.begun:
            return []
        live = [buffer.tensor for buffer in (*self._averaged, *self._counted)]
        return list(zip(live, [*self._committed, *self._committed_counts], strict=True))

    def settle(self) -> None:
        """Between shards: buffers are as committed."""
        if self.begun:
            self._restore()

    def begin_shard(self) -> None:
        """Gradients are zero, and buffers as committed. Call it right before the shard's forward."""
        # When a peer is lost, its shards may come to this rank behind its last one, of which an exchange has begun that will not end.
        self._leave_ahead("this rank computes one more shard")
        for parameter in self.parameters:
            parameter.grad = None
        self._restore()
        self.times = 1.0
        self._in_shard = self._watched
        self.habits.begin()

    def overlap(self, reducer: Reducer, shard: int) -> None:
        """``shard``, which begins, is this rank's last of the step: the exchange goes on beside its backward, if that can be.

        It cannot while it is not known when gradients come, nor where a forward changes buffers.
        """
        if not (self._watched and self.habits.known and self.constant and reducer.overlaps(self.layout)):
            return
        into, joined = self._sums.target(shard)
        coming = self._sums.coming(shard, into, joined)
        if tuple(sorted(coming.after)) != reducer.blocks:  # it is computed for another view than this one
            if not joined:
                self._sums.put_back(into)
            return
        out = self._sums.take()
        early = reducer.begin([coming.after[block].flats for block in reducer.blocks], out.flats)
        order = self._order_of(reducer)
        self._ahead = Ahead(self.parameters, order, self.habits.expected, into, joined, coming, out, early, self._collect)

    def _collect(self, values: Sequence[torch.Tensor | None], into: Sequence[torch.Tensor], add: bool) -> None:
        collect(values, into, add, self.times)

    def _order_of(self, reducer: Reducer) -> BucketOrder:
        buckets = reducer.stretches(self.layout)
        key = len(buckets), len(buckets[0]) if buckets else 0
        if key not in self._orders:
            self._orders[key] = BucketOrder(buckets, self.places, self.extents)
        return self._orders[key]

    def end_shard(self, shard: int, times: float = 1.0, weight: float = 1.0) -> None:
        """Take the gradients that backward has left in ``.grad``, and what the forward did to buffers.

        Args:
            times: what the gradients are multiplied with as they are added up; ``weight`` is that of the changes of buffers.
        """
        self._check_constant()
        self._end_watch()
        self.note(shard, [parameter.grad is not None for parameter in self.parameters])
        if self._ahead is not None:
            self._end_ahead(self._ahead)
            return
        into, joined = self._sums.target(shard)
        with torch.no_grad():
            # An equal value counts as no change also where subtracting would not give zero: infinities in a mask.
            changes: list[torch.Tensor | None] = [
                torch.where(b.tensor == c, torch.zeros_like(c), b.tensor - c) for b, c in zip(self._averaged, self._committed, strict=True)
            ]
            if weight != 1.0:  # a shard without weight counts nothing, also where its forward has left no numbers
                changes = [change * weight if change is not None and weight else None for change in changes]
            kept = [(p.grad, view) for p, view in zip(self.parameters, into.gradients, strict=True) if view is not None]
            collect([grad for grad, _ in kept], [view for _, view in kept], joined, times)
            collect(changes, into.changes, joined)
        if not self._first_count:
            self._first_count = [buffer.tensor.clone() for buffer in self._counted]
        if self._shards == 1 and weight:
            self._left = [buffer.tensor.clone() for buffer in self._averaged]
        self._sums.add(shard, into, joined)

    def note(self, shard: int, found: Sequence[bool]) -> None:
        """By parameter, whether ``shard`` has made a gradient for it."""
        bits = (1 << len(found)) - 1 if all(found) else sum(1 << number for number, yes in enumerate(found) if yes)
        self._present[shard] = self._present.get(shard, 0) | bits

    @property
    def present(self) -> int:
        """The parameters that have a gradient in some shard of this rank, as bits."""
        bits = 0
        for shard in self.held:
            bits |= self._present[shard]
        return bits

    def keep_present(self, present: int) -> None:
        """Those that have one in some shard of all ranks: of the mean that :meth:`summed` has left, all others become None."""
        assert self._mean is not None, "keep_present() without summed()"
        self._mean.present = present
        for number, parameter in enumerate(self.parameters):
            if not present >> number & 1:
                parameter.grad = None

    def _end_watch(self) -> None:
        """The shard is over."""
        if self._in_shard and not self.habits.off:
            self.habits.end()
        self._in_shard = False

    def _end_ahead(self, ahead: Ahead) -> None:
        if ahead.finish():
            self._sums.settle(ahead.coming)
            return
        self.habits.off = "a gradient was changed after it had been sent"
        log.warning("%s: this step is computed once more, and no gradient is sent before its backward is over from now on", self.habits.off)
        self._sums.spoil(ahead.coming, ahead.into)
        self._leave_ahead(self.habits.off)

    def _leave_ahead(self, reason: str) -> None:
        """An exchange that has begun is of no use. What this rank has computed stays, but for sums to which a shard was being added."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.early.leave(reason)
            self._taint(ahead.out)
            if self._in_shard:
                self._sums.spoil(ahead.coming, ahead.into)
        self._in_shard = False

    @property
    def ahead(self) -> tuple[int, int] | None:
        """Of the exchange that has begun: (bytes asked for, bytes that are here). None where none has."""
        return None if self._ahead is None else self._ahead.early.ahead()

    @property
    def last(self) -> list[torch.Tensor | None]:
        """What the shard at hand has come to, before :meth:`end_shard`: its gradients, and the buffers as its forward left them."""
        return [*(parameter.grad for parameter in self.parameters), *(buffer.tensor for buffer in self._averaged)]

    @property
    def held(self) -> frozenset[int]:
        """The shards that were computed for this step."""
        return self._sums.held

    def keep(self, blocks: Collection[Block]) -> None:
        """Of what was computed, only the sums of ``blocks`` will count."""
        self._sums.keep(blocks)

    @contextlib.contextmanager
    def summed(self) -> Iterator[tuple[ShardSums[GradientSet], GradientSet, Early | None]]:
        """Around the sum over all shards of all ranks; then ``.grad`` is their mean, and buffers are as committed. Raises what is raised
        within: all is as before.

        Gives the sums of this rank, where the mean is to be, and the exchange that goes on already, if one does.
        """
        self.begin_step()
        ahead, self._ahead = self._ahead, None
        self._mean = mean = self._sums.take() if ahead is None else ahead.out
        try:
            yield self._sums, mean, None if ahead is None else ahead.early
        except BaseException:
            self._taint(mean)
            self._mean = None
            raise
        for parameter, view in zip(self.parameters, mean.gradients, strict=True):
            parameter.grad = view
        self._restore()

    def expect(self, reducer: Reducer) -> None:
        """Between steps: see :meth:`Reducer.expect`."""
        like = self._sums.take()
        try:
            reducer.expect(like.flats)
        finally:
            self._sums.put_back(like)

    def partials(self, reducer: Reducer) -> list[Sequence[torch.Tensor]]:
        """The flat buffers of what this rank brought to the sum, between :meth:`summed` and the end of the step."""
        return [one.flats for one in self._sums.partials(reducer.blocks)]

    def rehearse_mean(self) -> None:
        """Touch the memory that the first reduction would take. One more set, which only a loss needs, is not made before there is one."""
        mean = self._sums.take()
        for flat in mean.flats:
            flat.zero_()
        self._sums.put_back(mean)

    def _forget_mean(self) -> None:
        if self._mean is not None:
            for flat in self.leaving:
                self._mean.flats[flat] = torch.zeros(0, dtype=self.layout[flat].dtype, device=self.parameters[0].device)
            self._sums.put_back(self._mean)
            self._mean = None

    def _taint(self, mean: GradientSet | None) -> None:
        """The reduction of ``mean`` broke: it serves again when the next one has, which had a group of its own, or a step is committed.

        What was to come may be marked (:mod:`actors.rank.step.landed`), between parameters too, where no gradient is ever written over it.
        """
        if self._tainted is not None:
            for flat in self._tainted.flats:
                flat.zero_()
            self._sums.put_back(self._tainted)
        self._tainted = mean

    def divide(self, divisor: float) -> None:
        """All of the mean that :meth:`summed` has left."""
        assert self._mean is not None, "divide() without summed()"
        for flat in self._mean.flats:
            if flat.is_floating_point() or flat.is_complex():
                flat.div_(divisor)

    @property
    def mean_present(self) -> int:
        """See :meth:`keep_present`."""
        assert self._mean is not None, "mean_present without summed()"
        return self._mean.present

    def take_mean(self) -> GradientSet:
        """Lay the step's mean aside, until it is given to :meth:`give_mean`."""
        assert self._mean is not None, "take_mean() without summed()"
        mean, self._mean = self._mean, None
        return mean

    def give_mean(self, mean: GradientSet) -> None:
        """What :meth:`take_mean` gave is the step's mean again."""
        self._forget_mean()
        self._mean = mean

    def put_means(self, means: Mapping[int, Any]) -> None:
        """By flat buffer that is summed elsewhere, what stands in its place in the step's mean until the step ends."""
        assert self._mean is not None, "put_means() without summed()"
        for flat, mean in means.items():
            self._mean.flats[flat] = mean

    def take(self) -> GradientSet:
        """A set of buffers to use for something else, between steps; contents undefined, and again to be once it is given back."""
        return self._sums.take()

    def give_back(self, buffers: GradientSet) -> None:
        self._sums.put_back(buffers)

    @property
    def mean_flats(self) -> list[torch.Tensor]:
        """The flat buffers of the step's mean, between :meth:`summed` and the end of the step."""
        assert self._mean is not None, "mean_flats without summed()"
        return self._mean.flats

    def commit(self, *, first: bool = False) -> None:
        """Give the buffers their new value: as committed, plus the mean of the shards' changes. One shard's, and integer ones: as after it.

        ``first``: it is the first step of all.
        """
        assert self._mean is not None, "commit() without summed()"
        self.stepped = self._mean.present | (0 if first else self.stepped)
        with torch.no_grad():
            for number, buffer in enumerate(self._averaged):
                if self._left is None:
                    buffer.tensor.add_(self._mean.changes[number])
                else:
                    buffer.tensor.copy_(self._left[number])
            for buffer, value in zip(self._counted, self._first_count, strict=True):
                buffer.tensor.copy_(value)
        self._taint(None)
        self._end()

    def _end(self) -> None:
        self._forget_mean()
        self._sums.keep(())
        self._present = {}
        self.begun = False

    def abandon(self) -> None:
        """Forget the step, if one has begun: no gradients, and buffers as committed. Allowed at any moment."""
        self.hold()
        self._end()

    def hold(self) -> None:
        """The attempt is over, the step is not: the shards computed stay, there are no gradients, and buffers are as committed."""
        self._leave_ahead("left")
        self._forget_mean()
        if self.begun:
            self._restore()
        for parameter in self.parameters:
            parameter.grad = None

    def _restore(self) -> None:
        with torch.no_grad():
            for buffer, value in zip(self._averaged + self._counted, self._committed + self._committed_counts, strict=True):
                buffer.tensor.copy_(value)

    def _check_constant(self) -> None:
        for buffer, version in zip(self._constant, self._versions, strict=True):
            if (id(buffer.tensor), buffer.tensor._version) != version:
                raise ConfigError(
                    "model",
                    buffer.name,
                    f"the forward changed this buffer; only those of up to {AVERAGED_BUFFER_LIMIT} elements are averaged over shards",
                    "Make it a parameter, or keep it out of the forward.",
                )


def _report(gradients: GradientBuffers | None, number: int) -> None:
    if gradients is not None:
        gradients._came(number)
