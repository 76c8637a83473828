"""The command line. Bad input ends with exit code 2 and one message, before any process starts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from fleet import __version__
from fleet.app.cli import attach as cli_attach
from fleet.app.cli import checkpoint as cli_checkpoint
from fleet.app.cli import cluster as cli_cluster
from fleet.app.cli import config as cli_config
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
        str, typer.Option(metavar="FILE", help="Write one Markdown page for those who were not there; -: print it.")
    ] = "",
    why: Annotated[str, typer.Option(metavar="RANK", help="Tell the story of one loss instead: 3.0, or 3 for slot 3's newest.")] = "",
    storage: Storage = RUNS,
) -> None:
    """Where every rank-second of RUN went, and what each fault cost."""
    from fleet.app.plans import find_run
    from fleet.app.result import report_data

    if why:
        cli_diagnose.print_why(find_run(name, Path(storage)), why, as_json=json_)
        return
    if post_mortem:
        cli_diagnose.write_post_mortem(find_run(name, Path(storage)), post_mortem)
        return
    found, damage = cli_diagnose.load_report(find_run(name, Path(storage)))
    if not json_:
        cli_run.print_report(found)
    cli_run.emit(report_data(found, damage, None), found, "-" if json_ else "", html)


SHOW = (
    cli_run.run, cli_run.resume, cli_attach.attach, cli_watch.watch, cli_logs.logs, cli_simulate.simulate, cli_simulate.compare,
)  # fmt: skip
"""They show by themselves what goes on."""
WAITS: Mapping[Callable[..., Any], str] = {
    cli_attach.stop: "the cluster at {address} is asked to stop {run}",
    cli_plan.plan: "the plan is computed",
    cli_scale.scale: "steps of {script} are measured at several world sizes",
    cli_diagnose.diagnose: "the journal of {name} is read",
    cli_doctor.doctor: "what is asked for is measured",
    cli_init.init: "{file} is written",
    cli_rehearse.rehearse: "small runs are trained on this machine",
    cli_up.up: "the service of {storage} comes up",
    cli_up.status: "whoever is asked answers",
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
    cli_set.resize: "the coordinator of {name} is asked",
    cli_set.pause: "the coordinator of {name} is asked",
    cli_drain.drain: "the coordinator of {name} is asked",
    cli_config.config: "settings are read",
    report: "the journal of {name} is read",
    cli_laws.sweep: "the laws are computed",
    cli_traces.import_: "{file} is read",
    cli_traces.fit: "{file} is read, and rates are fitted",
    cli_experiment.run: "the runs of {file} are trained",
    cli_experiment.soak: "runs of {script} are trained through faults",
    cli_checkpoint.list_: "the store of the checkpoints answers",
    cli_checkpoint.verify: "every byte of the checkpoints is read",
    cli_checkpoint.export: "the checkpoint is read",
    cli_checkpoint.delete: "the store of the checkpoints answers",
    cli_dashboard.push: "Grafana answers",
    cli_cluster.write: "files are written to {folder}",
    cli_cluster.check: "files are read",
}
"""What each of the others waits for, said where that takes longer than a few seconds. Fields are the command's own arguments."""


def with_words(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command, which is not silent for long: see ``WAITS``."""
    if command in SHOW:
        return command

    @wraps(command)
    def called(**given: Any) -> Any:
        with cli_print.waiting(WAITS[command].format_map(given)):
            return command(**given)

    return called


COMMANDS = (
    cli_run.run,
    cli_run.resume,
    cli_attach.attach,
    cli_attach.stop,
    cli_plan.plan,
    cli_scale.scale,
    cli_simulate.simulate,
    cli_simulate.compare,
    cli_diagnose.diagnose,
    cli_doctor.doctor,
    cli_init.init,
    cli_rehearse.rehearse,
    cli_watch.watch,
    cli_logs.logs,
    cli_up.up,
    cli_up.status,
    cli_up.down,
    cli_queue.submit,
    cli_queue.queue,
    cli_queue.cancel,
    cli_runs.show,
    cli_runs.diff,
    cli_data.data,
    cli_track.track,
    cli_set.set_,
    cli_set.resize,
    cli_set.pause,
    cli_drain.drain,
    cli_config.config,
    report,
)
"""Each is called by its name in the code."""
_asks = partial(typer.Typer, no_args_is_help=True)
GROUPS: Mapping[str, tuple[typer.Typer, Commands]] = {
    "laws": (_asks(help="The laws that plans are made with, beside what others have published."), (cli_laws.sweep,)),
    "traces": (_asks(help="Logs of faults: what they say, and how often what fails."), (cli_traces.import_, cli_traces.fit)),
    "experiment": (_asks(help="Experiments: what must hold is said in advance."), (cli_experiment.run, cli_experiment.soak)),
    "checkpoint": (
        _asks(help="List, verify, export and delete durable checkpoints."),
        (cli_checkpoint.list_, cli_checkpoint.verify, cli_checkpoint.export, cli_checkpoint.delete),
    ),
    "runs": (typer.Typer(invoke_without_command=True, callback=with_words(cli_runs.runs)), (cli_runs.prune, cli_runs.fold)),
    "dashboard": (_asks(help="Dashboards for Grafana."), (cli_dashboard.push,)),
    "cluster": (_asks(help="Files that bring up a cluster: ray up, Kubernetes, Slurm."), (cli_cluster.write, cli_cluster.check)),
}
PASS_ON = (cli_run.resume, cli_queue.submit)
"""They hand to others what they do not know."""


def _with(group: typer.Typer, commands: Commands) -> typer.Typer:
    for command in commands:
        others = {"allow_extra_args": True, "ignore_unknown_options": True} if command in PASS_ON else None
        group.command(command.__name__.rstrip("_"), context_settings=others)(with_words(command))
    return group


app = _with(typer.Typer(name="fleet", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, callback=about), COMMANDS)
for _name, (_group, _commands) in GROUPS.items():
    app.add_typer(_with(_group, _commands), name=_name)


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
    except BrokenPipeError:  # whoever read has gone
        cli_print.leave_to_nobody(sys.stdout.fileno())
        sys.exit(Exit.DONE)
