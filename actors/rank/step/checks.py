"""The checks before ranks use a sum: they hold the same state, compute and add up the same gradients, and see usual losses and norms."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from actors.rank.membership.process_group import Group
from actors.rank.state.tracked import TrackedState
from actors.rank.step.gradients import GradientBuffers
from actors.rank.step.jumps import Jumps, judged
from actors.rank.step.reduction import Reducer
from actors.rank.step.rows import Numbers
from actors.rank.step.update import Update
from actors.rank.telemetry.recorder import Recorder
from actors.rank.verify.body import Body
from actors.rank.verify.kept_digests import KeptDigests
from actors.rank.verify.recheck import Recheck
from actors.rank.verify.replicas import Replicas
from actors.rank.zero1.kept import KeptChunks
from fleet.protocol.records import COMM, VERIFY
from fleet.protocol.types import Column, Finding, StateId
from fleet.protocol.vote import Doubt
from fleet.settings.run import RunSettings

NOTHING_COUNTS = "the weights of all its shards are 0, so that nothing is updated"


class Checks:
    """One rank's part in the checks.

    Attributes:
        norm: of the gradient that was summed last; not a number where it is unknown.
    """

    def __init__(
        self,
        state: TrackedState,
        settings: RunSettings,
        recorder: Recorder,
        gradients: GradientBuffers,
        update: Update,
        kept: KeptChunks | None,
    ) -> None:
        self._recorder, self._gradients = recorder, gradients
        self.kept = KeptDigests(kept, settings.verify.replicas) if kept is not None else None
        self.replicas, self.recheck = Replicas(state, settings.verify.replicas), Recheck(settings.verify.compute, settings.shards)
        modules = {name: one for name, one in state.objects.items() if isinstance(one, torch.nn.Module)}
        samples = settings.verify.replicas > 0
        self._update, self._jumps = update, defaultdict[int, Jumps](functools.partial(Jumps, settings.verify.jumps))
        self.body = Body(modules, update, samples)
        self.body.apart = state.apart
        self.norm = self._largest = math.nan
        self._before: tuple[float, float] | None = None
        self._counts = True
        self._history = -1  # of the view at hand

    @property
    def widths(self) -> list[int]:
        """How many numbers each check sends beside the gradients."""
        return [
            self.replicas.width if self.kept is None else 0,
            self.recheck.width,
            self._jumps[0].width,
            self.body.width,
            self._update.width,
        ]

    @property
    def testimony(self) -> Finding | None:
        """This rank's side of a comparison that failed or is open. The rank reports it when it leaves its group now."""
        kept = self.kept.testimony if self.kept is not None else None
        return kept or self.recheck.open or self.replicas.testimony

    def begin(self) -> None:
        """Another history begins."""
        self._jumps.clear()

    def join(self, group: Group, column: Column, here: StateId, receiver: bool) -> None:
        """A view begins at state ``here``. A ``receiver`` got this state from a peer in the view."""
        if self.kept is not None:
            self.kept.join(group, column.generation, here)
        if here.history != self._history:
            self.begin()
        self._history = here.history
        self.replicas.join(column.generation, here, receiver)

    def repeat(self) -> None:
        """The step is computed once more, and its second result is accepted."""
        self._jumps[self._update.taken].accept()
        self._before = self._largest, self.norm

    def say(self, here: StateId, *, early: bool, alone: bool) -> list[float]:
        """The numbers that this rank sends at state ``here``. ``early``: the state is still on its way to this rank."""
        choice = self._update.said(early=early)
        limits = self._jumps[-1 if early and choice else self._update.asked].limits()  # which steps are usual depends on what they take
        return [*self._replicas(here, early, alone), *self.recheck.look(), *limits, *self.body.said(), *choice]

    def say_in_vote(self, here: StateId, *, alone: bool) -> list[float]:
        """The numbers on a sharded state that this rank sends beside its vote on the step at ``here``; as many as all ranks send."""
        if self.kept is None or not self.kept.width:
            return []
        if alone:
            return [0.0] * (self.kept.width + self.replicas.width)
        with self._recorder.during(VERIFY):
            self._gradients.buffers.restore()
            return [*self.kept.look(here), *self.replicas.look(here, uncompared=not self.kept.due(here))]

    def compare_in_vote(self, said: Numbers) -> None:
        """Compare the numbers of all ranks: of chunks first, as a wrong owner gives wrong parameters to most ranks.

        Raises GroupBroken: a rank is wrong.
        """
        if self.kept is not None and self.kept.width:
            width = self.kept.width
            self.kept.compare([row[:width] for row in said])
            self.replicas.compare([row[width:] for row in said])

    def _replicas(self, here: StateId, early: bool, alone: bool) -> list[float]:
        if self.kept is not None:
            return []
        if early:
            return self.replicas.abstain()
        if not self.replicas.width or alone:
            return [0.0] * self.replicas.width
        self._recorder.switch(VERIFY)
        self._gradients.buffers.restore()
        return self.replicas.look(here)

    def compare(self, said: Sequence[Numbers], group: Group, reducer: Reducer) -> bool:
        """Compare the numbers of all ranks. True: a shard is in dispute, and is computed again. Raises GroupBroken: a rank is wrong."""
        replicas, recheck, _, bodies, choices = said
        self.body.compare([row[0] for row in bodies] if self.body.width else [], group.generation)
        if self.kept is None:
            self.replicas.compare(replicas)
        self._update.agree(choices)
        disputed = self.recheck.compare(recheck)
        if self.recheck.verifies and not disputed:
            self._recorder.switch(VERIFY)
            partials = [one.flats for one in self._gradients.sums.partials(reducer.blocks)]
            self.recheck.check_sums(group, reducer, partials, self._gradients.mean.flats)
            self._recorder.switch(COMM)
        return disputed

    def judge(self, said: Sequence[Numbers], losses: Sequence[float], weights: Sequence[float]) -> tuple[Doubt | None, float]:
        """(a doubt about the losses or None, the largest gradient norm that is usual)."""
        limits = [min(limit) for limit in zip(*said[2], strict=True)]
        loss_limit, norm_limit = limits or (math.inf, math.inf)
        counted = [weight > 0 for weight in weights] or [True] * len(losses)
        self._largest, doubt = judged(losses, counted, loss_limit)
        self.norm, self._counts = math.nan, any(counted)
        return doubt, norm_limit

    def remark(self) -> str:
        """Why a step is strange that is applied all the same; else empty.

        Either it updates nothing, or its second computation gave the same unusual result as the first.
        """
        if not self._counts:
            return NOTHING_COUNTS
        before, self._before = self._before, None
        if before is None or before[0] != self._largest or (before[1] != self.norm and not math.isnan(before[1])):
            return ""
        return f"the largest loss of a shard is {self._largest:.4g} again, and the gradient's norm {self.norm:.4g}"

    def settle(self, here: StateId) -> None:
        """The commit that led to ``here`` is over, and the state stays as it is."""
        if self.kept is not None and self.kept.due(here):
            with self._recorder.during(VERIFY):
                self.kept.settle(here)

    def take(self, here: StateId) -> None:
        """The step is taken, to state ``here``."""
        self._jumps[self._update.taken].seen(self._largest, self.norm)
        self.recheck.begin(here)
