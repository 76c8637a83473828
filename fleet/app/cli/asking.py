"""Requests of a command to a run that goes on, of this machine or of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fleet.app.cli.config import RUNS
from fleet.errors import ConfigError

if TYPE_CHECKING:
    from actors.messages import Wanted
    from fleet.app.remote import RemoteRun


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
        way_out = f"See it with fleet runs watch {run} or fleet logs {run} --follow; fleet stop {run} ends it."
        raise ConfigError("RUN", run, "it goes on on this machine, and belongs to no cluster", way_out)


def have(name: str, storage: str, address: str, wanted: Wanted, field: str, value: object) -> None:
    """Send the request to the run. Raises ConfigError about ``field`` when the run refuses it, and FleetError without an answer."""
    if address:
        with found(name, address) as there:
            answer = there.ask(wanted)
    else:
        from actors.asking import ask
        from fleet.app.plans import find_run

        answer = ask(find_run(name, Path(storage)), wanted)
    if answer.refused:
        raise ConfigError(field, value, answer.refused, answer.way_out)
