"""``fleet experiment scale``: a prediction of a larger world from smaller ones. Heavy imports wait until the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fleet.app.cli import config as cli_config
from fleet.app.cli import prints as cli_print
from fleet.app.cli.config import option, option_of
from fleet.errors import ConfigError
from fleet.host.clock import MonotonicClock
from fleet.protocol.exit_codes import Exit

SCALE = "fleet.app.scale:ScaleRequest"
console = cli_print.Terminal(stderr=True)


def scale(
    script: Annotated[str, typer.Argument(help="Python file with a function train(run).")],
    hold_out: Annotated[int, option_of(SCALE, "hold_out", "One of the worlds, predicted from the others before it is measured.")],
    seconds: Annotated[float, option_of(SCALE, "seconds", "Training at each world, all rounds together.")],
    rounds: Annotated[int, option_of(SCALE, "rounds", "Visits of each world: how they differ is what intervals rest on.")],
    mtbf_hours: Annotated[float, option_of(SCALE, "rank_mtbf_hours", "Mean hours between two losses of one rank.")],
    recover: Annotated[float, option_of(SCALE, "recover_s", "Seconds that all ranks stand still after a loss.")],
    pays_up_to: Annotated[float, option_of(SCALE, "pays", "A further token may cost so many times the cheapest one.")],
    worlds: Annotated[str, typer.Option(help="World sizes to be measured, joined by commas.")] = "1,2,4,8",
    cpu_quota: Annotated[float | None, typer.Option(help="Cores of each rank, such as 0.25, where a host has too few.")] = None,
    steps: Annotated[int | None, option("steps")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value for run.options; repeatable.")] = None,
    config: Annotated[
        list[str] | None, typer.Option(help="File of settings, or key=value; repeatable. fleet init fleet.toml writes all.")
    ] = None,
    storage: Annotated[str | None, option("storage")] = None,
    json_: Annotated[str, typer.Option("--json", help="Write all of it to this file, which fleet plan --measured takes.")] = "scale.json",
) -> None:
    """Train SCRIPT with some worlds for a while each, predict another one and measure it, and say where adding ranks stops paying."""
    from fleet.app.scale import ScaleRequest
    from fleet.app.scale import scale as carry_out

    settings: dict[str, Any] = {"config": tuple(config or ()), "options": cli_config.pairs_of(set_ or [], "--set")}
    asked = ScaleRequest(
        script=script, worlds=_worlds(worlds), hold_out=hold_out, seconds=seconds, rounds=rounds, cpu_quota=cpu_quota,
        rank_mtbf_hours=mtbf_hours, recover_s=recover, pays=pays_up_to, file=Path(json_),
        settings=settings | {name: value for name, value in (("steps", steps), ("storage", storage)) if value is not None},
    )  # fmt: skip
    try:
        carry_out(asked, MonotonicClock(), _report)
    except KeyboardInterrupt:
        console.print(f"interrupted: what was measured so far is in {json_}")
        raise typer.Exit(Exit.STOPPED) from None
    console.print(f"all of it is in {json_}; fleet plan --measured {json_} plans with it")


def _worlds(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError:
        raise ConfigError("--worlds", text, "not of the form 1,2,4,8", "Join whole numbers of ranks by commas.") from None


def _report(stage: str, answer: dict[str, Any]) -> None:
    """Print the result of a stage."""
    from fleet.planning import scale_words as words

    match stage:
        case "visits":
            console.print(words.visit_line(answer["visits"][-1]))
        case "prediction":
            cli_print.write(words.prediction_line(answer["prediction"]))
        case "measured":
            cli_print.write(words.measured_line(answer["hold_out"], answer["measured"]))
        case "law":
            cli_print.write("", *words.law_lines(answer["law"]))
        case "larger":
            heads, rows = words.larger_table(answer["larger"])
            cli_print.write("", *cli_print.table(heads, rows), "", *words.larger_lines(answer["larger"]), *words.limits(answer))
