"""The command line. Bad input ends with exit code 2 and one message, before any process starts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any

import typer
from rich.text import Text

from fleet import __version__
from fleet.app.cli import attach as cli_attach
from fleet.app.cli import checkpoint as cli_checkpoint
from fleet.app.cli import cluster as cli_cluster
from fleet.app.cli import dashboard as cli_dashboard
from fleet.app.cli import data as cli_data
from fleet.app.cli import diagnose as cli_diagnose
from fleet.app.cli import doctor as cli_doctor
from fleet.app.cli import drain as cli_drain
from fleet.app.cli import experiment as cli_experiment
from fleet.app.cli import init as cli_init
from fleet.app.cli import laws as cli_laws
from fleet.app.cli import logs as cli_logs
from fleet.app.cli import plan as cli_plan
from fleet.app.cli import prints as cli_print
from fleet.app.cli import queue as cli_queue
from fleet.app.cli import rehearse as cli_rehearse
from fleet.app.cli import run as cli_run
from fleet.app.cli import runs as cli_runs
from fleet.app.cli import scale as cli_scale
from fleet.app.cli import set_ as cli_set
from fleet.app.cli import simulate as cli_simulate
from fleet.app.cli import traces as cli_traces
from fleet.app.cli import track as cli_track
from fleet.app.cli import up as cli_up
from fleet.app.cli import watch as cli_watch
from fleet.app.cli.config import RUNS, Storage
from fleet.app.cli.looked_at import looked_at
from fleet.errors import ConfigError, FleetError, OutOfSight
from fleet.protocol.exit_codes import Exit

console = cli_print.Terminal(stderr=True)
Commands = tuple[Callable[..., Any], ...]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"fleet {__version__}")
        raise typer.Exit


def about(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Train through failure, inject failure on purpose, account for every rank-second."""


def report(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name under --storage.")],
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    html: Annotated[str, typer.Option(help="Write one self-contained HTML page to this file.")] = "",
    post_mortem: Annotated[
        str, typer.Option(metavar="FILE", help="Write one Markdown page for readers who were absent; -: print it.")
    ] = "",
    why: Annotated[str, typer.Option(metavar="RANK", help="Tell the story of one loss instead: 3.0, or 3 for slot 3's newest.")] = "",
    diagnose: Annotated[bool, typer.Option("--diagnose", help="Name the largest costs instead, their causes and their remedies.")] = False,
    storage: Storage = RUNS,
) -> None:
    """Account for every rank-second of RUN, and for the cost of each fault."""
    from fleet.app.result import report_data

    folder = looked_at(name, storage)
    if diagnose:
        cli_diagnose.print_diagnosis(folder, as_json=json_)
        return
    if why:
        cli_diagnose.print_why(folder, why, as_json=json_)
        return
    if post_mortem:
        cli_diagnose.write_post_mortem(folder, post_mortem)
        return
    found, damage = cli_diagnose.load_report(folder)
    if not json_:
        cli_run.print_report(found)
    cli_run.emit(report_data(found, damage, None), found, "-" if json_ else "", html)


SHOW = (
    cli_run.run, cli_attach.attach, cli_watch.watch, cli_logs.logs, cli_simulate.simulate, cli_simulate.compare,
)  # fmt: skip
"""These commands show their progress themselves."""
WAITS: Mapping[Callable[..., Any], str] = {
    cli_attach.stop: "{run} is asked to stop",
    cli_plan.plan: "the plan is computed",
    cli_scale.scale: "steps of {script} are measured at several world sizes",
    cli_doctor.doctor: "checks are measured",
    cli_init.init: "{file} is written",
    cli_rehearse.rehearse: "small runs are trained on this machine",
    cli_up.up: "the service of {storage} comes up",
    cli_up.status: "the service, the run or the cluster answers",
    cli_up.down: "the service of {storage} ends",
    cli_queue.submit: "the service is asked to take {script}",
    cli_queue.queue: "the service is asked for its queue",
    cli_queue.cancel: "the service is asked to take {name} back",
    cli_runs.runs: "the journals of all runs are looked at",
    cli_runs.show: "the journal of {run} is read",
    cli_runs.diff: "the journals of {one} and {other} are read",
    cli_runs.prune: "the folders of all runs are looked at",
    cli_runs.fold: "the journal of {run} is read and written anew",
    cli_data.data: "the journal of {run} is read",
    cli_track.track: "trackers take what they lack of {run}",
    cli_set.set_: "the coordinator of {name} is asked",
    cli_drain.drain: "the coordinator of {name} is asked",
    report: "the journal of {name} is read",
    cli_laws.laws: "the laws are computed",
    cli_traces.import_: "{file} is read",
    cli_traces.fit: "{file} is read, and rates are fitted",
    cli_experiment.run: "the runs of {file} are trained",
    cli_experiment.soak: "runs of {script} are trained through faults",
    cli_checkpoint.list_: "the store of the checkpoints answers",
    cli_checkpoint.verify: "every byte of the checkpoints is read",
    cli_checkpoint.export: "the checkpoint is read",
    cli_checkpoint.delete: "the store of the checkpoints answers",
    cli_dashboard.dashboards: "Grafana answers",
    cli_cluster.write: "files are written to {folder}",
    cli_cluster.check: "files are read",
}
"""The words for each other command that takes longer than a few seconds. Fields are the command's own arguments."""


