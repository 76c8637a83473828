"""One rank's arithmetic of a step: gradients of its shards, their fixed-order mean, and the one mutation of the state."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from actors.rank.membership.process_group import Group, GroupBroken, Work
from actors.rank.state.saving import Share, WholeTensors
from actors.rank.state.tracked import TrackedState
from actors.rank.step import bits
from actors.rank.step.clipping import SplitNorms, block_norms, clip, clip_factor, plain_factor, total_norm
from actors.rank.step.gradients import GradientBuffers
from actors.rank.step.jumps import Jumps, judged
from actors.rank.step.logged import ShardLog
from actors.rank.step.outcome import ReductionOutcome
from actors.rank.step.reduction import Reducer, SideChannel
from actors.rank.step.stopwatch import Stopwatch
from actors.rank.step.weights import ShardWeights, agreed, divisor, mean_of
from actors.rank.tags import Tag
from actors.rank.telemetry.exchanged import EXCHANGED, Before
from actors.rank.telemetry.recorder import Recorder
from actors.rank.telemetry.usage import RECEIVED
from actors.rank.verify.body import Body
from actors.rank.verify.recheck import Recheck
from actors.rank.verify.replicas import Replicas
from fleet.errors import ConfigError
from fleet.protocol.duties import Duties
from fleet.protocol.levels import LEVELS
from fleet.protocol.member import NO_VIEW, Offer
from fleet.protocol.records import COMM, GRAD_NORM, LEARNING_RATE, STRAGGLER, VERIFY
from fleet.protocol.shards import Shares, cover
from fleet.protocol.types import Finding, StateId, View
from fleet.protocol.vote import CommitVote, Words
from fleet.settings.run import RunSettings

FLAGS = 2 + len(LEVELS)
"""Numbers that each rank sends beside the gradients, before its shards' losses: proposal, a request of each level, time of arrival.

Then comes what replicas, recheck and body of :mod:`actors.rank.verify` compare, :mod:`actors.rank.step.jumps`, and which parameters have
a gradient; behind the losses, the shards' weights."""


Change = Callable[[Sequence[torch.Tensor]], object]


