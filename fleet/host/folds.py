"""Folds a journal's old part in its file, while no process writes it. :mod:`fleet.ledger.folding` decides which records are folded."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fleet.errors import FleetError, JournalError
from fleet.host.journal import read_journal, sync_directory, take_lock
from fleet.ledger.folding import KEPT_STEPS, folded, survey
from fleet.ledger.goodput import Ledger
from fleet.protocol.journal import encode_line

FOLDING = ".folding"
CLOSE = 1e-9
"""Sums of the same floats in another order differ by less."""


@dataclass(frozen=True, slots=True)
class Fold:
    """Bytes of a journal before it was folded, and after."""

    before_bytes: int
    after_bytes: int


def fold_journal(path: Path, kept_steps: int = KEPT_STEPS) -> Fold:
    """Fold the old part of the journal at ``path``, in its place. The folded journal replaces it only where the ledger's figures agree.

    Raises:
        JournalError: a process writes the journal, it is damaged, or its figures would change. The journal then stays as it was.
    """
    with path.open("rb") as held:
        if not take_lock(held):
            raise JournalError(f"{path}: a process is writing this journal: it can be folded once the run does not go on")
        new = path.with_name(path.name + FOLDING)
        try:
            _write(path, new, kept_steps)
            _compare(path, new)
            sizes = Fold(path.stat().st_size, new.stat().st_size)
            if sizes.after_bytes < sizes.before_bytes:
                os.replace(new, path)
                sync_directory(path.parent)
            return Fold(sizes.before_bytes, min(sizes.before_bytes, sizes.after_bytes))
        finally:
            with suppress(FileNotFoundError):
                new.unlink()


def _refuse(message: str) -> None:
    raise JournalError(message)


def _write(path: Path, new: Path, kept_steps: int) -> None:
    known = survey(read_journal(path, spans=False, on_torn=_refuse), kept_steps)
    with new.open("wb") as file:
        file.writelines(map(encode_line, folded(read_journal(path, on_torn=_refuse), known)))
        file.flush()
        os.fsync(file.fileno())


def _compare(path: Path, new: Path) -> None:
    was, now = (Ledger().apply_all(read_journal(each)).summary() for each in (path, new))
    if not alike(was, now):
        raise JournalError(f"{path}: its figures would change if it were folded, so it stays as it is")


def _plain(summary: object) -> object:
    return {name: getattr(summary, name) for name in summary.__dataclass_fields__}  # type: ignore[attr-defined]


def alike(one: object, other: object) -> bool:
    """Whether two values are the same. Floats may differ by as much as their sums in another order."""
    if isinstance(one, float) and isinstance(other, float):
        return one == other or abs(one - other) <= CLOSE * max(abs(one), abs(other), 1.0)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if hasattr(one, "__dataclass_fields__") and type(one) is type(other):
        return alike(_plain(one), _plain(other))
    return one == other


def is_written(path: Path) -> bool:
    """Whether a process of this host has the journal open to write it."""
    try:
        with path.open("rb") as held:
            return not take_lock(held)
    except OSError as error:
        raise FleetError(f"{path}: {error}") from error
