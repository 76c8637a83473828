"""The run that this process is a rank of, for a train function that is not given it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fleet.errors import LoopError

if TYPE_CHECKING:
    from actors.rank.loop import Run

_runs: list[Run] = []
_looks: list[None] = []
"""One for each script whose top level runs here to be looked at, and not to train."""


def current_run() -> Run:
    """The ``fleet.Run`` of this rank. For train functions that are called with something else, as those of Ray Train are.

    Raises:
        LoopError: this process is no rank, or is not in its train function.
    """
    if not _runs:
        raise LoopError("fleet.current_run() was called outside of a train function: there is no run in this process")
    return _runs[-1]


def is_main() -> bool:
    """Whether this is the process for what should be done by one of them: ``run.is_main``, also at the top level of a script.

    There it is True in the process of slot 0, and in each that replaces it. It is False in the process of ``fleet run``, which executes
    the script ahead of the ranks to see whether it can be; and True where there is no Fleet, as under ``python train.py``. It asks nobody.
    What must happen, whoever is lost, is for ``run.once``.
    """
    return _runs[-1].is_main if _runs else not _looks


@contextmanager
def looking() -> Iterator[None]:
    """A script is executed meanwhile by a process that does not train with it."""
    _looks.append(None)
    try:
        yield
    finally:
        _looks.pop()


@contextmanager
def within(run: Run) -> Iterator[None]:
    """``run`` is the current one meanwhile, in all threads of the process."""
    _runs.append(run)
    try:
        yield
    finally:
        _runs.remove(run)
