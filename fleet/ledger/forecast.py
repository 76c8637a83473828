"""The cost of faults to a run, and a forecast: two questions, and one cost for each kind of fault. Pure.

*Given the faults that came*, how much should they have cost? :func:`predict` prices each fault with the facts that were known when it
struck. They are the run's own time-outs, the start-up time of its first processes, and its measurements of earlier faults. The *prediction*
stands beside the ledger's measured cost; they differ by the *error*.

*Which faults will come?* :func:`forecast` gives the rate of each kind of fault ahead (``fleet.ledger.rates``), and the goodput that they
leave. Each figure has the interval that holds the truth in 90% of cases. Both learn from every fault, planned or not.

Costs are first order: they take faults as not overlapping. They are rank-seconds that are in no kept step. A fault that only makes steps
longer (a slow rank, a bad link) costs none, as the ledger counts these steps as kept.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleet.ledger.rates import Gamma, Met, Rate, count_interval, together
from fleet.protocol.fault_kinds import Cost, FaultKind, FaultPlace, kind_of
from fleet.protocol.records import section
from fleet.settings.run import RunSettings, Timeouts

PAUSE_S, RESTORE_S, START_S, VACANT_S = 0.15, 1.0, 3.0, 1.0
"""Until measured: all ranks pause for a loss; a newcomer takes the state; a process starts; a slot is empty. Of a local cluster."""
REFILL_S = VACANT_S + START_S + RESTORE_S
"""Time from the loss of a rank until its replacement trains, until the run has measured it."""
SEND_S, JOIN_STEPS = 0.1, 2.5
"""A newcomer has the state after so long and about so many steps. It enters its view behind a step, and waits for the next one."""
SETTLE_S = 0.4
"""A spare that stands by joins after this time and its own restore."""
SAVING = 0.01
"""Share of the time that steps stop for checkpoints, until the first checkpoint is written: its cost is unknown before."""
UNLIKE = 0.5
"""The assumed spread of the cost of faults of a kind (standard deviation over mean). It also is the doubt before the first fault."""
KNOWN_AFTER_S = 0.5
"""The cost of a fault is known once its slots have been filled for so long."""
FROZEN = "freeze"
"""The simulator's trouble for kinds whose processes stand still as a whole and send no heartbeat. In other kinds heartbeats go on."""
OUTAGE = "outage"
"""The kind of an incident in which the whole run was stopped. Its start-up is not charged to a fault; its repeated steps are."""
LEAST_S = 30.0
"""The shortest time of a forecast: in a shorter one, a single loss decides the goodput."""


# ---- terms of costs ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Terms of costs, from the run's settings. ``timeouts`` are seconds by name; ``verify`` is a share of the time of ranks."""

    world: int
    spares: int
    nodes: int
    verify: float
    timeouts: Mapping[str, float]
    stalls: bool = False

    @classmethod
    def of(cls, settings: RunSettings) -> Terms:
        """Of a run with these settings."""
        return cls.said({"settings": dataclasses.asdict(settings)}, settings.world, settings.spares)

    @classmethod
    def said(cls, config: Mapping[str, Any], world: int, spares: int) -> Terms:
        """From the settings that a run recorded at its start. A missing value, or any text in its place, counts as the default."""
        run = section(config, "settings")
        own, verify = RunSettings(), numbers(section(run, "verify"))
        return cls(
            world=world, spares=spares, nodes=max(1, int(numbers(run).get("nodes", own.nodes))),
            stalls=run.get("on_partition") == "stall",
            verify=verify.get("replicas", own.verify.replicas) + verify.get("compute", own.verify.compute),
            timeouts=timeouts_said(run),
        )  # fmt: skip

    def noticed_s(self, kind: FaultKind) -> float:
        """How long all ranks wait until the ranks that a fault of this kind took are declared lost."""
        names: tuple[str, ...] = ()
        if Cost.APART in kind.may_cost:
            names = ("stall_s",) if self.stalls else ("node_s",)
        elif Cost.STILL in kind.may_cost:
            names = ("heartbeat_s",) if FROZEN in kind.simulated else ("progress_s", "quiesce_s")
        return sum(self.timeouts[name] for name in names)

    def ranks_lost(self, kind: FaultKind) -> int:
        """The ranks that one fault of this kind takes: one rank, those of a node, or all of the run."""
        if not kind.takes_ranks:
            return 0
        if FaultPlace.COORDINATOR in kind.targets:
            return self.world
        whole = kind.unit is FaultPlace.NODE or bool({Cost.NODE, Cost.APART} & set(kind.may_cost))
        return math.ceil(self.world / self.nodes) if whole else 1


