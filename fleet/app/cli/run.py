"""``fleet run``: its options, the run, and its report."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from rich.text import Text

from fleet.app.cli import config as cli_config
from fleet.app.cli import diagnose as cli_diagnose
from fleet.app.cli import plain as cli_plain
from fleet.app.cli import prints as cli_print
from fleet.app.cli import watch as cli_watch
from fleet.app.cli.config import AGAIN, FAULTS, RARE, RUNS, SCRIPT, SHOWN, SIZE, WHERE, option, placed
from fleet.app.cli.json_out import write_json
from fleet.errors import ConfigError, RunFailed
from fleet.host.clock import unix_time_s
from fleet.protocol.causes import EndWhy
from fleet.protocol.exit_codes import Exit
from fleet.protocol.records import COMPLETED, STOPPED, UNSAVED

if TYPE_CHECKING:
    from fleet.app.beginning import Beginning
    from fleet.app.cli.watch import PageServer
    from fleet.app.configuration import Configuration
    from fleet.app.expects import Expectation
    from fleet.app.first_steps import Wait
    from fleet.app.plans import Executed, RunPlan, RunResult
    from fleet.app.report import Report
    from fleet.settings.run import RunSettings


class Visible(Protocol):
    """A run that goes on, and that this process may only look at: ``fleet.app.remote.Attached``. ``execute`` returns at its end."""

    plan: RunPlan

    @property
    def controls(self) -> Any: ...

    def execute(self) -> RunResult: ...


class Launch(Visible, Protocol):
    """A run that is begun: ``LiveRun`` on a local cluster, ``Launched`` on one that was there, ``PlainRun`` of a script not of Fleet."""

    def stop(self, reason: str) -> None: ...


console = cli_print.Terminal(stderr=True)
TRIED = "two steps of the script are tried on this machine, before ranks start"
NOTHING_TYPED = (
    "fleet run train.py --world 4     trains your script, which has a function train(run); fleet init writes one",
    "fleet run --plain train.py       runs your script for torchrun as it is, and shows its losses",
    "fleet run --resume RUN           goes on with a run that was stopped; fleet run --help has the options",
)
CHECKPOINT = "Interval policy: exact, daly, young, seconds, or package.module:Class."


def _show_all(context: typer.Context, wanted: bool) -> None:
    if wanted:
        for parameter in context.command.params:
            vars(parameter)["hidden"] = False
        typer.echo(context.get_help())
        raise typer.Exit


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="Python file with a function train(run); with --plain any script that uses DDP.")] = "",
    arguments: Annotated[list[str] | None, typer.Argument(help="After --: what SCRIPT finds in sys.argv.", show_default=False)] = None,
    set_: Annotated[list[str] | None, placed(SCRIPT, "--set", help="key=value for run.options; repeatable.")] = None,
    steps: Annotated[int | None, option("steps", section=SCRIPT)] = None,
    config: Annotated[
        list[str] | None, placed(SCRIPT, help="File of settings, or key=value; repeatable. fleet init fleet.toml writes all.")
    ] = None,
    name: Annotated[str, placed(SCRIPT, help="Name of the run; empty: the script's, with the time.")] = "",
    plain: Annotated[bool, placed(SCRIPT, "--plain", help="SCRIPT is for torchrun: run it so, and see its losses.")] = False,
    world: Annotated[int | None, option("world", section=SIZE)] = None,
    spares: Annotated[int | None, option("spares", section=SIZE)] = None,
    nodes: Annotated[int | None, option("nodes", section=SIZE)] = None,
    shards: Annotated[int | None, option("shards", section=SIZE)] = None,
    gpus_per_rank: Annotated[float | None, option("per_rank.gpus", "--gpus-per-rank", section=SIZE)] = None,
    optimizer_sharding: Annotated[str | None, option("optimizer_sharding", section=SIZE)] = None,
    mesh: Annotated[list[str] | None, option("mesh", words="tensor=2 or stage=2: so many ranks divide a model.", section=SIZE)] = None,
    address: Annotated[str, placed(WHERE, help="Join a Ray cluster: auto, or HOST:PORT; empty: start a local one.")] = "",
    detach: Annotated[bool, placed(WHERE, "--detach", help="With --address: begin the run and leave it to the cluster.")] = False,
    storage: Annotated[str | None, option("storage", section=WHERE)] = None,
    chaos: Annotated[str | None, placed(FAULTS, help="off, storm, or e.g. mtbf=15s,kinds=kill_rank+hang.", show_default="off")] = None,
    twin: Annotated[bool, placed(FAULTS, "--twin", help="Run again without faults, and compare the final bits.")] = False,
    expect: Annotated[list[str] | None, placed(FAULTS, help="e.g. goodput>0.9, faults>=3, twin; repeatable. Else exit code 4.")] = None,
    checkpoint: Annotated[str | None, option("checkpoint.policy", "--checkpoint", words=CHECKPOINT, section=AGAIN)] = None,
    resume: Annotated[str, placed(AGAIN, help="Go on with this run from its newest durable checkpoint.")] = "",
    html: Annotated[str, placed(SHOWN, help="Write the report as one HTML page.")] = "",
    json_: Annotated[str, placed(SHOWN, "--json", help="Write the report as JSON to this file; - for stdout.")] = "",
    port: Annotated[int, placed(SHOWN, min=0, max=65_535, help="Serve the live page and /metrics on this port; 0: a free one.")] = 0,
    module: Annotated[bool, placed(RARE, "--module", "-m", help="SCRIPT is the name of a module, as for python -m.")] = False,
    min_ranks: Annotated[int | None, option("min_ranks", section=RARE)] = None,
    seed: Annotated[int | None, option("seed", section=RARE)] = None,
    verify: Annotated[float | None, option("verify.compute", section=RARE)] = None,
    track: Annotated[list[str] | None, placed(RARE, help="tensorboard, mlflow, wandb or otel; repeatable. See docs/tracking.md.")] = None,
    resources: Annotated[list[str] | None, option("per_rank.resources", "--resources", section=RARE)] = None,
    labels: Annotated[list[str] | None, option("per_rank.labels", "--labels", section=RARE)] = None,
    tls: Annotated[str | None, option("tls", section=RARE)] = None,
    copy_to: Annotated[str, placed(RARE, help="With --address: where copies of runs' folders lie; empty: runs.")] = "",
    working_dir: Annotated[str, placed(RARE, help="With --address: the folder that travels to the nodes; empty: the script's.")] = "",
    allow_chaos: Annotated[bool, placed(RARE, "--allow-chaos", help="With --address: faults may strike the run on that cluster.")] = False,
    no_trial: Annotated[bool, placed(RARE, "--no-trial", help="Do not have one process try two steps of SCRIPT first.")] = False,
    twin_world: Annotated[int, placed(RARE, help="World size of the twin; 0: the same.")] = 0,
    from_step: Annotated[int | None, placed(RARE, help="With --resume: go back to the checkpoint of this step.")] = None,
    skip_steps: Annotated[list[str] | None, placed(RARE, metavar="FIRST:END", help="With --from-step: leave out their samples.")] = None,
    resume_or_start: Annotated[str, placed(RARE, help="Go on with this run if there is one, here or in the store; else begin it.")] = "",
    take_over: Annotated[bool, placed(RARE, "--take-over", help="With --resume: take a run that goes on elsewhere.")] = False,
    repeat: Annotated[str, placed(RARE, help="Run this run once more, as its journal has it: settings, seed, chaos.")] = "",
    changed_code: Annotated[bool, placed(RARE, "--changed-code", help="With --repeat: although the code is another now.")] = False,
    help_all: Annotated[bool, typer.Option("--help-all", callback=_show_all, is_eager=True, help="Show all options.")] = False,
) -> None:
    """Train SCRIPT on a local cluster or on one that is there, through the loss of ranks and nodes."""
    if not any(str(context.get_parameter_source(each)).endswith("COMMANDLINE") for each in context.params):
        console.print(*NOTHING_TYPED, sep="\n", markup=False)
        raise typer.Exit(Exit.REFUSED)
    expected, shown = _expected(expect or [], twin and not plain), Show(json_, html, port, address)
    if plain:
        raise typer.Exit(_execute(cli_plain.plan_of(context), True, False, 0, shown, expected, "", ""))
    with cli_print.waiting("the run is planned, with what its journal and its store have of it"):
        plan = _plan_of(context.params)
    if detach:
        raise typer.Exit(_leave_to_the_cluster(plan, no_trial, address, working_dir))
    raise typer.Exit(_execute(plan, no_trial, twin, twin_world, shown, expected, address, working_dir))


def _plan_of(given: dict[str, Any]) -> RunPlan:
    """The run of these options. Raises ConfigError."""
    found, root = _settings(given)
    names = given["resume_or_start"], given["name"], given["resume"], given["repeat"]
    name, resumed, steps = _either(*names, found.run.storage, root, given["steps"] or 0)
    plan = _planned(given, found, name, resumed, root, steps)
    return _checked(plan, given)


@functools.cache
def _alone() -> Any:
    alone = typer.Typer(add_completion=False)
    alone.command()(run)
    return typer.main.get_command(alone)


def _checked(plan: RunPlan, given: dict[str, Any]) -> RunPlan:
    """The plan, unless it would be refused later, also its twin's, or another process holds the run. Raises ConfigError."""
    from fleet.app import holding, plans
    from fleet.app.cluster.gpus import gpus_for

    address, named = given["address"], plan.resume or bool(given["name"] or given["resume_or_start"])
    plans.check_chaos_allowed(address, given["allow_chaos"], plan.chaos.on)
    plans.check_asks(address, plan.settings.ask_for_nodes)
    plans.check_tls(address or None, plan.settings.tls, plan.resume)
    dataclasses.replace(plan.settings, world=given["twin_world"] or plan.settings.world, max_world=0, spares=0)
    if not address:
        gpus_for(plan.settings)
    return holding.looked_at(plan, named, address, given["take_over"], lambda line: console.print(line, style="dim"))


