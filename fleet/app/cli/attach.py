"""``fleet attach``, ``stop`` and ``runs --address``: runs that belong to a cluster, from any machine that reaches it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from fleet.app.cli import prints as cli_print
from fleet.app.cli import run as cli_run
from fleet.app.cli import watch as cli_watch
from fleet.app.cli.config import RUNS
from fleet.host.rank_logs import RunLogs, logs_of
from fleet.protocol.exit_codes import Exit

if TYPE_CHECKING:
    from fleet.app.remote import RemoteRun

Address = Annotated[str, typer.Option(help="The Ray cluster: auto, or HOST:PORT.")]
Name = Annotated[str, typer.Argument(metavar="RUN", help="Name of a run of that cluster.")]
console = cli_print.Terminal(stderr=True)


@contextmanager
def found(run: str, address: str) -> Iterator[RemoteRun]:
    """The run of the cluster at ``address``. Raises ConfigError when there is none."""
    from fleet.app import remote

    with remote.connected(address):
        yield remote.find(run, Path(RUNS).resolve())


def attach(
    run: Name,
    address: Address = "auto",
    json_: Annotated[str, typer.Option("--json", help="Write the report as JSON to this file; - for stdout.")] = "",
    html: Annotated[str, typer.Option(help="Write the report as one HTML page.")] = "",
    port: Annotated[int, typer.Option(help="Serve the live page and /metrics on this port; 0: a free one.")] = 0,
) -> None:
    """See RUN on a cluster as if it had been started here, to its end. Ctrl-C stops the run; fleet attach may be killed, and it goes on."""
    from fleet.app import remote

    with found(run, address) as there, cli_watch.serving(Path(RUNS).resolve(), "127.0.0.1", port) as server:
        plan = remote.plan_of(there)
        if plan is None:
            there.leave()
            console.print(Text.assemble((run, "bold"), " was stopped before it began"))
            raise typer.Exit(Exit.STOPPED)
        attached = remote.Attached(plan, there)
        result = cli_run.one_run(attached, server)
    raise typer.Exit(cli_run.close(attached.plan, result, None, cli_run.Show(json_, html, port), []))


def stop(run: Name, address: Address = "auto") -> None:
    """Stop RUN on a cluster in order: its last step is kept. Once more stops it at once."""
    with found(run, address) as there:
        there.stop()
    console.print(Text.assemble((run, "bold"), " is being stopped"))


def print_runs(address: str) -> None:
    """A line for each run of the cluster: those that go on, and those that have ended and that nobody has attached to since."""
    from fleet.app import remote

    with remote.connected(address):
        rows = [(run.name, remote.in_words(run)) for run in remote.all_runs(Path(RUNS).resolve())]
    cli_print.write(*(f"{name}  {words}" for name, words in rows) if rows else ["no run of Fleet's is on this cluster"])


def print_logs(run: str, address: str, slot: int | None, follow: bool) -> None:
    """What the ranks of a run on a cluster have printed, to the terminal."""
    with found(run, address) as there:
        lines, over = RunLogs(logs_of(there.folder), slot), False
        while not over:
            over = there.standing().code is not None or not follow
            while there.pull():
                cli_print.write(*lines.poll(None))
            if not over:
                there.pause()
        cli_print.write(*lines.poll(None, last=True))
        lines.close()
