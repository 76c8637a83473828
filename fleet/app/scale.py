"""``fleet experiment scale``: trains with some worlds, predicts another one before it is measured, and predicts larger ones."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.rank import script_loading
from fleet.app import launching, plans
from fleet.app.configuration import configured
from fleet.app.quota import Quotas
from fleet.app.stopping import stopped_by_signals
from fleet.errors import ConfigError, RunFailed
from fleet.host.clock import Clock, unix_time_s
from fleet.host.journal import JournalTail, read_journal
from fleet.host.processor_time import cores_of_host
from fleet.ledger.bill import tariff
from fleet.ledger.goodput import Ledger
from fleet.ledger.step_terms import StepTerms, means, settled
from fleet.protocol.records import FLOPS, Committed, DataRead, ProcessUp, Record, ViewPublished
from fleet.settings.run import RunSettings

if TYPE_CHECKING:
    from fleet.laws.scale_fit import Fit, Visit
    from fleet.planning.scale import Failures, RankPrice, WorldRow
    from fleet.protocol.provider import Cluster

LOOK_S = 0.1
LEAST_STEPS = 10
"""Least steps of a visit, without its beginning and its extremes."""
FIRST = {"nodes": 1, "straggler": {"enabled": False}}
"""Defaults of these runs: one node of the local cluster, and the same shards for each rank, however slow."""


@dataclass(frozen=True, kw_only=True)
class ScaleRequest:
    """A request for ``scale``.

    Attributes:
        script: a Python file with a function ``train(run)``.
        worlds: world sizes to measure. ``hold_out`` is one of them, which is predicted from the others first.
        seconds: of training at each world, in ``rounds`` visits.
        cpu_quota: cores of each rank; None: as many as it has threads.
        rank_mtbf_hours, recover_s: see ``fleet.planning.scale.Failures``.
        pays: a larger world pays while a further kept token costs at most ``pays`` times the cheapest.
        settings: of the runs, as ``fleet.launch`` takes them.
        file: the answer is written there, at each stage.
    """

    script: str
    worlds: tuple[int, ...] = (1, 2, 4, 8)
    hold_out: int = 8
    seconds: float = 60.0
    rounds: int = 3
    cpu_quota: float | None = None
    rank_mtbf_hours: float = 50_000.0
    recover_s: float = 25.0
    pays: float = 2.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    file: Path = Path("scale.json")

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise ConfigError("--seconds", self.seconds, "must be greater than 0 s", "Use 60.")
        if not self.pays >= 1:
            raise ConfigError("--pays-up-to", self.pays, "no token costs less than the cheapest one", "The nearest valid value is 1.")


@dataclass(frozen=True, slots=True)
class Seen:
    """Figures of one visit, from its journal. ``per_step`` and ``goods``: the yield of a step, and its unit. ``flops`` of a step; 0: not
    known. ``load`` of the host at its end, over a minute."""

    visit: Visit
    run: str
    steps: int
    per_step: float
    goods: str
    flops: float
    blocked_s: float
    load: float = 0.0

    def plain(self) -> dict[str, Any]:
        """The visit as plain data, for JSON."""
        return {"world": self.visit.world, "run": self.run, "steps": self.steps, "load": self.load, "terms": dict(self.visit.terms)}


Reporter = Callable[[str, dict[str, Any]], object]


def scale(asked: ScaleRequest, clock: Clock, report_to: Reporter) -> dict[str, Any]:
    """Carry out the request; returns the content of ``asked.file``. ``report_to`` takes each stage, with its name.

    Raises ConfigError before any process starts; RunFailed when a run fails, or has too few steps.
    """
    settings, train = _settings(asked), script_loading.load_train(asked.script)
    quotas = None if asked.cpu_quota is None else Quotas(asked.cpu_quota)
    from fleet.app import recipes

    widest = replace(settings, world=max(asked.worlds), max_world=0)
    with recipes.local_cluster(widest, [train.folder]) as cluster:
        return _Stages(asked, settings, train, cluster, quotas, clock, report_to).go()


def _settings(asked: ScaleRequest) -> RunSettings:
    """The settings of the runs. Raises ConfigError for those that cannot be measured."""
    from fleet.laws.scale_fit import check_determines
    from fleet.planning.scale import check_room, check_worlds

    layers = launching.layers_of(dict(asked.settings))
    found = configured(FIRST, *layers, over={"world": 1, "spares": 0, "min_ranks": 1})
    plans.check(found.run, found.chaos)
    if found.chaos.on:
        raise ConfigError(
            "chaos", "on", "a fault would be measured as a part of steps", "Leave it out; --mtbf-hours says how often ranks fail."
        )
    check_worlds(asked.worlds, asked.hold_out, found.run.shards)
    check_room(max(asked.worlds), found.run.threads_per_rank, cores_of_host(), asked.cpu_quota)
    fitted = [world for world in asked.worlds if world != asked.hold_out]
    check_determines(sorted(fitted), asked.rounds * len(fitted))
    return found.run


class _Stages:
    """Measures some worlds, predicts the one that was held out, writes the prediction down, measures it, and predicts larger ones."""

    def __init__(
        self, asked: ScaleRequest, settings: RunSettings, train: Callable[[Any], None], cluster: Cluster, quotas: Quotas | None,
        clock: Clock, report: Reporter,
    ) -> None:  # fmt: skip
        self._asked, self._settings, self._train, self._cluster = asked, settings, train, cluster
        self._quotas, self._clock, self._report = quotas, clock, report
        self._seen: list[Seen] = []
        from fleet.planning.scale import FORMAT, VERSION

        self._answer: dict[str, Any] = {
            "format": FORMAT, "version": VERSION, "script": asked.script, "device": settings.cost.device, "cores": cores_of_host(),
            "cpu_quota": asked.cpu_quota, "threads_per_rank": settings.threads_per_rank, "shards": settings.shards,
            "seconds": asked.seconds, "rounds": asked.rounds, "hold_out": asked.hold_out, "visits": [],
            "prediction": None, "measured": None, "law": None, "larger": None, "plan": None,
        }  # fmt: skip

    def go(self) -> dict[str, Any]:
        from fleet.laws.scale_fit import fit
        from fleet.planning.scale import fit_plain, judged

        asked, shards = self._asked, self._settings.shards
        self._visit([world for world in asked.worlds if world != asked.hold_out])
        before = fit([seen.visit for seen in self._seen], shards)
        prediction = before.step_s(asked.hold_out, asked.rounds)
        terms = before.terms_s(asked.hold_out)
        said = {"world": asked.hold_out, "step_s": asdict(prediction), "terms": terms, "law": fit_plain(before), "unix_s": unix_time_s()}
        self._note(prediction=said)  # before the measurement
        self._visit([asked.hold_out])
        held = [seen.visit for seen in self._seen if seen.visit.world == asked.hold_out]
        self._note(measured=judged(prediction, held) | {"terms": means(held)})
        law = fit([seen.visit for seen in self._seen], shards)
        self._note(law=fit_plain(law), larger=self._larger(law), plan=self._for_a_plan(law))
        return self._answer

    def _note(self, **said: Any) -> None:
        """Write an answer to the file, and report it."""
        self._answer |= said
        self._asked.file.parent.mkdir(parents=True, exist_ok=True)
        self._asked.file.write_text(json.dumps(self._answer, indent=1) + "\n")
        for name in said:
            self._report(name, self._answer)

    # ---- visits

    def _visit(self, worlds: Sequence[int]) -> None:
        """Visit worlds round by round, so that a drift of the host meets all worlds alike."""
        for _ in range(self._asked.rounds):
            for world in worlds:
                self._seen.append(seen := self._train_with(world))
                self._note(visits=[*self._answer["visits"], seen.plain()])

    def _train_with(self, world: int) -> Seen:
        from fleet.app.recipes import LiveRun

        name, root = plans.new_name(f"scale-{world}-{Path(self._asked.script).name}"), plans.root_of(self._settings.storage)
        settings = replace(self._settings, world=world, max_world=0)
        live = LiveRun(
            plans.RunPlan(name=name, folder=root / name, settings=settings, train=self._train, script=self._asked.script), self._cluster
        )
        seconds = self._asked.seconds / self._asked.rounds
        watch = _Watch(live.plan.journal, self._quotas, seconds, live.stop, self._clock)
        with stopped_by_signals(watch.interrupt, lambda words: None):
            result = watch.beside(live.execute)
        if watch.interrupted:
            raise KeyboardInterrupt
        if result.status == "failed" or watch.error:
            raise RunFailed(f"the run with {world} rank(s), {name}, failed: {watch.error or result.reason}", result.detail)
        seen = seen_in(world, name, seconds, list(read_journal(live.plan.journal)))
        return replace(seen, load=os.getloadavg()[0])

    # ---- what follows

    def _larger(self, law: Fit) -> dict[str, Any]:
        from fleet.planning.scale import candidates, fastest, pays_up_to, rows

        failures, price = self._failures(), self._price()
        found: list[WorldRow] = rows(law, candidates(self._asked.worlds), self._asked.rounds, failures, price, self._asked.pays)
        return {
            "failures": asdict(failures), "price": asdict(price), "rows": [asdict(row) for row in found],
            "pays_up_to": pays_up_to(found), "pays": self._asked.pays, "fastest": fastest(found),
        }  # fmt: skip

    def _failures(self) -> Failures:
        from fleet.planning.scale import Failures

        blocked_s = max(seen.blocked_s for seen in self._seen)
        return Failures(self._asked.rank_mtbf_hours, self._asked.recover_s, blocked_s, self._settings.recovery.policy)

    def _price(self) -> RankPrice:
        """Price of a rank-second in USD, where the settings have the cost of a slot."""
        from fleet.planning.scale import RankPrice

        found, first = tariff(asdict(self._settings.cost)), self._seen[0]
        usd = found.per_s.get("usd") if found is not None else None
        return RankPrice(1.0 if usd is None else usd, "rank-s" if usd is None else "USD", first.per_step, first.goods)

    def _for_a_plan(self, law: Fit) -> dict[str, Any]:
        """Figures for ``fleet plan --measured``. The share of the exchange that computing hides is not measured."""
        largest = max(self._asked.worlds)
        coefficients, flops = law.coefficients(), self._seen[0].flops
        alone_s, spread_s = coefficients["compute"].value, coefficients["wait"].value
        efficiency = None
        if flops and self._settings.cost.device and alone_s > 0:
            from fleet.laws.hardware import accelerator

            efficiency = flops / (alone_s * accelerator(self._settings.cost.device).peak_flop_per_s)
        of_rank_s = law.term_s("compute", largest)
        return {"kernel_efficiency": efficiency, "overlap": None, "spread": spread_s / of_rank_s if of_rank_s > 0 else 0.0}


def seen_in(world: int, run: str, seconds: float, records: Sequence[Record]) -> Seen:
    """Figures of a visit's ``seconds`` from the first step on. Raises RunFailed: it has too few steps, or a rank was lost."""
    from fleet.laws.scale_fit import Visit

    terms, ledger = StepTerms(), Ledger()
    for record in records:
        terms.add(record)
        ledger.apply(record)
    summary, steps = ledger.summary(), [row for row in terms.rows() if row.ranks == world]
    rows = settled([row for row in steps if row.end_s <= steps[0].end_s + seconds])  # later ones belong to the end of the run
    if summary.in_view_losses:
        raise RunFailed(f"the run with {world} rank(s), {run}, has lost a rank while it was measured: measure again")
    if len(rows) < LEAST_STEPS:
        reason = f"the run with {world} rank(s), {run}, has {len(rows)} steps beside its first ones, and {LEAST_STEPS} are needed"
        raise RunFailed(f"{reason}: give it more --seconds, or more steps (--steps) where the script has few")
    per_step, goods = _goods(summary.tokens_per_step, records)
    flops = summary.measurements.get(FLOPS, (0, 0.0))[1]
    return Seen(Visit(world, means(rows)), run, len(rows), per_step, goods, flops, summary.checkpoint_blocked_s)


