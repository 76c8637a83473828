"""``fleet simulate`` and ``fleet experiment compare``: losses of a fleet, and of two policies. Heavy imports wait until then."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleet.app.cli import prints as cli_print
from fleet.app.cli.config import RUNS, option_of
from fleet.app.cli.json_out import Json, write_json
from fleet.ledger.report import finite
from fleet.protocol.exit_codes import Exit

if TYPE_CHECKING:
    from fleet.app.cli.prints import Terminal
    from fleet.app.scenarios import Prepared, Scenario
    from fleet.simulation.fleet_model import FleetOutcome, Partial

PLAN, SCENARIO = "fleet.planning.inputs:PlanInput", "fleet.app.scenarios:Scenario"
SLOW_S = 5.0
TIMED_FROM_FAULTS, PILOT_SHARE = 1e6, 0.01
"""Faults of all runs from which on they may take that long: a million of them take some seconds."""
VECTORISED_FROM = 50
"""Runs from which on they are made side by side, if the scenario allows it."""

Gpus = Annotated[int, option_of(PLAN, "gpus", "GPUs that train.")]
Days = Annotated[float, option_of(SCENARIO, "days", "Length of the run.")]
Model = Annotated[str, option_of(PLAN, "model", "Model, for the size of its state and the length of a step.")]
SetPlan = Annotated[list[str] | None, typer.Option("--set", help="field=value, any field of fleet plan; repeatable.")]
Mttf = Annotated[float, option_of(SCENARIO, "mttf_hours", "Mean GPU-hours between faults, of all causes; 0: the fault catalogue's.")]
Interval = Annotated[str, option_of(SCENARIO, "interval", "Checkpoint policy: exact, daly, young, or seconds.")]
Trace = Annotated[Path | None, typer.Option(help="Faults from this trace, a CSV file: what happened once, with its times and nodes.")]
FaultsFile = Annotated[
    Path | None, typer.Option("--faults", help="Rates of a log of yours, from fleet experiment fit, not the catalogue's.")
]


def simulate(
    gpus: Gpus,
    days: Days,
    model: Model,
    recovery: Annotated[str, option_of(PLAN, "recovery", "in-place, or restart of all ranks.")],
    interval: Interval,
    mttf_hours: Mttf,
    spares: Annotated[int, option_of(PLAN, "spares", "Spare nodes; -1: as many as a risk of 1% asks for.")],
    rack_mttf_hours: Annotated[float, option_of(SCENARIO, "rack_mttf_hours", "MTTF of a rack of 64 GPUs; 0: racks do not fail as such.")],
    notice_s: Annotated[float, option_of(SCENARIO, "notice_s", "From a silent corruption until it is noticed.")],
    lemon_factor: Annotated[float, option_of(SCENARIO, "lemon_factor", "How many times as often 1.2% of the nodes fail; 1: none do.")],
    crews: Annotated[int, option_of(SCENARIO, "crews", "Repairs at a time; 0: any number.")],
    stragglers: Annotated[bool, option_of(SCENARIO, "stragglers", "Whether nodes and networks are slow at times.")],
    runs: Annotated[int, typer.Option(help="Runs; from 50 on side by side, where the scenario allows it.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the first run.")] = 0,
    faults: FaultsFile = None,
    trace: Trace = None,
    save_trace: Annotated[Path | None, typer.Option(help="Write the first run's faults to this CSV file.")] = None,
    set_: SetPlan = None,
    json_: Json = "",
) -> None:
    """Run a fleet of any size for weeks in milliseconds: what strikes it, and what that costs."""
    from fleet.app.scenarios import prepare

    scenario = _scenario(
        gpus, model, recovery, spares, set_, days=days, mttf_hours=mttf_hours, interval=interval, rack_mttf_hours=rack_mttf_hours,
        notice_s=notice_s, lemon_factor=lemon_factor, crews=crews, stragglers=stragglers, faults=faults,
    )  # fmt: skip
    prepared = prepare(scenario)
    if save_trace is not None:
        from fleet.simulation.fleet_arrivals import write_trace

        write_trace(prepared.model, prepared.injected(prepared.arrivals(seed, trace)), save_trace)
    with _interruptible() as partial:
        answer = _answer(prepared, scenario, runs, seed, trace, partial)
    write_json(answer, json_)
    if json_ != "-":
        _show(answer)
    if not answer["complete"]:
        raise typer.Exit(Exit.STOPPED)


def compare(
    *,
    policies: Annotated[
        list[str] | None,
        typer.Argument(help="Two or more of in-place, restart, each with :INTERVAL if wanted, e.g. restart:daly; or runs, side by side."),
    ] = None,
    recorded: Annotated[
        list[str] | None, typer.Option(help="FIRST,SECOND: two recorded runs on the same faults; repeatable, instead of policies.")
    ] = None,
    training: Annotated[bool, typer.Option("--training", help="With --recorded: goodput while runs train, start-up apart.")] = False,
    gpus: Gpus,
    days: Days,
    model: Model,
    mttf_hours: Mttf,
    pairs: Annotated[int, typer.Option(help="Stop after so many traces if it is not decided before.")] = 1000,
    alpha: Annotated[float, typer.Option(help="Probability of deciding wrongly, about any of the policies.")] = 0.05,
    least: Annotated[float, typer.Option(help="A smaller difference in goodput is none.")] = 0.005,
    seed: Annotated[int, typer.Option(help="Of the first trace.")] = 0,
    set_: SetPlan = None,
    storage: Annotated[str, typer.Option(help="Folder that holds recorded runs.")] = RUNS,
    json_: Json = "",
) -> None:
    """Which policy loses less on the same faults: the difference, with an interval that may be watched, until it is decided."""
    from fleet.app import comparisons
    from fleet.errors import ConfigError

    if training and not recorded:
        raise ConfigError("--training", "given", "it is for pairs of recorded runs", "Add --recorded FIRST,SECOND.")
    if not recorded and (folders := comparisons.runs_named(policies or [], Path(storage))):
        _beside_each_other(folders, json_)
        return
    with _interruptible() as partial:
        if recorded:
            found = {"second": comparisons.of_recorded(recorded, Path(storage), alpha, least, training)}
            names, each = ["first", "second"], alpha
        else:
            names = comparisons.check_policies(policies or [])
            each = alpha / len(names[1:])  # so that all verdicts are right together with 1 - alpha (Bonferroni)
            found = {}
            for other in names[1:]:
                if partial.stop:
                    break
                made = [
                    _scenario(gpus, model, comparisons.recovery_of(name), -1, set_, days=days, mttf_hours=mttf_hours,
                              interval=comparisons.interval_of(name)) for name in (names[0], other)
                ]  # fmt: skip
                found[other] = comparisons.of_simulated(made[0], made[1], pairs, seed, each, least, _Pairs(pairs).report, partial)
    complete = bool(recorded) or comparisons.complete(found, names[1:], pairs)
    answer = {
        "first": names[0], "against": {name: asdict(verdict) for name, verdict in found.items()}, "alpha": alpha, "alpha_each": each,
        "least": least, "complete": complete,
    }  # fmt: skip
    write_json(finite(answer), json_)
    if json_ != "-":
        for name, verdict in found.items():
            print(comparisons.sentence(names[0], name, verdict, each))
    if not complete:
        _terminal().print("interrupted: what was compared is kept")
        raise typer.Exit(Exit.STOPPED)


def _beside_each_other(folders: Sequence[Path], json_: str) -> None:
    """Recorded runs in one table."""
    from fleet.app import side_by_side
    from fleet.app.cli.diagnose import load_report
    from fleet.app.plans import recorded

    runs = [load_report(folder)[0].to_dict() for folder in folders]
    kinds = [side_by_side.kind_of_run(recorded(folder)[1]) for folder in folders]
    same = side_by_side.same_faults(runs)
    write_json({"runs": [run | {"script": kind} for run, kind in zip(runs, kinds, strict=True)], "faults": same}, json_)
    if json_ != "-":
        head, *rows = side_by_side.table(runs, kinds)
        cli_print.write(*cli_print.table(head, rows), same)


def _scenario(
    gpus: int, model: str, recovery: str, spares: int, set_: list[str] | None, *, faults: Path | None = None, **rest: Any
) -> Scenario:
    from fleet.app.scenarios import RATES, Scenario, repaired_with
    from fleet.errors import ConfigError
    from fleet.planning.inputs import PlanInput, parse_pairs
    from fleet.planning.traces.faults import load_faults

    named: dict[str, Any] = {"gpus": gpus, "model": model, "recovery": recovery, "spares": spares}
    given = parse_pairs(set_ or [])
    for name in RATES:
        if name in given:
            reason = "it would hold for the closed form alone, and not for the faults that are simulated"
            raise ConfigError(f"--set {name}", given[name], reason, "Use --mttf-hours or --faults.")
    plan, seen = PlanInput(**(named | given)), load_faults(faults) if faults is not None else None
    plan = plan if seen is None else repaired_with(plan, seen, given)
    return Scenario(plan=plan, faults=seen, **rest)


@contextmanager
def _interruptible() -> Iterator[Partial]:
    """The first Ctrl-C ends the work at the next fault and keeps what there is; the second ends it at once."""
    from fleet.simulation.fleet_model import Partial

    partial = Partial()

    def stop(number: int, frame: FrameType | None) -> None:
        partial.stop = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield partial
    finally:
        signal.signal(signal.SIGINT, before)


# ---- the answer --------------------------------------------------------------------------------------------------------------------------


def _answer(prepared: Prepared, scenario: Scenario, runs: int, seed: int, trace: Path | None, partial: Partial) -> dict[str, Any]:
    """Plain data: shares with their intervals, counts, and the closed form beside them."""
    from fleet.errors import ConfigError

    if runs < 1:
        raise ConfigError("runs", runs, "must be at least 1", "The nearest valid value is 1.")
    if trace is not None and runs > 1:
        raise ConfigError("runs", runs, "a trace has happened once", "Leave out --runs, or --trace.")
    model = prepared.model
    side_by_side = runs >= VECTORISED_FROM and not (scenario.notice_s or scenario.crews or scenario.lemons > 1)
    found = _vectorised(prepared, runs, seed, partial) if side_by_side else _events(prepared, runs, seed, trace, partial)
    return {
        "gpus": scenario.plan.gpus, "nodes": model.nodes, "spares": model.spares, "days": scenario.days, "recovery": scenario.plan.recovery,
        "expected_goodput": prepared.plan.faults.goodput, "expected_faults": model.rate_per_s * model.duration_s,
        "method": "vectorised" if side_by_side else "events", "seed": seed, **found,
    }  # fmt: skip


def _events(prepared: Prepared, runs: int, seed: int, trace: Path | None, partial: Partial) -> dict[str, Any]:
    from fleet.app.scenarios import summed_up

    if trace is None:
        _forewarn(prepared, runs, 1, lambda short: short.run(short.arrivals(seed)))
    outcomes: list[FleetOutcome] = []
    progress = _Progress(runs)
    for number in range(runs):
        if partial.stop and outcomes:
            break
        outcomes.append(prepared.run(prepared.arrivals(seed + number, trace), partial))
        progress.report(number + 1)
    return summed_up(outcomes, runs, prepared.model.duration_s)


def _vectorised(prepared: Prepared, runs: int, seed: int, partial: Partial) -> dict[str, Any]:
    from fleet.simulation.monte_carlo import BATCH, monte_carlo

    together = min(runs, BATCH)
    _forewarn(prepared, runs, together, lambda it: monte_carlo(it.model, it.recovery, it.intervals, runs=together, seed=seed))
    progress = _Progress(runs)

    def goes_on(done: int) -> bool:
        progress.report(done)
        return not partial.stop

    sample = monte_carlo(prepared.model, prepared.recovery, prepared.intervals, runs=runs, seed=seed, progress=goes_on)
    shares = {name: sample.interval(name) for name in sample.shares}
    return {
        "runs": len(sample.faults), "complete": len(sample.faults) == runs, "faults": float(sample.faults.mean()),
        "shares": {name: {"mean": mean, "halfwidth": half} for name, (mean, half) in shares.items()},
    }  # fmt: skip


def _forewarn(prepared: Prepared, runs: int, together: int, run: Callable[[Prepared], object]) -> None:
    """A hundredth of the duration is run first, for as many as go on ``together``, where all ``runs`` may take long."""
    model = prepared.model
    if runs * model.rate_per_s * model.duration_s < TIMED_FROM_FAULTS:
        return
    began_s = time.perf_counter()
    run(replace(prepared, model=replace(model, duration_s=PILOT_SHARE * model.duration_s)))
    whole_s = (time.perf_counter() - began_s) / PILOT_SHARE * runs / together
    if whole_s > SLOW_S:
        _terminal().print(f"{runs} run{'s' if runs > 1 else ''} will take about {whole_s:.0f} s; Ctrl-C keeps what there is")


class _Progress:
    """How long it will take, once that is known and worth saying, and then every tenth of the way."""

    def __init__(self, total: int) -> None:
        self._total, self._began_s, self._reported = total, time.perf_counter(), 0

    def report(self, done: int) -> None:
        left_s = (time.perf_counter() - self._began_s) / done * (self._total - done)
        tenth = 10 * done // self._total
        if left_s > SLOW_S and (self._reported == 0 or tenth > self._reported):
            self._reported = max(1, tenth)
            _terminal().print(f"{done} of {self._total} runs, about {left_s:.0f} s left; Ctrl-C keeps what there is")


class _Pairs:
    """How far a comparison is. It stops as soon as it is decided; its length is not known before."""

    def __init__(self, most: int) -> None:
        self._most, self._reported_s = most, time.perf_counter()

    def report(self, done: int) -> None:
        now_s = time.perf_counter()
        if now_s - self._reported_s > SLOW_S:
            self._reported_s = now_s
            pairs = f"{done} pair{'s' if done > 1 else ''}"
            _terminal().print(f"not decided yet after {pairs}; it goes on to at most {self._most}; Ctrl-C keeps what there is")


def _terminal() -> Terminal:
    from fleet.app.cli.prints import Terminal

    return Terminal(stderr=True)


# ---- tables ------------------------------------------------------------------------------------------------------------------------------


def _show(answer: dict[str, Any]) -> None:
    if not answer["complete"]:
        to_day = f", to day {answer['days_done']:.1f}" if "days_done" in answer else ""
        cli_print.write(f"interrupted: {answer['runs']} runs{to_day}")
    cli_print.write(f"{answer['nodes']:,} nodes and {answer['spares']} spares for {answer['days']:g} days, recovery {answer['recovery']}")
    rows = [
        (name.replace("_", " "), f"{share['mean']:.3%}", "" if share["halfwidth"] is None else f"{share['halfwidth']:.3%}")
        for name, share in answer["shares"].items()
    ]
    cli_print.write("", *cli_print.table(("share of the wall clock x nodes", "simulated", "+-"), rows), "")
    cli_print.write(f"faults     {answer['faults']:,.1f} a run, {answer['expected_faults']:,.1f} expected")
    counts = sorted(answer.get("counts", {}).items(), key=lambda item: -item[1])
    cli_print.write(*(f"           {count:8,.1f} {name}" for name, count in counts))
    cli_print.write(f"predicted  goodput {answer['expected_goodput']:.2%} by the closed form of fleet plan, which knows no stragglers")
    if "events" in answer:
        cli_print.write(f"{answer['events']:,.0f} events a run; the policies were asked {answer['asked']:,.0f} times")
