"""The levels of checkpoints: the durable store, and the memory of other nodes. One number names a request and its level.

Members agree on a request inside a reduction, as a number; so the level is in it: requests of peer memory are odd, those of the store even.
"""

from __future__ import annotations

from collections.abc import Iterable

STORE, PEERS = "store", "peers"
PEERS_SCHEME = "peers://"


def request_number(level: str, count: int) -> int:
    """The ``count``-th request of a level, counted from 1."""
    return 2 * count + (level == PEERS)


def level_of(request: int) -> str:
    """Inverse of :func:`request_number`, as far as the level goes."""
    return PEERS if request % 2 else STORE


def peers_url(addresses: Iterable[str]) -> str:
    """Where files lie that are in these memories (``host:port``)."""
    return PEERS_SCHEME + ",".join(addresses)
