"""``fleet doctor``: is this machine, this cluster or this script fit to train? A table, or JSON; exit code 1 when a check fails."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleet.app.cli import prints as cli_print
from fleet.app.cli.config import check_config
from fleet.errors import ConfigError
from fleet.ledger.figures import with_prefix
from fleet.protocol.exit_codes import Exit

if TYPE_CHECKING:
    from fleet.ledger.health import HealthCheck, MeasuredFigure


def doctor(
    context: typer.Context,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="With a SCRIPT, after --: what it finds in sys.argv.", show_default=False)
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    gather: Annotated[bool, typer.Option(help="Have two processes exchange data, too; with --cluster each two nodes.")] = True,
    cluster: Annotated[bool, typer.Option("--cluster", help="Look at a Ray cluster instead: its failure domains and links.")] = False,
    address: Annotated[str, typer.Option(help="With --cluster: auto, or HOST:PORT of its head.")] = "auto",
    world: Annotated[
        int | None,
        typer.Option(help="With --cluster and --shards: ranks of the run to judge it for.", show_default="all slots; with --shards 1"),
    ] = None,
    spares: Annotated[int | None, typer.Option(help="With --cluster: its spares.", show_default="0")] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(help="Settings of the run, as fleet run takes them. Alone: check them, and say what differs from the defaults."),
    ] = None,
    determinism: Annotated[
        str, typer.Option(metavar="SCRIPT", help="Try a training script instead: is it the same each time, and what is not?")
    ] = "",
    shards: Annotated[
        str, typer.Option(metavar="SCRIPT", help="Time a training script instead: what does each number of shards cost?")
    ] = "",
    set_: Annotated[list[str] | None, typer.Option("--set", help="With a SCRIPT: key=value for run.options; repeatable.")] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is the name of a module, as for python -m.")] = False,
) -> None:
    """Check this machine before it trains: arithmetic, memory, network, GPU errors. Or a cluster, a script, or settings."""
    _check_one(context.params)
    if determinism or shards:
        from fleet.app.cli import doctor_script

        tried = doctor_script.examine_determinism if determinism else doctor_script.examine_shards
        raise typer.Exit(tried(determinism or shards, context.params, json_))
    if cluster:
        from fleet.app.cli.doctor_cluster import examine

        raise typer.Exit(examine(address, context.params, gather, json_))
    _check_alone(context.params)
    if config:
        check_config(config, json_)
        return
    from actors.preflight import measure
    from policies.preflight import FATAL_XIDS, admit, judge

    checks = judge(measure(FATAL_XIDS, gather=gather))
    decision = admit(checks)
    if json_:
        answer = {"verdict": decision.action, "reason": decision.reason, "checks": [_plain(check) for check in checks]}
        print(json.dumps(answer, indent=2))
    else:
        _table(checks, decision.action, decision.reason)
    raise typer.Exit(Exit.DONE if decision.action == "admit" else Exit.FAILED)


def _check_one(values: Mapping[str, Any]) -> None:
    """One thing is examined at a time, and nothing is said that is about another. Raises ConfigError."""
    asked = [f"--{name}" for name in ("cluster", "determinism", "shards") if values[name]]
    if len(asked) > 1:
        raise ConfigError(asked[1], values[asked[1].removeprefix("--")], f"it contradicts {asked[0]}", "Ask for one at a time.")
    for name, option in (("set_", "--set"), ("arguments", "ARGUMENTS"), ("module", "--module")):
        if values[name] and asked[:1] not in (["--determinism"], ["--shards"]):
            reason = "it is about a script, and none is given"
            raise ConfigError(option, values[name], reason, "Add --determinism SCRIPT or --shards SCRIPT.")
    if asked and asked[0] != "--cluster":
        for name in ("spares", *(["world"] if values["determinism"] else [])):
            if values[name] is not None:
                raise ConfigError(f"--{name}", values[name], f"{asked[0]} tries one rank of each kind", "Leave it out.")


def _check_alone(values: Mapping[str, Any]) -> None:
    for name in ("world", "spares"):
        if values[name] not in (None, (), []):
            raise ConfigError(f"--{name}", values[name], "it is about a cluster, and this machine is asked for", "Add --cluster.")


def _plain(check: HealthCheck) -> dict[str, object]:
    return {**dataclasses.asdict(check.measured), "verdict": check.verdict, "reason": check.reason}


def _figure(one: MeasuredFigure) -> str:
    if one.unit not in ("FLOP/s", "B/s"):
        return f"{one.value:g} {one.unit}".strip()
    return with_prefix(one.value, one.unit)


def _table(checks: list[HealthCheck], action: str, reason: str) -> None:
    rows = [(check.measured.name, check.measured.where, _figure(check.measured), check.verdict, check.reason) for check in checks]
    cli_print.write(*cli_print.table(("check", "where", "value", "verdict", "reason"), rows), f"{action}: {reason}")