def _expected(texts: Sequence[str], twin: bool) -> list[Expectation]:
    """The expectations of the run. Raises ConfigError, also where a folder hides one of Fleet's packages."""
    from fleet.app import expects
    from fleet.host import packages

    packages.check_not_shadowed()
    return expects.parse_all(texts, twin)


def _settings(given: Mapping[str, Any]) -> tuple[Configuration, Path]:
    """Settings of the options, and the folder of the runs. Raises ConfigError."""
    if given["changed_code"] and not given["repeat"]:
        raise ConfigError("--changed-code", "given", "it is about a run that is repeated", "Use it with --repeat RUN.")
    found = cli_config.settings_of(given, Path())
    return found, _root(found.run.storage, given["address"], given["copy_to"], given["detach"], given["nodes"], given["twin"])


def _root(storage: str, address: str, copy_to: str, detach: bool, nodes: int | None, twin: bool) -> Path:
    """The folder of the runs on this machine. Raises ConfigError for options of a local cluster with one that is joined, and vice versa."""
    check_address(address, detach, nodes, twin)
    if copy_to and not address:
        raise ConfigError("--copy-to", copy_to, "a local run has its folder under --storage", "Use --storage.")
    return Path(copy_to or RUNS if "://" in storage or address else storage).resolve()


