"""The simulator, for authors of policies. It runs the decision core of live runs among simulated troubles, in parts of a second a run.

    from fleet.testing import check_straggler_policy, simulate

    results = simulate(straggler=lambda run: MyPolicy(), world="slow", seeds=range(200))
    assert not results.violated, results.report()
    print(results.goodput)

The caller hands in a policy as a function of the run's settings. The simulator calls it for every life of a coordinator: a trouble may end
the coordinator, and with it all that the policy has learned. Equal seeds give equal runs.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from actors.rank.telemetry.recorder import Row
from actors.rank.telemetry.timing import OwnTime, StepTimer
from fleet.errors import ConfigError
from fleet.host.journal import read_journal
from fleet.machine.core import FleetMachine
from fleet.protocol.decisions import Decision
from fleet.protocol.ports import CorruptionPolicy, IntervalPolicy, PlacementPolicy, ProgressPolicy, RecoveryPolicy, StragglerPolicy
from fleet.protocol.records import COMMIT, DecisionMade, Record, RunStarted, Spans, ViewPublished
from fleet.protocol.slowness import ACTIONS, Circumstances, Remedy, StepTime, Timings
from fleet.protocol.types import Member, StateId, View
from fleet.settings.run import RunSettings, StragglerSettings
from fleet.simulation.plan import Plan, Trouble, flipped_plan, random_plan, slow_plan, small, with_troubles
from fleet.simulation.rng import stream
from fleet.simulation.world import Outcome, World
from policies import placement
from policies.corruption import MajorityRules
from policies.interval import CheckpointInterval
from policies.recovery import ReformPromoteRegrow
from policies.straggler.mitigation import Mitigator
from policies.timeouts import ProgressTimeout

__all__ = [
    "Circumstances", "Decision", "Plan", "Policies", "Remedy", "Results", "Shown", "SimulatedResult", "StepTime", "Timings", "Trouble",
    "check_straggler_policy", "made_up", "recorded", "show", "simulate", "small",
]  # fmt: skip

WORLDS: Mapping[str, Callable[[int], Plan]] = {"any": random_plan, "slow": slow_plan, "flips": flipped_plan}
"""Families of runs by seed: every kind of trouble; slow ranks and links; bits that flip."""


@dataclass(frozen=True, kw_only=True)
class Policies:
    """Functions that make each policy of a run from its settings. The defaults are those of live runs, with the plan's intervals."""

    recovery: Callable[[RunSettings], RecoveryPolicy] = lambda run: ReformPromoteRegrow(run.budgets, run.timeouts.start_s)
    placement: Callable[[RunSettings], PlacementPolicy] = lambda run: placement
    straggler: Callable[[RunSettings], StragglerPolicy] = lambda run: Mitigator(run.straggler)
    progress: Callable[[RunSettings], ProgressPolicy] = ProgressTimeout.of
    corruption: Callable[[RunSettings], CorruptionPolicy] = lambda run: MajorityRules()
    interval: Callable[[RunSettings], IntervalPolicy] | None = None

    def machine(self, run: RunSettings, plan: Plan, now_s: float) -> FleetMachine:
        """The decision core of a live run, for one life of its coordinator."""
        store = self.interval(run) if self.interval is not None else CheckpointInterval(law="fixed", interval_s=plan.save_every_s)
        peers = CheckpointInterval(law="fixed", interval_s=plan.copy_every_s) if plan.copy_every_s is not None else None
        return FleetMachine(
            run, self.recovery(run), self.placement(run), store, straggler=self.straggler(run), progress=self.progress(run),
            corruption=self.corruption(run), peers=peers, now_s=now_s,
        )  # fmt: skip


