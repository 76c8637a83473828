"""A copy of the journal where the checkpoints are, so that it survives the coordinator's node."""

from __future__ import annotations

from pathlib import Path

import fsspec


class JournalMirror:
    """Copies a growing local file to ``URL/journal.jsonl``, whole: object stores cannot append. Does nothing when nothing was added."""

    def __init__(self, url: str) -> None:
        self._files, root = fsspec.core.url_to_fs(url)
        self._target = f"{root.rstrip('/')}/journal.jsonl"
        self._copied_bytes = -1

    def copy(self, journal: Path) -> bool:
        """True when something was copied. Raises OSError when the store fails; the next call copies everything again."""
        size = journal.stat().st_size
        if size == self._copied_bytes:
            return False
        self._files.put_file(str(journal), self._target)
        self._copied_bytes = size
        return True

    def fetch(self, journal: Path) -> bool:
        """Bring the copy back to ``journal`` when there is none; for a run that is resumed on another machine."""
        if journal.exists() or not self._files.exists(self._target):
            return False
        journal.parent.mkdir(parents=True, exist_ok=True)
        self._files.get_file(self._target, str(journal))
        return True
