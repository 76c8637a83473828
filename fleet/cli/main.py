"""The command line. Bad input ends with exit code 2 and one message, before any process starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from fleet import __version__
from fleet.app.exit_codes import Exit
from fleet.cli import attach as cli_attach
from fleet.cli import checkpoint as cli_checkpoint
from fleet.cli import cluster as cli_cluster
from fleet.cli import config as cli_config
from fleet.cli import dashboard as cli_dashboard
from fleet.cli import data as cli_data
from fleet.cli import diagnose as cli_diagnose
from fleet.cli import doctor as cli_doctor
from fleet.cli import drain as cli_drain
from fleet.cli import experiment as cli_experiment
from fleet.cli import init as cli_init
from fleet.cli import laws as cli_laws
from fleet.cli import logs as cli_logs
from fleet.cli import plan as cli_plan
from fleet.cli import prints as cli_print
from fleet.cli import queue as cli_queue
from fleet.cli import rehearse as cli_rehearse
from fleet.cli import run as cli_run
from fleet.cli import runs as cli_runs
from fleet.cli import scale as cli_scale
from fleet.cli import set_ as cli_set
from fleet.cli import simulate as cli_simulate
from fleet.cli import traces as cli_traces
from fleet.cli import track as cli_track
from fleet.cli import up as cli_up
from fleet.cli import watch as cli_watch
from fleet.cli.config import RUNS, Storage
from fleet.errors import ConfigError, FleetError

app = typer.Typer(name="fleet", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = cli_print.Terminal(stderr=True)
cli_run.register(app)
cli_attach.register(app)
cli_plan.register(app)
cli_laws.register(app)
cli_scale.register(app)
cli_simulate.register(app)
cli_traces.register(app)
cli_diagnose.register(app)
cli_doctor.register(app)
cli_init.register(app)
cli_rehearse.register(app)
cli_experiment.register(app)
cli_checkpoint.register(app)
cli_watch.register(app)
cli_logs.register(app)
cli_up.register(app)
cli_queue.register(app)
cli_runs.register(app)
cli_data.register(app)
cli_track.register(app)
cli_dashboard.register(app)
cli_set.register(app)
cli_drain.register(app)
cli_config.register(app)
cli_cluster.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"fleet {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Train through failure, inject failure on purpose, account for every rank-second."""


@app.command()
def report(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name under --storage.")],
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    html: Annotated[str, typer.Option(help="Write one self-contained HTML page to this file.")] = "",
    why: Annotated[str, typer.Option(metavar="RANK", help="Tell the story of one loss instead: 3.0, or 3 for slot 3's newest.")] = "",
    storage: Storage = RUNS,
) -> None:
    """Where every rank-second of RUN went, and what each fault cost."""
    from fleet.app.plans import find_run
    from fleet.app.result import report_data

    if why:
        cli_diagnose.print_why(find_run(name, Path(storage)), why, as_json=json_)
        return
    found, damage = cli_diagnose.load_report(find_run(name, Path(storage)))
    if not json_:
        cli_run.print_report(found)
    cli_run.emit(report_data(found, damage, None), found, "-" if json_ else "", html)


def main() -> None:
    """Entry point of the ``fleet`` command."""
    try:
        app(standalone_mode=True)
    except FleetError as error:
        console.print(Text.assemble(("fleet: ", "red bold"), str(error)))
        sys.exit(Exit.REFUSED if isinstance(error, ConfigError) else Exit.FAILED)
    except BrokenPipeError:  # whoever read has gone
        cli_print.leave_to_nobody(sys.stdout.fileno())
        sys.exit(0)
