"""How the ``fleet`` command ends: one table of exit codes."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes. Where several apply, ``fleet`` takes the first of 1, 130, 3, 5, 4."""

    DONE = 0
    FAILED = 1
    REFUSED = 2
    NOT_SAVED = 3
    CALLED_OFF = 3  # of an experiment: for experiments, 3 has no other meaning
    UNMET = 4
    VIOLATED = 5
    UNSEEN = 6
    STOPPED = 130
