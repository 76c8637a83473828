"""How the ``fleet`` command ends: one table of exit codes."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes; where several would do, the first of 1, 130, 3, 5, 4."""

    DONE = 0
    FAILED = 1
    REFUSED = 2
    NOT_SAVED = 3
    CALLED_OFF = 3  # of an experiment, which ends no other way that this could mean
    UNMET = 4
    VIOLATED = 5
    UNSEEN = 6
    STOPPED = 130
