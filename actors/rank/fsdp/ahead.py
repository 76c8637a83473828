"""The next unit is fetched while a unit computes: which one comes next, and the fetch beside the computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, NamedTuple, TypeVar

from actors.rank.fsdp.serving import FetchRequest

T = TypeVar("T")
Wanted = tuple[tuple[int, ...], FetchRequest]
"""A stretch of another rank, and the ranks to ask for it, in order."""


class GatherOrder(Generic[T]):
    """The order in which a shard gathers units. A shard is expected to do as the last whole shard did. Pure."""

    def __init__(self) -> None:
        self._last, self._now = list[T](), list[T]()
        self._at = 0  # in the last shard: behind the gathering that corresponds to the newest one

    def begin(self) -> None:
        """A shard begins."""
        self._now, self._at = [], 0

    def came(self, unit: T) -> None:
        """``unit`` is gathered."""
        self._now.append(unit)
        if unit in self._last[self._at :]:
            self._at = self._last.index(unit, self._at) + 1

    def end(self) -> None:
        """The shard is computed: the next one is expected to be like it."""
        self._last = self._now

    @property
    def next(self) -> T | None:
        """The unit to expect; None: not known, or no more."""
        return self._last[self._at] if 0 < self._at < len(self._last) else None


class FlatGathering(NamedTuple):
    """One flat buffer on its way: the stretches of other ranks, and ``wanted``, those that are still to be fetched."""

    flat: int
    requests: list[FetchRequest]
    wanted: list[Wanted]


class AheadFetch:
    """At most one fetch that no rank waits for yet, in a thread of its own.

    Args:
        fetch: asks the first server of each stretch; returns the numbers of stretches that it could not fill.

    Attributes:
        order: of the units, by their numbers.
        dropped: the fetch on its way is of no use.
    """

    def __init__(self, fetch: Callable[[Sequence[Wanted]], list[int]]) -> None:
        self._fetch, self._thread = fetch, ThreadPoolExecutor(1, "fleet-ahead")
        self._asked = dict[int, tuple[int, FlatGathering]]()  # by flat buffer, with the number of its first stretch
        self._work: Future[list[int]] | None = None
        self.order, self.dropped = GatherOrder[int](), False

    def ask(self, gatherings: Sequence[FlatGathering]) -> None:
        """Fetch all stretches of ``gatherings``. Their memory stays until :meth:`take` or :meth:`drop` has returned."""
        wanted = list[Wanted]()
        self._asked = {}
        for each in gatherings:
            self._asked[each.flat] = len(wanted), each
            wanted += each.wanted
        self._work = self._thread.submit(self._fetch, wanted)

    def take(self, flat: int) -> FlatGathering | None:
        """The gathering of a flat buffer, once, with what is still to be fetched; None: it was not asked for.

        Nothing is on its way when this returns: the fetcher belongs to one thread at a time.
        """
        missing = () if self._work is None else self._work.result()
        if flat not in self._asked:
            return None
        first, found = self._asked.pop(flat)
        left = [(keepers[1:], request) for number, (keepers, request) in enumerate(found.wanted, first) if number in missing]
        return found._replace(wanted=left)

    def drop(self) -> None:
        """Give up what was asked for. Its memory may be freed afterwards."""
        self.dropped = True
        if self._work is not None:
            self._work.exception()
        self._asked, self._work, self.dropped = {}, None, False

    def close(self) -> None:
        """No fetch begins any more."""
        self.drop()
        self._thread.shutdown(wait=False)
