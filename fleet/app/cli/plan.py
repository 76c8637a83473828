"""``fleet plan``: the answer as a table, as JSON, or as one page. Everything heavier than typer is imported when the command runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleet.app.cli import prints as cli_print
from fleet.app.cli.config import option_of
from fleet.app.cli.json_out import Json, write_json
from fleet.errors import ConfigError
from fleet.protocol.exit_codes import Exit

if TYPE_CHECKING:
    from rich.console import Console

    from fleet.planning.inputs import PlanInput
    from fleet.planning.plan import FleetPlan
    from fleet.planning.sweep import Point, Sweep

PLAN = "fleet.planning.inputs:PlanInput"
SLOW_S = 5.0
"""A sweep that will take longer says so before it starts."""
TIMED_FROM = 50
"""Points from which on a sweep may take that long: one takes some ten milliseconds."""


def plan(
    gpus: Annotated[int, option_of(PLAN, "gpus", "GPUs that train.")],
    model: Annotated[str, option_of(PLAN, "model", "Model, e.g. llama3-70b; a wrong one lists all.")],
    hardware: Annotated[str, option_of(PLAN, "hardware", "Accelerator, e.g. h100; a wrong one lists all.")],
    fabric: Annotated[str, option_of(PLAN, "fabric", "Network between nodes, e.g. ib-ndr; a wrong one lists all.")],
    tp: Annotated[int, option_of(PLAN, "tp", "Tensor-parallel ranks; 0: the best that fits.")],
    pp: Annotated[int, option_of(PLAN, "pp", "Pipeline stages; 0: the best that fits.")],
    dp: Annotated[int, option_of(PLAN, "dp", "Replicas; 0: gpus / (tp x pp).")],
    zero: Annotated[int, option_of(PLAN, "zero", "ZeRO stage, 0 to 3.")],
    optimizer_sharding: Annotated[
        str, option_of(PLAN, "optimizer_sharding", "As Fleet keeps the state: none (whole), zero1, fsdp; auto: by --zero, in any system.")
    ],
    optimizer_copies: Annotated[int, option_of(PLAN, "optimizer_copies", "With zero1 and fsdp: other ranks that keep each part.")],
    replica_size: Annotated[int, option_of(PLAN, "replica_size", "With fsdp: ranks of a group that is a replica; 1: no groups.")],
    recovery: Annotated[str, option_of(PLAN, "recovery", "in-place, or restart of all ranks.")],
    risk: Annotated[float, option_of(PLAN, "risk", "Accepted share of time with more nodes down than spares.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="field=value for any other field; repeatable. A wrong one lists all.")
    ] = None,
    faults: Annotated[
        Path | None, typer.Option(help="Rates of a log of yours, from fleet experiment fit: how often what fails, and its repairs.")
    ] = None,
    measured: Annotated[str, typer.Option(help="A file of fleet experiment scale: what it measured stands in place of assumptions.")] = "",
    sweep: Annotated[str, typer.Option(help="field=low:high:xN or field=low:high:+N, e.g. gpus=8:131072:x2.")] = "",
    json_: Json = "",
    html: Annotated[str, typer.Option(help="Write one self-contained HTML page with plots to this file.")] = "",
) -> None:
    """Predict a fleet's speed with a model, its losses, and the changes that would help most."""
    from fleet.planning.inputs import PlanInput, parse_pairs

    named: dict[str, Any] = {"gpus": gpus, "model": model, "hardware": hardware, "fabric": fabric, "tp": tp, "pp": pp, "dp": dp,
             "zero": zero, "recovery": recovery, "risk": risk, "optimizer_sharding": optimizer_sharding,
             "optimizer_copies": optimizer_copies, "replica_size": replica_size}  # fmt: skip
    given = parse_pairs(set_ or [])
    known, said = _measured(measured, hardware, int(given.get("gpus", gpus))) if measured else ({}, [])
    asked = PlanInput(**(known | named | given))
    if faults is not None:
        from fleet.app.scenarios import asked_with
        from fleet.planning.traces.faults import load_faults

        asked = asked_with(asked, load_faults(faults), given)
    if sweep:
        _sweep(asked, sweep, json_, html)
    else:
        _answer(asked, json_, html, said)
    if json_ != "-":
        cli_print.write(*said)


def _measured(file: str, hardware: str, gpus: int) -> tuple[dict[str, float], list[str]]:
    """(fields of the plan that were measured, sentences about them). Raises ConfigError."""
    from fleet.planning.measured import OPTION, fields_of, read_measured, sentences

    try:
        found = read_measured(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            OPTION, file, f"it cannot be read: {error}", "Name the file that fleet experiment scale --json has written."
        ) from error
    fields = fields_of(found, hardware, gpus)
    return fields, sentences(found, fields)


