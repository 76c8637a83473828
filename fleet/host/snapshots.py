"""A follower's fold, kept beside its journal, so that a long journal opens at once: the reader goes on from the snapshot.

The journal stays the only truth. The reader does not use a snapshot that does not fit the journal, is damaged, or comes from other code. It
then folds the journal from its start. Reading one makes only objects of the fold, so that a folder from elsewhere can be opened.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import pickle
from collections import Counter, OrderedDict, deque
from functools import cache
from pathlib import Path
from typing import Any

logger = logging.getLogger("fleet.host.snapshots")

NAME = "fold.snapshot"
MAGIC = b"fleet fold 1\n"
PROBE_BYTES = 4_096
EVERY_BYTES = 64 * 2**20
"""A journal that has grown by so much since the last snapshot gets a new one."""
LEAST_BYTES = 4 * 2**20
"""Folding a shorter journal is as fast as reading its snapshot."""
OURS = ("ledger", "protocol")
"""Packages of ``fleet`` whose classes make up a fold."""
BUILTIN = {("collections", kind.__name__) for kind in (Counter, OrderedDict, deque)} | {("builtins", "set"), ("builtins", "frozenset")}


@cache
def _code() -> str:
    """Digest of the code that makes a fold: a snapshot of another version may have another meaning."""
    here = Path(__file__)
    files = [path for room in OURS for path in sorted((here.parents[1] / room).glob("*.py"))]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in (*files, here.with_name("follow.py")))).hexdigest()


class _Reader(pickle.Unpickler):
    """Unpickles only the fold's own classes."""

    def find_class(self, module: str, name: str) -> Any:
        ours = module.split(".")[:-1] in (["fleet", room] for room in OURS)
        found = super().find_class(module, name) if ours or (module, name) in BUILTIN else None
        if not isinstance(found, type) or found.__module__ != module:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a fold")
        return found


def _probe(journal: Path, offset: int) -> str:
    """Digest of the journal's beginning, and of the bytes just before ``offset``."""
    with journal.open("rb") as file:
        head = file.read(min(PROBE_BYTES, offset))
        file.seek(max(0, offset - PROBE_BYTES))
        return hashlib.sha256(head + file.read(min(PROBE_BYTES, offset))).hexdigest()


def save(journal: Path, offset: int, line: int, fold: Any) -> bool:
    """Keep ``fold``, of the first ``offset`` bytes and ``line`` lines of ``journal``. False, and a warning, when it cannot be written."""
    header = {"code": _code(), "offset": offset, "line": line, "probe": _probe(journal, offset)}
    path = journal.with_name(NAME)
    new = path.with_suffix(f".{os.getpid()}")
    try:
        with new.open("wb") as file:
            file.write(MAGIC + json.dumps(header).encode() + b"\n")
            pickle.dump(fold, file, protocol=5)
        os.replace(new, path)
    except OSError as error:
        logger.warning("no snapshot of %s was kept: %s", journal, error)
        new.unlink(missing_ok=True)
        return False
    return True


def load(journal: Path) -> tuple[int, int, Any] | None:
    """(offset, line, fold) of the snapshot beside ``journal``; None when there is none that fits it."""
    path = journal.with_name(NAME)
    try:
        data = path.read_bytes()
        magic, header_line, body = data[: len(MAGIC)], *data[len(MAGIC) :].split(b"\n", 1)
        header = json.loads(header_line)
        fits = magic == MAGIC and header["code"] == _code() and header["offset"] <= journal.stat().st_size
        if not fits or header["probe"] != _probe(journal, header["offset"]):
            return None
        return header["offset"], header["line"], _Reader(io.BytesIO(body)).load()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, EOFError, pickle.UnpicklingError) as error:
        logger.warning("%s is not used: %r", path, error)
        return None
