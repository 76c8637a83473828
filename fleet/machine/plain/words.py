"""What the rank of a job that is not Fleet's tells: one JSON object a line, over the socket of the command that has started the job."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum

from fleet.errors import ProtocolError


class What(StrEnum):
    """What a rank has told."""

    UP = "up"
    """Its process is there, and waits to be let in."""
    READY = "ready"
    """Its model computes for the first time: it has started, and trains from now on."""
    STEP = "step"
    """A step of its optimizer has ended."""
    SAVE = "save"
    """``torch.save`` has begun."""
    SAVED = "saved"
    LOAD = "load"
    """``torch.load`` has begun, before the first step."""
    LOADED = "loaded"
    MOVED = "moved"
    """A file has another name now."""
    COPIED = "copied"
    RAISED = "raised"
    """The script has ended with an error."""
    DONE = "done"
    """The script has ended without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One line.

    Attributes:
        what: see there.
        at_us: when, in microseconds on the machine's monotonic clock.
        rank, launch, pid: with ``UP``, who it is: ``launch`` counts how often the launcher has started all ranks before.
        steps: how many steps its optimizer has made in this process.
        path, to: a file; of ``MOVED`` and ``COPIED`` its other name. Empty where there is none.
        bytes: size of a file that was saved.
        blocking: it holds up the training loop; else another thread does it.
        text: with ``RAISED``, the error's class and words.
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
    """Inverse of what a rank writes. Raises ProtocolError when it is none."""
    try:
        parsed = json.loads(line)
        return Word(**(parsed | {"what": What(parsed["what"]), "at_us": int(parsed["at_us"])}))
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolError(f"a rank has told {line[:200]!r}: {error}") from error