def check_address(address: str, detach: bool, nodes: int | None, twin: bool) -> None:
    """Whether these options go together. Raises ConfigError."""
    if detach and not address:
        raise ConfigError(
            "--detach",
            "given",
            "a local cluster ends with this process",
            "Give --address, or use fleet cluster up and fleet cluster submit.",
        )
    if address and nodes is not None:
        raise ConfigError(
            "--nodes", nodes, "it is about a cluster that Fleet starts, and --address names one that is there", "Leave it out."
        )
    if detach and twin:
        raise ConfigError("--twin", "given", "a detached run has no command that waits to compare it", "Run it without --detach.")


def code_folder(plan: RunPlan, working_dir: str) -> Path:
    """The folder that travels with a run. Raises ConfigError when it is none."""
    from actors.rank.script_loading import folder_of

    folder = Path(working_dir or folder_of(plan.train, plan.script)).resolve()
    if not folder.is_dir():
        raise ConfigError("--working-dir", working_dir, "is no folder", "Name the folder of the code that the script needs.")
    return folder


def _tried_first(plan: RunPlan, no_trial: bool, address: str) -> AbstractContextManager[Wait]:
    """The trial of the plan's script, see :func:`fleet.app.first_steps.tried_first`; of a script that is not Fleet's there is none."""
    from fleet.app import first_steps

    if no_trial or plan.plain is not None:
        return nullcontext(lambda until_s: None)
    return first_steps.tried_first(plan, bool(address), time.monotonic, lambda line: console.print(line, style="dim", highlight=False))


