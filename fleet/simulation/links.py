"""Links between the hosts of the simulated world: the nodes, the coordinator's host, and the store.

A cut link loses no message for good: the kernel sends packets again until they are acknowledged. So messages arrive once the link is
mended, unless the receiver has given up by then. A link may be cut one way. It may also be slow, or lose packets, which makes messages
late.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from fleet.simulation.clockwork import Clockwork

HEAD = ""
"""The name of the coordinator's host."""
STORE = "store"
"""The name of the store's host."""
AGAIN_S = (0.0, 0.2)
"""Seconds from the mending of a link until the kernel sends again: (least, most)."""
RESEND_S = 0.2
"""Seconds after which a lost packet is sent again, then after twice as long."""
BOTH = (True, True)


def host_of(end: str) -> str:
    """The host of one end of a link: a host by its name, or a process by ``host/process``."""
    return end.partition("/")[0]


@dataclass(eq=False, slots=True)
class Cut:
    """A cut between ``side`` and all other hosts. ``out``: messages from the side are held up; ``into``: messages to the side.

    ``spares_store``: the store is reached as before. ``later``: hosts that came since; their ways to the coordinator are not cut.
    """

    side: frozenset[str]
    out: bool
    into: bool
    spares_store: bool
    since_s: float = 0.0
    later: set[str] = field(default_factory=set)

    def holds_up(self, source: str, to: str) -> bool:
        """Whether messages from ``source`` to ``to`` do not pass."""
        inside, other = self._has(source), self._has(to)
        if inside == other or host_of(source) == host_of(to) or (self.spares_store and STORE in (source, to)):
            return False
        if HEAD in (source, to) and (source in self.later or to in self.later):
            return False
        return self.out if inside else self.into

    def _has(self, end: str) -> bool:
        return end in self.side or host_of(end) in self.side

    def crosses(self, source: str, to: str) -> bool:
        """Whether a message between these hosts goes over a link of this side."""
        return host_of(source) != host_of(to) and self._has(source) != self._has(to) and STORE not in (source, to)


@dataclass(eq=False, slots=True)
class Bad:
    """Links of a side over which messages take up to ``delay_s`` longer, and lose a share of their packets."""

    of: Cut
    delay_s: float
    loss: float


