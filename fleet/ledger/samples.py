"""The samples that a run was trained on, counted from the ranks' records: a step takes a batch, and batches follow each other.

The samples of a batch follow from seed and step. So no sample is skipped or repeated when each step of the present history was committed,
and no rank committed a step twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fleet.protocol.records import COMMIT, DataRead, Spans
from fleet.protocol.types import Member


@dataclass(frozen=True, slots=True)
class SampleCount:
    """``seen``: samples in the present history, where steps that share a sample count it once. ``epochs``: how often that is all samples; 0
    where their number is unknown. ``taken_back``: samples of steps that were rolled back.

    ``skipped``: samples of steps of the present history whose commit no rank has recorded, up to the newest recorded one. ``repeated``:
    samples of steps that a rank committed twice.
    """

    seen: int
    epochs: float
    taken_back: int
    skipped: int
    repeated: int


class StepCover:
    """The steps that ranks committed, by history: disjoint stretches ``[begin, end)``, in order."""

    def __init__(self) -> None:
        self._begins: dict[int, list[int]] = {}
        self._ends: dict[int, list[int]] = {}
        self._last: dict[int, tuple[Member, int, int]] = {}  # slot -> member of its newest commit, history, and next step
        self.repeated = 0

    def add(self, record: Spans) -> None:
        """Take one record of a rank."""
        count = record.codes.count(COMMIT)
        if not count:
            return
        member, history, first, end = record.member, record.history, record.step, record.step + count
        known, of, expected = self._last.get(member.slot, (member, history, first))
        if (known, of) == (member, history):
            self.repeated += max(0, expected - first)
        self._last[member.slot] = (member, history, end)
        self._merge(history, first, end)

    def _merge(self, history: int, first: int, end: int) -> None:
        begins, ends = self._begins.setdefault(history, []), self._ends.setdefault(history, [])
        at = bisect_right(begins, first)
        low = at - 1 if at and ends[at - 1] >= first else at
        high = low
        while high < len(begins) and begins[high] <= end:
            high += 1
        if low < high:
            first, end = min(first, begins[low]), max(end, ends[high - 1])
        begins[low:high], ends[low:high] = [first], [end]

    def reached(self, history: int) -> int:
        """The step after the newest committed one of that history."""
        return self._ends.get(history, [0])[-1]

    def __bool__(self) -> bool:
        return bool(self._last)

    def first_gap(self, history: int, begin: int) -> int:
        """The first step from ``begin`` on that no rank committed in that history."""
        at = bisect_right(self._begins.get(history, []), begin) - 1
        return max(begin, self._ends[history][at]) if at >= 0 else begin

    def missing(self, history: int, begin: int, end: int) -> int:
        """Steps of ``[begin, end)`` that no rank committed in that history."""
        stretches = zip(self._begins.get(history, ()), self._ends.get(history, ()), strict=True)
        return max(0, end - begin) - sum(max(0, min(end, b) - max(begin, a)) for a, b in stretches)


def trained_on(
    reads: Sequence[DataRead], cover: StepCover, begun: list[tuple[int, int]], steps: int, rolled_back: int
) -> SampleCount | None:  # fmt: skip
    """``reads`` are the reads of the present history, each from its ``step`` on. ``begun`` are the histories: (number, the step it went on
    from), in order. None when the loop body has read no data set.
    """
    if not reads:
        return None
    missing, end = 0, min(steps, cover.reached(begun[-1][0]))  # later steps are committed, and their ranks' records are still to come
    for history, first in reversed(begun):
        missing += cover.missing(history, first, end)
        end = min(end, first)
    begins = [0, *(min(steps, max(0, read.step)) for read in reads[1:]), steps]
    seen = [(end - begin) * read.batch_size // read.steps_each for read, (begin, end) in zip(reads, pairwise(begins), strict=True)]
    epochs = sum(count / read.samples for read, count in zip(reads, seen, strict=True) if read.samples)  # a stream has no known number
    each = reads[-1].batch_size
    return SampleCount(sum(seen), epochs, rolled_back * each, missing * each, cover.repeated * each)
