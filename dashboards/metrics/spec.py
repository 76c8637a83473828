"""What a metric is: a name, labels, words, and how its samples are read from a snapshot of the ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fleet.ledger.summary import LedgerSummary

COUNTER, GAUGE = "counter", "gauge"
Samples = Iterable[tuple[tuple[str, ...], float]]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: ``read`` gives its samples, as label values and a number, from a snapshot."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str
    question: str
    read: Callable[[LedgerSummary], Samples]
    per_rank: bool = False


def optional(value: Callable[[LedgerSummary], float | None]) -> Callable[[LedgerSummary], Samples]:
    """One sample without labels; none while nobody knows it."""
    return lambda summary: [] if (number := value(summary)) is None else [((), number)]
