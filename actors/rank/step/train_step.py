"""One rank's step, from its first shard to the new state on all ranks: ``compute -> reduce -> vote -> apply -> publish``.

Each phase is a method here, in this order, and carries out the move of its name. :mod:`fleet.protocol.rank_machine`, which simulated ranks
run as well, decides when each phase comes, and what follows when the group is lost in it. The layout (:mod:`actors.rank.step.layout`) has
all parts that depend on where the state lies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from actors.rank.membership.process_group import Group, GroupBroken, Work
from actors.rank.state.tracked import TrackedState
from actors.rank.step.checks import Checks
from actors.rank.step.contributions import Contributions, InView
from actors.rank.step.flats import ALL
from actors.rank.step.injections import Change, Injections
from actors.rank.step.layout import LayoutInputs, MakeLayout, layout_of
from actors.rank.step.outcome import NonFiniteError, ReductionOutcome
from actors.rank.step.rows import COLLECTS, LATE, LOGS, OFFER, RowFormat, Rows
from actors.rank.step.stopwatch import Stopwatch
from actors.rank.step.update import ClipNorm, Update
from actors.rank.step.weights import ShardWeights, agreed, divisor, mean_of
from actors.rank.tags import Tag
from actors.rank.telemetry.exchanged import EXCHANGED, Before
from actors.rank.telemetry.recorder import Recorder
from actors.rank.telemetry.usage import RECEIVED
from actors.rank.verify.body import Body
from fleet.protocol.duties import Duties
from fleet.protocol.member import NO_VIEW
from fleet.protocol.moves import Advance, Apply, CastVote, Reduce, Repeat, StepCommitted
from fleet.protocol.records import COMM, GRAD_NORM, LEARNING_RATE, STRAGGLER
from fleet.protocol.types import Column, StateId
from fleet.protocol.vote import CommitVote, Doubt, Words
from fleet.settings.run import RunSettings

PACES = 4
"""The shortest of so many last steps says how fast this rank steps."""


def gathered(group: Group, numbers: Sequence[float], more: torch.Tensor) -> torch.Tensor:
    """The numbers of all ranks of ``group``, a row for each rank: ``numbers``, then ``more``. Raises GroupBroken."""
    row = torch.cat([torch.tensor(numbers, dtype=torch.float64, device="cpu"), more])
    rows = torch.empty(group.size, len(row), dtype=torch.float64, device="cpu")
    group.all_gather(rows, row, Tag.READY)
    return rows


class Observer:
    """Called at the events of each step. This class does nothing: it is for steps outside of a run."""

    def changing(self, number: int) -> None:
        """Step ``number`` is about to change the state."""

    def committed(self, train: TrainStep) -> Callable[[], None]:
        """The step is taken on this rank. Gives a function to call once all ranks have the new state."""
        return lambda: None

    @property
    def collects(self) -> bool:
        """Whether all ranks shall collect garbage behind this step."""
        return False

    def doubted(self, train: TrainStep, why: str, doubt: Doubt | None = None) -> None:
        """A summed step is strange, for the reason ``why``; without ``doubt`` it is taken all the same."""


class TrainStep:
    """Steps of the tracked objects, one after the other.

    Args:
        state: its optimizers train its modules; learning-rate schedulers and a gradient scaler are stepped with them.
        clip_norm: see :class:`Update`.
        layout: makes the layout, in place of that of the settings.
        more: further arguments of the layout, see :class:`LayoutInputs`.

    Attributes:
        taken: the reduction's result of the step that this attempt has taken; None before.
    """

    def __init__(
        self,
        state: TrackedState,
        settings: RunSettings,
        recorder: Recorder,
        clip_norm: ClipNorm,
        *,
        observer: Observer | None = None,
        layout: MakeLayout | None = None,
        **more: Any,
    ) -> None:
        self.state, self._recorder, self.observer = state, recorder, observer or Observer()
        spread = not settings.replicated
        self.update, self.duties = Update(state, clip_norm, spread=spread), Duties(settings.shards)
        self.vote = CommitVote(spread=spread)
        self.shard_weights, self._injections = ShardWeights(settings.shards), Injections()
        given = (state, settings, recorder, self.update, self.duties, self.vote, self.shard_weights, self._injections)
        self.layout = (layout or layout_of(settings.optimizer_sharding))(LayoutInputs(*given, **more))
        self.gradients, self.reducer = self.layout.gradients, self.layout.reducer
        self.device = self.gradients.parameters[0].device
        self.verify = Checks(state, settings, recorder, self.gradients, self.update, self.layout.kept)
        self.contributions = Contributions(settings, state.objects, self.duties, self.shard_weights, self.gradients, self.reducer, recorder)
        self._stopwatch = Stopwatch(self.device)
        self._early_us = 0  # when the last exchange beside a shard began
        self._reduced = ReductionOutcome([], math.nan)
        self._suspect = -1  # the step that was repeated last
        self._applied_s = deque[float](maxlen=PACES + 1)
        self.taken: ReductionOutcome | None = None

    def begin_attempt(self, optimizers: int) -> None:
        """The loop body has computed its shards for a step of these ``optimizers``. The step is not taken yet."""
        self.update.asked, self.taken = optimizers, None

    # ---- compute -------------------------------------------------------------------------------------------------------------------------

    def begin_shard(self, shard: int) -> None:
        """Right before the forward of ``shard``."""
        self.state.free()  # parameters gathered outside the steps may be of an earlier state
        self._stopwatch.begin()
        self.gradients.begin_step()
        self.shard_weights.begin()
        self.gradients.begin_shard()
        assigned = self.assigned
        if len(assigned) == 1 and not self.verify.recheck.verifies and not self._injections:
            self.gradients.overlap(self.reducer, assigned[0])
            self._early_us = self._recorder.now_us()
        self.layout.begin_shard(shard)

    def begin_forward(self) -> None:
        """Right before the forward of one stage of a shard. Its backward begins with :meth:`begin_shard`, after others maybe."""
        self.state.free()
        self.gradients.begin_step()

    def scaled_elsewhere(self, weight: float) -> None:
        """The loss of the current shard, of which this rank has a stage, was scaled for this weight."""
        self.shard_weights.add(weight)
        self.gradients.times = self.shard_weights.unit

    def begin_look(self, shard: int) -> None:
        """Right before a forward of ``shard`` of which only representations count. Call :meth:`end_look` after it."""
        self.state.free()
        self.gradients.begin_step()
        self.gradients.begin_look()
        self.layout.begin_shard(shard)

    def end_look(self) -> None:
        """The representations of the shard are there."""
        self.state.free()

    def scaled(self, loss: torch.Tensor, weight: float | None = None) -> torch.Tensor | None:
        """The loss times its factors, for the backward; None where the weight is zero: the loss does not count. Raises LoopError."""
        factor = self.shard_weights.add(weight)
        if not factor:
            return None
        self.gradients.times = self.shard_weights.unit
        loss = loss if factor == 1.0 else loss * factor
        return loss if self.update.scaler is None else self.update.scaler.scale(loss)

    def end_shard(self, shard: int, loss: float) -> None:
        """Add the shard's gradients to those of this rank's other shards."""
        self.layout.end_shard(shard, loss)
        if self.layout.useless:
            return
        self.state.free()
        if self.gradients.ahead is None:
            self._injections.apply([parameter.grad for parameter in self.parameters if parameter.grad is not None])
        if self.verify.recheck.samples(shard):
            self.end_check(shard)
        self.gradients.end_shard(shard, *self.shard_weights.end(shard))
        self._stopwatch.end()
        self.contributions.losses[shard] = loss
        self.contributions.forget_lost()

    def end_check(self, shard: int) -> None:
        """Keep the gradients of another rank's shard for comparison. They count in no sum."""
        self.state.free()
        self.verify.recheck.take(shard, self.gradients.last)

    # ---- reduce --------------------------------------------------------------------------------------------------------------------------

    def reduce(self, move: Reduce) -> ReductionOutcome:
        """Exchange gradients and a few numbers with all ranks. Raises GroupBroken: the shards that this rank has computed stay.

        StatesDiffer is a GroupBroken: the ranks hold different states, so no rank may use the sum. With ``early`` the state is still on its
        way to this rank. The rank then adds nothing, and all its time counts as restoring.
        """
        self._recorder.paused |= move.early
        try:
            self.layout.flush()
            self.contributions.finish_gather()
            self.contributions.send_carried()
            row, form, exchanged = self._say(move)
            gradients, side = self.gradients, self.contributions.side
            gradients.begin_step()
            split = self.layout.split_norms()
            side.listen(form.width + split.width)

            def added() -> list[Work]:
                """Send the row and the norms of this rank's part now, while the part is in the caches."""
                return [side.start(torch.cat([row, split.take(gradients.mean.flats, self.contributions.rank)]))]

            with gradients.summed() as (sums, mean, early):
                if early is None:
                    self.reducer.reduce(sums, mean, added)
                else:
                    early.finish(added)
            rows = side.take()
            self.contributions.receive_carried()
            self.layout.keep_norms(split.in_order(rows[:, form.width :]))
            numbers = rows[:, : form.width].tolist()
            said = Rows(form, numbers, ())
            self.contributions.log.look(said.arrivals_us[0], some=bool(said.flags & LOGS))
            exchanged(said.arrivals_us)
            return self._compare(said, *self.contributions.rows(form, numbers))
        finally:
            self._recorder.paused &= not move.early

    def _say(self, move: Reduce) -> tuple[torch.Tensor, RowFormat, Callable[[Sequence[int]], None]]:
        """(this rank's row, its format, a function to call with all ranks' arrivals once the rows are exchanged)."""
        assert self.duties.at is not None
        gradients, ours, parameters = self.gradients, self.contributions, self.gradients.trained.count
        checks = self.verify.say(self.duties.at, early=move.early, alone=ours.group.size == 1)
        arrived_us = self._recorder.switch(STRAGGLER)
        there = None if move.early else gradients.ahead or self.reducer.ahead()  # of peers' gradients, at the end of its own
        before = None if there is None else Before(*there, RECEIVED.total)
        early_us = arrived_us if move.early or gradients.ahead is None else self._early_us
        flags = LOGS * bool(ours.log) + COLLECTS * self.observer.collects + LATE * self.layout.late
        form = RowFormat(self.verify.widths, parameters, ours.most)
        row = form.pack(move.offer, arrived_us, checks, flags, gradients.trained.of_all(gradients.present), ours.contributed)
        exchanged = functools.partial(self._exchanged, before, early_us, arrived_us)
        return torch.tensor(row, dtype=torch.float64, device="cpu"), form, exchanged

    def _exchanged(self, before: Before | None, early_us: int, arrived_us: int, arrivals_us: Sequence[int]) -> None:
        """The sum is here. The part of its exchange that is not hidden began when the last rank was done with its shards."""
        now_us = self._recorder.now_us()
        began_us = self._recorder.switch(COMM, min(now_us, max(arrivals_us)))
        if before is not None:
            EXCHANGED.note(before, arrived_us - min(early_us, *arrivals_us), now_us - began_us)

    def _compare(self, said: Rows, own: Rows, last: Rows) -> ReductionOutcome:
        """Use the sum if all ranks hold the same state and have computed the same gradients. Divide it by the sum of the weights.

        ``own``: the rows of this rank's column, which holds the same as this rank. ``last``: those of the column that has the losses.
        """
        checks = said.checks
        disputed = self.verify.compare(own.checks, self.contributions.group, self.reducer)
        present, elsewhere = self.gradients.trained.of_mine(said.present if self.state.stages.layers else own.present)
        self.gradients.keep_present(present & self._stepping, elsewhere)
        losses, given = last.by_shard(self.duties.shards)
        weights = agreed(given)
        divided_by = divisor(weights)
        if divided_by not in (0.0, 1.0):
            self.gradients.mean.divide(divided_by)
            self.layout.keep_norms(())
        doubt, norm_limit = (None, math.inf) if disputed else self.verify.judge(checks, losses, weights)
        loss, collects = mean_of(losses, weights), bool(said.flags & COLLECTS)
        self._reduced = ReductionOutcome(said.offers, loss, doubt, norm_limit, disputed, weights, collects)
        if doubt is None and not disputed:
            self.layout.settle(divided_by, late=bool(said.flags & LATE))
        return self._reduced

    @property
    def _stepping(self) -> int:
        """The parameters of the optimizers that the step takes, as bits; those of others have no gradient in it."""
        update = self.update
        return self.gradients.layout.parameters_of(update.taken) if update.several else ALL

    # ---- vote ----------------------------------------------------------------------------------------------------------------------------

    def cast_vote(self, move: CastVote) -> Words:
        """Exchange judgements of the sums with all ranks that hold other parts, for :meth:`CommitVote.decide`. Raises GroupBroken.

        Where ranks differ no rank takes the step, as all get the same words.
        """
        group, skips, word = self.contributions.whole, self.update.scaler is not None, self.layout.word()
        voters = self.vote.voters(group.size)
        if not voters:
            self.verify.norm = word.norm
            return Words((word.finite,), word.norm, skips=skips)
        assert self.duties.at is not None
        column = self.contributions.group
        own = self.verify.say_in_vote(self.duties.at, alone=column.size == 1)
        rows = gathered(column if self.layout.kept is not None else group, [word.finite, *own], word.norms)
        self.verify.compare_in_vote(rows[:, 1 : 1 + len(own)].tolist())
        norms = rows[:, 1 + len(own) :]
        if len(rows) < group.size:  # no rank says that it is ready before the ranks of its column have found no difference
            rows = gathered(group, [bool(rows[:, 0].all())], self.layout.of_column(norms))
            norms = rows[:, 1:]
        finite = tuple(bool(rows[rank, 0]) for rank in voters)
        norm, factor = self.layout.agree(norms) if all(finite) else (math.nan, math.nan)
        self.verify.norm = norm if not math.isnan(norm) else self.verify.norm
        return Words(finite, norm, factor, skips)

    def repeat(self, move: Repeat) -> None:
        """All ranks repeat the step together, once: a flipped bit goes away, a wrong model stays. Raises NonFiniteError."""
        here, doubt = self.duties.at, move.doubt
        assert here is not None
        if self._suspect == here.step and doubt.hopeless:
            raise NonFiniteError(f"step {here.step}, shard {doubt.shard}: {doubt.why}, and again when it was computed once more")
        self._suspect = here.step
        self.observer.doubted(self, doubt.why, doubt)
        self.reset()
        self.verify.repeat()
        self.contributions.assign_anew()
        self.verify.recheck.begin(here)
        self.layout.repeat()

    # ---- apply ---------------------------------------------------------------------------------------------------------------------------

    def apply(self, move: Apply | Advance) -> None:
        """Clip, step optimizers, scaler and schedulers, give buffers their new values. The state is dirty meanwhile.

        With ``Advance`` others have taken the step already: this rank takes it from the sums that it still has.
        """
        if isinstance(move, Apply) and (why := self.verify.remark()):
            self.observer.doubted(self, why)
        self._applied_s.append(time.monotonic())
        update, here, self.taken = self.update, self.duties.at, self._reduced
        assert here is not None
        self.observer.changing(here.step)
        if isinstance(move, Advance):
            self.layout.resume()
        self.state.free()
        self._recorder.measured(self._stopwatch.take_us())
        update.note(here.step)
        if (judged := update.judged) is not None:
            for plateau in update.judging:
                plateau.step(judged)
        with self.layout.stepping(turns=isinstance(move, Apply)) as gradients:
            scaler, present = update.scaler, self.gradients.mean.present
            some = [one for number, one in update.stepping if scaler is None or self.gradients.layout.parameters_of(1 << number) & present]
            if scaler is not None:
                for optimizer in some:
                    scaler.unscale_(optimizer)  # it raises where there is no gradient at all
            self.layout.clip(gradients)
            update.rate = float(update.stepping[0][1].param_groups[0]["lr"])
            for optimizer in some:
                with self.layout.step_of(optimizer):
                    if scaler is None:
                        optimizer.step()
                    else:
                        scaler.step(optimizer)
            if scaler is not None and some:
                scaler.update()
            for scheduler in update.following:
                scheduler.step()
            self.gradients.commit(first=here.step == 0)
            self.duties.at = StateId(here.history, here.step + 1)
            self.contributions.take()
            self.verify.take(self.duties.at)
            if self.duties.shares is not self.duties.whole:
                self.contributions.assign_anew()

    # ---- publish -------------------------------------------------------------------------------------------------------------------------

    def publish(self, move: StepCommitted) -> None:
        """The step is taken: send its state to all ranks that need parts of it. Raises GroupBroken."""
        self.layout.publish(self._behind_commit())

    def publish_later(self) -> None:
        """This rank took the step later than others. The observer's function runs once all ranks have the new state."""
        self.layout.afterwards(self._behind_commit())

    def _behind_commit(self) -> Callable[[], None]:
        """A function to call once this rank has all parameters of the new state."""
        committed = self.observer.committed(self)

        def then() -> None:
            committed()
            assert self.duties.at is not None
            self.verify.settle(self.duties.at)

        return then

    def expect(self) -> None:
        """The view stays for the next step, unless it changes: ask for its sums, as peers that are done early send them."""
        self.layout.go_on()
        with contextlib.suppress(GroupBroken):  # the view changes; the next use of the group raises, too
            self.gradients.expect(self.reducer)

    def alone(self) -> ReductionOutcome:
        """Reduce and vote without a rank machine. With a ``doubt`` the step must be repeated, not applied."""
        reduced = self.reduce(Reduce((NO_VIEW, *[0] * (OFFER - 1))))
        doubt = reduced.doubt
        if doubt is None:
            self.vote.ready()
            doubt = self.vote.decide(self.cast_vote(CastVote(reduced)), reduced.norm_limit)
        self.vote.begin()
        return dataclasses.replace(reduced, doubt=doubt)

    # ---- between steps, and out of one ---------------------------------------------------------------------------------------------------

    def begin(self, state: StateId) -> None:
        """This rank has loaded or built all of ``state``."""
        self.verify.begin()
        self.layout.begin(state)

    def join(self, group: Group, column: Column, rank: int, here: StateId, begun: bool, view: InView | None = None) -> None:
        """Compute with ``group``, the ranks of ``column``, from now on, at state ``here``. Raises GroupBroken. ``view``: all of its ranks,
        where there are other columns.

        With ``begun`` the view may come in the middle of a step. Then the shards that its members have computed count, and only the rest is
        due. Without, this rank knows that the view comes between steps.
        """
        receiver, compared = rank in column.receivers, self.verify.testimony is not None
        self.contributions.join(group, column, rank, view)
        self.layout.join(group)
        if view is not None:
            self.layout.meet(view.groups, view.view)
        if here != self.duties.at or receiver:
            self.reset()
        self.duties.at = here
        self.gradients.buffers.restore()
        if compared:  # the next line forgets it
            self.layout.drop()
        self.verify.join(group, column, here, receiver)
        idle = column.idle if self.layout.spares_newcomers else ()
        there = None if receiver else self.layout.there
        self.layout.count(self.contributions.assign(there, idle, begun=begun))
        self.layout.assigned(self.contributions.ways, rank)
        self.verify.recheck.join(column.generation, rank, here, receiver, column.ranges, whole=self.duties.shares is self.duties.whole)

    def promise(self, group: Group, shards: Collection[int]) -> None:
        """See :meth:`Contributions.promise`."""
        self.contributions.promise(group, shards)

    def reset(self) -> None:
        """Nothing of the present attempt remains."""
        self.layout.reset()
        self.state.free()
        if self.gradients.begun:
            self._recorder.abandon()
        self.gradients.abandon()
        self._stopwatch.forget()
        self.contributions.forget()
        self.vote.begin()

    def hold(self) -> None:
        """The group is gone or left. The shards that this rank has computed of the step stay."""
        self.body.leave()
        self.layout.hold()
        self.state.free()
        self.gradients.hold()
        self.contributions.forget_lost()

    def rehearse(self) -> None:
        """Prepare for one shard on this rank alone. So it has loaded, compiled and allocated all it needs before it is called."""
        self.contributions.rehearse()

    def forget(self) -> None:
        """The rehearsal is over: touch a set of buffers for the mean, and drop all else of it."""
        self.gradients.rehearse_mean()
        self.gradients.abandon()
        self.gradients.buffers.followed = self.layout.given.settings.spares > 0 and self.layout.kept is not None
        self._stopwatch.forget()
        self.contributions.losses = {}
        self.contributions.gathered.forget()
        self.contributions.carried.forget()

    def before_sum(self, change: Change) -> None:
        """See :meth:`Injections.add`."""
        self._injections.add(change)

    # ---- facts ---------------------------------------------------------------------------------------------------------------------------

    @property
    def assigned(self) -> tuple[int, ...]:
        """The shards that this rank has yet to compute for the step at hand."""
        return self.contributions.assigned

    @property
    def pace_s(self) -> float:
        """Seconds from one step to the next: the shortest of the last few; 0 before the second step."""
        return min((later - earlier for earlier, later in itertools.pairwise(self._applied_s)), default=0.0)

    @property
    def checks(self) -> tuple[int, ...]:
        """Shards of other ranks that this one computes again, for comparison: then :meth:`end_check`."""
        return self.verify.recheck.wanted

    @property
    def body(self) -> Body:
        """Watches the loop body."""
        return self.verify.body

    @property
    def figures(self) -> dict[str, float]:
        """Of the step that was taken last: the norm of its gradient before clipping, and the learning rate of the first group."""
        return {GRAD_NORM: self.verify.norm, LEARNING_RATE: self.update.rate}

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """All parameters that are trained."""
        return self.gradients.parameters
