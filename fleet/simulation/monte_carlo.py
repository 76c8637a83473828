"""Many runs of one fleet at once: the model of :mod:`fleet.simulation.fleet_run`, one numpy step for the next fault of every run.

Of a run, only its present state is kept. So memory grows with the number of runs, and neither with nodes nor with time. The policies are
asked beforehand (whether they restart, and how long they wait). Slow spells count by their mean.

The event-driven simulator alone has faults that are noticed late, repair crews, lemons, and a least number of nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigError
from fleet.laws.reliability import poisson_quantile
from fleet.protocol.ports import IntervalPolicy, RecoveryPolicy
from fleet.simulation.fleet_model import HELD, SHARES, FleetModel
from fleet.simulation.questions import WAIT, Recovery, Schedule, schedule
from fleet.simulation.rng import derive_seed

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
BATCH = 2_500
"""Number of runs that go on together: more do not fit the cache."""


@dataclass(frozen=True, slots=True)
class Sample:
    """``shares[name]``: one value for each run, [runs]. ``faults``: number of faults in each run."""

    shares: dict[str, Floats]
    faults: Floats

    def interval(self, name: str = "goodput", z: float = 1.96) -> tuple[float, float]:
        """(mean, half width of its normal interval). Needs at least 2 runs."""
        values = self.shares[name]
        return float(values.mean()), z * float(values.std(ddof=1)) / math.sqrt(len(values))


def monte_carlo(
    model: FleetModel,
    recovery: RecoveryPolicy,
    intervals: Sequence[IntervalPolicy],
    *,
    runs: int,
    seed: int,
    progress: Callable[[int], bool] = lambda done: True,
) -> Sample:
    """``runs`` independent runs. ``progress`` gets the number of runs that are done. If it returns False, the sample has these runs alone.

    Raises:
        ConfigError: the model needs the event-driven simulator, or ``runs`` is below 1.
    """
    _check(model, runs)
    setting = _Setting.of(model, recovery, intervals)
    batches: list[_Batch] = []
    done = 0
    while done < runs:
        batch = _Batch(setting, min(BATCH, runs - done), np.random.Generator(np.random.PCG64(derive_seed(seed, "monte carlo", done))))
        batch.run()
        batches.append(batch)
        done += batch.runs
        if not progress(done):
            break
    shares = [batch.shares() for batch in batches]
    return Sample({name: np.concatenate([share[name] for share in shares]) for name in SHARES}, np.concatenate([b.faults for b in batches]))


def _check(model: FleetModel, runs: int) -> None:
    if runs < 1:
        raise ConfigError("runs", runs, "must be at least 1", "The nearest valid value is 1.")
    reason, way_out = "only the event-driven simulator has that", "Use method events."
    late = [fault.name for fault in model.faults if fault.notice_s > 0]
    if late:
        raise ConfigError(f"faults.{late[0]}.notice_s", next(f.notice_s for f in model.faults if f.notice_s > 0), reason, way_out)
    other = [fault.name for fault in model.faults if fault.nodes and fault.repair_s not in (None, model.repair_s)]
    if other:
        raise ConfigError(f"faults.{other[0]}.repair_s", model.repair_s, reason, way_out)
    for name, plain in (("crews", None), ("min_nodes", 1), ("lemon_share", 0.0)):
        if getattr(model, name) != plain:
            raise ConfigError(name, getattr(model, name), reason, way_out)


def slow_loss(model: FleetModel) -> float:
    """Mean share of the work that slow spells cost. Spells of a class are an M/G/infinity queue, and the greatest severity counts."""
    levels = []
    for slow in model.slow:
        young = -math.expm1(-slow.rate_per_s * slow.unnoticed_s) if slow.mitigated is not None else 0.0
        some = -math.expm1(-slow.rate_per_s * slow.duration_s)
        rest = slow.severity if slow.mitigated is None else slow.mitigated
        levels.append(((young, slow.severity), (max(0.0, some - young), rest), (1.0 - max(some, young), 1.0)))
    return sum(
        math.prod(share for share, _ in mix) * (1.0 - 1.0 / max((severity for _, severity in mix), default=1.0)) for mix in product(*levels)
    )


@dataclass(frozen=True, slots=True)
class _Setting:
    """The constants of a run, as arrays by fault class. ``largest``: most nodes that one fault can take."""

    model: FleetModel
    schedules: list[Schedule]
    needs: Ints
    detect_s: Floats
    nodes: Ints
    announced: Flags
    mix: Floats
    rate_per_s: float
    wait_s: float
    away: bool
    largest: int

    @classmethod
    def of(cls, model: FleetModel, recovery: RecoveryPolicy, intervals: Sequence[IntervalPolicy]) -> _Setting:
        asked = Recovery(recovery, model.nodes)
        restarting = asked.restarts
        wait = asked.form(False, min(1, model.nodes - 1), 0, 0.0)
        rates = np.array([fault.rate_per_s for fault in model.faults])
        schedules = [
            schedule(policy, model, tier, model.tier_rate_per_s(tier, restarting)) for tier, policy in enumerate(intervals)
        ]  # fmt: skip
        nodes = np.array([fault.nodes for fault in model.faults])
        largest = int(nodes.max(initial=0))
        down = float(np.sum(rates * (nodes > 0))) * model.repair_s
        return cls(
            model=model,
            schedules=schedules,
            needs=np.array([model.needed(fault, restarting) for fault in model.faults]),
            detect_s=np.array([fault.detect_s for fault in model.faults]),
            nodes=nodes,
            announced=np.array([fault.announced for fault in model.faults]),
            mix=np.cumsum(rates) / rates.sum() if rates.sum() > 0 else rates,
            rate_per_s=float(rates.sum()),
            wait_s=wait.wait_s if wait.action == WAIT else 0.0,
            away=largest * poisson_quantile(down, 1 - 1e-12) > model.spares or model.replace_s > 0,
            largest=largest,
        )

    @property
    def untold(self) -> int:
        """The number of nodes that can be away while their count alone is simulated, without the time at which each is back.

        A count is enough where each node is repaired by itself, and a spare stands in for it. Nodes of one fault come back together.
        """
        return self.model.spares if self.largest <= 1 else 0


class _Copies:
    """The newest copy of each tier, [tiers, runs]: its beginning (``point``), and the seconds of work and of stall until then."""

    def __init__(self, tiers: int, runs: int) -> None:
        self.point, self.work, self.stall = np.zeros((tiers, runs)), np.zeros((tiers, runs)), np.zeros((tiers, runs))


class _Fetched:
    """Called spares, [runs, calls]: their arrival time, and their number."""

    def __init__(self, runs: int, calls: int) -> None:
        self.at, self.count = np.zeros((runs, calls)), np.zeros((runs, calls))


class _Batch:
    """Runs side by side. Every array is [runs], or [tiers, runs].

    Nodes that are away are counted. Repairs are exponential, so up to ``untold`` nodes their number is enough. For the runs ``short``,
    which have more, ``rest`` has the seconds until each node is back, longest first.
    """

    def __init__(self, setting: _Setting, runs: int, rng: np.random.Generator) -> None:
        self.setting, self.rng = setting, rng
        tiers = len(setting.schedules)
        self.now = np.zeros(runs)
        self.down, self.there, self.go, self.up = np.zeros(runs), np.zeros(runs), np.zeros(runs), np.zeros(runs)
        self.need = np.full(runs, HELD)
        self.next = np.tile(np.array([[at.interval_s] for at in setting.schedules]).reshape(tiers, 1), (1, runs))
        self.work, self.stall = np.zeros(runs), np.zeros(runs)
        self.copies = _Copies(tiers, runs)
        self.lost = {name: np.zeros(runs) for name in ("rework", "detect", "reform", "restore", "provision")}
        self.gone, self.seen, self.absence = np.zeros(runs, dtype=np.int64), np.zeros(runs), np.zeros(runs)
        self.short, self.rest = np.zeros(0, dtype=np.int64), np.zeros((0, 0))
        self.fetched = _Fetched(runs, 4 if setting.model.replace_s > 0 else 0)
        self.faults = np.zeros(runs)

    @property
    def runs(self) -> int:
        return len(self.now)

    def run(self) -> None:
        end_s, rate = self.setting.model.duration_s, self.setting.rate_per_s
        live = np.full(self.runs, rate > 0)
        while True:
            at = self.now + self.rng.standard_exponential(self.runs) / (rate or 1.0)
            live &= at < end_s
            if not live.any():
                break
            self.now = np.where(live, at, self.now)
            self._inject(live.copy())
        self.now = np.full(self.runs, end_s)
        everyone = np.full(self.runs, True)
        self._advance()
        self._stretch(everyone & (self.up < end_s))
        self._book(everyone)
        self.lost["detect"] -= np.maximum(0.0, self.down - end_s)

    def shares(self) -> dict[str, Floats]:
        end_s, slow = self.setting.model.duration_s, slow_loss(self.setting.model)
        found = {"goodput": self.work * (1 - slow), "straggler_wait": self.work * slow, "checkpoint_stall": self.stall, **self.lost}
        return {name: found[name] / end_s for name in SHARES}

    # ---- one fault of every run ----------------------------------------------------------------------------------------------------------

    def _inject(self, live: Flags) -> None:
        setting = self.setting
        kind = np.minimum(np.searchsorted(setting.mix, self.rng.random(self.runs), "right"), len(setting.mix) - 1)
        nodes = np.where(live, setting.nodes[kind], 0)
        self._advance()
        if setting.away:
            missing = self._missing()
            live = live & ((self.rng.random(self.runs) * setting.model.nodes >= missing) | (nodes == 0))
            nodes = np.where(live, np.minimum(nodes, setting.model.nodes - missing), 0).astype(np.int64)
        self.faults += live
        need, announced = setting.needs[kind], setting.announced[kind]
        running = live & (self.now >= self.up)
        absorbed = live & (self.now < self.down)
        fresh = live & ~absorbed
        self._stretch(running)
        if setting.away:
            self._take(nodes)
        if setting.model.step_s > 0:
            self._half_step(running & (need == HELD) & ~announced)
        self._book(fresh)
        deeper = absorbed & (need > self.need)
        before = np.where(running, HELD, self.need)
        self.need = np.where(fresh, np.maximum(need, before), np.where(deeper, need, self.need))
        moved = fresh | deeper
        notified = moved & announced
        copies = self.copies
        copies.point[:, notified] = self.now[notified]
        copies.work[:, notified], copies.stall[:, notified] = self.work[notified], self.stall[notified]
        self._roll_back(moved & ~announced & (self.need != HELD))
        detect_s = setting.detect_s[kind]
        self.lost["detect"] += np.where(fresh, detect_s, 0.0)
        self.down = np.where(fresh, self.now + detect_s, self.down)
        self._plan(moved)

    def _plan(self, moved: Flags) -> None:
        """Plan when training goes on, if no other fault comes."""
        setting, model = self.setting, self.setting.model
        held = self.need == HELD
        self.there = np.where(moved, self.down + np.where(held, 0.0, model.restart_s), self.there)
        go = self.there
        if setting.away and setting.wait_s > 0:
            go = np.where(held, go, np.clip(self._full(), go, np.maximum(go, self.now + setting.wait_s)))
        self.go = np.where(moved, go, self.go)
        restore_s = np.array([tier.restore_s for tier in model.tiers] or [0.0])[np.maximum(self.need, 0)]
        joins = model.join_s if model.spares and not model.replace_s else 0.0
        self.up = np.where(moved, self.go + np.where(held, model.reform_s, restore_s) + joins, self.up)
        for tier, at in enumerate(setting.schedules):
            self.next[tier] = np.where(moved & ~held, self.up + at.interval_s - at.blocked_s, self.next[tier])

    def _book(self, runs: Flags) -> None:
        """Book the time of the way back, until training went on or the next fault came."""
        until = np.clip(np.minimum(self.now, self.up), self.down, None)
        waited = np.clip(until, self.there, self.go) - self.there
        way = np.where(runs, np.maximum(0.0, until - self.down - waited), 0.0)
        self.lost["provision"] += np.where(runs, waited, 0.0)
        self.lost["reform"] += np.where(self.need == HELD, way, 0.0)
        self.lost["restore"] += np.where(self.need == HELD, 0.0, way)

    # ---- training ------------------------------------------------------------------------------------------------------------------------

    def _stretch(self, running: Flags) -> None:
        """Train from ``up`` to now, with copies. A copy that is not safe is given up, and requested again at once."""
        begin, end, copies = self.up, self.now, self.copies
        first = np.maximum(self.next, begin)
        absent = self._absent(begin, end, running)
        self.absence[running] = 0.0
        share = np.divide(absent, end - begin, out=np.zeros(self.runs), where=running & (end > begin))
        for tier, at in enumerate(self.setting.schedules):
            if at.interval_s == math.inf:
                continue
            safe = np.floor((end - at.latency_s - first[tier]) / at.interval_s)
            point = np.where(running & (safe >= 0), first[tier] + safe * at.interval_s, -1.0)
            fresh = point >= 0
            kept = np.minimum(point + at.blocked_s, end)
            stall = self._blocked(first, begin, kept)
            copies.point[tier] = np.where(fresh, point, copies.point[tier])
            copies.work[tier] = np.where(fresh, self.work + (kept - begin - stall) * (1 - share), copies.work[tier])
            copies.stall[tier] = np.where(fresh, self.stall + stall * (1 - share), copies.stall[tier])
            number = np.ceil((end - first[tier]) / at.interval_s)
            last = first[tier] + (number - 1) * at.interval_s
            later = np.where(last + at.latency_s <= end, last + at.interval_s, end)
            self.next[tier] = np.where(running & (first[tier] < end), later, self.next[tier])
        stall = self._blocked(first, begin, end)
        self.work += np.where(running, (end - begin - stall) * (1 - share), 0.0)
        self.stall += np.where(running, stall * (1 - share), 0.0)
        self.lost["provision"] += np.where(running, absent, 0.0)

    def _blocked(self, first: Floats, begin: Floats, until: Floats) -> Floats:
        """Seconds from ``begin`` to ``until`` in which copies stop training."""
        total = np.zeros(self.runs)
        for tier, at in enumerate(self.setting.schedules):
            if at.interval_s == math.inf or not at.blocked_s:
                continue
            number = np.maximum(0.0, np.ceil((until - first[tier]) / at.interval_s))
            last = first[tier] + (number - 1) * at.interval_s
            total += np.where(number > 0, number * at.blocked_s - np.maximum(0.0, last + at.blocked_s - until), 0.0)
        return np.minimum(total, np.maximum(0.0, until - begin))

    def _half_step(self, runs: Flags) -> None:
        lost = np.where(runs, np.minimum(0.5 * self.setting.model.step_s, self.now - self.up), 0.0)
        self.work -= lost
        self.lost["rework"] += lost

    def _roll_back(self, runs: Flags) -> None:
        """Go back to the newest copy of the tiers that are left, and of several to the nearest."""
        tiers, copies = len(self.setting.schedules), self.copies
        if not runs.any():
            return
        allowed = np.arange(tiers)[:, None] >= self.need[None, :]
        best = np.argmax(np.where(allowed, copies.point, -1.0), axis=0)
        index = np.arange(self.runs)
        point, work, stall = copies.point[best, index], copies.work[best, index], copies.stall[best, index]
        self.need = np.where(runs, best, self.need)
        self.lost["rework"] += np.where(runs, self.work + self.stall - work - stall, 0.0)
        self.work, self.stall = np.where(runs, work, self.work), np.where(runs, stall, self.stall)
        newer = runs & (copies.point > point)
        copies.point, copies.work = np.where(newer, point, copies.point), np.where(newer, work, copies.work)
        copies.stall = np.where(newer, stall, copies.stall)

    # ---- nodes that are away -------------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Take back nodes that were repaired since the last call, and add up the node-seconds that a stretch lacked meanwhile."""
        if not self.setting.away:
            return
        passed = self.now - self.seen
        calm = (passed > 0) & (self.gone > 0)
        calm[self.short] = False
        stay = np.exp(-passed[calm] / self.setting.model.repair_s)
        self.gone[calm] = self.rng.binomial(self.gone[calm], stay)
        if len(self.short):
            begin = np.clip(self.up - self.seen, 0.0, passed)[self.short, None]
            passed = passed[self.short, None]
            over = self.rest[:, self.setting.model.spares :]
            self.absence[self.short] += (np.clip(over, begin, passed) - begin).sum(axis=1)
            self.rest = np.maximum(self.rest - passed, 0.0)
            self.gone[self.short] = (self.rest > 0.0).sum(axis=1)
            self._keep(self.short, self.rest)
        self.seen = self.now.copy()

    def _keep(self, short: Ints, rest: Floats) -> None:
        """Keep the runs that are still short, and as many columns as they need at most."""
        still = self.gone[short] > self.setting.untold
        self.short = short[still]
        self.rest = rest[still, : int(self.gone[self.short].max(initial=0))]

    def _take(self, nodes: Ints) -> None:
        """Nodes go to repair, and spares are called. Runs that are short from now on get a repair time for each node that is away."""
        setting = self.setting
        before, self.gone = self.gone, self.gone + nodes
        short = np.flatnonzero(self.gone > setting.untold)
        if len(short):
            known = np.zeros(self.runs, dtype=np.int64)
            known[self.short] = before[self.short]
            width = int(self.gone[short].max())
            table = np.zeros((len(short), width))
            place = np.full(self.runs, -1)
            place[short] = np.arange(len(short))
            table[place[self.short], : self.rest.shape[1]] = self.rest
            column = np.arange(width)
            fresh = (column >= known[short, None]) & (column < self.gone[short, None])
            table[fresh] = self._repairs(fresh)
            self.short, self.rest = short, np.sort(table, axis=1)[:, ::-1]
        if self.fetched.at.shape[1]:
            self._fetch(np.where(nodes > 0, np.clip(setting.model.spares - before, 0, nodes), 0))

    def _repairs(self, fresh: Flags) -> Floats:
        """Seconds of repair of each of the nodes ``fresh``. Where a fault can take several nodes, they share one time."""
        if self.setting.largest <= 1:
            return self.rng.standard_exponential(int(fresh.sum())) * self.setting.model.repair_s
        return np.repeat(self.rng.standard_exponential(len(fresh)) * self.setting.model.repair_s, fresh.sum(axis=1))

    def _fetch(self, count: Ints) -> None:
        """Call ``count`` spares of each run. They take the array places of spares that arrived longest ago."""
        asking, spares = np.flatnonzero(count), self.fetched
        if np.any(spares.at[asking].min(axis=1, initial=math.inf) > self.now[asking]):
            more = np.zeros((self.runs, spares.at.shape[1]))
            spares.at, spares.count = np.hstack((spares.at, more)), np.hstack((spares.count, more))
        oldest = np.argmin(spares.at[asking], axis=1)
        spares.at[asking, oldest] = self.now[asking] + self.setting.model.replace_s
        spares.count[asking, oldest] = count[asking]

    def _missing(self) -> Floats:
        coming = (self.fetched.count * (self.fetched.at > self.now[:, None])).sum(axis=1)
        return np.asarray(np.maximum(0, self.gone - self.setting.model.spares) + coming, dtype=np.float64)

    def _full(self) -> Floats:
        """The time from which no place will be empty, by present knowledge."""
        full: Floats = self.fetched.at.max(axis=1, initial=0.0)
        if len(self.short):
            rest = self.rest[:, self.setting.model.spares :].max(axis=1, initial=0.0)  # until the last node without a spare is back
            full[self.short] = np.maximum(full[self.short], self.now[self.short] + rest)
        return full

    def _absent(self, begin: Floats, end: Floats, running: Flags) -> Floats:
        """The missing work between ``begin`` and ``end``, in seconds of the whole fleet."""
        model = self.setting.model
        if not self.setting.away:
            return np.zeros(self.runs)
        total = self.absence
        if self.fetched.at.shape[1]:
            waited = np.clip(self.fetched.at, begin[:, None], end[:, None]) - begin[:, None]
            total = total + (self.fetched.count * waited).sum(axis=1)
        return np.where(running, np.minimum(total * model.replica_nodes / model.nodes, end - begin), 0.0)
