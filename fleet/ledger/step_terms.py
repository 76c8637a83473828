"""The terms of the Fleet Law in a step, measured from its ranks' records. Pure.

A rank records each change of its work, so the train function needs no clock. Each term is a mean over the ranks of a view. All ranks commit
a step together, so the terms add up to the step.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fleet.protocol.records import ABANDON, COMM, COMMIT, COMPUTE, DATA, HOLD, STRAGGLER, VERIFY, Record, Spans, ViewPublished
from fleet.protocol.types import Member

TERMS = ("compute", "update", "data", "exchange", "wait", "verify")
MEANINGS: Mapping[str, str] = {
    "compute": "forward and backward of a rank's shards",
    "update": "compute of each rank that does not depend on the world size: clipping, the optimizer, the loop between steps",
    "data": "waiting for samples",
    "exchange": "exchange of gradients that nothing hides",
    "wait": "waiting for a slower rank",
    "verify": "comparing the replicas' states",
}
_OF_CODE = {DATA: "data", COMM: "exchange", STRAGGLER: "wait", VERIFY: "verify"}
WARM_SHARE = 0.2
"""This share of a run's time, from its first step on, is left out: caches fill, and libraries choose their algorithms."""
MIDDLE_SHARE = 0.8
"""Of the other steps, the shortest and the longest tenth are left out: other work on the host disturbed them."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """A step that all ranks of its view committed. ``terms`` are means over the ranks, in seconds, by name of ``TERMS``."""

    step: int
    end_s: float
    ranks: int
    terms: Mapping[str, float]

    @property
    def step_s(self) -> float:
        """The sum of its terms."""
        return sum(self.terms.values())


class StepTerms:
    """Folds records, in the journal's order, into rows of steps. A step in which a peer was lost is left out."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._spares: dict[int, tuple[Member, ...]] = {}
        self._open: dict[Member, _Attempt] = {}
        self._parts: dict[tuple[int, int], list[tuple[int, dict[str, int]]]] = {}

    def add(self, record: Record) -> None:
        """Take the steps of a record, if it has any."""
        match record:
            case ViewPublished(view=view):
                self._sizes[view.generation] = len(view.computing)
                self._spares[view.generation] = view.spares
            case Spans(member=member, generation=generation) if member not in self._spares.get(generation, ()):
                self._spans(record)

    def _spans(self, record: Spans) -> None:
        attempt = self._open.setdefault(record.member, _Attempt())
        at_us, step = record.start_us, record.step
        for code, duration_us in zip(record.codes, record.durations_us, strict=True):
            at_us += duration_us
            attempt.take(code, duration_us)
            if code == COMMIT:
                if (us := attempt.close()) is not None:
                    self._parts.setdefault((record.generation, step), []).append((at_us, us))
                step += 1

    def rows(self) -> list[StepRow]:
        """The steps that all ranks of their view have reported, in order."""
        whole = {key: parts for key, parts in sorted(self._parts.items()) if len(parts) == self._sizes.get(key[0])}
        return [_row(step, parts) for (_, step), parts in whole.items()]


class _Attempt:
    """One rank's step so far, in microseconds by term."""

    def __init__(self) -> None:
        self._us = dict.fromkeys(TERMS, 0)
        self._before, self._torn = "", False

    def take(self, code: str, us: int) -> None:
        if code == COMPUTE:  # compute right after a shard's samples belongs to the shard
            self._us["compute" if self._before == DATA else "update"] += us
        elif code in _OF_CODE:
            self._us[_OF_CODE[code]] += us
        self._torn |= code in (ABANDON, HOLD)
        self._before = code

    def close(self) -> dict[str, int] | None:
        """The step is committed: its times, None where it was torn."""
        us, torn = self._us, self._torn
        self._us, self._torn = dict.fromkeys(TERMS, 0), False
        return None if torn else us


def _row(step: int, parts: Sequence[tuple[int, dict[str, int]]]) -> StepRow:
    means = {name: sum(us[name] for _, us in parts) / len(parts) / 1e6 for name in TERMS}
    return StepRow(step, max(at_us for at_us, _ in parts) / 1e6, len(parts), means)


def settled(rows: Sequence[StepRow]) -> list[StepRow]:
    """The rows without the beginning and the extremes, see ``WARM_SHARE`` and ``MIDDLE_SHARE``."""
    if not rows:
        return []
    warm_s = rows[0].end_s + WARM_SHARE * (rows[-1].end_s - rows[0].end_s)
    kept = sorted((row for row in rows[1:] if row.end_s >= warm_s), key=lambda row: row.step_s)
    cut = round(len(kept) * (1.0 - MIDDLE_SHARE) / 2.0)
    return kept[cut : len(kept) - cut]


class Termed(Protocol):
    """A step, or several steps together."""

    @property
    def terms(self) -> Mapping[str, float]: ...


def means(rows: Sequence[Termed]) -> dict[str, float]:
    """Mean seconds by term."""
    return {name: statistics.fmean(row.terms[name] for row in rows) for name in TERMS}
