"""The exchange of a step whose last shard is still computed: buckets of the sums travel one by one, as they are complete.

The loop's thread gives a bucket as soon as it has added it up, and goes on with its backward. What arrives is taken in by the thread that
waits for the group (``Group.begin_aside``), which adds it up, too. Nothing of it counts before the loop has come to its reduction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from actors.rank.membership.errands import Signal
from actors.rank.membership.process_group import Group, GroupBroken, Transfer, Work
from actors.rank.step.landed import Landing

Added = Callable[[], Sequence[Work]]
BACK = -1
"""In the place of a bucket's number: what comes back of them."""


class Early:
    """One exchange. From the loop's thread, but for :meth:`own` and :meth:`added`, which the other one calls.

    Args:
        buckets: how many there are.
        send: sends this rank's own of a bucket.
    """

    def __init__(self, group: Group, buckets: int, send: Callable[[int], None]) -> None:
        self._group, self._send = group, send
        self._own = [Signal() for _ in range(buckets)]
        self._called = Signal()
        self._added: Added = tuple
        self._landings: list[tuple[int, Landing]] = []
        self._landed_bytes = 0
        self._given = 0
        self._wait: Callable[[], None] | None = None

    def run(self, exchange: Callable[[], None]) -> None:
        """Begin."""
        self._wait = self._group.begin_in_background(exchange)

    def give(self) -> None:
        """This rank's own sums of the next bucket are complete. When the group is broken they stay here, and whoever waits is told."""
        number, self._given = self._given, self._given + 1
        with contextlib.suppress(GroupBroken):
            self._send(number)
        self._own[number].put(None)

    def own(self, number: int) -> None:
        """Wait until this rank's own of bucket ``number`` was given."""
        self._group.rest(self._own[number])

    def added(self) -> Sequence[Work]:
        """Wait until the loop has come to its reduction: what that has to say goes out."""
        self._group.rest(self._called)
        return self._added()

    def finish(self, added: Added) -> None:
        """The reduction. All buckets were given. Raises GroupBroken."""
        self._added = added
        self._called.put(None)
        assert self._wait is not None
        wait, self._wait = self._wait, None
        wait()

    def leave(self, reason: str) -> None:
        """The exchange is of no use, and so is its group: once this returns nothing of it changes anything."""
        self._group.interrupt(reason)
        self._group.quiet()

    # ---- how far it has come -------------------------------------------------------------------------------------------------------------

    def coming(self, number: int, messages: Sequence[Transfer]) -> None:
        """Of bucket ``number`` more is about to be asked for."""
        self.asked(number, Landing([message for message, _ in messages]))

    def asked(self, number: int, landing: Landing) -> None:
        """It has been, and all of it comes before what comes of the next one."""
        self._landings.append((number, landing))

    def arrived(self, number: int) -> None:
        """What the peers have brought of bucket ``number`` is here, and its memory serves another one soon."""
        self._landed_bytes += sum(each.asked_bytes for whose, each in self._landings if whose == number)
        self._landings = [(whose, each) for whose, each in self._landings if whose != number]

    def ahead(self) -> tuple[int, int]:
        """(bytes asked for, bytes that are here)."""
        landings = [each for _, each in self._landings]
        landed_bytes = self._landed_bytes + sum(each.landed_bytes for each in landings)
        return self._landed_bytes + sum(each.asked_bytes for each in landings), landed_bytes
