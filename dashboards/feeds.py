"""The runs under one folder: which there are, and a follower for each that somebody looks at."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

from dashboards.metrics.table import RunsCollector
from dashboards.pages.state import run_state
from fleet.host.clock import unix_time_s
from fleet.host.follow import SILENT_S, Follower, last_words
from fleet.host.snapshots import EVERY_BYTES, LEAST_BYTES
from fleet.ledger.summary import LedgerSummary
from fleet.protocol.records import RUN_NAME

RUNNING, SILENT = "running", "silent"
POLL_S = 0.25
AGE_S = 1.0
"""While a run goes on its state is made anew so often, even when the journal has nothing new: time passes."""
MAX_OPEN = 16
"""Of more followed runs, those that nobody needs are let go, the one that was asked for the longest time ago first, and read again when
wanted. Runs that are scraped or looked at are needed, however many they are."""
ASKED_S = 60.0
"""A run was asked for within so long: somebody looks at it."""
FRESH_S = 600.0
"""A run is scraped until its journal has not grown for so long."""
SILENT_FOR_S = 86_400.0
"""One that fell silent without an end is scraped for so long: who is not there at night still finds the alert in the morning."""


class RunFeed:
    """One run's follower, kept up to date by :class:`RunFeeds`; ``body`` is the newest state as JSON, made once for all who look."""

    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self.unread = True
        self.asked_unix_s = unix_time_s()
        self._made: tuple[int, float] | None = None
        self._body = b""
        self._lock = threading.Lock()

    @property
    def version(self) -> int:
        return self.follower.version

    def state(self) -> dict[str, Any] | None:
        follower = self.follower
        started = follower.started
        if started is None:
            return {"run": follower.journal.parent.name, "status": "damaged", "damage": follower.damage} if follower.damage else None
        silent, members, injected = follower.silent(), follower.slots(), follower.injected()
        return follower.look(
            lambda report: run_state(report, members, started.config, silent=silent, damage=follower.damage, injected=injected)
        )

    def summary(self) -> LedgerSummary | None:
        """The ledger now, ``silent`` where a run that has no end is written by nobody any more; None before the run's first record."""
        summary = self.follower.summary()
        if summary is not None and summary.status == RUNNING and self.follower.silent():
            return dataclasses.replace(summary, status=SILENT)
        return summary

    def body(self) -> bytes:
        """The state as JSON; ``null`` before the run's first record. While the run goes on it is made anew once a second at most."""
        self.asked_unix_s = unix_time_s()
        with self._lock:
            if self._is_old():
                self._made = (self.version, unix_time_s())
                self._body = json.dumps(self.state(), separators=(",", ":"), allow_nan=False).encode()
            return self._body

    def needed(self) -> bool:
        """Somebody else reads it for us, somebody looks at it, or it is scraped."""
        if not self.unread or unix_time_s() - self.asked_unix_s < ASKED_S:
            return True
        limit_s = FRESH_S if self.follower.ended else SILENT_FOR_S
        changed_s = _changed_s(self.follower.journal)
        return changed_s is not None and unix_time_s() - changed_s < limit_s

    def _is_old(self) -> bool:
        if self._made is None:
            return True
        version, made_s = self._made
        age_s = unix_time_s() - made_s
        return age_s >= POLL_S if version != self.version else age_s >= AGE_S and self.follower.now_s() is not None