def _leave_to_the_cluster(plan: RunPlan, no_trial: bool, address: str, working_dir: str) -> int:
    from fleet.app import first_steps, remote

    with cli_print.waiting(TRIED), _tried_first(plan, no_trial, address) as wait:
        wait(first_steps.LIMIT_S)
    with cli_print.waiting(f"the cluster at {address} is asked, and code is sent there"), remote.connected(address):
        remote.begin(plan, plan.folder.parent, code_folder(plan, working_dir))
    console.print(Text.assemble((plan.name, "bold"), " goes on without this shell"))
    for what in ("attach", "logs", "stop"):
        console.print(f"fleet {what} {plan.name} --address {address}", highlight=False)
    return Exit.DONE


def checked(script: str, arguments: Sequence[str], directory: Path) -> tuple[RunSettings, set[str], dict[str, Any]]:
    """(settings of ``fleet run SCRIPT ARGUMENTS`` in ``directory``, the options that were given, the values of all).

    Raises ConfigError as the command would, but for policies of the user's own: no code of theirs runs here.
    """
    from fleet.app import expects, plans

    command = _alone()
    try:
        context = command.make_context("run", [script, *arguments])
    except typer.Exit:
        raise ConfigError("arguments", " ".join(arguments)[:200], "ask for help, and for no run") from None
    except typer.exceptions.TyperException as error:
        reason = getattr(error, "message", str(error))
        raise ConfigError("arguments", " ".join(arguments)[:200], reason, "See fleet run --help.") from None
    given = {name for name in context.params if str(context.get_parameter_source(name)).endswith("COMMANDLINE")}
    values = context.params
    found = cli_plain.checked(values, given) if values["plain"] else cli_config.settings_of(values, directory)
    if not values["plain"]:
        plans.check(found.run, found.chaos)
    expects.parse_all(values["expect"] or [], values["twin"])
    return found.run, given, values


def _planned(given: Mapping[str, Any], found: Configuration, name: str, resume: str, root: Path, steps: int) -> RunPlan:
    """The run that the options ask for. Raises ConfigError; typer.Exit when there is nothing to resume."""
    from fleet.app import plans, resuming

    back = _back(given, resume)
    if back is None:
        _leave_if_ended(resume, given["script"], found.run.storage, root, steps)
    asked = plans.Executed(given["script"], tuple(given["arguments"] or ()), given["module"])
    if given["repeat"] and not resume:
        return _repeated(given["repeat"], asked, root, given["changed_code"])
    plan = _plan(asked, found, name, resume, root, steps, goes_back=back is not None)
    return plan if back is None else resuming.going_back(plan, secrets.token_hex(4), *back)


def _back(given: Mapping[str, Any], resume: str) -> tuple[int, Sequence[str]] | None:
    """(the step that a run is to go back to, steps whose samples it is to leave out); None: to none. Raises ConfigError."""
    from_step, skipped = given["from_step"], tuple(given["skip_steps"] or ())
    if from_step is None and skipped:
        way_out = f"Say where it goes back to: --from-step STEP --skip-steps {skipped[0]}."
        raise ConfigError("--skip-steps", skipped[0], "a run leaves samples out from a checkpoint on", way_out)
    if from_step is None:
        return None
    if not resume or given["resume_or_start"]:
        raise ConfigError("--from-step", from_step, "it is about a run that is resumed, by its name", "Use it with --resume RUN.")
    if from_step < 1:
        raise ConfigError("--from-step", from_step, "a checkpoint is of a step from 1 on", "To begin anew, repeat the run: --repeat RUN.")
    return from_step, skipped


