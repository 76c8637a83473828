"""The way of a kill: the files through which its consequences are decided, from the agent that sees a death to the step of the spare.

*Words* go this way: messages, a recovery policy's answer, and views (``WORDS``). A file is on the way if one of its functions

- makes such a word first. The same word again is a copy: where it is decoded, numbered, repeated or written to the journal;
- handles such a message: an event's function in ``fleet.machine.table``, or ``MemberProtocol.receive``;
- or runs in between: it holds a word, as an argument or a variable, or was called, by whatever number of calls, from a function that does;
  and the function that makes or handles the next word was called from it in the same manner.

So a layer that a word only goes through is counted, wherever it is put in. Two things are not. Helpers that are called and have
returned, such as codec, log and ledger, do not hand the word on. And functions that a thread was in before a word came to it, such as an
event loop or the train function's, have nothing to do with the loss: from the spare's ``commit()`` on it is the way of any step.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from fleet.machine.table import TABLE
from fleet.protocol.events import Formed, Quiesced
from fleet.protocol.facts import ProcessLost
from fleet.protocol.instructions import Propose, Publish, Quiesce
from fleet.protocol.member import MemberProtocol
from fleet.protocol.types import Formation, View
from tests.tidy.rules import SHIPPED

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = tuple(f"{ROOT / package}{os.sep}" for package in SHIPPED)

WORDS = (ProcessLost, Quiesce, Quiesced, Formation, View, Publish, Formed, Propose)
"""In the order in which they come first."""
MAKERS = {word.__init__.__code__ for word in WORDS}
HANDLERS = {TABLE[word].do.__code__ for word in WORDS if word in TABLE} | {MemberProtocol.receive.__code__}
STEP = MemberProtocol.committed.__code__
SEEN = MAKERS | HANDLERS | {STEP}
MADE, HANDLED, STEPPED = "made", "handled", "stepped"
MOST_FILES = 12
HEADING = "From a kill to the spare that steps, file by file"
"""In ``docs/protocol.md``."""


class Crossing(NamedTuple):
    """A word was made or handled, or a step taken, at ``at_ns`` of the machine's clock.

    ``about`` tells a copy of a word from another one of its kind. ``files``: those that it came through, the innermost first.
    """

    at_ns: int
    process: str
    what: str
    word: str
    about: str
    files: tuple[str, ...]


def trace(folder: Path, process: str) -> None:
    """Trace this thread, and in a rank all threads that it starts. It is what each process of a ``PlainFleet`` may do ``first``.

    Each crossing is written to a file of ``folder`` as it happens: the process may be killed at any moment.
    """
    file = os.open(folder / f"{process}-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in SEEN:
            for what, word, about in _seen(frame):
                found = Crossing(time.monotonic_ns(), process, what, word, about, files_to(frame))
                os.write(file, (json.dumps(found) + "\n").encode())

    if threading.current_thread() is threading.main_thread():
        threading.setprofile(look)
    sys.setprofile(look)


def _seen(frame: FrameType) -> Iterator[tuple[str, str, str]]:
    """(what happens, to which word, what that is about) where a function begins. Classes with the same fields have equal constructors."""
    held = dict(frame.f_locals)
    if frame.f_code is STEP:
        yield STEPPED, "", ""
    elif frame.f_code in HANDLERS:
        yield from ((HANDLED, type(value).__name__, "") for value in held.values() if isinstance(value, WORDS))
    elif isinstance(held["self"], WORDS) and (about := _about(held)):
        yield MADE, type(held["self"]).__name__, about


def _about(given: Mapping[str, Any]) -> str:
    """Of a word that is made of these: who it is from or to, and of which view. "" of a policy's answer that nothing follows from."""
    match given:
        case {"decision": decision, "members": members}:
            return f"{decision.action} {members}" if decision.action in ("form", "grow") else ""
        case {"view": view}:
            return f"{view.generation}"
        case {"cause": _, "member": member}:
            return f"{member}"
        case {"member": member, "generation": generation}:
            return f"{member} {generation}"
        case {"generation": generation}:
            return f"{generation}"
    raise AssertionError(given)


def files_to(frame: FrameType | None) -> tuple[str, ...]:
    """From a function outwards to the last one of ours that holds a word; the first of ours alone, where none does."""
    found, last = list[str](), 1
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGES):
            found.append(path.removeprefix(f"{ROOT}{os.sep}"))
            last = len(found) if _holds(frame) else last
        frame = frame.f_back
    return tuple(dict.fromkeys(found[:last]))


def _holds(frame: FrameType) -> bool:
    values = frame.f_locals.values()
    return any(isinstance(each, WORDS) for value in values for each in (value if isinstance(value, (list, tuple)) else (value,)))


def crossings(folder: Path) -> list[Crossing]:
    """All that was traced, in order. A copy of a word is left out."""
    lines = [line for path in folder.iterdir() for line in path.read_text().splitlines()]
    known, found = set[tuple[str, str]](), []
    for *begin, files in sorted(map(json.loads, lines)):
        crossing = Crossing._make((*begin, tuple(files)))
        if crossing.what != MADE or (crossing.word, crossing.about) not in known:
            found.append(crossing)
        known |= {(crossing.word, crossing.about)} if crossing.what == MADE else set()
    return found


def way(folder: Path, spare: str) -> list[Crossing]:
    """The crossings from the first loss to the first step of ``spare`` after it; [] until it has taken that."""
    traced = crossings(folder)
    lost = next((at for at, crossing in enumerate(traced) if crossing.word == ProcessLost.__name__), len(traced))
    for at, crossing in enumerate(traced[lost:], lost):
        if crossing.what == STEPPED and crossing.process == spare:
            return traced[lost : at + 1]
    return []


def files(crossed: list[Crossing]) -> list[str]:
    """The files of these, in the order in which they are reached first."""
    return list(dict.fromkeys(path for crossing in crossed for path in reversed(crossing.files)))


def documented() -> list[str]:
    """The files that ``docs/protocol.md`` names on the way of a kill, in its order."""
    _, _, page = (ROOT / "docs/protocol.md").read_text().partition(f"\n## {HEADING}\n")
    return re.findall(rf"`((?:{'|'.join(SHIPPED)})/[\w/]+\.py)`", page.partition("\n## ")[0])
