"""The exchange of a step while the rank's last shard is still computed: each bucket of the sums travels once it is complete.

The loop's thread gives a bucket as soon as it has added it up, and goes on with its backward. The group's thread
(``Group.begin_in_background``) receives the peers' buckets and adds them up. No sum counts before the loop has come to its reduction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from actors.rank.membership.errands import Signal
from actors.rank.membership.process_group import Group, GroupBroken, Transfer, Work
from actors.rank.step.landed import Landing

Added = Callable[[], Sequence[Work]]
BACK = -1
"""In the place of a bucket's number: the sums that come back, of all buckets."""


class Early:
    """One exchange. The group's thread calls :meth:`own` and :meth:`added`; the loop's thread calls all other methods.

    Args:
        buckets: how many buckets the exchange has.
        send: sends this rank's own sums of a bucket, by number.
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
        """Begin the exchange in the group's thread."""
        self._wait = self._group.begin_in_background(exchange)

    def give(self) -> None:
        """Send this rank's own sums of the next bucket, which are complete. In a broken group the sums stay here, and :meth:`finish`
        raises."""
        number, self._given = self._given, self._given + 1
        with contextlib.suppress(GroupBroken):
            self._send(number)
        self._own[number].put(None)

    def own(self, number: int) -> None:
        """Wait until the loop has given this rank's own sums of bucket ``number``."""
        self._group.rest(self._own[number])

    def added(self) -> Sequence[Work]:
        """Wait until the loop has come to its reduction, then send the reduction's numbers."""
        self._group.rest(self._called)
        return self._added()

    def finish(self, added: Added) -> None:
        """Wait for the end of the exchange: the loop has given all buckets. Raises GroupBroken."""
        self._added = added
        self._called.put(None)
        assert self._wait is not None
        wait, self._wait = self._wait, None
        wait()

    def leave(self, reason: str) -> None:
        """Give up the exchange and its group. After the return no message of the group changes any memory."""
        self._group.interrupt(reason)
        self._group.quiet()

    # ---- how far it has come -------------------------------------------------------------------------------------------------------------

    def coming(self, number: int, messages: Sequence[Transfer]) -> None:
        """The exchange is about to ask for ``messages`` of bucket ``number``."""
        self.asked(number, Landing([message for message, _ in messages]))

    def asked(self, number: int, landing: Landing) -> None:
        """The exchange has asked for the messages in ``landing``, all of bucket ``number`` or earlier ones."""
        self._landings.append((number, landing))

    def arrived(self, number: int) -> None:
        """The peers' sums of bucket ``number`` are here. A later bucket may use their memory soon."""
        self._landed_bytes += sum(each.asked_bytes for whose, each in self._landings if whose == number)
        self._landings = [(whose, each) for whose, each in self._landings if whose != number]

    def ahead(self) -> tuple[int, int]:
        """(bytes asked for, bytes that are here)."""
        landings = [each for _, each in self._landings]
        landed_bytes = self._landed_bytes + sum(each.landed_bytes for each in landings)
        return self._landed_bytes + sum(each.asked_bytes for each in landings), landed_bytes