class Links:
    """The cuts between hosts. ``rng`` draws when held-up messages arrive, and the delays of messages over bad links."""

    def __init__(self, clock: Clockwork, rng: random.Random) -> None:
        self._clock, self._rng = clock, rng
        self._cuts: list[Cut] = []
        self._mended: list[tuple[float, Cut]] = []
        self._bad: list[Bad] = []
        self._held_up: list[tuple[str, frozenset[str], Callable[[], None]]] = []

    def cut(
        self, side: Collection[str], duration_s: float, *, ways: tuple[bool, bool] = BOTH, spares_store: bool = True,
        closes_s: float | None = None,
    ) -> None:  # fmt: skip
        """Hold up all messages between the hosts of ``side`` and all others, for a while. Cuts may overlap.

        ``ways``: whether messages from the side are held up, and messages to it. ``closes_s``: a connection that is cut one way fails the
        other way, too, as acknowledgements are missing. After so many seconds no message passes either way.
        """
        cut = Cut(frozenset(side), *ways, spares_store, self._clock.now_s)
        self._cuts.append(cut)
        if closes_s is not None and closes_s < duration_s:
            self._clock.after(closes_s, lambda: self._close(cut))
        self._clock.after(duration_s, lambda: self._mend(cut))

    @staticmethod
    def _close(cut: Cut) -> None:
        cut.out = cut.into = True

    def joins(self, host: str) -> None:
        """A new host joins."""
        for cut in self._cuts:
            cut.later.add(host)

    def spoil(self, side: Collection[str], duration_s: float, *, delay_s: float = 0.0, loss: float = 0.0) -> None:
        """Make messages between ``side`` and all others late for a while, each by its own time."""
        bad = Bad(Cut(frozenset(side), False, False, True), delay_s, loss)
        self._bad.append(bad)
        self._clock.after(duration_s, lambda: self._bad.remove(bad))

    def passes(self, source: str, to: str) -> bool:
        """Whether messages from ``source`` get to ``to``."""
        return not any(cut.holds_up(source, to) for cut in self._cuts)

    def answers(self, one: str, other: str) -> bool:
        """Whether two hosts reach each other, both ways."""
        return self.passes(one, other) and self.passes(other, one)

    def was_cut(self, one: str, other: str, within_s: float = 0.0, for_s: float = 0.0) -> bool:
        """Whether a cut between two hosts, at least ``for_s`` old, exists now or existed within the last ``within_s``."""
        late = [cut for mended_s, cut in self._mended if self._clock.now_s - mended_s <= within_s]
        old = [cut for cut in (*self._cuts, *late) if self._clock.now_s - cut.since_s >= for_s]
        return any(cut.holds_up(one, other) or cut.holds_up(other, one) for cut in old)

    def late_s(self, to: str, sources: Collection[str]) -> float:
        """The additional seconds until ``to`` has a message from each of ``sources``."""
        if not self._bad:
            return 0.0
        return max((sum(self._draw(bad) for bad in self._bad if bad.of.crosses(source, to)) for source in sources), default=0.0)

    def _draw(self, bad: Bad) -> float:
        late_s, again_s = bad.delay_s * self._rng.uniform(0.5, 1.0), RESEND_S
        while again_s < 2.0 and self._rng.random() < bad.loss:
            late_s, again_s = late_s + again_s, 2 * again_s
        return late_s

    def deliver(self, to: str, sources: Collection[str], arrive: Callable[[], None]) -> None:
        """Call ``arrive`` now if messages from all ``sources`` get to ``to``, else once they do."""
        if not self._cuts or self._reach(to, sources):
            arrive()
        else:
            self._held_up.append((to, frozenset(sources), arrive))

    def carry(self, to: str, sources: Collection[str], arrive: Callable[[], None]) -> None:
        """As :meth:`deliver`, after the delay of bad links."""
        late_s = self.late_s(to, sources)
        if late_s > 0:
            self._clock.after(late_s, lambda: self.deliver(to, sources, arrive))
        else:
            self.deliver(to, sources, arrive)

    def _reach(self, to: str, sources: Collection[str]) -> bool:
        return all(self.passes(source, to) for source in sources)

    def _mend(self, cut: Cut) -> None:
        self._cuts.remove(cut)
        self._mended.append((self._clock.now_s, cut))
        held_up, self._held_up = self._held_up, []
        for to, sources, arrive in held_up:
            if self._reach(to, sources):
                self._clock.after(self._rng.uniform(*AGAIN_S), lambda one=(to, sources, arrive): self.deliver(*one))  # type: ignore[misc]
            else:
                self._held_up.append((to, sources, arrive))


class Pipe:
    """One direction of a connection: messages come out in their order, once the link works, and after the delay of bad links."""

    def __init__(self, clock: Clockwork, links: Links, source: str, to: str) -> None:
        self._clock, self._links, self._source, self._to = clock, links, source, to
        self._waiting: deque[Callable[[], None]] = deque()
        self._until_s = 0.0

    def put(self, arrive: Callable[[], None]) -> None:
        """Send a message: ``arrive`` is called once it has passed."""
        until_s = max(self._until_s, self._clock.now_s + self._links.late_s(self._to, (self._source,)))
        if until_s > self._clock.now_s:
            self._until_s = until_s
            self._clock.after(until_s - self._clock.now_s, lambda: self._enter(arrive))
        else:
            self._enter(arrive)

    def _enter(self, arrive: Callable[[], None]) -> None:
        if not self._waiting and self._links.passes(self._source, self._to):
            arrive()
            return
        self._waiting.append(arrive)
        if len(self._waiting) == 1:
            self._links.deliver(self._to, (self._source,), self._flush)

    def _flush(self) -> None:
        while self._waiting and self._links.passes(self._source, self._to):
            self._waiting.popleft()()
        if self._waiting:
            self._links.deliver(self._to, (self._source,), self._flush)
