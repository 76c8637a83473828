"""``fleet runs drain``: a node will be taken away. Its ranks leave at a step boundary, and the run goes on without it."""

from __future__ import annotations

from typing import Annotated

import typer

from fleet.app.cli.asking import have
from fleet.app.cli.config import RUNS, Storage
from fleet.app.cli.set_ import Address, Name
from fleet.errors import ConfigError
from fleet.settings.fields import seconds

NOTICE = "30s"


def drain(
    name: Name,
    node: Annotated[str, typer.Argument(metavar="NODE", help="Index of the node, or the first letters of Ray's id of it.")],
    notice: Annotated[str, typer.Option(help="How soon it will be taken away, e.g. 30s or 5m.")] = NOTICE,
    withdraw: Annotated[bool, typer.Option("--withdraw", help="It stays after all.")] = False,
    storage: Storage = RUNS,
    address: Address = "",
) -> None:
    """Announce that NODE will be taken away from RUN while that goes on.

    Spares take the places of its ranks beside the running steps, and no step is lost. Without a spare the world shrinks right before the
    node goes.
    """
    from actors.messages import NoticeWanted

    notice_s = None if withdraw else _notice_s(notice)
    have(name, storage, address, NoticeWanted(node, notice_s, "fleet runs drain"), "NODE", node)
    print(f"node {node} stays" if notice_s is None else f"node {node} goes in {notice_s:g} s")


def _notice_s(text: str) -> float:
    notice_s = seconds(text, "--notice")
    if not 0 < notice_s < float("inf"):
        raise ConfigError("--notice", text, "must be more than 0 s", f"Leave it out for {NOTICE}.")
    return notice_s
