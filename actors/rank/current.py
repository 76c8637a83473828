"""The run that this process is a rank of, for a train function that is not given it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fleet.errors import LoopError

if TYPE_CHECKING:
    from actors.rank.loop import Run

_runs: list[Run] = []


def current_run() -> Run:
    """The ``fleet.Run`` of this rank. For train functions that are called with something else, as those of Ray Train are.

    Raises:
        LoopError: this process is no rank, or is not in its train function.
    """
    if not _runs:
        raise LoopError("fleet.current_run() was called outside of a train function: there is no run in this process")
    return _runs[-1]


@contextmanager
def within(run: Run) -> Iterator[None]:
    """``run`` is the current one meanwhile, in all threads of the process."""
    _runs.append(run)
    try:
        yield
    finally:
        _runs.remove(run)
