"""``fleet run``: what it is told, the run, and what is told of it."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from fleet.app.exit_codes import Exit
from fleet.cli import config as cli_config
from fleet.cli import diagnose as cli_diagnose
from fleet.cli import prints as cli_print
from fleet.cli import watch as cli_watch
from fleet.cli.config import RUNS, option
from fleet.cluster.clock import unix_time_s
from fleet.errors import ConfigError
from fleet.protocol.records import COMPLETED, UNSAVED

if TYPE_CHECKING:
    from fleet.app.configuration import Configuration
    from fleet.app.expects import Expectation
    from fleet.app.plans import RunPlan, RunResult
    from fleet.app.recipes import LiveRun
    from fleet.app.report import Report
    from fleet.cli.watch import Watch
    from fleet.settings.run import RunSettings

console = cli_print.Terminal(stderr=True)
CHECKPOINT = "Interval policy: exact, daly, young, seconds, or package.module:Class."


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="Python file with a function train(run).")] = "",
    world: Annotated[int | None, option("world")] = None,
    spares: Annotated[int | None, option("spares")] = None,
    nodes: Annotated[int | None, option("nodes")] = None,
    shards: Annotated[int | None, option("shards")] = None,
    min_ranks: Annotated[int | None, option("min_ranks")] = None,
    steps: Annotated[int | None, option("steps")] = None,
    peer_copies: Annotated[int | None, option("peer_copies")] = None,
    seed: Annotated[int | None, option("seed")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value for run.options; repeatable.")] = None,
    config: Annotated[list[str] | None, typer.Option(help="File of settings, or key=value; repeatable. See fleet config.")] = None,
    chaos: Annotated[str | None, typer.Option(help="off, storm, or e.g. mtbf=15s,kinds=kill_rank+hang.", show_default="off")] = None,
    reduction: Annotated[str | None, option("reduction")] = None,
    optimizer_sharding: Annotated[str | None, option("optimizer_sharding")] = None,
    verify: Annotated[float | None, option("verify.compute")] = None,
    preflight: Annotated[bool | None, option("preflight", "--preflight")] = None,
    checkpoint: Annotated[str | None, option("checkpoint.policy", "--checkpoint", "--interval", words=CHECKPOINT)] = None,
    on_store_failure: Annotated[str | None, option("checkpoint.on_store_failure")] = None,
    recovery: Annotated[str | None, option("recovery.policy")] = None,
    straggler: Annotated[str | None, option("straggler.policy")] = None,
    placement: Annotated[str | None, option("placement.policy")] = None,
    corruption: Annotated[str | None, option("corruption.policy")] = None,
    timeout: Annotated[list[str] | None, typer.Option(help="name=seconds, e.g. progress_s=30; repeatable. A wrong one lists all.")] = None,
    storage: Annotated[str | None, option("storage", "--storage", "--store")] = None,
    twin: Annotated[bool, typer.Option("--twin", help="Run again without faults, and compare the final bits.")] = False,
    twin_world: Annotated[int, typer.Option(help="World size of the twin; 0: the same.")] = 0,
    name: Annotated[str, typer.Option(help="Name of the run; empty: the script's, with the time.")] = "",
    resume: Annotated[str, typer.Option(help="Go on with this run from its newest durable checkpoint.")] = "",
    repeat: Annotated[str, typer.Option(help="Run this run once more, as its journal has it: settings, seed, chaos.")] = "",
    changed_code: Annotated[bool, typer.Option("--changed-code", help="With --repeat: although the code is another now.")] = False,
    json_: Annotated[str, typer.Option("--json", help="Write the report as JSON to this file; - for stdout.")] = "",
    html: Annotated[str, typer.Option(help="Write the report as one HTML page.")] = "",
    port: Annotated[int, typer.Option(help="Serve the live page and /metrics on this port; 0: a free one.")] = 0,
    expect: Annotated[list[str] | None, typer.Option(help="e.g. goodput>0.9, faults>=3, twin; repeatable. Else exit code 4.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show views and healed faults too, and the whole report at the end.")] = False,
) -> None:
    """Train SCRIPT on a local cluster, through whatever happens to its ranks."""
    from fleet.app import expects, scripts

    scripts.check_not_shadowed()
    found = cli_config.settings_of(context.params, Path())
    settings, given_steps = found.run, steps or 0
    root = Path(RUNS if "://" in settings.storage else settings.storage).resolve()
    expected = expects.parse_all(expect or [], twin)
    if resume and _has_ended(resume, script, settings.storage, root, given_steps):
        raise typer.Exit(0)
    if changed_code and not repeat:
        raise ConfigError("--changed-code", "given", "it is about a run that is repeated", "Use it with --repeat RUN.")
    plan = _repeated(repeat, script, root, changed_code) if repeat and not resume else _plan(script, found, name, resume, root, given_steps)
    if twin_world:
        dataclasses.replace(settings, world=twin_world, spares=0)  # refused now, not after the run
    raise typer.Exit(_execute(plan, twin, twin_world, Show(json_, html, port, verbose), expected))


def checked(script: str, arguments: Sequence[str], directory: Path) -> tuple[RunSettings, set[str], dict[str, Any]]:
    """(what ``fleet run SCRIPT ARGUMENTS`` in ``directory`` would train with, the options that were given, the values of all).

    Raises ConfigError as the command would, but for policies of the user's own: no code of theirs runs here.
    """
    from fleet.app import expects, plans

    alone = typer.Typer(add_completion=False)
    register(alone)
    command = typer.main.get_command(alone)
    try:
        context = command.make_context("run", [script, *arguments])
    except typer.Exit:
        raise ConfigError("arguments", " ".join(arguments)[:200], "ask for help, and for no run") from None
    except typer.exceptions.TyperException as error:
        reason = getattr(error, "message", str(error))
        raise ConfigError("arguments", " ".join(arguments)[:200], reason, "See fleet run --help.") from None
    given = {name for name in context.params if str(context.get_parameter_source(name)).endswith("COMMANDLINE")}
    found, values = cli_config.settings_of(context.params, directory), context.params
    plans.check(found.run, found.chaos)
    expects.parse_all(values["expect"] or [], values["twin"])
    return found.run, given, values


def _plan(script: str, found: Configuration, name: str, resume: str, root: Path, steps: int) -> RunPlan:
    from fleet.app import plans, scripts
    from fleet.cluster.queue import SUBMITTED

    settings = found.run
    plans.check(settings, found.chaos)
    if resume:
        folder = plans.find_run(resume, root)
        if plans.is_completed(folder):
            return plans.continued_plan(folder, script, name, steps, settings.storage)
        if steps:
            reason = f"run {resume} has not come to its end: it is resumed with the number of steps that it began with"
            raise ConfigError("--steps", steps, reason, "Resume it without --steps; go on beyond its end afterwards.")
        return plans.resumed_plan(folder, script, settings.storage)
    if not script:
        raise ConfigError("SCRIPT", script, "missing", "Name a Python file with a function train(run), or use --resume RUN.")
    name = plans.checked_name(name, root) if name else plans.new_name(script)
    train, now_s = scripts.load_train(script), unix_time_s()
    return plans.RunPlan(
        name=name, folder=root / name, settings=settings, train=train, script=script, chaos=found.chaos, lemons=found.lemons,
        queued_s=max(0.0, now_s - float(os.environ.get(SUBMITTED, now_s))),
    )  # fmt: skip


def _has_ended(run: str, script: str, storage: str, root: Path, steps: int) -> bool:
    """Whether there is nothing to resume, which is said then. A journal that lies in the run's store alone is fetched first."""
    from fleet.app import plans

    if "://" in storage:
        from storage.mirror import fetch_journal

        fetch_journal(f"{storage.rstrip('/')}/{run}", root / run / "journal.jsonl")
    folder = plans.find_run(run, root)
    if steps or not plans.is_completed(folder):
        return False
    again = shlex.join(["fleet", "run", *([script] if script else []), "--resume", run])
    console.print(f"{folder.name} is completed: all its steps are committed, and its last state is kept.", highlight=False, soft_wrap=True)
    console.print(f"To go on beyond its end, as a new run: {again} --steps N", markup=False, highlight=False, soft_wrap=True)
    return True


