"""A rank's reports of the steps of its loop: figures, resources used, and why a step was strange."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import SupportsFloat

from actors.rank.data.sampling import seed_step
from actors.rank.membership.membership import Membership
from actors.rank.state.saving import Saver
from actors.rank.step.outcome import ReductionOutcome
from actors.rank.step.step import Loop, Step
from actors.rank.step.train_step import Observer, TrainStep
from actors.rank.telemetry import usage
from actors.rank.telemetry.energy import metered
from actors.rank.telemetry.exchanged import EXCHANGED
from fleet.host.clock import now_us
from fleet.protocol.events import Implausible, Logged
from fleet.protocol.facts import Measurement, Usage
from fleet.protocol.records import COMPUTE, GRAD_NORM
from fleet.protocol.vote import Doubt
from fleet.settings.run import RunSettings

MEASURE_EVERY_US = 500_000


class Reports(Observer):
    """The reports of one rank of a run. Before a step's change it also settles the saver, begins the span and seeds the generators."""

    def __init__(self, loop: Loop, settings: RunSettings, membership: Membership, saver: Saver) -> None:
        self._loop, self._settings, self._membership, self._saver = loop, settings, membership, saver
        self._client, self._protocol = loop.client, loop.client.protocol
        self._measured_us = self._used_us = self._changing_us = 0
        self._unreported: list[Callable[[], None]] = []

    def changing(self, number: int) -> None:
        """See :class:`Observer`, here and below."""
        self._saver.settle()
        self._changing_us = self._loop.recorder.switch(COMPUTE)
        seed_step(self._loop.seed, number)

    def committed(self, train: TrainStep) -> Callable[[], None]:
        step, taken = self._loop.attempted, train.taken
        assert step is not None and taken is not None
        self._membership.settled()
        self._loop.recorder.commit(max(self._changing_us, now_us()))
        self._loop.committed = True
        step.loss, step.grad_norm = taken.loss, train.figures[GRAD_NORM]
        return lambda: self._taken(train, step, taken)

    @property
    def collects(self) -> bool:
        return self._loop.garbage.due

    def measure(self, figures: Mapping[str, SupportsFloat]) -> None:
        """Report figures of the current state, except those that are not finite."""
        if (here := self._protocol.state) is not None:
            values = {name: float(value) for name, value in figures.items()}
            found = [(name, value) for name, value in values.items() if math.isfinite(value)]
            self._client.say(*(Measurement(self._protocol.member, here, name, value) for name, value in found))

    def doubted(self, train: TrainStep, why: str, doubt: Doubt | None = None) -> None:
        here = self._protocol.state
        assert here is not None
        if self._loop.rank == 0:
            shard = -1 if doubt is None else doubt.shard
            computed_by = train.contributions.computed_by(shard)
            self._client.say(Implausible(self._protocol.member, here, shard, computed_by, why, accepted=doubt is None))

    def _taken(self, train: TrainStep, step: Step, taken: ReductionOutcome) -> None:
        """A step is taken, and all ranks have its whole state."""
        if taken.collects:
            self._loop.garbage.collect()
        for fn in step.callbacks:
            with train.layout.unread():
                fn()
        last, here = step.number + 1 == self._loop.total, self._protocol.state
        assert here is not None
        self._used(last)
        self._unreported = []
        if self._loop.rank == 0:
            due = last or now_us() - self._measured_us > MEASURE_EVERY_US
            self._report(due, lambda: self._measure_step(train, step, taken.loss, last))
        if (log := train.contributions.log).some:
            self._report(last or log.due, lambda: self._client.say(Logged(self._protocol.member, here, *log.reported)))

    def _report(self, due: bool, report: Callable[[], None]) -> None:
        """Report now if ``due``; else only if no step follows."""
        if due:
            report()
        else:
            self._unreported.append(report)

    def _measure_step(self, train: TrainStep, step: Step, loss: float, last: bool) -> None:
        self._measured_us = now_us()
        counted = self._loop.flops.figures(self._settings.shards, train.device, last)
        self.measure({"loss": loss, **train.figures, **counted, **step.figures})

    def ended(self) -> None:
        """No step follows: send the reports of the last step that are still kept back."""
        unreported, self._unreported = self._unreported, []
        for report in unreported:
            report()

    def _used(self, last: bool) -> None:
        if last or now_us() - self._used_us > usage.every_us(self._settings.world):
            self._used_us = now_us()
            self._client.say(Usage(self._protocol.member, *usage.used(), *EXCHANGED.counts, usage.FETCHED.total, *metered()))
