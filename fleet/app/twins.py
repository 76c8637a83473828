"""The verdict on a run and its twin, the same run without faults: one of four, the same everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

SHOWN_DIGITS = 12


class Sameness(StrEnum):
    """The verdict on the bits of a run and its twin. The last two say nothing about them."""

    EQUAL = "equal"
    """Both are completed, with the same bits."""
    DIFFERENT = "different"
    """Both are completed, with other bits."""
    NOT_COMPLETED = "not completed"
    """The twin was begun, and did not come to its end."""
    NOT_RUN = "not run"
    """The run itself did not come to its end, so no twin was begun."""

    @property
    def equal(self) -> bool | None:
        """Whether the bits are equal; None: not known."""
        return {Sameness.EQUAL: True, Sameness.DIFFERENT: False}.get(self)


def verdict(run_digest: str, twin_digest: str, completed: bool, status: str, reason: str, world: int) -> dict[str, Any]:
    """The verdict as plain data. ``status`` and ``reason`` are those of the twin's end; ``completed``: it has come to its end."""
    known = completed and run_digest != "" != twin_digest
    found = Sameness.NOT_COMPLETED if not known else Sameness.EQUAL if run_digest == twin_digest else Sameness.DIFFERENT
    return _plain(found, world, run_digest, twin_digest, status, reason)


def not_run(status: str, reason: str, world: int) -> dict[str, Any]:
    """The verdict on a run that ended as ``status`` before its last step, so that no twin was begun."""
    return _plain(Sameness.NOT_RUN, world, "", "", status, reason)


def _plain(found: Sameness, world: int, run_digest: str, twin_digest: str, status: str, reason: str) -> dict[str, Any]:
    digests = {"run_digest": run_digest, "twin_digest": twin_digest}
    return {"verdict": str(found), "equal": found.equal, "world": world, **digests, "status": status, "reason": reason}


def found_in(twin: Mapping[str, Any]) -> Sameness:
    """The verdict of plain data."""
    return Sameness(twin["verdict"])


def in_words(twin: Mapping[str, Any]) -> str:
    """A line for people."""
    why = ": ".join(filter(None, (twin["status"], twin["reason"])))
    match found_in(twin):
        case Sameness.EQUAL:
            return f"equal, bit for bit, without faults, world {twin['world']}: sha256 {_short(twin['run_digest'])}"
        case Sameness.DIFFERENT:
            return f"DIFFERENT, world {twin['world']}: run {_short(twin['run_digest'])}, twin {_short(twin['twin_digest'])}"
        case Sameness.NOT_COMPLETED:
            return f"not completed, so nothing was compared: it ended as {why}"
        case Sameness.NOT_RUN:
            return f"not run: this run ended as {why}"


def _short(digest: str) -> str:
    """The first digits of a digest; the report's JSON has all."""
    return digest[:SHOWN_DIGITS] + ("..." if len(digest) > SHOWN_DIGITS else "")
