"""The working directory of a twin. It shows the files that the run saw, and the twin's writes there change nothing of the run's.

A twin repeats the run's work. So the folder leaves out files that the run has written since its begin, and the twin makes its own. It links
the rest, which neither of them writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

MOST_ENTRIES = 100_000
"""The search ends after so many files. A folder with more files below it is linked whole: it most likely holds a data set."""


def make(work: Path, seen: Path, since_unix_s: float, excluded: Iterable[Path]) -> None:
    """Fill ``work`` with links to entries of the folder ``seen`` that were not written since ``since_unix_s``.

    Hidden entries are linked whole. ``excluded`` are left out: the folders with runs, one of which may hold ``work`` itself.
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
    """Whether an entry in or below ``folder`` was written since then, or is one to leave out."""
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
