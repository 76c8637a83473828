"""The run that this process is a rank of, for a train function without the run as argument."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fleet.errors import LoopError

if TYPE_CHECKING:
    from actors.rank.loop import Run

_runs: list[Run] = []
_looks: list[None] = []
"""One for each script whose top level this process executes without training."""


def current_run() -> Run:
    """The ``fleet.Run`` of this rank. For train functions that get other arguments, as those of Ray Train do.

    Raises:
        LoopError: this process is no rank, or is not in its train function.
    """
    if not _runs:
        raise LoopError("fleet.current_run() was called outside of a train function: there is no run in this process")
    return _runs[-1]


def is_main() -> bool:
    """Whether this process is the one for work that one process should do: ``run.is_main``, also at the top level of a script.

    There it is True in the process of slot 0, and in each process that replaces it. It is False in the process of ``fleet run``, which
    executes the script before the ranks, to check it. It is True without Fleet, as under ``python train.py``. It needs no message. Use
    ``run.once`` for work that must be done even if a rank is lost.
    """
    return _runs[-1].is_main if _runs else not _looks


@contextmanager
def looking() -> Iterator[None]:
    """Context in which this process executes a script without training."""
    _looks.append(None)
    try:
        yield
    finally:
        _looks.pop()


@contextmanager
def within(run: Run) -> Iterator[None]:
    """Context in which ``run`` is the current run, in all threads of the process."""
    _runs.append(run)
    try:
        yield
    finally:
        _runs.remove(run)