class RunFeeds:
    """Runs by name. Use as a context manager: a thread of its own reads the journals that are open.

    Args:
        root: folder that holds a folder for each run.
        per_rank: scrape series for each rank of large runs, too: three for each slot, at every scrape.
    """

    def __init__(self, root: Path, per_rank: bool = False) -> None:
        self.root, self.per_rank = root, per_rank
        self._open: dict[str, RunFeed] = {}
        self._ends: dict[Path, tuple[float, bool]] = {}
        self._lock = threading.Lock()
        self._stop, self._wanted = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="fleet-feeds", daemon=True)

    def __enter__(self) -> RunFeeds:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._wanted.set()
        self._thread.join(10.0)

    def journal(self, name: str) -> Path | None:
        """The journal of run ``name``; None when there is none, or when the name is no name, or leads out of the root."""
        if not RUN_NAME.fullmatch(name):
            return None
        path = self.root / name / "journal.jsonl"
        inside = path.resolve().is_relative_to(self.root.resolve())
        return path if inside and path.is_file() else None

    def get(self, name: str) -> RunFeed | None:
        """The feed of run ``name``, opened if need be; None when there is no such run."""
        with self._lock:
            feed = self._open.get(name)
            if feed is None:
                path = self.journal(name)
                if path is None:
                    return None
                feed = self._open[name] = RunFeed(Follower(path))
                self._release()
                self._wanted.set()
            feed.asked_unix_s = unix_time_s()
            return feed

    def _release(self) -> None:
        """A feed that is let go is read no more, so never one that a page still holds, or that the next scrape would open again."""
        spare = sorted((feed.asked_unix_s, name) for name, feed in self._open.items() if not feed.needed())
        for _, name in spare[: max(0, len(self._open) - MAX_OPEN)]:
            del self._open[name]

    def adopt(self, name: str, follower: Follower) -> None:
        """Serve run ``name`` from a follower that somebody else keeps up to date."""
        feed = RunFeed(follower)
        feed.unread = False
        with self._lock:
            self._open[name] = feed

    def runs(self) -> list[dict[str, Any]]:
        """All runs, newest first: what their first and last records say."""
        return [_row(path, changed_s) for changed_s, path in self._journals()[:500]]

    def _journals(self) -> list[tuple[float, Path]]:
        """(when it last changed, journal) of each run, newest first."""
        paths = [path for path in self.root.glob("*/journal.jsonl") if self.journal(path.parent.name) is not None]
        return sorted(((changed_s, path) for path in paths if (changed_s := _changed_s(path)) is not None), reverse=True)

    def fresh(self) -> list[LedgerSummary]:
        """Summaries of the runs that go on, or did until a moment ago, and of those that fell silent within a day; for ``/metrics``.

        A run whose journal is still being read for the first time is left out: its counters would start low and climb, and whoever
        scraped them before would take that for resets.
        """
        names = [path.parent.name for changed_s, path in self._journals() if self._is_scraped(path, changed_s)]
        feeds = [feed for name in names if (feed := self.get(name)) is not None]
        return [summary for feed in feeds if feed.follower.caught_up and (summary := feed.summary()) is not None]

    def collector(self) -> RunsCollector:
        """The metrics of the runs that are scraped, for a registry."""
        return RunsCollector(self.fresh, self.per_rank or None)

    def _is_scraped(self, path: Path, changed_s: float) -> bool:
        age_s = unix_time_s() - changed_s
        return age_s < FRESH_S or (age_s < SILENT_FOR_S and self._lacks_end(path, changed_s))

    def _lacks_end(self, path: Path, changed_s: float) -> bool:
        """From the journal's ends alone, and once for each time that it changed: a folder may hold many runs that ended today."""
        known = self._ends.get(path)
        if known is None or known[0] != changed_s:
            first, last = last_words(path)
            known = self._ends[path] = changed_s, first is not None and last is None
        return known[1]

    def _follow(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                feeds = [feed for feed in self._open.values() if feed.unread]
            busy = [feed for feed in feeds if feed.follower.poll()]
            for feed in feeds:
                feed.follower.keep(LEAST_BYTES if feed.follower.ended else EVERY_BYTES)
            if not busy:
                self._wanted.wait(POLL_S)
                self._wanted.clear()


def _changed_s(journal: Path) -> float | None:
    """When it last grew, in Unix time; None of one that is deleted."""
    try:
        return journal.stat().st_mtime
    except FileNotFoundError:
        return None


def _row(path: Path, changed_s: float) -> dict[str, Any]:
    first, last = last_words(path)
    row: dict[str, Any] = {"name": path.parent.name, "changed_unix_s": changed_s}
    if first is None:
        return row | {"status": "damaged"}
    going_on = unix_time_s() - changed_s < SILENT_S
    return row | {
        "run": first.run,
        "status": last.status if last is not None else RUNNING if going_on else SILENT,
        "reason": last.reason if last is not None else "",
        "started_unix_s": first.unix_time_s,
        "world": first.world,
        "spares": first.spares,
    }
