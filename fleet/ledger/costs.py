"""The cost of each loss: the ledger's time, charged to the loss that caused it. Used by ``fleet.ledger.goodput``.

A loss has the name of its member, ``slot.incarnation``. A time when the whole run was down without a recorded loss is an ``outage-N``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field

from fleet.errors import LedgerError
from fleet.ledger.apart import Apart
from fleet.ledger.rates import looks_like
from fleet.ledger.slots import CODES, Charge
from fleet.protocol.causes import Evicted
from fleet.protocol.decisions import DomainLost
from fleet.protocol.fault_kinds import Cost, kind_of
from fleet.protocol.records import FaultRecord, LossExplained, ProcessLost, ViewPublished
from fleet.protocol.types import Fault, Member, StateId

STEADY_STEPS = 20
"""Steps after the world is full again, before the excess of a loss is taken."""

Causes = tuple[str, ...]


@dataclass(slots=True)
class LossCost:
    """A lost process (``at_us`` on the run's clock), and the microseconds by category that it is charged with."""

    id: str
    at_us: int
    cause: str
    fault: str | None
    generation: int
    us: list[int] = field(default_factory=lambda: [0] * len(CODES))
    before: tuple[int, int] | None = None
    """(step, at_us) of the last commit before the loss."""
    target: int | None = None
    """Step at which the excess is taken."""
    steady: tuple[int, int] | None = None
    """(step, at_us) of the first commit at or after the target."""
    views: list[int] = field(default_factory=list)
    like: str = "kill_rank"
    """The kind of fault that the loss looks like, where no fault explains it."""
    domain: str = ""
    """The domain that was lost as a whole, with this process: ``rack a: 2 nodes, 4 ranks``."""
    together: int = 0
    """The same number for all losses of one domain; 0: it was lost alone."""
    evicted: bool = False
    """The cause stays the rule that evicted the process, and not the kill that followed."""
    down_us: int = 0
    """Of an outage: time without a machine, which is in no category."""


class CostBook:
    """Losses, views and faults, and the time that each loss is charged with."""

    def __init__(self) -> None:
        self.losses: dict[str, LossCost] = {}
        self.faults: dict[str, list[FaultRecord]] = {}
        self.uncharged, self.apart = [0] * len(CODES), Apart()
        self.generation = -1
        self.shape: dict[int, tuple[int, tuple[Member, ...]]] = {}
        self._broken: dict[int, list[LossCost]] = {}
        self._broke_us: dict[int, int] = {}
        self._shared: dict[Causes, list[int]] = {}
        self._generations: list[int] = []
        self._causes: list[Causes] = []
        self._graceful_causes: dict[int, Causes] = {}
        self._waiting: dict[int, Counter[int]] = {}
        self._commit_times: dict[int, tuple[int, int]] = {}
        self._open_outage: Causes = ()
        self._committed: tuple[int, int] | None = None
        self.in_view: frozenset[Member] = frozenset()
        self._downs: list[tuple[int, int]] = []
        self._unsettled: list[LossCost] = []
        self._domains = 0

    # ---- happenings

    def lost(self, record: ProcessLost, at_us: int) -> None:
        loss = LossCost(str(record.member), at_us, str(record.cause), record.fault, record.generation, like=looks_like(record.cause))
        loss.evicted = isinstance(record.cause, Evicted)
        self.losses[loss.id] = loss
        self._broke_us.clear()
        if record.generation >= 0:
            self._broken.setdefault(record.generation, []).append(loss)
            loss.before = self._committed
            self._unsettled.append(loss)

    def domain_lost(self, lost: DomainLost) -> None:
        """These losses are one. The later loss of a wider domain takes the place of those in it."""
        nodes, ranks = (
            f"{count} {what}{'s' if count != 1 else ''}" for count, what in ((len(lost.nodes), "node"), (len(lost.members), "rank"))
        )
        self._domains += 1
        for slot, incarnation in lost.members:
            if (loss := self.losses.get(f"{slot}.{incarnation}")) is not None:
                loss.domain, loss.together = f"{lost.level} {lost.domain}: {nodes}, {ranks}", self._domains

    def explained(self, record: LossExplained) -> None:
        """Record how the process of a loss ended."""
        if (loss := self.losses.get(str(record.member))) is not None and not loss.evicted:
            loss.cause = str(record.cause)

    def outage(self, at_us: int, back_us: int, cause: str) -> None:
        """The whole run was down between these times. The outage is charged with the cost of the new start, not with its own length."""
        self._downs.append((at_us, back_us))
        loss = LossCost(f"outage-{len(self._downs)}", at_us, cause, None, -1, before=self._committed, down_us=back_us - at_us)
        self.losses[loss.id] = loss
        self._open_outage = (loss.id,)
        self._unsettled.append(loss)

    def fault(self, record: FaultRecord) -> None:
        self.faults.setdefault(record.fault.id, []).append(record)
        self._broke_us.clear()

    def committed(self, state: StateId, at_us: int) -> None:
        self._committed = (state.step, at_us)
        for loss in self._unsettled:
            if loss.target is not None and state.step >= loss.target:
                loss.steady = self._committed
        self._unsettled = [loss for loss in self._unsettled if loss.steady is None]

    def published(self, record: ViewPublished, world: int) -> None:
        """Raises LedgerError when generations do not rise: a resumed run goes on from the greatest number."""
        view = record.view
        if view.generation <= self.generation:
            raise LedgerError(f"view generation {view.generation} at {record.at_s} s follows generation {self.generation}: they must rise")
        self.generation = view.generation
        self.shape[view.generation] = (len(view.computing), view.spares)
        step = max(view.state.step, self._committed[0] if self._committed and record.graceful else 0)
        for loss in self._unsettled:
            loss.target = step + STEADY_STEPS if len(view.computing) >= world else None
        if record.graceful:
            self._graceful_causes[view.generation] = self._replaced(view.members) or record.causes
        else:
            self._settle(view.generation, record.causes or self._inherited())
        self.apart.published(self.in_view, view.members, round(record.at_s * 1e6))
        self.in_view = frozenset(view.members)

    def _replaced(self, members: tuple[Member, ...]) -> Causes:
        """The losses whose replacements are new in a view."""
        before = (f"{member.slot}.{member.incarnation - 1}" for member in members if member not in self.in_view)
        return tuple(name for name in before if name in self.losses)

    def _inherited(self) -> Causes:
        """The causes of a view without causes of its own: it follows an outage, or a view that never committed a step."""
        if self._open_outage or not self._generations:
            return self._open_outage
        tried = self._generations[-1]
        return () if any(generation >= tried for generation in self._commit_times) else self._causes[-1]

    def _settle(self, generation: int, causes: Causes) -> None:
        self._open_outage = ()
        self._generations.append(generation)
        self._causes.append(causes)
        for cause in causes:
            if cause in self.losses:
                self.losses[cause].views.append(generation)
        for earlier in [g for g in self._waiting if g < generation]:
            for index, duration in self._waiting.pop(earlier).items():
                self.charge(index, duration, causes)

    def stepped(self, generation: int, first_us: int, last_us: int) -> None:
        """Ranks committed steps in ``generation`` between these times."""
        known = self._commit_times.get(generation, (first_us, last_us))
        self._commit_times[generation] = (min(known[0], first_us), max(known[1], last_us))

    # ---- charging

    def charge(self, index: int, duration_us: int, causes: Causes) -> None:
        """Charge time to its causes in equal shares. Time without a known cause is kept apart."""
        if len(causes) > 1:
            self._shared.setdefault(causes, [0] * len(CODES))[index] += duration_us
            return
        loss = self.losses.get(causes[0]) if causes else None
        (self.uncharged if loss is None else loss.us)[index] += duration_us

    def charged(self) -> tuple[dict[str, list[int]], list[int]]:
        """Microseconds by category for each loss, and those without a cause. Shares are equal, to the microsecond.

        It deals out the shares here and not in ``charge``: when thousands of ranks are lost at once, each span would have as many parts.
        """
        us = {name: list(loss.us) for name, loss in self.losses.items()}
        uncharged = list(self.uncharged)
        for causes, totals in self._shared.items():
            payers = [us[cause] for cause in causes if cause in us] or [uncharged]
            for index, total in enumerate(totals):
                share, rest = divmod(total, len(payers))
                for number, payer in enumerate(payers):
                    payer[index] += share + (number < rest)
        return us, uncharged

    def charge_after(self, index: int, duration_us: int, generation: int) -> None:
        """Charge the losses that ended ``generation``. The next view that is not graceful names them."""
        causes = self.causes_after(generation)
        if causes is None:
            self._waiting.setdefault(generation, Counter())[index] += duration_us
        else:
            self.charge(index, duration_us, causes)

    def charge_span(self, charge: Charge) -> None:
        """Charge a rank's own time: after its steps to the end of its view, before them to the cause of view or process."""
        if charge.after:
            self.charge_after(charge.category, charge.duration_us, charge.generation)
            return
        predecessor = f"{charge.member.slot}.{charge.member.incarnation - 1}"
        self.charge(charge.category, charge.duration_us, self._causes_of(charge.generation) or (predecessor,))

    def _causes_of(self, generation: int) -> Causes:
        at = bisect_right(self._generations, generation) - 1
        if at >= 0 and self._generations[at] == generation:
            return self._causes[at]
        return self._graceful_causes.get(generation, ())

    def causes_after(self, generation: int) -> Causes | None:
        """Causes of the first view after ``generation`` that was not graceful; None before there is one."""
        at = bisect_right(self._generations, generation)
        return self._causes[at] if at < len(self._causes) else None

    def broke_us(self, generation: int) -> int | None:
        """The time when ``generation`` broke: its first loss, or the time when the lost rank began to hang, if it is known."""
        if generation not in self._broken:
            return None
        if generation not in self._broke_us:
            self._broke_us[generation] = min(map(self._onset_us, self._broken[generation]))
        return self._broke_us[generation]

    def _onset_us(self, loss: LossCost) -> int:
        records = self.faults.get(loss.fault, []) if loss.fault else []
        hung = [round(r.at_s * 1e6) for r in records if r.phase == "executed" and Cost.STILL in kind_of(r.fault.kind).may_cost]
        return min([loss.at_us, *hung])

    def close(self) -> None:
        """At the end of the run: charge time that waits for a view to the losses of its own generation."""
        for generation, waiting in self._waiting.items():
            causes = tuple(loss.id for loss in self._broken.get(generation, ()))
            for index, duration in waiting.items():
                self.charge(index, duration, causes)
        self._waiting.clear()

    # ---- results

    def stall_us(self, loss: LossCost, median_us: float) -> float | None:
        """Gap between the last commit before the view that repaired ``loss`` and the first after it, less the median step."""
        if not loss.views:
            return None
        generations = sorted(self._commit_times)
        at = bisect_right(generations, loss.views[0] - 1)
        if at in (0, len(generations)):
            return None
        last = max(self._commit_times[g][1] for g in generations[:at])
        first = min(self._commit_times[g][0] for g in generations[at:])
        return max(0.0, first - last - self._down_us(last, first) - median_us)

    def _down_us(self, begin_us: int, end_us: int) -> int:
        """Time without a machine between these times."""
        return sum(max(0, min(end_us, back_us) - max(begin_us, gone_us)) for gone_us, back_us in self._downs)

    def excess_us(self, loss: LossCost, median_us: float) -> float | None:
        """All wall time that the loss cost while machines were held, until 20 steps after the world is full again.

        None when the run did not get that far.
        """
        if loss.before is None or loss.steady is None:
            return None
        (step, at_us), (steady_step, steady_us) = loss.before, loss.steady
        return steady_us - at_us - self._down_us(at_us, steady_us) - (steady_step - step) * median_us

    def planned(self, fault: str) -> Fault:
        return self.faults[fault][-1].fault


class Floors:
    """The last steps that count, by key (generation or history): later steps of an older key are no longer part of history.

    ``add(key, step)``: keys older than ``key`` count only up to ``step``. Keys rise.
    """

    def __init__(self) -> None:
        self._keys: list[int] = []
        self._steps: list[int] = []

    def add(self, key: int, step: int) -> None:
        while self._steps and self._steps[-1] >= step:
            self._keys.pop()
            self._steps.pop()
        self._keys.append(key)
        self._steps.append(step)

    def of(self, key: int, default: int) -> int:
        """The last step of ``key`` that counts; ``default`` when no step was taken back."""
        at = bisect_right(self._keys, key)
        return self._steps[at] if at < len(self._steps) else default
