"""How the ``fleet`` command ends: one table of exit codes."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes; where several would do, the first of 1, 130, 3, 5, 4."""

    DONE = 0
    FAILED = 1
    REFUSED = 2
    NOT_SAVED = 3
    UNMET = 4
    VIOLATED = 5
    STOPPED = 130


MEANINGS = {
    Exit.DONE: "The run is completed, and all that was asked of it holds.",
    Exit.FAILED: "The run failed, or its twin failed or ended with other bits; a check of `fleet doctor` failed.",
    Exit.REFUSED: "Bad input, named with field, value, reason and way out, before any process starts; or what is resumed is not what ran.",
    Exit.NOT_SAVED: "All steps are committed, but the final checkpoint could not be kept.",
    Exit.UNMET: "What `--expect` says is not so.",
    Exit.VIOLATED: "A [check of what should hold after chaos](chaos.md#checks) says that it does not.",
    Exit.STOPPED: "The run was stopped in order.",
}


def exit_codes_table() -> str:
    """The codes, as a table for the docs."""
    return "\n".join(["| code | when |", "|---|---|", *(f"| {code.value} | {MEANINGS[code]} |" for code in Exit)]) + "\n"
