"""``fleet laws``: published tables of large fleets, computed anew by the laws of Fleet."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from fleet.app.cli import prints as cli_print
from fleet.app.cli.json_out import Json, write_json
from fleet.errors import ConfigError


def laws(
    table: Annotated[str, typer.Option(help="One table alone, by its name; a wrong one lists all.")] = "",
    json_: Json = "",
) -> None:
    """Print published values of large fleets beside those of the laws, and contradictions within a publication."""
    from fleet.laws.published import HEADS, cells, tables

    found = tables()
    if table and table not in found:
        raise ConfigError("--table", table, "there is no such table", f"There are {', '.join(found)}.")
    wanted = {table: found[table]} if table else found
    write_json({name: [{**asdict(row), "agrees": row.agrees} for row in rows] for name, rows in wanted.items()}, json_)
    if json_ == "-":
        return
    for name, rows in wanted.items():
        cli_print.write(name, *cli_print.table(HEADS, map(cells, rows)), "")
