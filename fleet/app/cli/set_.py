"""Commands that ask something of a run that goes on: ``fleet set``, ``resize`` and ``pause``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleet.app.cli.config import RUNS, Storage, pairs_of
from fleet.errors import ConfigError

if TYPE_CHECKING:
    from actors.messages import Wanted

Name = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name under --storage.")]
Address = Annotated[str, typer.Option(help="RUN is one of this Ray cluster: auto, or HOST:PORT; empty: it lies here.")]
PAUSED = "paused by its user"


def set_(
    name: Name,
    pairs: Annotated[list[str], typer.Argument(metavar="KEY=VALUE", help="What to change; several are changed one after the other.")],
    storage: Storage = RUNS,
    address: Address = "",
) -> None:
    """Change settings of RUN while it goes on. Each change is in its journal."""
    from actors.messages import SettingWanted

    for key, text in pairs_of(pairs, "KEY=VALUE").items():
        have(name, storage, address, SettingWanted(key, text), key, text)
        print(f"{key} = {text}")


def resize(
    name: Name,
    world: Annotated[int, typer.Option(help="Ranks that train from now on: from min_ranks to the --max-world that the run began with.")],
    storage: Storage = RUNS,
    address: Address = "",
) -> None:
    """Have more or fewer ranks of RUN train, while it goes on.

    More are taken in at a step boundary, as soon as they are there. Fewer leave between two steps, and stand by: no step is lost, and the
    result is the same.
    """
    from actors.messages import SettingWanted
    from fleet.settings.live import WORLD

    have(name, storage, address, SettingWanted(WORLD, str(world)), "--world", world)
    print(f"{name} is to have {world} ranks")


def pause(name: Name, storage: Storage = RUNS, address: Address = "") -> None:
    """Have RUN keep its last step and end, so that its machines are free. ``fleet run --resume RUN`` goes on from that step."""
    from actors.messages import PauseWanted

    have(name, storage, address, PauseWanted(PAUSED), "RUN", name)
    there = f" --address {address}" if address else f" --storage {storage}" if storage != RUNS else ""
    print(f"{name} keeps its last step and ends; fleet run --resume {name}{there} goes on from it")


def have(name: str, storage: str, address: str, wanted: Wanted, field: str, value: object) -> None:
    """Have the run do what is wanted. Raises ConfigError about ``field``: the run refuses it. Raises FleetError: nobody answers."""
    if address:
        from fleet.app.cli.attach import found

        with found(name, address) as there:
            answer = there.ask(wanted)
    else:
        from actors.asking import ask
        from fleet.app.plans import find_run

        answer = ask(find_run(name, Path(storage)), wanted)
    if answer.refused:
        raise ConfigError(field, value, answer.refused, answer.way_out)