# ---- simulated runs ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SimulatedResult:
    """One simulated run.

    Attributes:
        seed, plan: the seed and the plan of the run; ``plan.troubles`` are the troubles that struck it.
        status, reason: the end of the run: completed, stopped or failed; "" when it did not end.
        violated: the invariant that did not hold, "" when all did; ``why`` describes the violation.
        journal: its records, as of a live run, but without the ranks' times.
        took_s: simulated seconds from its start to its end.
        trace: the last lines of the simulation's trace.
    """

    seed: int
    plan: Plan
    status: str
    reason: str
    violated: str
    why: str
    journal: tuple[Record, ...]
    took_s: float
    trace: tuple[str, ...]
    policies: Policies

    @cached_property
    def goodput(self) -> float:
        """Time of the same run without troubles over the time that it took; 0 when it did not complete. It is at most about 1."""
        if self.status != "completed" or self.violated:
            return 0.0
        quiet = _run(dataclasses.replace(self.plan, troubles=()), self.policies)
        return quiet.took_s / self.took_s

    def decisions(self, policy: str, *actions: str) -> list[DecisionMade]:
        """The decisions of ``policy`` ("straggler", "interval", ...): all of them, or those with one of ``actions``."""
        found = [record for record in self.journal if isinstance(record, DecisionMade) and record.policy == policy]
        return [record for record in found if not actions or record.action in actions]

    def report(self) -> str:
        """The violated invariant, or the status, and the end of the trace."""
        return "\n".join([f"seed {self.seed}: {self.violated or self.status}: {self.why or self.reason}", *self.trace])


class Results(tuple[SimulatedResult, ...]):
    """Simulated runs, in order of their seeds."""

    @property
    def violated(self) -> list[SimulatedResult]:
        """The runs in which an invariant did not hold: there the policy, or Fleet, is wrong."""
        return [run for run in self if run.violated]

    @property
    def goodput(self) -> float:
        """The mean over all runs."""
        return statistics.fmean(run.goodput for run in self)

    def report(self, most: int = 3) -> str:
        """The first ``most`` violations."""
        return "\n\n".join(run.report() for run in self.violated[:most]) or f"{len(self)} runs, no invariant violated"


def simulate(
    *,
    seeds: Iterable[int] = range(50),
    world: str | Plan = "any",
    faults: Sequence[Trouble] | None = None,
    policies: Policies | None = None,
    recovery: Callable[[RunSettings], RecoveryPolicy] | None = None,
    straggler: Callable[[RunSettings], StragglerPolicy] | None = None,
    corruption: Callable[[RunSettings], CorruptionPolicy] | None = None,
    interval: Callable[[RunSettings], IntervalPolicy] | None = None,
) -> Results:
    """Run each seed once, with these policies in the place of Fleet's own.

    Args:
        seeds: of sizes, networks, times and troubles.
        world: "any" (every kind of trouble), "slow" (slow ranks and links), "flips" (bits that flip), or one :class:`Plan` for all seeds.
        faults: troubles in the place of the world's own; () for none.
        policies: all policies at once. The policies of the next arguments replace theirs.
        recovery, straggler, corruption, interval: functions of the run's settings that make the policy; see ``fleet.protocol.ports``.

    Raises:
        ConfigError: there is no such world.
    """
    own = policies or Policies()
    chosen = dataclasses.replace(
        own, recovery=recovery or own.recovery, straggler=straggler or own.straggler, corruption=corruption or own.corruption,
        interval=interval or own.interval,
    )  # fmt: skip
    return Results(_run(_plan(world, seed, faults), chosen) for seed in seeds)


def _plan(world: str | Plan, seed: int, faults: Sequence[Trouble] | None) -> Plan:
    if isinstance(world, str) and world not in WORLDS:
        raise ConfigError("world", world, "there is no such family of runs", f"Choose {', '.join(WORLDS)}, or give a Plan.")
    plan = dataclasses.replace(world, seed=seed) if isinstance(world, Plan) else WORLDS[world](seed)
    return plan if faults is None else with_troubles(plan, tuple(faults))


def _run(plan: Plan, policies: Policies) -> SimulatedResult:
    outcome: Outcome = World(plan, policies.machine).run()
    world = outcome.world
    return SimulatedResult(
        plan.seed, plan, outcome.status, outcome.reason, outcome.broken, outcome.complaint, tuple(world.journal), world.clock.now_s,
        outcome.trace, policies,
    )  # fmt: skip


# ---- times of steps ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shown:
    """The input of a straggler policy at one moment: the arguments of ``StragglerPolicy.look``."""

    timings: Timings | None
    circumstances: Circumstances
    now_s: float


def show(policy: StragglerPolicy, moments: Iterable[Shown]) -> list[Remedy]:
    """The policy's answers, in order. No answer is carried out: the moments stay as they are."""
    return [policy.look(moment.timings, moment.circumstances, moment.now_s) for moment in moments]


