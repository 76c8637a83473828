"""Simulated process groups: they form when all members arrive, and break when one leaves, for each member at its own time."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

from fleet.errors import GroupLost
from fleet.protocol.types import Member, View
from fleet.simulation.clockwork import Clockwork, Future
from fleet.simulation.links import Links


class Broken(GroupLost):
    """A peer was lost, the group could not be formed in time, or this rank was told to leave."""


class End:
    """One member's end of a group."""

    __slots__ = ("broken", "left", "pending")

    def __init__(self) -> None:
        self.pending: list[Future] = []
        self.broken: str | None = None
        self.left = False

    def fail(self, reason: str) -> None:
        self.broken = self.broken or reason
        pending, self.pending = self.pending, []
        for future in pending:
            future.resolve(error=Broken(reason))


class SimGroup:
    """The process group of one view.

    A reduction gives all members' values to every member, to each at its own time. So if a member dies meanwhile, only some members may
    have the result. ``completed`` is called for each reduction that every member has entered. A state that the donor posts also reaches
    each receiver at its own time. ``complete_s``: when the last member came to the latest reduction.

    Messages between members pass the links between their hosts, or wait for them.
    """

    def __init__(
        self, clock: Clockwork, rng: random.Random, view: View, completed: Callable[[View, dict[Member, Any]], None], links: Links
    ) -> None:
        self.clock, self.rng, self.view = clock, rng, view
        self._completed, self._links = completed, links
        self._hosts: dict[Member, str] = {}
        self.ends: dict[Member, End] = {}
        self._arrivals: dict[Member, Future] = {}
        self._values: dict[Any, dict[Member, Any]] = {}
        self._outcomes: dict[Any, dict[Member, Future]] = {}
        self._received: dict[Any, Any] = {}
        self._listening: list[tuple[Member, Future, Sequence[Any]]] = []
        self._states: dict[Any, Any] = {}
        self._receivers: dict[Member, Future] = {}
        self.complete_s = 0.0

    def arrive(self, member: Member, timeout_s: float, host: str) -> Future:
        """Resolves once all members of the view have arrived. ``host`` is this member's end of all links."""
        self._hosts[member] = host
        end = self.ends.setdefault(member, End())
        future = self._pend(end)
        self._arrivals[member] = future
        self.clock.after(timeout_s, lambda: self._late(member, future))
        if any(other.left for other in self.ends.values()):
            self._break_soon(member, "a peer has left already")
        if len(self._arrivals) == len(self.view.members):
            for each, waiting in self._arrivals.items():
                self._resolve_after(each, waiting, self.rng.uniform(0.01, 0.06), None)
        return future

    def _late(self, member: Member, future: Future) -> None:
        if not future.done:
            self.ends[member].fail("not all members arrived in time")

    def reduce(self, member: Member, number: int, value: Any) -> Future:
        """Reduction ``number`` of this group: resolves to all members' values, by member."""
        return self._meet(member, number, value, self._reduced)

    def _reduced(self, view: View, values: dict[Member, Any]) -> None:
        self._completed(view, values)
        self.complete_s = self.clock.now_s

    def exchange(self, member: Member, what: Any, value: Any, among: Sequence[Member] = ()) -> Future:
        """As :meth:`reduce`, for values outside of steps, under the name ``what``; ``among``: some members alone."""
        return self._meet(member, (what, tuple(among)), value, lambda view, values: None, among)

    def _meet(
        self,
        member: Member,
        what: Any,
        value: Any,
        completed: Callable[[View, dict[Member, Any]], None],
        among: Sequence[Member] = (),
    ) -> Future:
        members = among or self.view.members
        end = self.ends[member]
        future = self._pend(end)
        if any(other.left for other in self.ends.values()):
            self._break_soon(member, "a peer has left")
            return future  # the chunks of the lost peer cannot be summed any more
        values, results = self._values.setdefault(what, {}), self._outcomes.setdefault(what, {})
        values[member], results[member] = value, future
        if len(values) == len(members):
            ordered = {each: values[each] for each in members}
            completed(self.view, ordered)
            for each, waiting in results.items():
                self._resolve_after(each, waiting, self.rng.uniform(0.002, 0.03), ordered)
            del self._values[what], self._outcomes[what]
        return future

    def send(self, member: Any, value: Any) -> None:
        """Send a value under the name of a member, or another. The first value counts, since others may have received it."""
        self._received.setdefault(member, value)
        self._inform()

    def received(self, member: Member, givers: Sequence[Any]) -> Future:
        """Resolves to the values under the names ``givers``, by name."""
        future = self._pend(self.ends[member])
        if any(other.left for other in self.ends.values()):
            self._break_soon(member, "a peer has left")
        self._listening.append((member, future, givers))
        self._inform()
        return future

    def _inform(self) -> None:
        ready = [one for one in self._listening if all(giver in self._received for giver in one[2])]
        self._listening = [one for one in self._listening if one not in ready]
        for member, future, givers in ready:
            values = {giver: self._received[giver] for giver in givers}
            self._resolve_after(member, future, self.rng.uniform(0.0, 0.01), values)

    def post_state(self, member: Member, state: Any) -> None:
        """``member`` offers its state to all receivers of its column."""
        self._states[member.coordinate] = state
        for receiver, future in self._receivers.items():
            if receiver.coordinate == member.coordinate:
                self._resolve_after(receiver, future, self.rng.uniform(0.0, 0.01), state)

    def receive_state(self, member: Member) -> Future:
        """Resolves when the donor has begun to send. The receiver adds the time of the transfer."""
        future = self._pend(self.ends[member])
        self._receivers[member] = future
        if (state := self._states.get(member.coordinate)) is not None:
            self._resolve_after(member, future, self.rng.uniform(0.0, 0.01), state)
        return future

    def leave(self, member: Member, graceful: bool = False) -> None:
        """Close this member's end. Unless that is graceful, the other ends break soon, each at its own time."""
        end = self.ends.get(member)
        if end is None or end.left:
            return
        end.left = True
        end.fail("left")
        if not graceful:
            for other in self.ends:
                if other != member:
                    self._break_soon(other, f"peer {member} is gone", member)

    def broken_for(self, member: Member) -> str | None:
        end = self.ends.get(member)
        return end.broken if end is not None else None

    def _break_soon(self, member: Member, reason: str, source: Member | None = None) -> None:
        """Break ``member``'s end soon. The news comes from ``source``, the member that has left, or without it from all members."""
        hosts = {self._hosts[source]} if source is not None else set(self._hosts.values())
        fail = functools.partial(self.ends[member].fail, reason)
        self.clock.after(self.rng.uniform(0.001, 0.04), lambda: self._links.carry(self._hosts[member], hosts, fail))

    def _pend(self, end: End) -> Future:
        future = Future()
        if end.broken is not None:
            future.resolve(error=Broken(end.broken))
        else:
            end.pending = [*(other for other in end.pending if not other.done), future]
        return future

    def _resolve_after(self, member: Member, future: Future, delay_s: float, value: Any) -> None:
        """Resolve ``future`` for ``member``, once the messages of all other members have passed their links."""
        hosts = set(self._hosts.values())
        self.clock.after(delay_s, lambda: self._links.carry(self._hosts[member], hosts, lambda: future.resolve(value)))
