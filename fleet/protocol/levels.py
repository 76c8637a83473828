"""The levels of checkpoints, in one table. One number names a request and its level.

Members agree on a request inside a reduction, as a number. So the number contains the level: with n levels, it is the remainder of the
division by n.
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

    The store and the memory of other nodes have rules of their own. Each further level is another place, with checkpoints more often than
    the store. It keeps the newest of them. It lasts as long as the run's cluster: ``--resume`` goes on from the store.

    Attributes:
        name: the level's name in records.
        scheme: the prefix of its places' URLs; "" for the run's own store, whose checkpoints are named by their ids.
        place: the level's URL in a run; "" where the run has none.
        every_s: seconds from one checkpoint of the level to the next.
    """

    name: str
    scheme: str = ""
    place: Callable[[RunSettings], str] = lambda run: ""
    every_s: Callable[[RunSettings], float] = lambda run: 0.0


LEVELS = (
    Level(STORE),
    Level(PEERS, PEERS_SCHEME),
)
"""A later level counts as nearer: of two checkpoints of one state, a new history begins from the nearer one."""


def request_number(level: str, count: int) -> int:
    """The ``count``-th request of a level, counted from 1."""
    return len(LEVELS) * count + [each.name for each in LEVELS].index(level)


def level_of(request: int) -> str:
    """Inverse of :func:`request_number`, as far as the level goes."""
    return LEVELS[request % len(LEVELS)].name


def level_at(url: str | None) -> str:
    """The level of a checkpoint, or of a place, by its URL. An id, or a URL of no level, belongs to the store."""
    return next((level.name for level in LEVELS if level.scheme and (url or "").startswith(level.scheme)), STORE)


def places(settings: RunSettings) -> Mapping[str, str]:
    """Level -> URL of the levels that have a place of their own in this run."""
    return {level.name: place for level in LEVELS if (place := level.place(settings))}


def peers_url(addresses: Iterable[str]) -> str:
    """The URL of files in the memories at these addresses (``host:port``)."""
    return PEERS_SCHEME + ",".join(addresses)
