"""A user's request to a run that goes on, sent directly to its coordinator. It needs neither Ray nor torch."""

from __future__ import annotations

import socket
from pathlib import Path

from actors.messages import DOWN, UP, SettingAnswer, Wanted
from fleet.errors import FleetError, LineRefused
from fleet.host import secret, tls
from fleet.host.journal import read_journal
from fleet.host.lines import Knock
from fleet.host.wire import FrameBuffer, frame
from fleet.protocol.proof import ANSWERS_BYTES, Purpose
from fleet.protocol.records import RunStarted, configuration, section
from fleet.settings.live import ADDRESS_FILE

ANSWER_S = 10.0
UNKNOWN = "it is unknown whether that was done: its journal shows it, see fleet report"


def ask(folder: Path, wanted: Wanted) -> SettingAnswer:
    """Send the request ``wanted`` to the coordinator of the run in ``folder``. The answer says why it was refused, if it was.

    Raises FleetError: no coordinator answers, or it did not answer in time, so that the result is unknown.
    """
    name = folder.name
    try:
        host, port = (folder / ADDRESS_FILE).read_text().rsplit(":", 1)
        with _reached(folder, host, int(port)) as line:
            proof = Knock(line, Purpose.SETTING, secret.read(folder)).proof()
            line.sendall(proof + frame(UP.encode(wanted)))
            buffer, frames = FrameBuffer(ANSWERS_BYTES[Purpose.SETTING]), list[bytes]()
            while not frames and (data := line.recv(65536)):
                frames = buffer.feed(data)
    except LineRefused as error:
        raise FleetError(f"{name}: the process at {host}:{port} is not its coordinator, or that of another run: {error}") from error
    except FileNotFoundError as error:
        raise FleetError(
            f"{name}: no coordinator answers: the run has not begun yet, or has ended ({error.filename} is not there)"
        ) from error
    except TimeoutError as error:
        raise FleetError(f"{name}: its coordinator has not answered for {ANSWER_S:g} s, and {UNKNOWN}") from error
    except OSError as error:
        raise FleetError(f"{name}: no coordinator answers, so the run does not go on ({error})") from error
    if not frames:
        raise FleetError(f"{name}: its coordinator hung up before it answered, and {UNKNOWN}")
    answer = DOWN.decode(frames[0])
    assert isinstance(answer, SettingAnswer)
    return answer


def _reached(folder: Path, host: str, port: int) -> socket.socket:
    """Connected to the coordinator of the run in ``folder``; from another host, as that run encrypts. Raises OSError, ConfigError."""
    line = socket.create_connection((host, port), timeout=ANSWER_S)
    if tls.between_hosts(line):
        first = next(read_journal(folder / "journal.jsonl", spans=False), None)
        assert isinstance(first, RunStarted)
        tls.hold(str(section(configuration(first.config), "settings").get("tls", "")))
    return tls.secured(line)