def made_up(
    *, world: int = 4, steps: int = 120, shard_s: float = 0.02, noise: float = 0.02, slow: Mapping[int, float] | None = None,
    since: int = 40, kind: str = "compute", spares: int = 0, seed: int = 0, generation: int = 1,
) -> list[Shown]:  # fmt: skip
    """An invented run with four shards a rank, a step at a time.

    Args:
        shard_s: seconds of a shard; ``noise``: the standard deviation of that, as a share.
        slow: view rank -> factor by which its ``kind`` of time (compute, network or data) grows, from step ``since`` on.
    """
    rng = stream(seed, "made up")
    members = tuple(Member(slot, 0) for slot in range(world))
    circumstances = _circumstances(_view(generation, members), spares)
    moments, now_s = [], 0.0
    for step in range(steps):
        times = [
            _made_up(rng.gauss(1.0, noise), shard_s, kind, (slow or {}).get(rank, 1.0) if step >= since else 1.0) for rank in range(world)
        ]
        now_s += max(time.own_s for time in times)
        moments.append(Shown(Timings(generation, (step,), members, tuple((time,) for time in times)), circumstances, now_s))
    return moments


def _made_up(wavers: float, shard_s: float, kind: str, slowness: float) -> StepTime:
    times = {"compute": 4 * shard_s * max(0.1, wavers), "data": shard_s / 10, "network": shard_s}
    times[kind] *= slowness
    return StepTime(4, times["compute"], times["data"], times["network"], shard_s / 2)


def _view(generation: int, members: tuple[Member, ...]) -> View:
    shares = placement.ranges(4 * len(members), len(members))
    return View(generation, members, shares, 0, (), StateId(0, 0), "")


def _circumstances(view: View, spares: int = 0, shards: int = 0) -> Circumstances:
    """Each member on a node of its own; the run has no end in sight, and has made no change yet."""
    standing_by = tuple((Member(len(view.members) + number, 0), f"spare-{number}") for number in range(spares))
    nodes = tuple(f"node-{member.slot}" for member in view.members)
    return Circumstances(view, nodes, shards or 4 * len(view.members), standing_by, math.inf, 0, 0.0)


def recorded(journal: str | Path | Iterable[Record], batch: int = 8) -> Iterator[Shown]:
    """The measured steps of a past run, from its journal, as a policy would see them: ``batch`` steps at a time.

    Views stay those of the journal, also where the policy answers otherwise. There are no spares. A step that some rank of a view did not
    finish is left out.
    """
    records = list(read_journal(journal) if isinstance(journal, str | Path) else journal)
    shards = next((record.shards for record in records if isinstance(record, RunStarted)), 0)
    steps = _own_times(records)
    for published in (record for record in records if isinstance(record, ViewPublished)):
        view, now_s = published.view, published.at_s
        common = set.intersection(*(set(steps[view.generation, member]) for member in view.members))
        known, circumstances = sorted(common), _circumstances(view, shards=shards)
        for first in range(0, len(known), batch):
            numbers = known[first : first + batch]
            rows = tuple(tuple(steps[view.generation, member][number] for number in numbers) for member in view.members)
            now_s += sum(max(row[column].own_s for row in rows) for column in range(len(numbers)))
            yield Shown(Timings(view.generation, tuple(numbers), view.members, rows), circumstances, now_s)


def _own_times(records: Iterable[Record]) -> dict[tuple[int, Member], dict[int, StepTime]]:
    """Own times by (generation, member) and step, as the agents measured them."""
    found: dict[tuple[int, Member], dict[int, StepTime]] = defaultdict(dict)
    timers: dict[Member, StepTimer] = defaultdict(StepTimer)
    for spans in records:
        if isinstance(spans, Spans):
            timer = timers[spans.member]
            timer.add(_rows(spans))
            for time in timer.take():
                found[time.generation, spans.member][time.step] = _seconds(time)
    return found


def _rows(spans: Spans) -> Iterator[Row]:
    at_us, step = spans.start_us, spans.step
    for duration_us, code in zip(spans.durations_us, spans.codes, strict=True):
        yield Row(at_us, step, spans.generation, spans.history, code)
        at_us += duration_us
        step += code == COMMIT


