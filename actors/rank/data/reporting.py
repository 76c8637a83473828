"""Reports of view rank 0 on the run's data: the data set of each step, and its files."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from actors.rank.data.catalogue import FileCatalogue, default_cache, report_files
from actors.rank.data.feeds import Feed
from actors.rank.membership.client import Client
from fleet.host.scheduling import give_way
from fleet.protocol.facts import DataFiles, DataRead
from fleet.protocol.types import DataFile

MOST = 32
"""At most so many data sets of one size are reported. A loop that makes a new one in each step would read samples for each report."""


class DataReporter:
    """The reports of one rank, over all of its steps.

    Args:
        cache: of digests of files; None: the user's.
    """

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache or default_cache(os.environ)
        self._last: tuple[Feed, int] | None = None
        self._sizes = (0, 0, -1)
        self._history, self._count = -1, 0
        self.reporting: dict[str, threading.Thread] = {}

    def is_news(self, feed: Feed, batch_size: int, history: int) -> bool:
        """Whether the step that begins has another data set or batch size than the last step, or is the first of its history."""
        before, self._sizes = self._sizes, (feed.samples, batch_size, history)
        if self._last == (feed, history) or (self._count >= MOST and before == self._sizes):
            return False
        self._last, self._history = (feed, history), history
        self._count += 1
        return True

    def report(self, feed: Feed, step: int, client: Client, total_steps: int) -> None:
        """Report that ``step`` and later steps read from ``feed``. A thread reports its files and their digests beside the steps."""
        member, sha256 = client.protocol.member, feed.data_sha256
        samples, batch_size, _ = self._sizes
        client.say(DataRead(member, samples, batch_size, sha256, total_steps, self._history, step, feed.reported_order))
        if sha256 in self.reporting or (catalogue := feed.catalogue) is None:
            return

        def say(first: int, files: tuple[DataFile, ...]) -> None:
            client.say(_found(client, catalogue, first, files))

        def run() -> None:
            give_way()
            report_files(catalogue, feed.files, say, self._cache)

        self.reporting[sha256] = threading.Thread(target=run, name="fleet-digests", daemon=True)
        self.reporting[sha256].start()


def _found(client: Client, catalogue: FileCatalogue, first: int, files: tuple[DataFile, ...]) -> DataFiles:
    layout = catalogue.reader, catalogue.layout, catalogue.window_bytes
    return DataFiles(client.protocol.member, catalogue.data_sha256, *layout, first, len(catalogue.files), files)
