"""Messages of a plain job's ranks: one JSON object a line, over the socket of the command that has started the job."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum

from fleet.errors import ProtocolError


class What(StrEnum):
    """The kind of a message."""

    UP = "up"
    """The process is there, and waits for the command's answer."""
    READY = "ready"
    """The model computes for the first time: the rank has started, and trains from now on."""
    STEP = "step"
    """An optimizer step has ended."""
    SAVE = "save"
    """``torch.save`` has begun."""
    SAVED = "saved"
    LOAD = "load"
    """``torch.load`` has begun, before the first step."""
    LOADED = "loaded"
    MOVED = "moved"
    """A file has a new name."""
    COPIED = "copied"
    RAISED = "raised"
    """The script has ended with an error."""
    DONE = "done"
    """The script has ended without an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One line.

    Attributes:
        what: the kind.
        at_us: time in microseconds on the machine's monotonic clock.
        rank, launch, pid: with ``UP``, the process. ``launch``: how often the launcher had started all ranks before.
        steps: number of optimizer steps in this process.
        path, to: a file, and for ``MOVED`` and ``COPIED`` its other name. Empty where there is none.
        bytes: size of a saved file.
        blocking: the training loop waits for it; else another thread does it.
        text: with ``RAISED``, the error's class and message.
    """

    what: What
    at_us: int
    rank: int = -1
    launch: int = -1
    pid: int = 0
    steps: int = 0
    path: str = ""
    to: str = ""
    bytes: int = 0
    blocking: bool = True
    text: str = ""


def read(line: bytes) -> Word:
    """The message in a line. Raises ProtocolError when the line is none."""
    try:
        parsed = json.loads(line)
        return Word(**(parsed | {"what": What(parsed["what"]), "at_us": int(parsed["at_us"])}))
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolError(f"a rank has sent {line[:200]!r}: {error}") from error