def timeouts_said(run: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by name, from the settings that a run recorded. A missing value, or any text in its place, counts as the default."""
    return numbers(dataclasses.asdict(Timeouts())) | numbers(section(run, "timeouts"))


def numbers(found: Mapping[str, Any]) -> dict[str, float]:
    """The values that are numbers."""
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


# ---- measured times ----------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Mean:
    """A learned time. The assumed time counts as one measurement."""

    assumed_s: float
    sum_s: float = 0.0
    count: int = 0
    squares: float = 0.0
    """Sum of squared differences from the mean so far, each over that mean."""

    @property
    def value_s(self) -> float:
        return (self.assumed_s + self.sum_s) / (1 + self.count)

    def add(self, sum_s: float, count: int = 1) -> None:
        """``count`` times took ``sum_s`` together. An open time adds its part so far, and no count: the mean of exponential times."""
        if count and self.value_s:
            self.squares += count * (sum_s / count / self.value_s - 1) ** 2
        self.sum_s, self.count = self.sum_s + sum_s, self.count + count

    @property
    def unlike(self) -> float:
        """Standard deviation over mean; ``UNLIKE`` counts as one measurement."""
        return math.sqrt((UNLIKE**2 + self.squares) / (1 + self.count))


@dataclass(slots=True)
class RecoveryTimes:
    """Durations of the run's own recoveries. ``refill``: from a loss until the slot's next process trains. ``restore``: the part of it in
    which a newcomer takes the state. ``pause``: all ranks stop. Refills are learned by kind: a lost node is not a lost process."""

    pause: Mean
    restore: Mean
    refill: Mean
    by_kind: dict[str, Mean] = field(default_factory=dict)

    @classmethod
    def of(cls, start_s: float | None, step_s: float = 0.0) -> RecoveryTimes:
        """Times before the first fault: a replacement starts as slowly as the run's first processes on average, and needs some steps to
        join. None, and 0: not known."""
        start_s, restore_s = START_S if start_s is None else start_s, SEND_S + JOIN_STEPS * step_s if step_s else RESTORE_S
        return cls(Mean(PAUSE_S), Mean(restore_s), Mean(VACANT_S + start_s + restore_s))

    def refill_s(self, kind: str) -> float:
        """The mean of this kind's faults, if there were any; the mean of all kinds counts as one of them."""
        known = self.by_kind.get(kind)
        return self.refill.value_s if known is None else (self.refill.value_s + known.sum_s) / (1 + known.count)

    def learn(self, kind: str, item: Any, noticed_s: float, world: int, over: bool, kept: bool) -> None:
        """Learn from a fault that took ranks. Its detection beyond the time-outs is a part of the pause. ``over``: its slots are filled
        again. ``kept``: no step was taken back meanwhile; steps taken back have their own price."""
        cost, lost = item.cost, len(item.members)
        if over and kept:
            self.pause.add(max(0.0, (cost["detect"] + cost["reform"] + cost["rework"]) / world - noticed_s))
        if over:
            self.restore.add(cost["restore"] / lost)
        for mean in (self.refill, self.by_kind.setdefault(kind, Mean(0.0))):
            mean.add(cost["provision"] + cost["maintenance"] + item.init_s + cost["restore"], lost if over else 0)


# ---- one cost a kind ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FaultCost:
    """Rank-seconds in which the world stands still, places of the world are empty, and slots are empty (with those of spares)."""

    pause_s: float = 0.0
    missing_s: float = 0.0
    refill_s: float = 0.0

    @property
    def charged_s(self) -> float:
        """The predicted charge of the ledger, start-up of replacements included."""
        return self.pause_s + self.refill_s

    @property
    def lost_s(self) -> float:
        """The predicted loss of the world's goodput."""
        return self.pause_s + self.missing_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultImpact:
    """Facts about a fault, for its price: its kind, its ranks, the number of them in the view, and the spares that stood by.

    ``training_s`` and ``run_s``: how long training and run lasted from then on. ``back_s``: training taken back, as no rank held the state.
    """

    kind: str
    lost: int
    in_view: int
    spares: int = 0
    training_s: float = math.inf
    run_s: float = math.inf
    back_s: float = 0.0


def fault_cost(impact: FaultImpact, terms: Terms, times: RecoveryTimes) -> FaultCost:
    """The predicted cost. Zero where the fault takes no rank: slower steps and waits are in the time of kept steps."""
    if not impact.lost:
        return FaultCost()
    kind = kind_of(impact.kind)
    stop_s = (terms.noticed_s(kind) + times.pause.value_s) if impact.in_view else 0.0
    refill_s, taken = times.refill_s(impact.kind), min(impact.spares, impact.in_view)
    spared_s = min(refill_s, SETTLE_S + times.restore.value_s)
    members_s = (impact.in_view - taken) * min(refill_s, impact.training_s) + taken * min(spared_s, impact.training_s)
    return FaultCost(terms.world * (min(stop_s, impact.training_s) + impact.back_s), members_s, impact.lost * min(refill_s, impact.run_s))


# ---- given the faults that came ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Term:
    """One part of the loss of goodput, as shares of the rank-seconds of the world."""

    name: str
    predicted: float
    measured: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """The run's predicted goodput by now, given the faults that came. ``goodput`` is 1 less the predicted shares of ``terms``.

    ``error`` is the measured goodput less the predicted one; ``costs`` are those of each incident, by its id. Measured shares and the
    measured goodput add up to 1: the last term is the rest, with all costs that no model has.
    """

    goodput: float
    error: float
    terms: tuple[Term, ...]
    costs: Mapping[str, FaultCost]
    times: RecoveryTimes

    def plain(self) -> dict[str, Any]:
        """For the report's JSON and the pages."""
        return {"goodput": self.goodput, "error": self.error, "terms": [dataclasses.asdict(term) for term in self.terms]}


def predict(s: Any) -> Prediction:
    """The prediction of a ``LedgerSummary`` for its ``now_s``. Start-up and end, also of a resume, count as measured, and as no fault's."""
    found: Prediction = s.once("prediction", lambda: _predict(s))
    return found


def _predict(s: Any) -> Prediction:
    world_s = max(s.world_s, 1e-9)
    trained = min(1.0, s.goodput / s.training_goodput) if s.training_goodput > 0 else 0.0
    outside, saving = 1.0 - trained, _saving(s)
    costs, times = priced(s)
    fault_share = min(trained, sum(cost.lost_s for cost in costs.values()) / world_s)
    stopped, verified = s.categories["checkpoint_stall"] / world_s, s.categories["verify"] / world_s
    going = trained - fault_share
    goodput = going * (1.0 - saving - s.terms.verify)
    terms = (
        Term("start-up and end", outside, outside),
        Term("checkpoints", going * saving, stopped),
        Term("verification", going * s.terms.verify, verified),
        Term("faults and all else", fault_share, 1.0 - s.goodput - outside - stopped - verified),
    )
    return Prediction(goodput, s.goodput - goodput, terms, costs, times)


def _saving(s: Any) -> float:
    """Share of the time of steps for checkpoints of all levels: the time that one blocks, over the interval."""
    intervals = [each for each in (s.checkpoint_interval_s, s.copy_interval_s) if each]
    known = s.checkpoint_blocked_s and intervals
    saving: float = sum(s.checkpoint_blocked_s / interval_s for interval_s in intervals) if known else SAVING
    return max(0.0, min(saving, 1.0 - float(s.terms.verify)))


def priced(s: Any) -> tuple[dict[str, FaultCost], RecoveryTimes]:
    """Each incident's cost from the facts known when it struck; and the times that all of them have taught."""
    found: tuple[dict[str, FaultCost], RecoveryTimes] = s.once("priced", lambda: _priced(s))
    return found


def _priced(s: Any) -> tuple[dict[str, FaultCost], RecoveryTimes]:
    times, costs, back, slot_losses = RecoveryTimes.of(s.start_s, s.median_step_s), {}, _taken_back(s), _SlotLosses(s)
    free_s: list[float] = [-math.inf] * s.spares
    for item in sorted(s.incidents, key=lambda item: item.at_s):
        ready = sum(at_s <= item.at_s for at_s in free_s)
        trained_s, held_s = next((end for end in s.ends if end[1] >= item.at_s), s.ends[-1])
        next_s, joined = slot_losses.next_s(item), item.in_view or slot_losses.still_empty(item, times.refill_s(item.like))
        training_s, run_s = (max(0.0, min(end_s, next_s) - item.at_s) for end_s in (trained_s, held_s))
        injection = FaultImpact(
            kind=item.like, lost=len(item.members), in_view=joined, spares=ready, training_s=training_s, run_s=run_s,
            back_s=back.get(item.id, 0.0),
        )  # fmt: skip
        costs[item.id] = fault_cost(injection, s.terms, times) if item.kind != OUTAGE else FaultCost(pause_s=s.world * injection.back_s)
        if item.members:
            back_s = item.at_s + times.refill_s(item.like)
            free_s = sorted(free_s)[min(injection.lost, ready) :] + [back_s] * min(injection.lost, ready)
            over = _slot_s(item) + KNOWN_AFTER_S < injection.run_s
            kept = not any(item.at_s <= rollback.at_s <= item.at_s + _slot_s(item) + REFILL_S for rollback in s.rollbacks)
            times.learn(item.like, item, s.terms.noticed_s(kind_of(item.like)), s.world, over, kept)
    return costs, times


class _SlotLosses:
    """Times at which slots lost a process. A process that is lost before it trains leaves its place empty."""

    def __init__(self, s: Any) -> None:
        self._spares = s.spares
        self._lost: dict[str, list[float]] = {}
        for item in s.incidents:
            for member in item.members:
                self._lost.setdefault(_slot(member), []).append(item.at_s)

    def next_s(self, item: Any) -> float:
        """The time at which the slot of a single loss lost its next process."""
        slots = {_slot(member) for member in item.members}
        later = [at_s for at_s in self._lost[slots.pop()] if at_s > item.at_s] if len(slots) == 1 else []
        return min(later, default=math.inf)

    def still_empty(self, item: Any, refill_s: float) -> int:
        """The number of lost processes, in no view, that were to fill an empty place. With spares, a slot without a process is no place."""
        before = [[at_s for at_s in self._lost[_slot(member)] if at_s < item.at_s] for member in item.members]
        return 0 if self._spares else sum(bool(each) and item.at_s - max(each) < 2 * refill_s for each in before)


def _slot(member: str) -> str:
    return member.partition(".")[0]


def _slot_s(item: Any) -> float:
    """The time in which each of its slots had no rank that trains."""
    total: float = item.cost["provision"] + item.cost["maintenance"] + item.init_s + item.cost["restore"]
    return total / len(item.members)


def _taken_back(s: Any) -> dict[str, float]:
    """Seconds of training since the newest kept state, by the incident that took the last holder of a newer state."""
    found: dict[str, float] = {}
    for rollback in s.rollbacks:
        before = [item for item in s.incidents if (item.in_view or item.kind == OUTAGE) and item.at_s <= rollback.at_s]
        if before:
            last = max(before, key=lambda item: item.at_s).id
            found[last] = found.get(last, 0.0) + rollback.steps * s.median_step_s
    return found


# ---- the time ahead ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MeanInterval:
    """A mean, and the bounds that hold the truth in 90% of cases."""

    mean: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Forecast:
    """A forecast of the next ``ahead_s`` seconds of training.

    Attributes:
        ahead_s: the training time that the run has left, if its number of steps is known; else as long as it has trained.
        goodput: of that time.
        faults: their number in that time.
        rates: events a second, of each kind that is known or was met; ``all``: of all kinds.
        inside, scored: of ``scored`` earlier forecasts of the run's own faults, ``inside`` intervals held the truth.
        spares: so many keep the world whole for 95% of the time.
    """

    ahead_s: float
    goodput: MeanInterval
    faults: MeanInterval
    all: MeanInterval
    rates: Mapping[str, MeanInterval]
    inside: int
    scored: int
    spares: int

    def plain(self) -> dict[str, Any]:
        """For the report's JSON and the pages."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Price:
    """Cost of the next fault of a kind in rank-seconds of the world.

    ``unlike`` is its spread (standard deviation over mean), ``known`` the number of faults that it rests on.
    """

    mean_s: float
    unlike: float = UNLIKE
    known: int = 0


def coming(
    rates: Mapping[str, Rate], prices: Mapping[str, Price], ahead_s: float, world: int, always: float, unsure: float = 0.0
) -> MeanInterval:  # fmt: skip
    """Goodput of the next ``ahead_s`` seconds. A share ``always`` of them is lost without any fault, known up to a share ``unsure`` of it.

    The loss is a sum over a random number of faults. A kind comes at rate r, of mean m and variance v. Its cost c differs from fault to
    fault by a share u. After n faults the mean of c is known up to u / sqrt(1 + n). In a time t it takes t m c.
    The variance: t m c^2 (1 + u^2) + t^2 v c^2 + (t m c u)^2 / (1 + n). A Gamma law of the same mean and variance stands for the sum. Where
    the chance that no fault comes is above 5%, the least loss is 0.
    """
    mean = variance = 0.0
    none = 1.0
    for kind, rate in rates.items():
        price = prices.get(kind, Price(0.0))
        expected, cost = ahead_s * rate.mean, price.mean_s
        mean += expected * cost
        variance += (expected * (1 + price.unlike**2) + ahead_s**2 * rate.variance) * cost**2
        variance += (expected * cost * price.unlike) ** 2 / (1 + price.known)
        none *= rate.none_within(ahead_s) if cost else 1.0
    whole = world * ahead_s
    least, most = 0.0, 0.0
    if mean > 0:
        law = Gamma.like(mean, variance)
        least, most = (0.0 if none > 0.05 else law.quantile(0.05)), law.quantile(0.95)
    ends = ((mean, always), (most, always * (1 + unsure)), (least, always * (1 - unsure)))
    return MeanInterval(*(max(0.0, (1.0 - stopped) * (1.0 - lost_s / whole)) for lost_s, stopped in ends))


def forecast(s: Any, left_s: float | None = None) -> Forecast | None:
    """The forecast of a ``LedgerSummary``; None before training has begun. ``left_s``: the training time left, if it is known."""
    found: Forecast | None = s.once(("forecast", left_s), lambda: _forecast(s, left_s))
    return found


def _forecast(s: Any, left_s: float | None) -> Forecast | None:
    met: Met = s.met
    if not s.training_s:
        return None
    ahead_s = max(LEAST_S, left_s if left_s else s.training_s)
    rates, prediction = met.rates(s.training_s), predict(s)
    prices = {kind: typical(kind, s, prediction.times) for kind in rates}
    total = together(rates.values())
    few, many = count_interval(total, ahead_s)
    known = {kind: MeanInterval(rate.mean, *rate.interval()) for kind, rate in rates.items()}
    return Forecast(
        ahead_s=ahead_s, goodput=coming(rates, prices, ahead_s, s.world, *_always(s)), faults=MeanInterval(total.mean * ahead_s, few, many),
        all=MeanInterval(total.mean, *total.interval()), rates=known, inside=met.inside, scored=met.scored,
        spares=spares_wanted(rates, s, prediction.times),
    )  # fmt: skip


def _always(s: Any) -> tuple[float, float]:
    """(share of the world's time for checkpoints and checks, the relative doubt of it). Once a state is saved, the share is that so far.

    The time of one save is known up to its spread over sqrt(1 + n) after ``n`` saves. The bounds are two such deviations away.
    """
    saves = s.checkpoints_by_phase.get("durable", 0) + s.copies_by_phase.get("durable", 0)
    share = s.categories["checkpoint_stall"] / max(s.world_s, 1e-9) if saves else _saving(s)
    return share + s.categories["verify"] / max(s.world_s, 1e-9), min(1.0, 2 * UNLIKE / math.sqrt(1 + saves))


def typical(kind: str, s: Any, times: RecoveryTimes) -> Price:
    """The cost of the next fault of a kind, with the run's number of spares."""
    lost = s.terms.ranks_lost(kind_of(kind))
    known = times.by_kind.get(kind, times.refill)
    every_s = s.copy_interval_s or s.checkpoint_interval_s or 0.0
    back_s = every_s / 2 if lost >= s.world > 1 else 0.0
    injection = FaultImpact(kind=kind, lost=lost, in_view=lost, spares=s.spares, back_s=back_s)
    return Price(fault_cost(injection, s.terms, times).lost_s, times.refill.unlike, known.count)


def spares_wanted(rates: Mapping[str, Rate], s: Any, times: RecoveryTimes, whole: float = 0.95) -> int:
    """The fewest spares that keep the world whole for a share ``whole`` of the time, if faults come as forecast.

    The number of ranks away at a time is Poisson. Its mean is Little's law, rate x time of a replacement (M/G/infinity; Gross et al. 2008,
    Fundamentals of Queueing Theory, sec. 2.7).
    """
    away = sum(rate.mean * s.terms.ranks_lost(kind_of(kind)) * times.refill_s(kind) for kind, rate in rates.items())
    from fleet.laws.reliability import poisson_quantile  # it takes numpy, which most of a report does without

    wanted: int = min(s.world, poisson_quantile(away, whole))
    return wanted


# ---- worth -------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Worth:
    """Rank-seconds of the world that a measure has saved, and its cost; ``uses``: how many times it was used."""

    name: str
    saved_s: float
    cost_s: float
    uses: int


def worths(s: Any) -> Sequence[Worth]:
    """The worth of spares and checkpoints to the run of a ``LedgerSummary``, by the prices of its own faults.

    A spare saves the time in which a place would have been empty, and costs its idle time. When all ranks are lost, a checkpoint saves the
    steps before it, which ranks would repeat from the beginning. It costs the time that it blocks.
    """
    spares = [_spared(s)] if s.spares else []
    kept_s = sum(rollback.to_step for rollback in s.rollbacks) * s.median_step_s * s.world
    return [*spares, Worth("checkpoints", kept_s, s.categories["checkpoint_stall"], len(s.rollbacks))]


def _spared(s: Any) -> Worth:
    costs, bare = priced(s)[0], priced(dataclasses.replace(s, spares=0))[0]
    saved = [bare[name].missing_s - cost.missing_s for name, cost in costs.items()]
    return Worth("spares", sum(saved), s.categories["idle_spare"], sum(each > 0 for each in saved))
