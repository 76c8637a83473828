"""The levels of checkpoints, in one table. One number names a request and its level.

Members agree on a request inside a reduction, as a number; so the level is in it: with n levels, the remainder of its division by n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fleet.settings.run import RunSettings

STORE, PEERS = "store", "peers"
PEERS_SCHEME = "peers://"


@dataclass(frozen=True, slots=True)
class Level:
    """One level of checkpoints.

    The store and the memory of other nodes have rules of their own. Each further level is a place beside them, with checkpoints more often
    than in the store, of which it keeps the newest. It lasts as long as the run's cluster: ``--resume`` goes on from the store.

    Attributes:
        name: in records.
        scheme: how the URLs of its places begin; "" for the run's own store, whose checkpoints are named by their ids.
        place: its URL in a run; "" where the run has none.
        every_s: seconds from one of its checkpoints to the next.
    """

    name: str
    scheme: str = ""
    place: Callable[[RunSettings], str] = lambda run: ""
    every_s: Callable[[RunSettings], float] = lambda run: 0.0


LEVELS = (
    Level(STORE),
    Level(PEERS, PEERS_SCHEME),
)
"""A later one counts as nearer: of two checkpoints of one state a new history begins from its."""


def request_number(level: str, count: int) -> int:
    """The ``count``-th request of a level, counted from 1."""
    return len(LEVELS) * count + [each.name for each in LEVELS].index(level)


def level_of(request: int) -> str:
    """Inverse of :func:`request_number`, as far as the level goes."""
    return LEVELS[request % len(LEVELS)].name


def level_at(url: str | None) -> str:
    """The level of a checkpoint, or of a place, by its URL; ids, and what is at no level's place, are the store's."""
    return next((level.name for level in LEVELS if level.scheme and (url or "").startswith(level.scheme)), STORE)


def places(settings: RunSettings) -> Mapping[str, str]:
    """Level -> URL of the levels that have a place of their own in this run."""
    return {level.name: place for level in LEVELS if (place := level.place(settings))}


def peers_url(addresses: Iterable[str]) -> str:
    """Where files lie that are in these memories (``host:port``)."""
    return PEERS_SCHEME + ",".join(addresses)
