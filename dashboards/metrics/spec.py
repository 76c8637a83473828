"""What a metric is: a name, labels, words, and how its samples are read from a snapshot of the ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fleet.ledger.summary import LedgerSummary

Samples = Iterable[tuple[tuple[str, ...], float]]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: ``read`` gives its samples, as label values and a number, from a snapshot. A counter's name ends in ``_total``."""

    name: str
    help: str
    read: Callable[[LedgerSummary], Samples]
    labels: tuple[str, ...] = ()
    per_rank: bool = False

    @property
    def counts(self) -> bool:
        """It is a counter; all others are gauges."""
        return self.name.endswith("_total")


def optional(value: Callable[[LedgerSummary], float | None]) -> Callable[[LedgerSummary], Samples]:
    """One sample without labels; none while nobody knows it."""
    return lambda summary: [] if (number := value(summary)) is None else [((), number)]