def _goods(tokens: float | None, records: Sequence[Record]) -> tuple[float, str]:
    """The yield of a step, and its unit: tokens, where the script gives their number; else samples; else the step itself."""
    samples = next((record.batch_size for record in records if isinstance(record, DataRead)), 0)
    if tokens:
        return tokens, "tokens"
    return (float(samples), "samples") if samples else (1.0, "steps")


class _Watch:
    """Follows a run's journal. It gives each rank its part of the cores, and ends the run after ``seconds`` of training."""

    def __init__(self, journal: Path, quotas: Quotas | None, seconds: float, stop: Callable[[str], None], clock: Clock) -> None:
        self._tail, self._quotas, self._seconds, self._stop, self._clock = JournalTail(journal), quotas, seconds, stop, clock
        self._since_s: float | None = None
        self._pids: list[int] = []
        self._over = threading.Event()
        self.interrupted, self.error = False, ""

    def beside(self, execute: Callable[[], Any]) -> Any:
        """Watch while ``execute`` runs."""
        thread = threading.Thread(target=self._watch, name="fleet-scale", daemon=True)
        thread.start()
        try:
            return execute()
        finally:
            self._over.set()
            thread.join()
            if self._quotas is not None:
                self._quotas.close()

    def interrupt(self, reason: str) -> None:
        """End the run, as its user wants."""
        self.interrupted = True
        self._stop(reason)

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            try:
                for record in self._tail.poll():
                    self._see(record)
            except Exception as error:  # noqa: BLE001 - after any error, nothing is measured any more
                self.error = f"{type(error).__name__}: {error}"
            if self.error or (self._since_s is not None and self._clock.now_s() >= self._since_s + self._seconds):
                if self._quotas is not None:
                    self._quotas.close()  # the rest of the run is not measured, and short
                self._stop("fleet experiment scale has seen enough")
                return

    def _see(self, record: Record) -> None:
        match record:
            case ProcessUp(process=process):
                self._pids.append(process.pid)
            case ViewPublished():
                self._hold()
            case Committed() if self._since_s is None:
                self._since_s = self._clock.now_s()

    def _hold(self) -> None:
        """Give ranks their part from their first view on: before, they import and build, which is no part of a step."""
        while self._quotas is not None and self._pids:
            with suppress(ProcessLookupError):  # it has ended, which the run will tell
                self._quotas.hold(self._pids.pop())
