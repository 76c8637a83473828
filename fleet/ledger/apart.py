"""Times in which ranks wait for others of their group, where several compute a shard together. Pure.

A rank leaves its view when a rank of its group is lost. Without a whole group it is in no view, and other groups train on. The ledger calls
this ``group_wait``: from the view without the rank to the next one that has it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from fleet.protocol.records import GROUP_WAIT, REFORM, Spans
from fleet.protocol.types import Member

Interval = tuple[int, float]
"""(from_us, to_us)."""


class Apart:
    """Which ranks wait, and when."""

    def __init__(self) -> None:
        self._since_us: dict[Member, int] = {}
        self._waited: dict[Member, list[Interval]] = {}

    def published(self, before: Collection[Member], members: Sequence[Member], at_us: int) -> None:
        """A view of ``members`` begins at ``at_us``, and ends that of the members ``before``. Those that are lost record no more time."""
        if len({member.coordinate for member in members}) < 2:
            return
        here = frozenset(members)
        for member in here & self._since_us.keys():
            self._waited.setdefault(member, []).append((self._since_us.pop(member), at_us))
        self._since_us |= dict.fromkeys(set(before) - here, at_us)

    def named(self, record: Spans) -> Spans:
        """The record, which has the name ``group_wait`` for the time in which its rank waited for its group."""
        member = record.member
        if member not in self._waited and member not in self._since_us:
            return record
        waited = self._waited[member] = [one for one in self._waited.get(member, ()) if one[1] > record.start_us]
        intervals = [*waited, *((since_us, float("inf")) for since_us in [self._since_us.get(member)] if since_us is not None)]
        pieces = list(_named(record, intervals))
        return replace(record, codes="".join(code for code, _ in pieces), durations_us=tuple(duration for _, duration in pieces))


def _named(record: Spans, intervals: Sequence[Interval]) -> Iterator[tuple[str, int]]:
    """(code, duration_us) of each span; one that is partly in an interval is cut there."""
    time_us = record.start_us
    for code, duration in zip(record.codes, record.durations_us, strict=True):
        end_us = time_us + duration
        if code != REFORM:
            yield code, duration
            time_us = end_us
            continue
        for begin_us, stop_us in intervals:
            if begin_us < end_us and stop_us > time_us:
                if begin_us > time_us:
                    yield code, begin_us - time_us
                    time_us = begin_us
                yield GROUP_WAIT, int(min(stop_us, end_us)) - time_us
                time_us = int(min(stop_us, end_us))
        if time_us < end_us or not duration:
            yield code, end_us - time_us
        time_us = end_us
