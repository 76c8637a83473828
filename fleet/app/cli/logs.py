"""``fleet logs``: the output of the ranks of a run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from fleet.app.cli import attach as cli_attach
from fleet.app.cli import prints as cli_print
from fleet.app.cli.config import RUNS, Storage
from fleet.app.cli.looked_at import check_there, looked_at
from fleet.errors import ConfigError
from fleet.host.rank_logs import RunLogs, found, logs_of, older, prefix, shown

LOOK_S = 0.25
AT_ONCE = 1_000


def logs(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name under --storage.")],
    rank: Annotated[int, typer.Option(help="Of this slot alone; -1: of all.")] = -1,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run ends.")] = False,
    storage: Storage = RUNS,
    address: Annotated[str, typer.Option(help="RUN is one of this Ray cluster: auto, or HOST:PORT.")] = "",
) -> None:
    """Show the output of the ranks of RUN. `rank 2.1` before a line is the second process of slot 2."""
    slot = None if rank < 0 else rank
    if address:
        cli_attach.print_logs(run, address, slot, follow)
        return
    folder = looked_at(run, storage)
    there = found(logs_of(folder), slot)
    if not there and not follow:
        of = f"rank {rank} of {run}" if slot is not None else run
        raise ConfigError("RUN", run, f"no log of {of} in {logs_of(folder)}", "A rank that has joined writes there.")
    for member, path in there.items():
        if older(path).exists():
            _report_lines(prefix(member) + line for line in map(shown, older(path).read_bytes().splitlines()))
    _read(folder, slot, follow)


def _read(folder: Path, slot: int | None, follow: bool) -> None:
    from fleet.host.follow import is_over

    lines = RunLogs(logs_of(folder), slot)
    over = not follow
    while not over:
        over = is_over(folder / "journal.jsonl")
        _report_lines(lines.poll(None))
        if not over:
            check_there(folder)
            time.sleep(LOOK_S)
    _report_lines(lines.poll(None, last=True))
    lines.close()


def _report_lines(lines: Iterable[str]) -> None:
    """Print lines; the command ends when its reader has gone."""
    for some in _batched(lines, AT_ONCE):
        if not cli_print.write(*some):
            raise typer.Exit


def _batched(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    rest = iter(lines)
    while some := list(islice(rest, size)):
        yield some