def _answer(asked: PlanInput, json_: str, html: str, said: list[str]) -> None:
    from fleet.planning.plan import make_plan

    answer = make_plan(asked)
    data = answer.to_dict()
    write_json(data | {"notes": [*said, *data["notes"]]}, json_)
    if json_ != "-":
        _show(answer)
    if html:
        from dashboards.pages.plan import render_plan
        from fleet.planning.sweep import run_sweep

        Path(html).write_text(render_plan(answer, "gpus", [*run_sweep(asked, _around(asked))]))


def _around(asked: PlanInput) -> Sweep:
    """Fleets from a 16th of the size to 8 times it, for the page; the mapping is found anew where it was."""
    from fleet.planning.sweep import Sweep

    return Sweep("gpus", tuple(dict.fromkeys(max(1, round(asked.gpus * 2.0**power)) for power in range(-4, 4))))


# ---- tables ------------------------------------------------------------------------------------------------------------------------------


def _show(answer: FleetPlan) -> None:
    from fleet.planning.plan import notes
    from fleet.planning.words import sections

    for title, rows in sections(answer):
        width = max(len(row) for row in rows)
        first, *rest = [(*row, *[""] * (width - len(row))) for row in rows]
        cli_print.write(title, *(f"  {line}" for line in cli_print.table(first, rest)), "")
    if answer.levers:
        cli_print.write("What would help most")
    cli_print.write(*(f"{number:3}. {lever.sentence}" for number, lever in enumerate(answer.levers, 1)), *notes(answer))


def _sweep(asked: PlanInput, text: str, json_: str, html: str) -> None:
    from fleet.app.cli.prints import Terminal
    from fleet.planning.sweep import parse_sweep, run_sweep

    what = parse_sweep(text)
    points: list[Point] = []
    terminal = Terminal(stderr=True)
    _forewarn(terminal, asked, what)
    started_s = time.perf_counter()
    try:
        for point in run_sweep(asked, what):
            points.append(point)
            _progress(terminal, len(points), len(what.values), time.perf_counter() - started_s)
    except KeyboardInterrupt:
        terminal.print(f"interrupted: {len(points)} of {len(what.values)} points are kept")
    rows = [{"value": point.value, "plan": point.plan.to_dict() if point.plan else None, "refusal": point.refusal} for point in points]
    write_json({"field": what.field, "complete": len(points) == len(what.values), "points": rows}, json_)
    if json_ != "-":
        _show_sweep(what.field, points)
    best = max((point.plan for point in points if point.plan), key=lambda each: each.kept_tokens_per_s, default=None)
    if html and best:
        from dashboards.pages.plan import render_plan

        Path(html).write_text(render_plan(best, what.field, points))
    if len(points) < len(what.values):
        raise typer.Exit(Exit.STOPPED)


def _forewarn(terminal: Console, asked: PlanInput, what: Sweep) -> None:
    """One point in the middle is timed before a sweep that may be long, so that the user knows how long it will take."""
    from fleet.planning.sweep import Sweep, run_sweep

    if len(what.values) < TIMED_FROM:
        return
    began_s = time.perf_counter()
    list(run_sweep(asked, Sweep(what.field, what.values[len(what.values) // 2 :][:1])))
    whole_s = (time.perf_counter() - began_s) * len(what.values)
    if whole_s > SLOW_S:
        terminal.print(f"{len(what.values)} points will take about {whole_s:.0f} s; Ctrl-C keeps what there is")


def _progress(terminal: Console, done: int, points: int, elapsed_s: float) -> None:
    """How long it will still take, every tenth of the way, where that is worth saying."""
    left_s = elapsed_s / done * (points - done)
    if elapsed_s + left_s > SLOW_S and done % max(1, points // 10) == 0:
        terminal.print(f"{done} of {points} points, about {left_s:.0f} s left; Ctrl-C keeps what there is")


def _show_sweep(field: str, points: list[Point]) -> None:
    from fleet.planning.words import sweep_row

    heads = (field, "tp x pp x dp", "MFU", "MTBF", "goodput", "spares", "tokens/s kept", "days", "USD", "t CO2")
    cli_print.write(*cli_print.table(heads, map(sweep_row, points)))
    for point in points:
        if point.plan is None:
            where = "" if point.refusal.startswith(f"{field} = {point.value}:") else f"{field} = {point.value}: "
            cli_print.write(f"{where}{point.refusal}")