def with_words(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command, which is not silent for long: see ``WAITS``."""
    if command in SHOW:
        return command

    @wraps(command)
    def called(**given: Any) -> Any:
        with cli_print.waiting(WAITS[command].format_map(given)):
            return command(**given)

    return called


TRAIN, LOOK, PLAN, KEEP = "Train", "Look", "Plan", "Keep"
COMMANDS: Mapping[str, Commands] = {
    TRAIN: (cli_run.run, cli_attach.stop, cli_init.init, cli_doctor.doctor),
    LOOK: (cli_attach.attach, cli_up.status, cli_logs.logs, report),
    PLAN: (cli_plan.plan, cli_simulate.simulate, cli_laws.laws),
}
"""Section of ``fleet --help`` -> its commands. Each has its name in the code."""


@dataclass(frozen=True, slots=True)
class CommandGroup:
    """Commands that are typed behind the group's name."""

    section: str
    help: str
    commands: Commands
    alone: Callable[..., Any] | None = None


GROUPS: Mapping[str, CommandGroup] = {
    "experiment": CommandGroup(
        PLAN, "Run experiments: faults with a hypothesis, policies compared, scale models, fits of fault logs.",
        (
            cli_experiment.run, cli_experiment.soak, cli_rehearse.rehearse, cli_simulate.compare, cli_scale.scale, cli_traces.import_,
            cli_traces.fit,
        ),
    ),
    "runs": CommandGroup(
        KEEP, "List, watch, change, compare and clean up runs.",
        (
            cli_watch.watch, cli_set.set_, cli_drain.drain, cli_runs.show, cli_runs.diff, cli_data.data, cli_track.track, cli_runs.prune,
            cli_runs.fold,
        ),
        cli_runs.runs,
    ),
    "checkpoint": CommandGroup(
        KEEP, "List, verify, export and delete durable checkpoints.",
        (cli_checkpoint.list_, cli_checkpoint.verify, cli_checkpoint.export, cli_checkpoint.delete),
    ),
    "cluster": CommandGroup(
        KEEP, "Write the files of a cluster, serve and queue its runs, fill Grafana.",
        (
            cli_cluster.write, cli_cluster.check, cli_up.up, cli_up.down, cli_queue.submit, cli_queue.queue, cli_queue.cancel,
            cli_dashboard.dashboards,
        ),
    ),
}  # fmt: skip
PASS_ON = (cli_queue.submit,)
"""They hand to others the options that they do not know."""


def _add(group: typer.Typer, commands: Commands, section: str | None = None) -> typer.Typer:
    for command in commands:
        others = {"allow_extra_args": True, "ignore_unknown_options": True} if command in PASS_ON else None
        group.command(command.__name__.rstrip("_"), context_settings=others, rich_help_panel=section)(with_words(command))
    return group


def _app() -> typer.Typer:
    made = typer.Typer(name="fleet", no_args_is_help=True, pretty_exceptions_enable=False, callback=about)
    for section, commands in COMMANDS.items():
        _add(made, commands, section)
    for name, each in GROUPS.items():
        alone = {"invoke_without_command": True, "callback": with_words(each.alone)} if each.alone else {"no_args_is_help": True}
        made.add_typer(_add(typer.Typer(**alone), each.commands), name=name, help=each.help, rich_help_panel=each.section)
    return made


app = _app()


def _code_of(error: FleetError) -> Exit:
    match error:
        case ConfigError():
            return Exit.REFUSED
        case OutOfSight():
            return Exit.UNSEEN
        case _:
            return Exit.FAILED


def main() -> None:
    """Entry point of the ``fleet`` command."""
    try:
        app(standalone_mode=True)
    except FleetError as error:
        console.print(Text.assemble(("fleet: ", "red bold"), str(error)))
        sys.exit(_code_of(error))
    except BrokenPipeError:  # the reader has gone
        cli_print.discard(sys.stdout.fileno())
        sys.exit(Exit.DONE)
