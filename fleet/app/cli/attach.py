"""``fleet attach``, ``stop`` and ``runs --address``: runs that belong to a cluster, from any machine that reaches it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from fleet.app.beginning import Beginning
from fleet.app.cli import prints as cli_print
from fleet.app.cli import run as cli_run
from fleet.app.cli import watch as cli_watch
from fleet.app.cli.config import RUNS
from fleet.app.stopping import interrupted_by_signals
from fleet.errors import ConfigError
from fleet.host.rank_logs import RunLogs, logs_of
from fleet.protocol.exit_codes import Exit

if TYPE_CHECKING:
    from fleet.app.remote import RemoteRun

AUTO = "auto"
Address = Annotated[str, typer.Option(help="The Ray cluster: auto, or HOST:PORT.")]
Name = Annotated[str, typer.Argument(metavar="RUN", help="Name of a run of that cluster.")]
console = cli_print.Terminal(stderr=True)


@contextmanager
def found(run: str, address: str) -> Iterator[RemoteRun]:
    """The run of the cluster at ``address``. Raises ConfigError when there is none, which says where a run of this machine is seen."""
    from fleet.app import remote

    with ExitStack() as stack:
        try:
            stack.enter_context(remote.connected(address))
            there = remote.find(run, Path(RUNS).resolve())
        except ConfigError:
            _check_elsewhere(run)
            raise
        yield there


def _check_elsewhere(run: str) -> None:
    """Raises ConfigError when ``run`` is one of this machine's, and goes on."""
    from fleet.host.follow import is_over
    from fleet.settings.live import ADDRESS_FILE

    folder = Path(RUNS) / run
    if (folder / ADDRESS_FILE).exists() and not is_over(folder / "journal.jsonl"):
        way_out = f"See it with fleet watch {run} or fleet logs {run} --follow; fleet pause {run} ends it."
        raise ConfigError("RUN", run, "it goes on on this machine, and belongs to no cluster", way_out)


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
    port: Annotated[int, typer.Option(help="Serve the live page and /metrics on this port; 0: a free one.")] = 0,
) -> None:
    """See RUN on a cluster as if it had been started here, to its end. Ctrl-C or any signal ends the look alone; fleet stop ends RUN."""
    from fleet.app import remote

    beginning = Beginning(console, time.monotonic)
    with ExitStack() as stack:
        stack.enter_context(looking(run, stopping(run, address)))
        stack.enter_context(beginning)
        beginning.say(f"the cluster at {address} is asked for {run}")
        there = stack.enter_context(found(run, address))
        server = stack.enter_context(cli_watch.serving(Path(RUNS).resolve(), "127.0.0.1", port))
        plan = remote.plan_of(there, beginning.say)
        if plan is None:
            console.print(Text.assemble((run, "bold"), " was stopped before it began"))
            raise typer.Exit(Exit.STOPPED)
        result = cli_run.shown(remote.Attached(plan, there), server, beginning, nullcontext())
    raise typer.Exit(cli_run.close(plan, result, None, cli_run.Show(json_, html, port), []))


def stopping(run: str, address: str) -> str:
    """The command that ends ``run`` of the cluster at ``address``, as it is to be typed."""
    return shlex.join(["fleet", "stop", run, *(["--address", address] if address != AUTO else [])])


def stop(run: Name, address: Address = AUTO) -> None:
    """Stop RUN on a cluster in order: its last step is kept. Once more stops it at once."""
    with found(run, address) as there:
        there.stop()
    console.print(Text.assemble((run, "bold"), " is being stopped"))


def print_runs(address: str) -> None:
    """A line for each run of the cluster: those that go on, and those that have ended and that nobody has attached to since."""
    from fleet.app import remote

    with looking("the cluster", stopping("RUN", address)), remote.connected(address):
        rows = [(run.name, remote.in_words(run)) for run in remote.all_runs(Path(RUNS).resolve())]
    cli_print.write(*(f"{name}  {words}" for name, words in rows) if rows else ["no run of Fleet's is on this cluster"])


def print_logs(run: str, address: str, slot: int | None, follow: bool) -> None:
    """What the ranks of a run on a cluster have printed, to the terminal."""
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