def _plan(asked: Executed, found: Configuration, name: str, resume: str, root: Path, steps: int, *, goes_back: bool = False) -> RunPlan:
    from actors.rank import script_loading
    from fleet.app import plans, resuming
    from fleet.app.cluster.queue import SUBMITTED

    settings = found.run
    plans.check(settings, found.chaos)
    if resume:
        folder = plans.find_run(resume, root, "--resume")
        if plans.is_completed(folder) and not goes_back:
            resuming.check_given(folder, found, resuming.BEYOND)
            return plans.continued_plan(folder, asked, name, steps, settings.storage)
        if steps:
            why = "goes back" if goes_back else "has not come to its end"
            reason = f"run {resume} {why}: it is resumed with the number of steps that it began with"
            raise ConfigError("--steps", steps, reason, "Resume it without --steps; go on beyond its end afterwards.")
        resuming.check(folder, found, asked.path)
        _report_changes(folder, plans.changed_since(folder, asked.path).code)
        return plans.resumed_plan(folder, asked, settings.storage)
    if not asked.script:
        raise ConfigError("SCRIPT", "", "missing", "Name a Python file with a function train(run), or use --resume RUN.")
    name = plans.checked_name(name, root) if name else ""
    train, now_s = script_loading.load_train(asked.script, asked.arguments, asked.module), unix_time_s()
    script = train.file if asked.module else asked.script
    name = name or plans.new_name(script)
    return plans.RunPlan(
        name=name, folder=root / name, settings=settings, train=train, script=script, chaos=found.chaos,
        queued_s=max(0.0, now_s - float(os.environ.get(SUBMITTED, now_s))),
    )  # fmt: skip


def _either(run: str, name: str, resume: str, repeat: str, storage: str, root: Path, steps: int) -> tuple[str, str, int]:
    """(the name of a run to begin, that of one to go on with, steps that are asked for). Raises ConfigError.

    Of ``run`` it is one or the other; without it ``name`` and ``resume``. A run that goes on keeps the number of steps that it began with.
    """
    if not run:
        return name, resume, steps
    for other, value in (("--name", name), ("--resume", resume), ("--repeat", repeat)):
        if value:
            raise ConfigError("--resume-or-start", run, f"{other} = {value} is given, too", "Give one of them.")
    if Path(run).name != run:
        raise ConfigError("--resume-or-start", run, "it is a path, and a run that is to begin has a name", "Give the name alone.")
    from fleet.app import plans

    plans.fetch_journal(storage, run, root)
    return ("", run, 0) if (root / run / "journal.jsonl").is_file() else (run, "", steps)


