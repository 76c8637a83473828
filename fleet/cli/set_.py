"""``fleet set``: change a setting of a run that goes on. The coordinator is asked directly; neither Ray nor torch is needed."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleet.cli.config import RUNS, Storage
from fleet.errors import ConfigError, FleetError, LineRefused

if TYPE_CHECKING:
    from actors.messages import NoticeWanted, SettingWanted

ANSWER_S = 10.0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("set")(set_)


def set_(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name under --storage.")],
    pairs: Annotated[list[str], typer.Argument(metavar="KEY=VALUE", help="What to change; several are changed one after the other.")],
    storage: Storage = RUNS,
) -> None:
    """Change settings of RUN while it goes on. Each change is in its journal."""
    from actors.messages import SettingWanted
    from fleet.app.plans import find_run

    folder = find_run(name, Path(storage))
    for pair in pairs:
        key, sign, text = pair.partition("=")
        if not sign:
            raise ConfigError("KEY=VALUE", pair, "not of the form key=value")
        refused, way_out = ask(folder, SettingWanted(key, text))
        if refused:
            raise ConfigError(key, text, refused, way_out)
        print(f"{key} = {text}")


def ask(folder: Path, wanted: SettingWanted | NoticeWanted) -> tuple[str, str]:
    """Have the coordinator of the run in ``folder`` do what is wanted. Returns why it refuses, or "", and the way out.

    Raises FleetError: nobody answers.
    """
    from actors.messages import DOWN, UP, SettingAnswer
    from fleet.cluster import secret
    from fleet.cluster.lines import Knock
    from fleet.protocol.proof import ANSWERS_BYTES, Purpose
    from fleet.protocol.wire import FrameBuffer, frame
    from fleet.settings.live import ADDRESS_FILE

    try:
        host, port = (folder / ADDRESS_FILE).read_text().rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=ANSWER_S) as line:
            proof = Knock(line, Purpose.SETTING, secret.read(folder)).proof()
            line.sendall(proof + frame(UP.encode(wanted)))
            buffer, frames = FrameBuffer(ANSWERS_BYTES[Purpose.SETTING]), list[bytes]()
            while not frames and (data := line.recv(65536)):
                frames = buffer.feed(data)
    except LineRefused as error:
        raise FleetError(f"{folder.name}: who answers at {host}:{port} is not its coordinator, or another run's: {error}") from error
    except OSError as error:
        raise FleetError(f"{folder.name}: no coordinator answers, so the run does not go on ({error})") from error
    answer = DOWN.decode(frames[0]) if frames else SettingAnswer("the coordinator hung up")
    return str(answer.refused), str(answer.way_out)