class Engine:
    """Computes, reduces and applies steps of the tracked objects.

    Args:
        state: of which the modules are trained by its one optimizer; a learning-rate scheduler and a gradient scaler are stepped with it.
        clip_norm: the gradient's norm is clipped to this.
    """

    _leave = False
    """Whether gradients of units leave the rank in the backward."""
    _fixed = ""
    """Why no parameter may train that did not at first."""
    _spread = False
    """Whether the state is spread over the ranks, so that each has the sums of a part alone."""

    def __init__(self, state: TrackedState, settings: RunSettings, recorder: Recorder, clip_norm: float | None) -> None:
        self.state, self._recorder, self._clip_norm = state, recorder, clip_norm
        self._shards = settings.shards
        self._to_change: list[Change] = []
        modules = {name: o for name, o in state.objects.items() if isinstance(o, torch.nn.Module)}
        self._optimizer = _only(state, torch.optim.Optimizer, "optimizer")
        self._schedulers = [o for o in state.objects.values() if isinstance(o, torch.optim.lr_scheduler.LRScheduler)]
        self._scaler = next((o for o in state.objects.values() if isinstance(o, torch.amp.GradScaler)), None)
        known = state.trained if self._fixed else ()  # a loop may freeze them behind run.track, and thaw them later
        self._gradients = GradientBuffers(
            modules, settings.shards, state.units, leave=self._leave, watched=self._watches(settings), fixed=self._fixed, known=known
        )
        state.marks, state.mark = self._gradients.marks, self._gradients.mark
        if not self._gradients.parameters:
            raise ConfigError("track", sorted(state.objects), "no module with parameters that require a gradient", "Track model=... too.")
        self.device = self._gradients.parameters[0].device
        self._stopwatch = Stopwatch(self.device)
        self._reducer = self._make_reducer(settings)
        self._replicas = Replicas(state, settings.verify.replicas)
        self._recheck = Recheck(settings.verify.compute, settings.shards)
        self._jumps = Jumps(settings.verify.jumps)
        self.body = Body(modules, self._optimizer, self._schedulers, self._scaler, samples=settings.verify.replicas > 0)
        self._head = FLAGS + self._replicas.width + self._recheck.width + self._jumps.width + self.body.width
        self._norms: list[torch.Tensor] = []
        self._split = SplitNorms((), ())
        self._split_of: Sequence[torch.nn.Parameter] = ()
        self._largest = self._norm = self._rate = math.nan
        self._before: tuple[float, float] | None = None
        self._side: SideChannel | None = None
        self.duties, self.vote = Duties(settings.shards), CommitVote(spread=self._spread)
        self._rank = 0
        self._history = -1  # of the view at hand
        self._counted, self._divisor = [True] * settings.shards, 1.0  # of the step at hand: by shard, whether it has a weight
        self._early_us = 0  # when the last exchange began that did so beside a shard
        self._sent: list[tuple[Work, torch.Tensor]] = []  # memory of what is on its way to the peers
        self._promise: tuple[Group, tuple[int, ...]] | None = None
        self.losses: dict[int, float] = {}
        self.shard_weights = ShardWeights(settings.shards)
        self.log = ShardLog(settings.world)

    def _make_reducer(self, settings: RunSettings) -> Reducer:
        kind = "native" if settings.reduction == "native" else "ordered"
        return Reducer(settings.shards, kind, two_levels=self._in_two_levels(settings), overlap_cores=self._overlap_cores(settings))

    def _overlap_cores(self, settings: RunSettings) -> float:
        """See :class:`Reducer`. All ranks find alike."""
        return settings.overlap_cores if self._watches(settings) and settings.threads_per_rank == 1 else math.inf

    def _watches(self, settings: RunSettings) -> bool:
        """Whether it is watched when gradients come, so that they can leave while others still do."""
        return settings.overlap and settings.optimizer_sharding != "fsdp" and not self.state.casts

    def _in_two_levels(self, settings: RunSettings) -> bool:
        """Whether hosts may combine sums. Not where sums are checked: the owner would be blamed for what another rank has combined."""
        return settings.two_level_sums and not settings.verify.compute and not self._leave

    def before_sum(self, change: Change) -> None:
        """``change`` is given the gradients of a shard, once, between its backward and its sum: the first one that begins, or is at hand,
        and whose gradients have not been sent meanwhile. From any thread."""
        self._to_change.append(change)

    def _change(self, gradients: Sequence[torch.Tensor]) -> None:
        if self._to_change and gradients:
            self._to_change.pop(0)(gradients)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return self._gradients.parameters

    @property
    def weights(self) -> list[torch.Tensor]:
        """The memory of the parameters that is here between steps."""
        return list(self._gradients.parameters)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """All parameters of the model can be read here meanwhile, by this rank alone."""
        yield

    def unread(self) -> contextlib.AbstractContextManager[Any]:
        """Around what may not read the parameters, if they are not whole here."""
        return contextlib.nullcontext()

    @property
    def broken(self) -> bool:
        """Whether what the loop body computes now is of no use, as this rank could not have what it needs for it."""
        return False

    @property
    def figures(self) -> dict[str, float]:
        """Of the step that was taken last: the norm of its gradient before it was clipped, and the learning rate of the first group."""
        return {GRAD_NORM: self._norm, LEARNING_RATE: self._rate}

    @property
    def modules(self) -> list[torch.nn.Module]:
        """All modules, the inner ones too."""
        return [inner for module in self.state.modules.values() for inner in module.modules()]

    @property
    def moments(self) -> list[torch.Tensor]:
        """The tensors of the optimizer's state."""
        states = self._optimizer.state.values()
        return [value for one in states for value in one.values() if isinstance(value, torch.Tensor) and value.dim()]

    @property
    def _state(self) -> StateId | None:
        """The state that the step at hand begins from."""
        return self.duties.at

    @_state.setter
    def _state(self, state: StateId | None) -> None:
        self.duties.at = state

    @property
    def assigned(self) -> tuple[int, ...]:
        """The shards that this rank has yet to compute for the step at hand."""
        return self.duties.assigned(self.losses)

    @property
    def next_assigned(self) -> tuple[int, ...]:
        """The shards of this rank in the step after the one at hand, if nobody is lost meanwhile."""
        return self.duties.next_assigned

    @property
    def steady(self) -> bool:
        """True when nothing that is tracked changes while shards are computed, so that it can be sent to a newcomer meanwhile."""
        return self._gradients.constant

    def as_committed(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """See :meth:`GradientBuffers.as_committed`."""
        return self._gradients.as_committed()

    def join(self, group: Group, view: View, rank: int, here: StateId, begun: bool) -> None:
        """Compute with this group from now on, at state ``here``. Raises GroupBroken.

        With ``begun`` the view may come in the middle of a step: what its members have computed of it counts, and only the rest is due.
        Without, this rank knows that it comes between steps.
        """
        self._group, self._view, self._rank = group, view, rank
        if here.history != self._history:
            self._jumps.begin()
        self._history = here.history
        if here != self._state or rank in view.receivers:
            self.reset()
        self._state = here
        self._gradients.settle()
        self.log.begin_view()
        self._replicas.join(view.generation, here, rank in view.receivers)
        contributed, idle = self._contributed_by_all(begun), view.idle if self.spares_newcomers else ()
        shares = self.duties.join(view, rank, contributed, idle)
        self._share(shares)
        self._recheck.join(view.generation, rank, here, rank in view.receivers, view.ranges, whole=shares is self.duties.whole)

    @property
    def spares_newcomers(self) -> bool:
        """Whether a rank can take a step of which it has computed nothing: not when a forward counts something that only it knows."""
        return self.steady

    @property
    def trained(self) -> int:
        """See :attr:`GradientBuffers.trained`."""
        return self._gradients.trained

    def rehearse(self) -> None:
        """Alone, for one shard: what a first attempt has to load, compile and allocate is there when this rank is called."""
        self._group, self._rank = Group(0, 0, 1, self.device), 0
        self.duties.rehearse()

    def forget(self) -> None:
        """The rehearsal is over: one more set of buffers is made for its mean, and nothing else remains."""
        self._gradients.rehearse_mean()
        self._gradients.abandon()
        self._stopwatch.forget()
        self.losses = {}

    def promise(self, group: Group, shards: tuple[int, ...]) -> None:
        """Tell all of ``group`` which shards this rank will bring when it joins there: those it has and those it goes on with.

        From the thread that joins while the loop computes. So whoever is done goes on with what was lost, and waits for nobody.
        """
        self._promise = group, shards
        self._send_held(group, group.peers, shards)

    def _send_held(self, group: Group, peers: Sequence[int], shards: Collection[int]) -> None:
        mask = torch.zeros(self._shards, dtype=torch.uint8, device="cpu")
        mask[sorted(shards)] = 1
        self._sent = [*self._sent[-1:], (group.start([(mask, peer) for peer in peers], [], Tag.HELD), mask)]

    def _contributed_by_all(self, begun: bool) -> list[frozenset[int]]:
        """By view rank, what it has or has promised of the step at hand. Receivers of the state have nothing, and nobody waits for them."""
        group, receivers = self._group, self._view.receivers
        promise, self._promise = self._promise, None
        if promise is not None and promise[0] is group:
            mine: Collection[int] = promise[1]
        else:
            mine = self._contributes
            asking = group.peers if begun else [peer for peer in group.peers if peer in receivers]
            self._send_held(group, [] if self._rank in receivers else asking, mine)
        masks = torch.zeros(group.size, self._shards, dtype=torch.uint8, device="cpu")
        givers = [peer for peer in group.peers if peer not in receivers] if begun else []
        group.start([], [(masks[peer], peer) for peer in givers], Tag.HELD).wait()
        received = [frozenset(mask.nonzero().flatten().tolist()) for mask in masks]
        return [frozenset(mine) if rank == self._rank else shards for rank, shards in enumerate(received)]

    @property
    def _contributes(self) -> frozenset[int]:
        """The shards of the step at hand that count in a view that begins within it."""
        return self._gradients.held

    def _share(self, shares: Shares) -> None:
        kept = {shard for lo, hi in shares.kept[self._rank] for shard in range(lo, hi)}
        held = self._gradients.held
        if not held <= kept:
            self._recorder.abandon()
            self._gradients.keep(cover(held & kept, self._shards))
            self.losses = {shard: loss for shard, loss in self.losses.items() if shard in kept}
            self.shard_weights.keep(kept)
            self.log.keep(kept)
        self._reducer.bind(self._group, shares.leaves(self._shards))
        self._gradients.watch(self._reducer.beside)
        self._side, self._split_of = SideChannel(self._group), ()

    def begin(self, state: StateId) -> None:
        """All of ``state`` was loaded or built here."""
        self._jumps.begin()

    def outcome_of(self, step: int) -> ReductionOutcome | None:
        """What the reduction of ``step`` said, when it was applied without the loop; see :mod:`actors.rank.zero1.sharded`."""
        return None

    def finish(self, then: Callable[[], None]) -> None:
        """The step is applied: ``then`` is what follows, once the state is whole everywhere."""
        then()

    def share(self) -> Share:
        """What this rank writes of a checkpoint, as one of the ranks of its view."""
        return WholeTensors(self.state, self._group.rank, self._group.size)

    def digest(self, step: int) -> str:
        """Of all of the state, after ``step`` steps; the same on all ranks."""
        return self.state.digest(step)

    def begin_shard(self, shard: int) -> None:
        """Right before the forward of ``shard``."""
        self.state.free()
        self._stopwatch.begin()
        self._gradients.begin_step()
        self.shard_weights.begin()
        self._gradients.begin_shard()
        assigned = self.assigned
        if len(assigned) == 1 and not self._recheck.verifies and not self._to_change:
            self._gradients.overlap(self._reducer, assigned[0])
            self._early_us = self._recorder.now_us()

    @property
    def checks(self) -> tuple[int, ...]:
        """Shards of other ranks that this one computes again, for comparison: then :meth:`end_check`."""
        return self._recheck.wanted

    def end_check(self, shard: int) -> None:
        """The gradients of another rank's shard are there. They count in no sum."""
        self.state.free()
        self._recheck.take(shard, self._gradients.last)

    def end_shard(self, shard: int, loss: float) -> None:
        self.state.free()
        if self._gradients.ahead is None:
            self._change([parameter.grad for parameter in self.parameters if parameter.grad is not None])
        if self._recheck.samples(shard):
            self.end_check(shard)
        self._gradients.end_shard(shard, *self.shard_weights.end(shard))
        self._stopwatch.end()
        self.losses[shard] = loss
        self._forget_lost()

    def _forget_lost(self) -> None:
        """What is no longer in the sums is due again."""
        held = self._gradients.held
        self.losses = {shard: loss for shard, loss in self.losses.items() if shard in held}

    def scaled(self, loss: torch.Tensor, weight: float | None = None) -> torch.Tensor | None:
        """What the backward begins with; None where the weight is zero, and nothing of it counts. Raises LoopError."""
        factor = self.shard_weights.add(weight)
        if not factor:
            return None
        self._gradients.times = self.shard_weights.unit
        loss = loss if factor == 1.0 else loss * factor
        return loss if self._scaler is None else self._scaler.scale(loss)

    def reset(self) -> None:
        """Nothing of the present attempt remains."""
        self.state.free()
        if self._gradients.begun:
            self._recorder.abandon()
        self._gradients.abandon()
        self._stopwatch.forget()
        self.losses = {}
        self.shard_weights.forget()
        self.log.forget()
        self.vote.begin()

    def repeat(self) -> None:
        """The step at hand is computed anew, by whom it is computed when nothing is lost. All ranks do so, or none."""
        self.reset()
        self._jumps.accept()
        self._before = self._largest, self._norm
        self._share(self.duties.begin_step())
        assert self._state is not None
        self._recheck.begin(self._state)

    def hold(self) -> None:
        """The group is gone or left; what this rank has computed of the step stays."""
        self.state.free()
        self._gradients.hold()
        self._forget_lost()

    def reduce(self, offer: Offer, *, early: bool = False) -> ReductionOutcome:
        """Exchange gradients and a few numbers with all ranks. Raises GroupBroken: what this rank has computed stays.

        StatesDiffer is one: the ranks do not hold the same, so that what was summed is not to be used. ``early``: the state is still on its
        way to this rank, which brings nothing.
        """
        assert self._side is not None and self._state is not None
        said = self._replicas.abstain() + self._recheck.look() if early else self._look(self._state)
        said += self._jumps.limits() + self.body.said()
        arrived_us = self._recorder.switch(STRAGGLER)
        contributed, most = self.duties.contributed[self._rank], max(map(len, self.duties.contributed))
        losses, ahead = [self.losses[shard] for shard in contributed], None if early else self._ahead()
        said += [float(bool(self.log)), *bits.numbers_of(self._gradients.present, len(self.parameters))]
        weighed = [*losses, *[0.0] * (most - len(losses)), *self.shard_weights.of(contributed)]
        early_us = arrived_us if early or self._gradients.ahead is None else self._early_us
        first = self._head + 1 + bits.width(len(self.parameters))
        width = first + 2 * most
        rows = self._sum([*offer, arrived_us, *said, *weighed], width)
        numbers = rows[:, :width].tolist()
        self.log.look(numbers[0][FLAGS - 1], some=any(row[self._head] for row in numbers))
        self._exchanged(ahead, early_us, arrived_us, [int(row[FLAGS - 1]) for row in numbers])
        second = FLAGS + self._replicas.width
        third = second + self._recheck.width
        fourth = third + self._jumps.width
        self.body.compare([row[fourth] for row in numbers] if self.body.width else [], self._view.generation)
        self._replicas.compare([row[FLAGS:second] for row in numbers])
        disputed = self._recheck.compare([row[second:third] for row in numbers])
        if self._recheck.verifies and not disputed:
            self._recorder.switch(VERIFY)
            self._recheck.check_sums(self._group, self._reducer, self._gradients.partials(self._reducer), self._gradients.mean_flats)
            self._recorder.switch(COMM)
        self._gradients.keep_present(bits.any_of([row[self._head + 1 : first] for row in numbers]))
        by_shard, weights = self._by_shard(numbers, first, most)
        self._weigh(weights)
        limits = [min(limit) for limit in zip(*(row[third:fourth] for row in numbers), strict=True)]
        loss_limit, norm_limit = limits or (math.inf, math.inf)
        doubt = None
        if not disputed:
            self._largest, doubt = judged(by_shard, self._counted, loss_limit)
            self._norm = math.nan
        offers = [tuple(map(int, row[: len(offer)])) for row in numbers]
        return ReductionOutcome(offers, mean_of(by_shard, weights), doubt, norm_limit, disputed, weights)

    def _by_shard(self, numbers: Sequence[Sequence[float]], first: int, most: int) -> tuple[list[float], tuple[float, ...]]:
        """(losses, weights) of all shards. Raises LoopError where some have a weight and others have none."""
        rows = zip(numbers, self.duties.contributed, strict=True)
        where = [(shard, row, first + i) for row, shards in rows for i, shard in enumerate(shards)]
        losses, weights = {shard: row[at] for shard, row, at in where}, {shard: row[at + most] for shard, row, at in where}
        shards = range(self._shards)
        return [losses[shard] for shard in shards], agreed([weights[shard] for shard in shards])

    def _weigh(self, weights: Sequence[float]) -> None:
        """The sum, which was divided by the number of shards, becomes one that was divided by the sum of the weights."""
        self._counted = [not weights or weight > 0 for weight in weights or [1.0] * self._shards]
        self._divisor = divisor(weights)
        if self._divisor not in (0.0, 1.0):
            self._gradients.divide(self._divisor)
            self._norms = []

    def _ahead(self) -> Before | None:
        """What is here of the others' gradients as this rank is done with its own."""
        here = self._gradients.ahead or self._reducer.ahead()
        return None if here is None else Before(*here, RECEIVED.total)

    def _exchanged(self, before: Before | None, early_us: int, arrived_us: int, arrivals_us: Sequence[int]) -> None:
        """The sum is here, and what is not hidden of its exchange began when the last rank was done with its shards."""
        now_us = self._recorder.now_us()
        began_us = self._recorder.switch(COMM, min(now_us, max(arrivals_us)))
        if before is not None:
            EXCHANGED.note(before, arrived_us - min(early_us, *arrivals_us), now_us - began_us)

    def _sum(self, said: list[float], width: int) -> torch.Tensor:
        """Sum the gradients. By rank, the numbers that it said, ``width`` of them with zeros at the end; then its norms, which are kept."""
        assert self._side is not None
        side, gradients = self._side, self._gradients
        gradients.begin_step()
        self._split_norms()
        side.listen(width + self._split.width)

        def added() -> list[Work]:
            """What this rank has added up is in its caches now."""
            padded = torch.tensor(said + [0.0] * (width - len(said)), dtype=torch.float64, device="cpu")
            return [side.start(torch.cat([padded, self._split.take(gradients.mean_flats, self._rank)]))]

        gradients.reduce(self._reducer, added)
        rows = side.take()
        self._norms = self._split.in_order(rows[:, width:])
        return rows

    def _split_norms(self) -> None:
        """Who takes which norms: each rank those of the part that it alone adds up. With a gradient scaler nobody does."""
        gradients = self._gradients
        if self._split_of is not gradients.parameters:
            parts = self._reducer.parts(gradients.layout) if self._reports_norms else [[] for _ in range(self._group.size)]
            self._split, self._split_of = SplitNorms(parts, gradients.extents), gradients.parameters

    @property
    def _reports_norms(self) -> bool:
        """Beside the gradients."""
        return self._scaler is None

    def remark(self) -> str:
        """In words, what is strange about a step that is to be applied: it updates nothing, or came out as before when it was computed once
        more, and is believed now."""
        if not any(self._counted):
            return "the weights of all its shards are 0, so that nothing is updated"
        before, self._before = self._before, None
        if before is None or before[0] != self._largest or (before[1] != self._norm and not math.isnan(before[1])):
            return ""
        return f"the largest loss of a shard is {self._largest:.4g} again, and the gradient's norm {self._norm:.4g}"

    def owner(self, shard: int) -> int:
        """The view rank that has computed ``shard``; -1: nobody."""
        return next((rank for rank, shards in enumerate(self.duties.contributed) if shard in shards), -1)

    @property
    def testimony(self) -> Finding | None:
        """What this rank tells when it leaves its group now: its end of a comparison that did not come to a good end."""
        return self._recheck.open or self._replicas.testimony

    def _look(self, here: StateId) -> list[float]:
        if not self._replicas.width or self._group.size == 1:
            return [0.0] * self._replicas.width + self._recheck.look()
        self._recorder.switch(VERIFY)
        self._gradients.settle()
        return self._replicas.look(here) + self._recheck.look()

    def words(self) -> Words:
        """What is said of the sums, by all who are asked. Raises GroupBroken.

        With a gradient scaler infinite gradients are its business: it skips the update, lowers its scale.
        """
        if self._scaler is not None:
            return Words((True,), skips=True)
        finite = self._finite()
        return Words((finite,), self._norm)

    def alone(self) -> ReductionOutcome:
        """Reduce and vote, where no rank machine asks for both. With a ``doubt`` the step is not to be applied, but to be repeated."""
        reduced = self.reduce((NO_VIEW, *[0] * len(LEVELS)))
        doubt = reduced.doubt
        if doubt is None:
            self.vote.ready()
            doubt = self.vote.decide(self.words(), reduced.norm_limit)
        self.vote.begin()
        return dataclasses.replace(reduced, doubt=doubt)

    def _finite(self) -> bool:
        """Whether the sum is, by its norm, which is kept."""
        flats, extents = self._gradients.mean_flats, self._gradients.extents
        self._norms = self._norms or [block_norms(flat[:extent]) for flat, extent in zip(flats, extents, strict=True)]
        self._norm = total_norm(self._norms)
        cuts = [(flat, extent) for flat, extent in zip(flats, extents, strict=True) if flat.is_floating_point()]
        rest = [flat[extent:] for flat, extent in cuts if extent < flat.numel()]
        return (math.isfinite(self._norm) and _all_finite(rest)) or _all_finite(flats)

    def _clip(self, norm: float) -> None:
        parts = [flat[:extent] for flat, extent in zip(self._gradients.mean_flats, self._gradients.extents, strict=True)]
        if self._shards == 1:
            factor = plain_factor(self._there, norm)
        else:
            factor = clip_factor(self._norms if self._scaler is None else map(block_norms, parts), norm)
        clip(parts, factor)

    @property
    def _there(self) -> list[torch.Tensor]:
        """The gradients of the step, of the parameters that have one."""
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def expect(self) -> None:
        """The next step is computed in this view, if nothing comes between: what peers who are done early bring to it may come."""
        with contextlib.suppress(GroupBroken):  # then something has, and whoever needs the group is told
            self._gradients.expect(self._reducer)

    def apply(self) -> None:
        """Clip, step optimizer, scaler and schedulers, give buffers their new values. The state is dirty meanwhile."""
        self.state.free()
        self._recorder.measured(self._stopwatch.take_us())
        scaler = self._scaler if self._gradients.mean_present else None  # without any gradient one raises
        if scaler is not None:
            scaler.unscale_(self._optimizer)
        if self._clip_norm is not None:
            self._clip(self._clip_norm)
        self._rate = float(self._optimizer.param_groups[0]["lr"])
        if scaler is not None:
            scaler.step(self._optimizer)
            scaler.update()
        elif self._scaler is None:
            self._optimizer.step()
        for scheduler in self._schedulers:
            scheduler.step()
        assert self._state is not None
        self._gradients.commit(first=self._state.step == 0)
        self._jumps.seen(self._largest, self._norm)
        self._state, self.losses = StateId(self._state.history, self._state.step + 1), {}
        self.log.take(self.shard_weights.taken())
        self._recheck.begin(self._state)
        if self.duties.shares is not self.duties.whole:
            self._share(self.duties.begin_step())


def _all_finite(flats: Sequence[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(flat).all()) for flat in flats)


def _only(state: TrackedState, kind: type, name: str) -> Any:
    found = [o for o in state.objects.values() if isinstance(o, kind)]
    if len(found) != 1:
        raise ConfigError(
            "track",
            sorted(state.objects),
            f"{len(found)} of its objects are an {name}",
            f"Track exactly one {name}; its groups may have other options.",
        )
    return found[0]
