"""``fleet experiment import`` and ``fit``: logs of faults become traces, and rates that other commands take as ``--faults``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleet.app.cli import prints as cli_print
from fleet.app.cli.json_out import Json, write_json
from fleet.errors import ConfigError

if TYPE_CHECKING:
    from fleet.planning.traces.importing import Log

File = Annotated[Path, typer.Argument(metavar="FILE", help="CSV, JSON lines, or what sacct --parsable2 prints.", show_default=False)]
Map = Annotated[
    str,
    typer.Option("--map", help="Meaning of its columns: a TOML file, or lanl, sacct, acme; empty: guessed, and shown.", show_default=False),
]
Nodes = Annotated[int, typer.Option(help="Nodes of the fleet, those that never failed too; 0: what the log says.")]
Since = Annotated[str, typer.Option(help="The log covers the time from this date on; empty: from its first fault.")]
Until = Annotated[str, typer.Option(help="And until this date; empty: its last fault.")]


def import_(
    file: File, map_: Map = "", nodes: Nodes = 0, since: Since = "", until: Until = "",
    output: Annotated[Path | None, typer.Option(help="Write the faults to this file, as a trace of Fleet's own form.")] = None,
    json_: Json = "",
) -> None:  # fmt: skip
    """Read a log of faults: what its columns mean, what is wrong in it, line by line, and the faults as a trace."""
    from fleet.planning.traces.importing import as_trace
    from fleet.planning.traces.words import lines_of, understanding

    log = _log(file, map_, nodes, since, until)
    if output is not None:
        _write(output, as_trace(log))
    data = {"faults": len(log.entries), "rows": log.rows, "nodes": log.nodes, "node_hours": log.exposure_node_s / 3600.0,
            "exposure": log.exposure_of, "mapping": dict(understanding(log)), "found": log.counts(), "lines": lines_of(log.findings),
            "notes": list(log.notes)}  # fmt: skip
    write_json(data, json_)
    if json_ != "-":
        _show(log)
        if output is not None:
            cli_print.write(f"written to {output}")


def fit(
    file: File, map_: Map = "", nodes: Nodes = 0, since: Since = "", until: Until = "",
    output: Annotated[Path | None, typer.Option(help="Write the rates to this file, for --faults of other commands.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw what was fitted into this file, such as faults.png; it needs matplotlib.")] = None,
    seed: Annotated[int, typer.Option(help="Of the tests of goodness of fit.")] = 0,
    json_: Json = "",
) -> None:  # fmt: skip
    """Say how often what fails, by which law, in bursts or not, which nodes again and again, and how long repairs take."""
    if plot is not None:
        from fleet.app.cli import traces_plot

        traces_plot.check(plot)
    from fleet.planning.traces.fit import fit as fitted
    from fleet.planning.traces.words import lines_of

    log = _log(file, map_, nodes, since, until)
    found = fitted(log, file.name, seed)
    if output is not None:
        _write(output, found.faults().to_json())
    if plot is not None:
        traces_plot.draw(found, plot)
    write_json({**found.to_dict(), "lines": lines_of(log.findings)}, json_)
    if json_ != "-":
        from fleet.planning.traces import words

        _show(log)
        head = ("component", "faults", "share", "node-hours each", "95% interval", "law of the times between them")
        cli_print.write("", *cli_print.table(head, words.rates(found)), "", *words.sentences(found))
        cli_print.write(*(f"written to {path}" for path in (output, plot) if path is not None))


def _log(file: Path, map_: str, nodes: int, since: str, until: str) -> Log:
    from fleet.planning.traces.importing import from_trace, read_log
    from fleet.planning.traces.mapping import load
    from fleet.planning.traces.trace import is_trace, read_trace, text_of

    if nodes < 0:
        raise ConfigError("--nodes", nodes, "must be at least 1", "0 takes what the log says.")
    text = text_of(file, "FILE")
    if is_trace(text):
        _check_alone(map_=map_, nodes=nodes, since=since, until=until)
        return from_trace(read_trace(file, "FILE"))
    return read_log(text, load(map_) if map_ else None, nodes=nodes, since=since, until=until)


def _check_alone(**given: object) -> None:
    """A trace was imported with these already."""
    for name, value in given.items():
        if value:
            raise ConfigError(f"--{name.rstrip('_')}", value, "the file is a trace of Fleet's own: that was said when it was imported",
                              "Import the log again.")  # fmt: skip


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("--output", str(path), f"cannot be written: {error.strerror}") from error


def _show(log: Log) -> None:
    from fleet.planning.traces.words import findings, summary, understanding

    cli_print.write(summary(log))
    cli_print.write(*(f"  {name:9} {text}" for name, text in understanding(log)))
    rows: Sequence[Sequence[str]] = list(findings(log))
    if rows:
        cli_print.write("", *cli_print.table(("found in the log", "times", "where"), rows))
    cli_print.write(*log.notes)