def _repeated(run: str, script: str, root: Path, changed_code: bool) -> RunPlan:
    """The plan of ``run`` once more. What has changed since is told; other code is refused unless the user has said so."""
    from fleet.app import plans

    folder = plans.find_run(run, root)
    changes = plans.changed_since(folder, script)
    if not changed_code:
        plans.check_same_code(folder, changes)
    for change in (*changes.code, *changes.around):
        console.print(f"not as in {folder.name}: {change}", style="yellow", markup=False)
    return plans.repeated_plan(folder, script, root)


@dataclasses.dataclass(frozen=True, slots=True)
class Show:
    """Where the report goes, and how much of it is shown; see the options of ``fleet run``."""

    json: str
    html: str
    port: int
    verbose: bool


def _execute(plan: RunPlan, twin: bool, twin_world: int, show: Show, expected: Sequence[Expectation]) -> int:
    from fleet.app import expects, plans, policy_choice, recipes
    from fleet.ledger import checkers
    from storage.trial import Trial, check_folder

    root = plan.folder.parent
    policy_choice.look_in(Path(plan.script).resolve().parent, Path.cwd())
    policy_choice.check(plan.settings)
    check_folder(plan.folder if plan.resume else root)
    tried = Trial(plans.store_url(plan)) if "://" in plan.settings.storage else None  # beside the cluster's start
    with cli_watch.serving(root, "127.0.0.1", show.port) as server, recipes.local_cluster(plan.settings, plan.script) as cluster:
        if tried is not None:
            tried.check("this machine")
        result = _one_run(recipes.LiveRun(plan, cluster), server, show.verbose)
        verdict = None
        if twin and result.status in (COMPLETED, UNSAVED):
            other = plans.twin_of(plan, twin_world or None)
            verdict = plans.compare(plan, other, _one_run(recipes.LiveRun(other, cluster), None, show.verbose))
    report, damage = cli_diagnose.load_report(plan.folder)
    data = report_data(report, damage, verdict)
    if show.json != "-":
        _sum_up(data, plan, report, show.verbose)
    emit(data, report, show.json, show.html)
    unmet = expects.unmet(expected, data)
    for line in unmet:
        console.print(line, style="red", markup=False)
    return _exit_code(result, verdict) or (Exit.VIOLATED if checkers.violated(data["checks"]) else Exit.UNMET if unmet else Exit.DONE)


