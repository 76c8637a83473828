"""What a tracker is told of a run, and the port that every tracker fills."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fleet.errors import FleetError

FAULT, LOSS, ROLLBACK, NOTE = "fault", "loss", "rollback", "note"
"""Kinds of marks."""
ADDRESS = re.compile(r"<[\w.]+ object at 0x[0-9a-f]+>:? ?")
"""Of an object in the words of an error: another one at each try."""


class TrackerAway(FleetError):
    """The tracker's other side cannot be reached, or does not take what it is sent now. The same is tried again later."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The run. ``key`` tells it from all others, also from one of the same name; ``facts`` are its configuration and versions, as texts by
    dotted name. ``started_s`` is Unix time."""

    run: str
    key: str
    started_s: float
    facts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TrackedFigures:
    """Values by name, at ``step``. ``at_s`` is Unix time, here and below."""

    step: int
    values: Mapping[str, float]
    at_s: float


@dataclass(frozen=True, slots=True)
class TrackedMark:
    """Something that happened. ``number`` counts marks of this ``kind``, from 1 on."""

    kind: str
    number: int
    text: str
    step: int
    at_s: float


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What became known of the run after its beginning, such as the digest of its data: texts by dotted name."""

    facts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time. ``name`` says what it is of: the run, a view, a fault, a loss, a checkpoint. ``id`` is its own within the run; all
    but the run's lie inside the run's."""

    id: str
    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, str | int | float]
    failed: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """How the run ended, for now: a run that is resumed goes on after it."""

    status: str
    reason: str
    at_s: float


Item = Begun | TrackedFigures | TrackedMark | RunFacts | Span | Ended


@dataclass(frozen=True, slots=True)
class TrackerPlace:
    """Where a tracker writes, as settings and environment say. ``folder`` is for trackers that write files."""

    project: str = "fleet"
    folder: Path = field(default_factory=Path)
    url: str = ""


class Tracker(Protocol):
    """One run in one tracker. Not for several threads.

    What is given may be kept until :meth:`flush`. Each method may raise TrackerAway, and is called again with the same later: nothing is
    doubled by that. A method that the tracker has no use for does nothing.

    Attributes:
        anew: it cannot go on where an earlier process stopped: it removes what that wrote, and is given everything again.
        refused: how many figures and facts the other side will never take, as it has said; ``why`` is what it said last.
        where: what to open to see the run.
    """

    anew: bool
    refused: int
    why: str
    where: str

    def begin(self, run: Begun) -> None:
        """Find the run, or make it. Also of a run that goes on."""

    def figures(self, step: int, values: Mapping[str, float], at_s: float) -> None:
        """Values at a step, at a Unix time."""

    def facts(self, facts: Mapping[str, str]) -> None:
        """Texts about the run."""

    def mark(self, mark: TrackedMark) -> None:
        """Something happened."""

    def span(self, span: Span) -> None:
        """A stretch of time is over."""

    def artefact(self, path: Path) -> None:
        """Keep this file with the run; it is there until the next flush has returned."""

    def end(self, ended: Ended) -> None:
        """The run has ended, for now."""

    def flush(self) -> None:
        """When it returns, all that was given is where it belongs."""

    def close(self) -> None:
        """Nothing more is given. When it returns, a run that has ended is complete at the other side. Called again, it does nothing."""


def short(error: BaseException) -> str:
    """What an error says, in one line, and the same each time."""
    words = " ".join(str(error).split())
    return ADDRESS.sub("", words)[:300] or type(error).__name__
