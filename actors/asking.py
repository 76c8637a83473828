"""What a user wants of a run that goes on: its coordinator is asked directly. Neither Ray nor torch is needed."""

from __future__ import annotations

import socket
from pathlib import Path

from actors.messages import DOWN, UP, SettingAnswer, Wanted
from fleet.errors import FleetError, LineRefused
from fleet.host import secret
from fleet.host.lines import Knock
from fleet.host.wire import FrameBuffer, frame
from fleet.protocol.proof import ANSWERS_BYTES, Purpose
from fleet.settings.live import ADDRESS_FILE

ANSWER_S = 10.0


def ask(folder: Path, wanted: Wanted) -> SettingAnswer:
    """Have the coordinator of the run in ``folder`` do what is wanted; it answers why not, if not.

    Raises FleetError: nobody answers.
    """
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
    assert isinstance(answer, SettingAnswer)
    return answer