def _one_run(live: LiveRun, server: Watch | None, verbose: bool) -> RunResult:
    """Train; with a ``server``, its page shows the run, and takes orders for its chaos."""
    from fleet.app.follow import Follower
    from fleet.app.progress import LiveView
    from fleet.app.rank_logs import RunLogs, logs_of

    plan, follower = live.plan, Follower(live.plan.journal)
    console.print(Text.assemble((plan.name, "bold"), f"  journal {plan.journal}"))
    if server is not None:
        server.show(plan.name, follower, live.controls)
        console.print(Text.assemble("watch it at ", (server.link(plan.name), "bold")))
    logs = RunLogs(logs_of(plan.folder), from_start=not plan.resume)
    with LiveView(follower, console, time.monotonic, logs, _first_fault_s(plan), verbose), _stopped_by_signals(live):
        result = live.execute()
    if server is not None:
        server.release(plan.name)
    if result.status == "failed":
        if result.detail:
            console.print(result.detail, markup=False)
        console.print(Text.assemble(("failed: ", "red bold"), result.reason))
    return result


def _first_fault_s(plan: RunPlan) -> float | None:
    """When chaos strikes first, in seconds of training; None: never."""
    faults = plan.chaos.plan(seed=plan.settings.seed, world=plan.settings.slots, nodes=plan.settings.nodes)
    return min((fault.at_s for fault in faults), default=None)


@contextmanager
def _stopped_by_signals(live: LiveRun) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends the run in order; the second one at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, before[each])
        console.print(f"{signal.Signals(number).name}: stopping in order; once more to stop at once")
        threading.Thread(target=live.stop, args=(signal.Signals(number).name,), daemon=True).start()

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _exit_code(result: RunResult, verdict: dict[str, Any] | None) -> int:
    if result.status == "failed" or (verdict is not None and not verdict["equal"]):
        return Exit.FAILED
    return {COMPLETED: Exit.DONE, UNSAVED: Exit.NOT_SAVED}.get(result.status, Exit.STOPPED)


def report_data(report: Report, damage: str, twin: dict[str, Any] | None) -> dict[str, Any]:
    """The report as plain data, with what was damaged in the journal, and the comparison with the twin."""
    from fleet.ledger import checkers

    data = report.to_dict() | {"damage": damage}
    return data | {"twin": twin, "checks": checkers.with_twin(data["checks"], twin["equal"])} if twin is not None else data


def emit(data: dict[str, Any], report: Report, json_: str, html: str) -> None:
    """The report to where it was asked for."""
    if json_ == "-":
        cli_print.write(json.dumps(data, indent=2))
    elif json_:
        Path(json_).write_text(json.dumps(data, indent=2) + "\n")
    if html:
        from dashboards.page import render_html

        Path(html).write_text(render_html(report))


def tell(report: Report) -> None:
    """The report to the terminal."""
    from fleet.app.report import render_table

    cli_print.write(render_table(report, colour=sys.stdout.isatty()).rstrip("\n"))


def _sum_up(data: dict[str, Any], plan: RunPlan, report: Report, verbose: bool) -> None:
    """The last lines: what training came to, what it cost, and what to do next."""
    from fleet.app import ending, plans
    from fleet.app.live_line import hung
    from storage.urls import redact

    if verbose:
        tell(report)
    views = report.history["views"]
    trained_s = report.summary.now_s - views[0]["at_s"] if views else None
    elsewhere = str(plan.folder.parent) if plan.folder.parent != Path(RUNS).resolve() else ""
    context = ending.Context(plan.name, redact(plans.store_url(plan)), _first_fault_s(plan), elsewhere)
    out = cli_print.Terminal()
    width = out.width if out.is_terminal else None
    for head, words in ending.ending(data | {"trained_s": trained_s}, context):
        line = Text(hung(f"{head:8} {words}", width, 9))
        line.stylize("bold", 0, len(head))
        out.print(line)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(run)
