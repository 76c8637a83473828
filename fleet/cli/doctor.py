"""``fleet doctor``: is this machine, or this cluster, fit to train? A table, or JSON; exit code 1 when a check fails."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleet.errors import ConfigError

if TYPE_CHECKING:
    from fleet.ledger.health import Check, Measured

UNITS = (("T", 1e12), ("G", 1e9), ("M", 1e6))
COLOURS = {"pass": "green", "warn": "yellow", "fail": "red bold"}


def doctor(
    context: typer.Context,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    gather: Annotated[bool, typer.Option(help="Have two processes exchange data, too; with --cluster each two nodes.")] = True,
    cluster: Annotated[bool, typer.Option("--cluster", help="Look at a Ray cluster instead: its failure domains and links.")] = False,
    address: Annotated[str, typer.Option(help="With --cluster: auto, or HOST:PORT of its head.")] = "auto",
    world: Annotated[int | None, typer.Option(help="With --cluster: ranks of the run to judge it for.", show_default="all slots")] = None,
    spares: Annotated[int | None, typer.Option(help="With --cluster: its spares.", show_default="0")] = None,
    config: Annotated[list[str] | None, typer.Option(help="With --cluster: settings of the run, as fleet run takes them.")] = None,
) -> None:
    """Check this machine before it trains: products, memory, network, and what the driver knows of its GPUs. Or a whole cluster."""
    if cluster:
        from fleet.cli.doctor_cluster import examine

        raise typer.Exit(examine(address, context.params, gather, json_))
    _check_alone(context.params)
    from actors.preflight import measure
    from policies.preflight import FATAL_XIDS, admit, judge

    checks = judge(measure(FATAL_XIDS, gather=gather))
    decision = admit(checks)
    if json_:
        told = {"verdict": decision.action, "reason": decision.reason, "checks": [_plain(check) for check in checks]}
        print(json.dumps(told, indent=2))
    else:
        _table(checks, decision.action, decision.reason)
    raise typer.Exit(0 if decision.action == "admit" else 1)


def _check_alone(values: Mapping[str, Any]) -> None:
    for name in ("world", "spares", "config"):
        if values[name] not in (None, (), []):
            raise ConfigError(f"--{name}", values[name], "it is about a cluster, and this machine is asked for", "Add --cluster.")


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(doctor)


def _plain(check: Check) -> dict[str, object]:
    return {**dataclasses.asdict(check.measured), "verdict": check.verdict, "reason": check.reason}


def _figure(one: Measured) -> str:
    if one.unit not in ("FLOP/s", "B/s"):
        return f"{one.value:g} {one.unit}".strip()
    prefix, factor = next(((prefix, factor) for prefix, factor in UNITS if one.value >= factor), ("", 1.0))
    return f"{one.value / factor:.2f} {prefix}{one.unit}"


def _table(checks: list[Check], action: str, reason: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("check", "where", "value", "verdict", "reason", box=None, pad_edge=False)
    for check in checks:
        colour = COLOURS[check.verdict]
        table.add_row(check.measured.name, check.measured.where, _figure(check.measured), f"[{colour}]{check.verdict}[/]", check.reason)
    console = Console(file=sys.stdout, highlight=False)
    console.print(table)
    console.print(f"{action}: {reason}")
