"""The command line. Bad input ends with exit code 2 and one message, before any process starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from fleet import (
    __version__,
    cli_checkpoint,
    cli_config,
    cli_dashboard,
    cli_diagnose,
    cli_doctor,
    cli_init,
    cli_logs,
    cli_plan,
    cli_print,
    cli_queue,
    cli_rehearse,
    cli_run,
    cli_runs,
    cli_set,
    cli_simulate,
    cli_up,
    cli_watch,
)
from fleet.cli_config import RUNS, Storage
from fleet.errors import ConfigError, FleetError
from fleet.exit_codes import Exit

app = typer.Typer(name="fleet", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = cli_print.Terminal(stderr=True)
cli_run.register(app)
cli_plan.register(app)
cli_simulate.register(app)
cli_diagnose.register(app)
cli_doctor.register(app)
cli_init.register(app)
cli_rehearse.register(app)
cli_checkpoint.register(app)
cli_watch.register(app)
cli_logs.register(app)
cli_up.register(app)
cli_queue.register(app)
cli_runs.register(app)
cli_dashboard.register(app)
cli_set.register(app)
cli_config.register(app)


def _tell_version(wanted: bool) -> None:
    if wanted:
        print(f"fleet {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version.")] = False,
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
    from fleet.plans import find_run

    if why:
        cli_diagnose.tell_why(find_run(name, Path(storage)), why, as_json=json_)
        return
    found, damage = cli_diagnose.load_report(find_run(name, Path(storage)))
    if not json_:
        cli_run.tell(found)
    cli_run.emit(cli_run.report_data(found, damage, None), found, "-" if json_ else "", html)


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
