"""A copy of the journal beside the checkpoints, so that it survives the coordinator's node."""

from __future__ import annotations

from pathlib import Path

from fleet.protocol.holding import Tenure
from storage.backends.causes import cause_of
from storage.backends.files import copy_in, open_files
from storage.backends.trial import detail_of, refusal
from storage.lock import RunLock

JOURNAL = "journal.jsonl"


class JournalMirror:
    """Copies a growing local file to ``URL/journal.jsonl``, whole: object stores cannot append. It copies only when the file has grown.

    ``tenure``: by which the run is held, as for :class:`storage.checkpoint.store.CheckpointStore`.
    """

    def __init__(self, url: str, tenure: Tenure | None = None) -> None:
        self._files, self._url, self._tenure = open_files(url), url, tenure
        self._copied_bytes = -1

    def copy(self, journal: Path) -> bool:
        """Whether it copied. Raises OSError when the store fails; the next call copies the whole file again.

        Raises TakenOver, with nothing written: the copy there is that of another process now.
        """
        size = journal.stat().st_size
        if size == self._copied_bytes:
            return False
        if self._tenure is not None:
            RunLock(self._url).check(self._tenure)
        copy_in(self._files, JOURNAL, journal)
        self._copied_bytes = size
        return True


def fetch_journal(url: str, journal: Path) -> bool:
    """Bring the copy back to ``journal`` when there is none: for a resume on another machine. Returns whether it did.

    Raises ConfigError when the store fails.
    """
    try:
        files = open_files(url)
        if journal.exists() or files.size(JOURNAL) is None:
            return False
        journal.parent.mkdir(parents=True, exist_ok=True)
        journal.write_bytes(files.read(JOURNAL))
        return True
    except OSError as error:
        raise refusal(url, "this machine could not read the run's journal there", cause_of(error), detail_of(error)) from error