def _seconds(time: OwnTime) -> StepTime:
    return StepTime(time.shards, time.compute_us / 1e6, time.data_us / 1e6, time.network_us / 1e6, time.fixed_us / 1e6)


# ---- rules of a straggler policy ---------------------------------------------------------------------------------------------------------


def check_straggler_policy(make: Callable[[RunSettings], StragglerPolicy], seeds: Iterable[int] = range(20)) -> list[str]:
    """Faults of a straggler policy, in sentences; none when it keeps the rules that Fleet relies on.

    The policy gets invented times: well ranks, slow ones, gaps, a new view, ranks that are all slow alike, a world of one. It must give
    answers that Fleet can carry out, and twice the same answers for the same times. Then it runs the "slow" world, where every invariant
    must hold. Whether it pays is another question: compare ``simulate(...).goodput`` with that of Fleet's own policy.
    """
    faults = [f"{name}: {fault}" for name, moments in _situations().items() for fault in _faults_in(make, moments)]
    faults += [run.report() for run in simulate(straggler=make, world="slow", seeds=seeds).violated]
    return faults


def _situations() -> dict[str, list[Shown]]:
    well, slow = made_up(), made_up(slow={2: 3.0}, spares=1)
    gap = dataclasses.replace(slow[60], timings=dataclasses.replace(_timings(slow[60]), rows=((None,),) * 4))
    return {
        "all are well": well,
        "one is slow": slow,
        "its link is slow": made_up(slow={1: 4.0}, kind="network"),
        "a step without measured times": [*slow[:60], gap, *slow[61:]],
        "nothing is new": [*slow, dataclasses.replace(slow[-1], timings=None)],
        "a new view": [*slow, *made_up(world=3, generation=2)],
        "a world of one": made_up(world=1, slow={0: 3.0}),
        "all are slow alike": made_up(slow=dict.fromkeys(range(4), 3.0)),
    }


def _timings(moment: Shown) -> Timings:
    assert moment.timings is not None
    return moment.timings


def _faults_in(make: Callable[[RunSettings], StragglerPolicy], moments: Sequence[Shown]) -> Iterator[str]:
    settings = small(len(moments[0].circumstances.view.members))
    try:
        first, second = (show(_configured(make(settings), settings), moments) for _ in range(2))
    except Exception as error:  # noqa: BLE001 - any error of the policy is the finding
        yield f"it raised {type(error).__name__}: {error}"
        return
    if first != second:
        yield "it gave two answers to the same times: clocks and chance are no part of a policy"
    for moment, remedy in zip(moments, first, strict=True):
        fault = _fault_of(remedy, moment.circumstances)
        if fault:
            yield f"at {moment.now_s:.2f} s {fault}"
            return


def _configured(policy: StragglerPolicy, settings: RunSettings) -> StragglerPolicy:
    policy.configure(StragglerSettings(changes=settings.straggler.changes))
    return policy


def _fault_of(remedy: Remedy, circumstances: Circumstances) -> str:
    """The reason why Fleet cannot carry out an answer, or ""."""
    action = remedy.decision.action if remedy.decision is not None else "tolerate"
    view = circumstances.view
    if action not in (*ACTIONS, "tolerate"):
        return f"it answered {action!r}: the answers are tolerate, {', '.join(ACTIONS)}"
    if action == "rebalance" and not _tile(remedy.ranges, circumstances):
        return f"it shared {circumstances.shards} shards among {len(view.members)} ranks as {remedy.ranges}"
    if action in ("replace", "evict") and not (remedy.members and set(remedy.members) < set(view.members)):
        return f"it wants {remedy.members} to go, of {view.members}: some must go, and some must stay"
    if action == "replace" and len(remedy.members) > len(circumstances.spares):
        return f"it wants {len(remedy.members)} replaced, and {len(circumstances.spares)} stand by"
    return ""


def _tile(ranges: Sequence[tuple[int, int]], circumstances: Circumstances) -> bool:
    """Whether every shard has one rank, in order."""
    ends = [0, *(end for _, end in ranges)]
    whole = [begin for begin, _ in ranges] == ends[:-1] and ends == sorted(ends) and ends[-1] == circumstances.shards
    return whole and len(ranges) == len(circumstances.view.members)
