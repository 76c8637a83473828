"""Flat gradient buffers: the gradients that a backward leaves in ``.grad`` are added up there, one pass over memory for each shard.

The changes that a forward makes to buffers of the model are summed with the gradients (:mod:`actors.rank.step.module_buffers`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from actors.rank.mesh.parts import of_parameter
from actors.rank.step.ahead import Ahead
from actors.rank.step.early import Early
from actors.rank.step.flats import ALL, ONE_OWNER, FlatLayout, GradientSet, collect
from actors.rank.step.habits import BucketOrder, Habits
from actors.rank.step.module_buffers import ModuleBuffers
from actors.rank.step.reduction import Reducer
from actors.rank.step.sums import ShardSums
from actors.rank.step.trained import TrainedParameters

log = logging.getLogger("fleet.rank")


class GradientBuffers:
    """Gradients of ``modules`` by shard, and their mean.

    For each step: :meth:`begin_step`, then :meth:`begin_shard` and :meth:`end_shard` around each shard's forward and backward, in any
    order, then :meth:`summed` and :meth:`commit`. When the reduction breaks, the computed shards stay: compute the missing shards and sum
    up again, or :meth:`abandon` the step.

    A parameter that has required a gradient once keeps its place here. A parameter without a gradient in any shard of a step gets None as
    gradient, as in plain PyTorch: the optimizer leaves it alone.

    Args:
        modules: by name, for messages; all parameters that require a gradient are taken, in order.
        shards: number of shards of the run.
        units, leave, owners: see :class:`FlatLayout`; ``fixed``, ``known``, ``elsewhere``: see :class:`TrainedParameters`.
        watched: whether hooks observe when gradients come, for :meth:`overlap`; see :meth:`watch`.

    Attributes:
        parameters: the parameters with gradients: all that are ``trained``.
        buffers: of the modules.
        layout: how gradients, and changes of buffers, lie in a set of flat buffers.
        sums: the sums of the shards that were computed for this step.
        times: the factor of the current shard's gradients as they are added up; see :meth:`end_shard`.
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
        owners: Mapping[int, int] = ONE_OWNER,
        elsewhere: Collection[int] = (),
    ) -> None:
        self._shards, self._units, self._leave, self._watched, self._owners = shards, units or {}, leave, watched, owners
        self.trained, self.buffers = TrainedParameters(modules, fixed, known, elsewhere), ModuleBuffers(modules, shards)
        self._present: dict[int, int] = {}  # by shard, which parameters have a gradient in it
        self._mean: GradientSet | None = None
        self._ahead: Ahead | None = None  # the current or the last computed shard, whose exchange has begun
        self._in_shard = False
        self._hooks: list[Any] = []
        self.begun, self.times = False, 1.0
        self._place()

    def _place(self) -> None:
        """Each parameter that trains gets its place."""
        self.parameters = self.trained.parameters
        self.layout = FlatLayout(self.parameters, self.buffers.averaged, self._units, leave=self._leave, owners=self._owners)
        self._tainted: GradientSet | None = None  # messages of a lost group may still be written there
        self.sums = ShardSums(self._shards, functools.partial(GradientSet, self.layout))
        self._watch()

    def _watch(self) -> None:
        """Other parameters train: forget the order in which gradients came."""
        self.habits, self._orders = Habits(len(self.parameters)), dict[tuple[int, int], BucketOrder]()
        self._hook()

    def watch(self, watched: bool) -> None:
        """Set or remove the hooks that observe when gradients come. A hook for each parameter costs each backward a little."""
        if watched != self._watched:
            self._watched = watched
            self._hook()

    def _hook(self) -> None:
        """Put a hook on each parameter that trains, if gradients are watched."""
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

    def mark(self, marks: str | None) -> None:
        """See :meth:`TrainedParameters.mark`. Call it between steps."""
        if self.trained.mark(marks):
            self._follow()

    def _follow(self) -> None:
        """Other parameters train than before."""
        if self.parameters is self.trained.parameters:
            self._watch()
        else:
            self.buffers.find()
            self._place()

    def begin_step(self) -> None:
        """A step begins unless one has. The modules' buffers hold their committed values."""
        if self.begun:
            return
        if self.trained.look():
            self._follow()
        self.buffers.begin_step()
        self.begun = True

    def begin_shard(self) -> None:
        """Gradients are zero, and buffers as committed. Call it right before the shard's forward."""
        # When a peer is lost, its shards may come to this rank after its last shard. The exchange of that shard has begun and will not end.
        self._leave_ahead("this rank computes one more shard")
        for parameter in self.parameters:
            parameter.grad = None
        self.buffers.restore()
        self.times = 1.0
        self._in_shard = self._watched
        self.habits.begin()

    def begin_look(self) -> None:
        """Buffers are as committed. Call it right before a forward that makes no gradients and counts for no shard."""
        self._leave_ahead("this rank computes one more shard")
        self.buffers.restore()

    def overlap(self, reducer: Reducer, shard: int) -> None:
        """``shard``, which begins, is this rank's last of the step: begin the exchange beside its backward, if possible.

        It is not possible before the order of gradients is known, nor where a forward changes buffers.
        """
        if not (self._watched and self.habits.known and self.buffers.constant and reducer.overlaps(self.layout.meta)):
            return
        into, joined = self.sums.target(shard)
        coming = self.sums.coming(shard, into, joined)
        if tuple(sorted(coming.after)) != reducer.blocks:  # the shards are those of another view
            if not joined:
                self.sums.put_back(into)
            return
        out = self.sums.take()
        early = reducer.begin([coming.after[block].flats for block in reducer.blocks], out.flats)
        order = self._order_of(reducer)
        self._ahead = Ahead(self.parameters, order, self.habits.expected, into, joined, coming, out, early, self._collect)

    def _collect(self, values: Sequence[torch.Tensor | None], into: Sequence[torch.Tensor], add: bool) -> None:
        collect(values, into, add, self.times)

    def _order_of(self, reducer: Reducer) -> BucketOrder:
        buckets = reducer.stretches(self.layout.meta)
        key = len(buckets), len(buckets[0]) if buckets else 0
        if key not in self._orders:
            self._orders[key] = BucketOrder(buckets, self.layout.places, self.layout.extents)
        return self._orders[key]

    def end_shard(self, shard: int, times: float = 1.0, weight: float = 1.0) -> None:
        """Take the gradients that the backward has left in ``.grad``, and the changes that the forward made to buffers.

        Args:
            times: the factor of the gradients as they are added up. ``weight``: the factor of the changes of buffers.
        """
        self.buffers.check()
        if self._in_shard and not self.habits.off:
            self.habits.end()
        self._in_shard = False
        self.note(shard, [parameter.grad is not None for parameter in self.parameters])
        if self._ahead is not None:
            self._end_ahead(self._ahead)
            return
        into, joined = self.sums.target(shard)
        with torch.no_grad():
            kept = [(p, view) for p, view in zip(self.parameters, into.gradients, strict=True) if view is not None]
            found = [None if p.grad is None else of_parameter(p, p.grad) for p, _ in kept]
            collect(found, [view for _, view in kept], joined, times)
        self.buffers.collect(into.changes, joined, weight)
        self.sums.add(shard, into, joined)

    def note(self, shard: int, found: Sequence[bool]) -> None:
        """Note by parameter whether ``shard`` has made a gradient for it."""
        bits = (1 << len(found)) - 1 if all(found) else sum(1 << number for number, yes in enumerate(found) if yes)
        self._present[shard] = self._present.get(shard, 0) | bits

    @property
    def present(self) -> int:
        """The parameters that have a gradient in some shard of this rank, as bits."""
        bits = 0
        for shard in self.sums.held:
            bits |= self._present[shard]
        return bits

    def keep_present(self, present: int, elsewhere: Sequence[nn.Parameter] = ()) -> None:
        """``present``: the parameters with a gradient in some shard of some rank, as bits. ``.grad`` of all others becomes None.

        ``elsewhere``: those of other stages.
        """
        self.mean.present, self.mean.elsewhere = present, elsewhere
        for number, parameter in enumerate(self.parameters):
            if not present >> number & 1:
                parameter.grad = None

    def _end_ahead(self, ahead: Ahead) -> None:
        if ahead.finish():
            self.sums.settle(ahead.coming)
            return
        self.habits.off = "a gradient was changed after it had been sent"
        log.warning("%s: this step is computed once more, and no gradient is sent before its backward is over from now on", self.habits.off)
        self.sums.spoil(ahead.coming, ahead.into)
        self._leave_ahead(self.habits.off)

    def _leave_ahead(self, reason: str) -> None:
        """Give up an exchange that has begun. This rank's sums stay, except those to which a shard was being added."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.early.leave(reason)
            self._taint(ahead.out)
            if self._in_shard:
                self.sums.spoil(ahead.coming, ahead.into)
        self._in_shard = False

    @property
    def ahead(self) -> tuple[int, int] | None:
        """(bytes asked for, bytes that are here) of the exchange that has begun; None where none has."""
        return None if self._ahead is None else self._ahead.early.ahead()

    @property
    def last(self) -> list[torch.Tensor | None]:
        """The result of the current shard, before :meth:`end_shard`: its gradients, and the buffers as its forward left them."""
        return [*(parameter.grad for parameter in self.parameters), *self.buffers.averaged]

    @property
    def mean(self) -> GradientSet:
        """The step's mean. It exists from :meth:`summed` to the end of the step."""
        assert self._mean is not None, "no step was summed"
        return self._mean

    @contextlib.contextmanager
    def summed(self) -> Iterator[tuple[ShardSums[GradientSet], GradientSet, Early | None]]:
        """Context of the sum over all shards of all ranks. After it ``.grad`` is their mean, and buffers are as committed.

        Gives (this rank's sums, the set for the mean, the exchange that runs already or None). An error within leaves all as before.
        """
        self.begin_step()
        ahead, self._ahead = self._ahead, None
        self._mean = mean = self.sums.take() if ahead is None else ahead.out
        try:
            yield self.sums, mean, None if ahead is None else ahead.early
        except BaseException:
            self._taint(mean)
            self._mean = None
            raise
        self._show(mean)
        self.buffers.restore()

    def _show(self, mean: GradientSet, present: int = ALL) -> None:
        """``.grad`` of each parameter becomes its part of ``mean``; None where it is not in ``present``."""
        for number, (parameter, gradient) in enumerate(zip(self.parameters, mean.shown(self.parameters), strict=True)):
            parameter.grad = gradient if present >> number & 1 else None

    def cut_anew(self) -> None:
        """Other ranks add up other parts of the gradient than before."""
        self._orders.clear()

    def expect(self, reducer: Reducer) -> None:
        """Between steps: see :meth:`Reducer.expect`."""
        like = self.sums.take()
        try:
            reducer.expect(like.flats)
        finally:
            self.sums.put_back(like)

    def rehearse_mean(self) -> None:
        """Touch the memory that the first reduction takes. A further set, which only the loss of a rank needs, is made at that loss."""
        mean = self.sums.take()
        for flat in mean.flats:
            flat.zero_()
        self.sums.put_back(mean)

    def _forget_mean(self) -> None:
        if self._mean is not None:
            for flat in self.layout.leaving:
                self._mean.flats[flat] = torch.zeros(0, dtype=self.layout.meta[flat].dtype, device=self.parameters[0].device)
            self.sums.put_back(self._mean)
            self._mean = None

    def _taint(self, mean: GradientSet | None) -> None:
        """The reduction of ``mean`` broke. Keep the set until a later reduction, of another group, breaks or a step is committed. Then use
        it again.

        The set is zeroed first: marks of expected messages (:mod:`actors.rank.step.landed`) may lie between parameters, where no gradient
        overwrites them.
        """
        if self._tainted is not None:
            for flat in self._tainted.flats:
                flat.zero_()
            self.sums.put_back(self._tainted)
        self._tainted = mean

    def take_mean(self) -> GradientSet:
        """Take the step's mean away, until the caller gives it back to :meth:`give_mean`."""
        mean, self._mean = self.mean, None
        return mean

    def give_mean(self, mean: GradientSet) -> None:
        """Make ``mean``, which :meth:`take_mean` gave, the step's mean again, and ``.grad``."""
        self._forget_mean()
        self._mean = mean
        self._show(mean, mean.present)

    def commit(self, *, first: bool = False) -> None:
        """The step is taken: the modules' buffers get their new value. ``first``: it is the first step of the run."""
        self.trained.stepped = self.mean.present | (0 if first else self.trained.stepped)
        self.buffers.commit(self.mean.changes)
        self._taint(None)
        self._end()

    def _end(self) -> None:
        self._forget_mean()
        self.sums.keep(())
        self._present = {}
        self.buffers.end_step()
        self.begun = False

    def abandon(self) -> None:
        """Forget the step, if one has begun: no gradients, and buffers as committed. Allowed at any moment."""
        self.hold()
        self._end()

    def hold(self) -> None:
        """End the attempt, not the step: the computed shards stay, ``.grad`` is None, and buffers are as committed."""
        self._leave_ahead("left")
        self._forget_mean()
        self.buffers.restore()
        for parameter in self.parameters:
            parameter.grad = None


def _report(gradients: GradientBuffers | None, number: int) -> None:
    if gradients is not None:
        gradients._came(number)
