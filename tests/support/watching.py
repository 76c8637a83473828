"""A folder of runs that are written by hand, and a server that shows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from chaos.controls import ChaosControls
from dashboards.access import LOOPBACK, Access, Audit
from dashboards.feeds import RunFeeds
from dashboards.server import WatchServer
from fleet.host.journal import JournalWriter
from fleet.protocol.records import Record

WRITE_TOKEN, READ_TOKEN = "w" * 32, "r" * 32


@dataclass(frozen=True)
class Watched:
    """``root`` holds the runs; ``server`` shows them."""

    root: Path
    server: WatchServer

    @property
    def url(self) -> str:
        return self.server.url

    def write(self, name: str, records: list[Record]) -> None:
        """Append to a run's journal."""
        writer = JournalWriter(self.root / name / "journal.jsonl")
        for record in records:
            writer.append(record)
        writer.close()


@contextmanager
def watched(root: Path, read_token: str | None = None, port: int = 0) -> Iterator[Watched]:
    """A server on loopback; with ``read_token`` it asks readers for it."""
    access = Access(WRITE_TOKEN, read_token, LOOPBACK)
    with RunFeeds(root) as feeds, WatchServer(feeds, access, Audit(root / "audit.jsonl"), port=port) as server:
        yield Watched(root, server)


def controls() -> ChaosControls:
    """Of a run with three slots on two nodes, under chaos."""
    return ChaosControls(slots=3, nodes=2, planned=True)
