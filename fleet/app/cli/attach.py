"""``fleet attach``, ``stop`` and ``status --address``: runs of a cluster, from any machine that reaches it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from fleet.app.beginning import Beginning
from fleet.app.cli import prints as cli_print
from fleet.app.cli import run as cli_run
from fleet.app.cli import watch as cli_watch
from fleet.app.cli.asking import found
from fleet.app.cli.config import RUNS, Storage
from fleet.app.stopping import interrupted_by_signals
from fleet.errors import ConfigError
from fleet.host.rank_logs import RunLogs, logs_of
from fleet.protocol.exit_codes import Exit

AUTO = "auto"
STOPPED = "stopped by its user"
Address = Annotated[str, typer.Option(help="The Ray cluster: auto, or HOST:PORT.")]
Name = Annotated[str, typer.Argument(metavar="RUN", help="Name of a run of that cluster.")]
console = cli_print.Terminal(stderr=True)


@contextmanager
def looking(what: str, ends_it: str) -> Iterator[None]:
    """A look at ``what``: a signal ends that alone, and says by which command a run itself is ended."""
    with interrupted_by_signals():
        try:
            yield
        except (KeyboardInterrupt, SystemExit):  # Ray hears SIGTERM itself from its beginning on, and exits
            console.print(f"{what} is as it was: this look alone has ended. {ends_it} would end the run", markup=False)
            raise typer.Exit(Exit.UNSEEN) from None


def attach(
    run: Name,
    address: Address = AUTO,
    json_: Annotated[str, typer.Option("--json", help="Write the report as JSON to this file; - for stdout.")] = "",
    html: Annotated[str, typer.Option(help="Write the report as one HTML page.")] = "",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Serve the live page and /metrics on this port; 0: a free one.")] = 0,
) -> None:
    """See RUN on a cluster as if it had been started here, to its end. Ctrl-C or any signal ends the look alone; fleet stop ends RUN."""
    from fleet.app import remote

    beginning = Beginning(console, time.monotonic)
    with ExitStack() as stack:
        stack.enter_context(looking(run, stopping(run, address)))
        stack.enter_context(beginning)
        beginning.say(f"the cluster at {address} is asked for run '{run}'")
        there = stack.enter_context(found(run, address))
        server = stack.enter_context(cli_watch.serving(Path(RUNS).resolve(), "127.0.0.1", port))
        plan = remote.plan_of(there, beginning.say)
        if plan is None:
            console.print(Text.assemble((run, "bold"), " was stopped before it began"))
            raise typer.Exit(Exit.STOPPED)
        result = cli_run.shown(remote.Attached(plan, there), server, beginning, nullcontext())
    raise typer.Exit(cli_run.close(plan, result, None, cli_run.Show(json_, html, port, address), []))


def stopping(run: str, address: str) -> str:
    """The command that ends ``run`` of the cluster at ``address``, as it is to be typed."""
    return shlex.join(["fleet", "stop", run, *(["--address", address] if address != AUTO else [])])


def stop(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run of a cluster; or a run's folder, or its name under --storage.")],
    address: Annotated[str, typer.Option(help="The Ray cluster: auto, or HOST:PORT; empty: this machine, then auto.")] = "",
    storage: Storage = RUNS,
) -> None:
    """Stop RUN in order: its last step is kept, and `fleet run --resume RUN` goes on from it. On a cluster, once more stops it at once."""
    if address or not _stopped_here(run, storage):
        with found(run, address or AUTO) as there:
            there.stop()
    there_too = f" --address {address}" if address else f" --storage {storage}" if storage != RUNS else ""
    console.print(f"{run} is being stopped; fleet run --resume {run}{there_too} goes on from its last step", markup=False)


def _stopped_here(run: str, storage: str) -> bool:
    """Whether the run is one of this machine; it is told to stop then. Raises ConfigError when it has ended."""
    from actors.asking import ask
    from actors.messages import PauseWanted
    from fleet.host.follow import last_words
    from fleet.settings.live import ADDRESS_FILE

    for folder in (Path(run), Path(storage) / run):
        if (folder / ADDRESS_FILE).exists():
            answer = ask(folder, PauseWanted(STOPPED))
            if answer.refused:
                raise ConfigError("RUN", run, answer.refused, answer.way_out)
            return True
        if last_words(folder / "journal.jsonl")[1] is not None:
            raise ConfigError("RUN", run, "the run has ended", f"Go on from its last step: fleet run --resume {run}.")
    return False


def print_runs(address: str) -> None:
    """A line for each run of the cluster: runs that go on, and runs that have ended and that no command has attached to since."""
    from fleet.app import remote

    with looking("the cluster", stopping("RUN", address)), remote.connected(address):
        rows = [(run.name, remote.in_words(run)) for run in remote.all_runs(Path(RUNS).resolve())]
    cli_print.write(*(f"{name}  {words}" for name, words in rows) if rows else ["no run of Fleet's is on this cluster"])


def print_logs(run: str, address: str, slot: int | None, follow: bool) -> None:
    """Show the output of the ranks of a run on a cluster."""
    waiting = cli_print.waiting(f"the cluster at {address} is asked for what ranks of {run} have printed")
    with looking(run, stopping(run, address)), waiting, found(run, address) as there:
        lines, over = RunLogs(logs_of(there.folder), slot), False
        while not over:
            over = there.standing().code is not None or not follow
            waiting.over()
            while there.pull():
                cli_print.write(*lines.poll(None))
            if not over:
                there.pause()
        cli_print.write(*lines.poll(None, last=True))
        lines.close()
