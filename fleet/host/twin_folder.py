"""The working directory of a twin: it shows what the run saw, and what the twin writes there touches nothing of the run's.

A twin does again what the run did. So whatever the run has written since it began is left out, and the twin makes its own; the rest, which
neither of them writes, is linked.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

MOST_ENTRIES = 100_000
"""So many files are looked at. A folder that has more below it is linked as it is: a data set, most likely."""


def make(work: Path, seen: Path, since_unix_s: float, excluded: Iterable[Path]) -> None:
    """Fill ``work`` with links to what lies in the folder ``seen`` and was not written since ``since_unix_s``.

    Hidden entries are linked as they are. ``excluded`` are left out: where runs are kept, in which ``work`` itself may be.
    """
    left_out = {path.resolve() for path in excluded}
    work.mkdir(parents=True, exist_ok=True)
    for entry in sorted(os.scandir(seen), key=lambda one: one.name):
        path = Path(entry.path)
        if path.resolve() in left_out:
            continue
        if not entry.is_dir(follow_symlinks=False):
            if entry.stat(follow_symlinks=False).st_mtime < since_unix_s:
                (work / entry.name).symlink_to(path.absolute())
        elif entry.name.startswith(".") or not _touched(path, since_unix_s, left_out):
            (work / entry.name).symlink_to(path.absolute(), target_is_directory=True)
        else:
            make(work / entry.name, path, since_unix_s, left_out)


def _touched(folder: Path, since_unix_s: float, left_out: set[Path]) -> bool:
    """Whether something in or below ``folder`` was written since, or is to be left out."""
    seen = 0
    for root, folders, files in os.walk(folder):
        paths = [Path(root), *(Path(root, name) for name in files)]
        if any(path.resolve() in left_out for path in (Path(root, name) for name in folders)):
            return True
        if any(path.lstat().st_mtime >= since_unix_s for path in paths):
            return True
        seen += len(paths)
        if seen > MOST_ENTRIES:
            return False
    return False
