"""``fleet experiment run`` and ``soak``: an expectation is written down before the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from fleet.app.cli import config as cli_config
from fleet.app.cli import prints as cli_print
from fleet.app.cli.json_out import Json, write_json
from fleet.host.clock import MonotonicClock
from fleet.protocol.exit_codes import Exit

if TYPE_CHECKING:
    from fleet.app.experiment import ExperimentOutcome
    from fleet.app.soak import Round

console = cli_print.Terminal(stderr=True)
STYLES = {"held": "green", "violated": "red", "could not be told": "yellow"}
File = Annotated[str, typer.Argument(metavar="FILE", help="An experiment in Chaos Toolkit's format: JSON or YAML.")]


def run(file: File, json_: Json = "") -> None:
    """Carry out the experiment in FILE and say of each probe whether it was held.

    Exit code 0: all were; 1: not; 2: it was not started; 3: its faults cost more than it allows, and were called off.
    """
    from fleet.app import experiment
    from fleet.ledger.report import finite

    found = experiment.load(file)
    console.print(Text(found["title"], style="bold"))
    console.print(Text(f"{found['steady-state-hypothesis']['title']} It takes as long as its runs do; fleet runs watch shows them."))
    outcome = experiment.run(found)
    show(outcome)
    write_json(finite(outcome.to_dict()), json_)
    raise typer.Exit(outcome.exit_code)


def show(outcome: ExperimentOutcome) -> None:
    """A line for each probe, and one for the whole."""
    for one in outcome.verdicts:
        value = f"{one.value:.6g}" if isinstance(one.value, float) else str(one.value)
        words = f"{value}, tolerated: {one.tolerance}" if not one.reason else one.reason
        console.print(Text.assemble((f"{one.verdict:>17}", STYLES[one.verdict]), f"  {one.probe}: {words}"))
    if outcome.failed:
        console.print(Text(f"the method came to no end: {outcome.failed}", style="red"))
    if outcome.floor:
        console.print(Text("its faults cost more than its floor allows: they were healed, and the run went on without", style="yellow"))
    console.print(Text(f"{outcome.title}: {outcome.held} of {len(outcome.verdicts)} probes held"))


def soak(
    script: Annotated[str, typer.Argument(help="Python file with a function train(run).")],
    hours: Annotated[float, typer.Option(help="No round begins after so many.")] = 8.0,
    seed: Annotated[int, typer.Option(help="Of the faults.")] = 0,
    mtbf: Annotated[float, typer.Option(help="Mean seconds between two faults.")] = 10.0,
    kinds: Annotated[str, typer.Option(help="Kinds of fault, joined by +; empty: all that can be carried out.")] = "",
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value for run.options; repeatable.")] = None,
    config: Annotated[
        list[str] | None, typer.Option(help="File of settings, or key=value; repeatable. fleet init fleet.toml writes all.")
    ] = None,
    address: Annotated[str, typer.Option(help="Join a Ray cluster: auto, or HOST:PORT; empty: a local one for each run.")] = "",
    allow_chaos: Annotated[bool, typer.Option("--allow-chaos", help="With --address: faults may strike runs on that cluster.")] = False,
) -> None:
    """Train again and again through faults of all kinds, until the time is over or a round fails; one file then has all about it.

    Exit code 0: each round was right; 1: a round failed, or no fault has struck; 2: it was not started.
    """
    from fleet.app.plans import check_chaos_allowed
    from fleet.app.soak import Soak
    from fleet.app.soak import soak as carry_out

    check_chaos_allowed(address, allow_chaos)
    settings = {"config": tuple(config or ()), "options": cli_config.pairs_of(set_ or [], "--set")}
    asked = Soak(
        script=script, seed=seed, mtbf_s=mtbf, kinds=tuple(kinds.split("+")) if kinds else None, address=address, settings=settings
    )
    clock = MonotonicClock()
    until_s = clock.now_s() + 3600.0 * hours
    rounds = carry_out(asked, lambda: clock.now_s() < until_s, _report)
    injected = any(one.executed for one in rounds)
    if not injected:
        console.print(Text("no fault has struck: this has shown nothing", style="red"))
    raise typer.Exit(Exit.FAILED if not injected or any(one.wrong for one in rounds) else Exit.DONE)


def _report(one: Round) -> None:
    line = f"round {one.number}: {one.executed} faults struck, goodput {one.goodput:.1%}"
    console.print(Text(line if not one.wrong else f"{line}: {one.wrong}. All about it: {one.kept}", style="red" if one.wrong else ""))