def _leave_if_ended(run: str, script: str, storage: str, root: Path, steps: int) -> None:
    """Raises typer.Exit when there is nothing to resume of ``run``, which is said then; empty: none is to be resumed.

    A journal that lies in the run's store alone is fetched first.
    """
    from fleet.app import plans

    if not run:
        return
    plans.fetch_journal(storage, run, root)
    folder = plans.find_run(run, root, "--resume")
    plans.check_fleets(folder, "--resume")
    if steps or not plans.is_completed(folder):
        return
    again = shlex.join(["fleet", "run", *([script] if script else []), "--resume", run])
    why = plans.why_completed(folder)
    console.print(f"{folder.name} is completed: {why}, and its last state is kept.", markup=False, highlight=False, soft_wrap=True)
    console.print(f"To go on beyond its end, as a new run: {again} --steps N", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(Exit.DONE)


def _repeated(run: str, asked: Executed, root: Path, changed_code: bool) -> RunPlan:
    """The plan of ``run`` once more. Changes since then are printed; changed code is refused without ``--changed-code``."""
    from fleet.app import plans

    folder = plans.find_run(run, root, "--repeat")
    plans.check_fleets(folder, "--repeat")
    changes = plans.changed_since(folder, asked.path)
    if not changed_code:
        plans.check_same_code(folder, changes)
    _report_changes(folder, (*changes.code, *changes.around))
    return plans.repeated_plan(folder, asked, root)


def _report_changes(folder: Path, changes: Sequence[str]) -> None:
    """Print the changes since the run in ``folder`` began."""
    for change in changes:
        console.print(f"not as in {folder.name}: {change}", style="yellow", markup=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Show:
    """Where the report goes, and which cluster the run has joined; see the options of ``fleet run``."""

    json: str
    html: str
    port: int
    address: str = ""


def _execute(
    plan: RunPlan,
    no_trial: bool,
    twin: bool,
    twin_world: int,
    show: Show,
    expected: Sequence[Expectation],
    address: str,
    working_dir: str,
) -> int:
    from dashboards.trackers import choice
    from fleet.app import first_steps, plans, policy_choice
    from fleet.app.beginning import Beginning
    from storage.backends.trial import StoreTrial, check_folder

    root, beginning = plan.folder.parent, Beginning(console, time.monotonic)
    if not address:  # else it is checked where the run is driven
        choice.check(plan.settings.track, os.environ)
    policy_choice.look_in(Path(plan.script).resolve().parent, Path.cwd())
    policy_choice.check(plan.settings)
    with ExitStack() as stack:
        tried = stack.enter_context(cli_print.waiting(TRIED))
        wait = stack.enter_context(_tried_first(plan, no_trial, address))
        if plan.plain is None:  # this import takes as long as most trials: beside one it costs nothing
            importlib.import_module("fleet.app.remote" if address else "fleet.app.recipes")
        wait(first_steps.ALONE_S)
        check_folder(plan.folder if plan.resume else root)
        store = StoreTrial(plans.store_url(plan)) if "://" in plan.settings.storage else None  # beside the cluster's start
        tried.over()
        stack.enter_context(beginning)
        server = stack.enter_context(cli_watch.serving(root, "127.0.0.1", show.port))
        try:
            launched = stack.enter_context(_ground(plan, address, working_dir, beginning))
        except RunFailed:
            wait(0.0)  # where the trial has found a mistake meanwhile, that is told
            raise
        if store is not None and not address:
            store.check("this machine")
        wait(first_steps.LIMIT_S)
        plan = dataclasses.replace(plan, page=server.read_link(plan.name))
        result, stopped_by = one_run(launched(plan), server, beginning)
        if result.status == "failed" and _is_refused(plan):
            return Exit.REFUSED
        verdict = None
        if twin and result.completed and not stopped_by:
            other = plans.twin_of(plan, twin_world or None)
            verdict = plans.compare(plan, other, one_run(launched(other), None)[0])
        elif twin:
            verdict = plans.without_twin(result, stopped_by, twin_world or plan.settings.world)
    return close(plan, result, verdict, show, expected)


@contextmanager
def _ground(plan: RunPlan, address: str, working_dir: str, beginning: Beginning) -> Iterator[Callable[[RunPlan], Launch]]:
    """The launcher of plans: a local cluster while the context lasts, or the one at ``address``; or that of a plain job."""
    if plan.plain is not None:
        from fleet.app import plain

        beginning.say(f"{plan.name}: the ranks of {Path(plan.script).name} are started on this machine")
        yield plain.PlainRun
    elif address:
        from fleet.app import remote

        beginning.say(f"{plan.name}: the cluster at {address} is asked")
        with remote.connected(address):
            console.print(f"cluster {address}: {remote.seen()}; code is sent there, and processes are started", highlight=False)
            yield lambda each: remote.Launched(each, plan.folder.parent, code_folder(plan, working_dir))
    else:
        nodes, slots = plan.settings.nodes, plan.settings.slots
        beginning.say(f"{plan.name}: a Ray cluster of {nodes} node{'s' if nodes > 1 else ''} for {slots} ranks is started on this machine")
        from actors.rank import script_loading
        from fleet.app import recipes

        with recipes.local_cluster(plan.settings, [script_loading.folder_of(plan.train, plan.script)]) as cluster:
            beginning.say("the cluster is up; a coordinator is started, and an agent on each node")
            yield lambda each: recipes.LiveRun(each, cluster)


def close(plan: RunPlan, result: RunResult, verdict: dict[str, Any] | None, show: Show, expected: Sequence[Expectation]) -> int:
    """Print the outcome of a run that has ended, and return the exit code."""
    from fleet.app import expects, tracking
    from fleet.app.result import report_data
    from fleet.ledger import checkers

    if not plan.journal.exists():  # it was deleted, and the run has failed for that
        return Exit.FAILED
    with cli_print.waiting(f"the journal of {plan.name} is read"):
        report, damage = cli_diagnose.load_report(plan.folder)
    data = report_data(report, damage, verdict)
    if show.json != "-":
        _sum_up(data, plan, report, show.address)
    emit(data, report, show.json, show.html)
    for line in tracking.in_words(plan.folder, plan.settings.track):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    unmet = expects.unmet(expected, data)
    for line in unmet:
        console.print(line, style="red", markup=False)
    return _exit_code(result, verdict) or (Exit.VIOLATED if checkers.violated(data["checks"]) else Exit.UNMET if unmet else Exit.DONE)


def one_run(live: Launch, server: PageServer | None, beginning: Beginning | None = None) -> tuple[RunResult, str]:
    """Train, see :func:`shown`; signals stop the run in order. Also returns the signal that came; empty: none did."""
    from fleet.app.stopping import StopSignal, stopped_by_signals

    noted = StopSignal()
    if beginning is not None:
        beginning.say("ranks are started")
    return shown(live, server, beginning, stopped_by_signals(noted.stopping(live.stop), console.print)), noted.by


def shown(live: Visible, server: PageServer | None, beginning: Beginning | None, signals: AbstractContextManager[object]) -> RunResult:
    """A run to its end, on the terminal; with a ``server``, its page shows the run, and takes orders.

    ``beginning`` tells what the first step waits for; ``signals`` is entered while the run goes on.
    """
    from fleet.app.progress import LiveView
    from fleet.host.follow import Follower
    from fleet.host.rank_logs import RunLogs, logs_of

    plan, follower = live.plan, Follower(live.plan.journal)
    console.print(Text.assemble((plan.name, "bold"), f"  journal {plan.journal}"))
    if server is not None:
        server.show(plan.name, follower, live.controls)
        console.print(Text.assemble("watch it at ", (server.link(plan.name), "bold")))
    logs = RunLogs(logs_of(plan.folder), from_start=not plan.resume)
    view = LiveView(follower, console, time.monotonic, logs, _first_fault_s(plan), beginning)
    with view, signals:
        result = live.execute()
    if beginning is not None:
        beginning.over()
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


def _is_refused(plan: RunPlan) -> bool:
    """Whether its ranks have built another state than the one to be resumed. The reason has been printed."""
    from fleet.host.follow import last_words

    return getattr(last_words(plan.journal)[1], "why", None) is EndWhy.REFUSED


def _exit_code(result: RunResult, verdict: dict[str, Any] | None) -> int:
    """A twin that differs, or has failed, is a failure; one that was stopped has shown nothing."""
    if result.status == "failed":
        return Exit.FAILED
    if result.completed and verdict is not None and not verdict["equal"]:
        return Exit.STOPPED if verdict["status"] == STOPPED else Exit.FAILED
    return {COMPLETED: Exit.DONE, UNSAVED: Exit.NOT_SAVED}.get(result.status, Exit.STOPPED)


def emit(data: dict[str, Any], report: Report, json_: str, html: str) -> None:
    """The report to where it was asked for."""
    write_json(data, json_)
    if html:
        from dashboards.pages.run import render_html

        Path(html).write_text(render_html(report))


def print_report(report: Report) -> None:
    """The report to the terminal."""
    from fleet.app.report import render_table

    cli_print.write(render_table(report, colour=sys.stdout.isatty()).rstrip("\n"))


def _sum_up(data: dict[str, Any], plan: RunPlan, report: Report, address: str) -> None:
    """Print the last lines: result of the training, its cost, and the next command."""
    from fleet.app import ending, plans, resuming
    from fleet.app.live_line import hung
    from fleet.host.follow import last_words
    from storage.backends.urls import redact, without_credentials

    views = report.history["views"]
    trained_s = report.summary.now_s - views[0]["at_s"] if views else None
    elsewhere = str(plan.folder.parent) if plan.folder.parent != Path(RUNS).resolve() else ""
    place, ended = plans.place_of(plan, address), last_words(plan.journal)[1]
    again, saved_at = "", redact(place or f"~/.fleet/runs/{plan.name} of the cluster's head")
    joined = address and ending.JoinedPlace(address, without_credentials(plan.settings.storage), without_credentials(place))
    if plan.plain is not None:
        again, saved_at = plans.again(plan), str(data["checkpoints"][-1]["checkpoint"]) if data["checkpoints"] else ""
    returns = resuming.returns_of(plan.journal) if data["status"] == "failed" else 0
    taken_over = ended is not None and ended.why is EndWhy.TAKEN_OVER
    context = ending.EndContext(plan.name, saved_at, _first_fault_s(plan), elsewhere, again, returns, joined or None, taken_over)
    out = cli_print.Terminal()
    for head, words in ending.ending(data | {"trained_s": trained_s, "total_steps": report.total_steps}, context):
        line = Text(hung(f"{head:8} {words}", out.width if out.is_terminal else None, 9))
        line.stylize("bold", 0, len(head))
        out.print(line)
