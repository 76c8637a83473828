"""``fleet runs set``: settings of a run that goes on."""

from __future__ import annotations

from typing import Annotated

import typer

from fleet.app.cli.asking import have
from fleet.app.cli.config import RUNS, Storage, pairs_of

Name = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name under --storage.")]
Address = Annotated[str, typer.Option(help="RUN is one of this Ray cluster: auto, or HOST:PORT; empty: it lies here.")]


def set_(
    name: Name,
    pairs: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE", help="Setting and new value; several are changed one after the other.")
    ],
    storage: Storage = RUNS,
    address: Address = "",
) -> None:
    """Change settings of RUN while it goes on, such as world=6. Each change is in its journal."""
    from actors.messages import SettingWanted

    for key, text in pairs_of(pairs, "KEY=VALUE").items():
        have(name, storage, address, SettingWanted(key, text), key, text)
        print(f"{key} = {text}")
