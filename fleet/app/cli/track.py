"""``fleet runs track``: a recorded run, sent to a tracker."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Annotated

import typer

from fleet.app.cli import prints as cli_print
from fleet.app.cli.config import RUNS, Storage
from fleet.protocol.exit_codes import Exit

LIMIT_S = 600.0
console = cli_print.Terminal(stderr=True)


def track(
    run: Annotated[str, typer.Argument(help="A run's folder, or its name under --storage.")],
    to: Annotated[list[str] | None, typer.Option("--track", help="Tracker; repeatable. Without it: those that the run had.")] = None,
    storage: Storage = RUNS,
    limit_s: Annotated[float, typer.Option(help="Give up after so many seconds; what has arrived is not sent again.")] = LIMIT_S,
) -> None:
    """Send RUN to trackers: what of it has not arrived yet. A run that goes on is followed to its end."""
    from dashboards.trackers import choice
    from dashboards.trackers.session import StandingFile
    from fleet.app import tracking
    from fleet.app.plans import find_run
    from fleet.errors import ConfigError
    from fleet.host.clock import MonotonicClock
    from fleet.host.follow import is_over

    folder = find_run(run, Path(storage))
    settings = tracking.recorded(folder, to or (), os.environ)
    if not settings.to:
        raise ConfigError("--track", "", "the run had no tracker", "Name one, such as --track tensorboard.")
    choice.check(settings, os.environ)
    clock, never, journal = MonotonicClock(), threading.Event(), folder / "journal.jsonl"
    end_s = clock.now_s() + limit_s

    def over() -> bool:
        return is_over(journal)

    def wait(seconds: float) -> bool:
        never.wait(max(0.0, min(seconds, end_s - clock.now_s())))
        return clock.now_s() >= end_s

    done = True
    for name in settings.to:
        kept = StandingFile(folder, name)
        try:
            found = tracking.send(folder, name, settings, kept, over, wait)
        finally:
            kept.close()
        console.print(str(found), markup=False, highlight=False, soft_wrap=True)
        done &= found.done
    raise typer.Exit(Exit.DONE if done else Exit.FAILED)
