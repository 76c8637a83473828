"""From a journal's records to what trackers are told, in order. Pure: the same records give the same items, live and afterwards.

So an item has a number, its place in that order, and whoever sends items has to remember one number alone: the journal itself is what is
kept until it is sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dashboards.metrics.table import METRICS
from dashboards.trackers.port import FAULT, LOSS, NOTE, ROLLBACK, Begun, Ended, Item, RunFacts, TrackedFigures, TrackedMark
from dashboards.trackers.spans import SpanFold
from fleet.ledger.goodput import Ledger
from fleet.ledger.happenings import Line, Narrator
from fleet.ledger.summary import LedgerSummary
from fleet.protocol.records import DataRead, Measurement, Record, Resumed, RunEnded, RunStarted, configuration, dotted

ORDER = 1
"""It rises when the same records come to give other items, or the same in another order: numbers that were kept mean nothing then."""
SPARSER = 0.002
"""The time between samples grows by so much of the run's age, so that a run of weeks has some thousand of them."""
KINDS = {"!": FAULT, "-": LOSS, "<": ROLLBACK}
"""Mark of a line of the terminal -> kind of mark."""
ITS_OWN = "fleet_measurement"
"""The metric of what the training program reports."""
DATA = ("samples", "batch_size", "data_sha256", "total_steps")


@dataclass(frozen=True, slots=True)
class Numbered:
    """``number``: from 1 on."""

    number: int
    item: Item


def values_of(summary: LedgerSummary) -> dict[str, float]:
    """What ``/metrics`` shows of a run, as one number a name: labels follow the metric's name, after slashes.

    Series of single ranks are left out, and counts of what has not happened yet; so is what the training program reports, which is tracked
    at its own steps.
    """
    specs = [spec for spec in METRICS if not spec.per_rank and spec.name != ITS_OWN]
    read = ((spec, labels, float(value)) for spec in specs for labels, value in spec.read(summary))
    return {"/".join((spec.name, *labels)): value for spec, labels, value in read if value or not (spec.counts and spec.labels)}


class TrackFold:
    """Folds records, in the journal's order, into items.

    Args:
        every_s: seconds of the run from one sample of all metrics to the next.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s, self._due_s = every_s, 0.0
        self._ledger, self._narrator, self._spans = Ledger(), Narrator(), SpanFold()
        self._marks: Counter[str] = Counter()
        self._now_s = 0.0
        self._open_end: RunEnded | None = None
        self.count = 0
        self.report_lines: list[str] = []
        """A line for each mark."""

    @property
    def started(self) -> RunStarted | None:
        return self._ledger.started

    @property
    def ended(self) -> bool:
        """The run has ended, and was not resumed."""
        return self._ledger.ended is not None

    def take(self, record: Record) -> list[Numbered]:
        """What follows from ``record``. Raises LedgerError when it does not fit those before it."""
        return self._numbered(self._of(record))

    def finish(self) -> list[Numbered]:
        """What is left to say once no record comes any more, of a run that has ended. Called again, nothing."""
        return self._numbered(self._close())

    def _numbered(self, items: Iterable[Item]) -> list[Numbered]:
        found = [Numbered(self.count + place, item) for place, item in enumerate(items, 1)]
        self.count += len(found)
        return found

    def _of(self, record: Record) -> Iterator[Item]:
        if isinstance(record, Resumed):
            yield from self._close()
        self._ledger.apply(record)
        self._now_s = max(self._now_s, getattr(record, "at_s", 0.0))
        match record:
            case RunStarted():
                self._due_s = record.at_s + self._every_s
                yield begun(record)
            case RunEnded():
                self._open_end = record
            case DataRead():
                yield RunFacts({f"data.{name}": str(getattr(record, name)) for name in DATA})
            case Measurement(state=state, name=name, value=value, at_s=at_s):
                yield TrackedFigures(state.step, {name: value}, self._unix_s(at_s))
        yield from self._happened(self._narrator.take(record, self._now_s))
        yield from self._spans.take(record)
        if self._now_s >= self._due_s and not self.ended:
            yield self._sample()

    def _close(self) -> Iterator[Item]:
        """Late words of ranks may come after the end of a run; a figure of the whole run is made after them."""
        ended, self._open_end = self._open_end, None
        if ended is None:
            return
        yield from self._happened(self._narrator.rest())
        yield self._sample()
        yield from self._spans.close(ended)
        yield Ended(ended.status, ended.reason, self._unix_s(ended.at_s))

    def _sample(self) -> TrackedFigures:
        summary = self._ledger.summary()
        self._due_s = self._now_s + max(self._every_s, SPARSER * (self._now_s - summary.started_s))
        return TrackedFigures(summary.steps, values_of(summary), self._unix_s(self._now_s))

    def _happened(self, lines: Iterable[Line]) -> Iterator[TrackedMark]:
        for line in lines:
            kind = KINDS.get(line.mark, NOTE)
            self._marks[kind] += 1
            self.report_lines.append(str(line))
            yield TrackedMark(kind, self._marks[kind], line.text, self._ledger.steps.step, self._unix_s(self._began_s + line.at_s))

    @property
    def _began_s(self) -> float:
        return self._ledger.started.at_s if self._ledger.started is not None else 0.0

    def _unix_s(self, at_s: float) -> float:
        assert self._ledger.started is not None
        return self._ledger.started.unix_time_s + at_s - self._began_s


def begun(record: RunStarted) -> Begun:
    """A run, from its first record."""
    shape = {"run": record.run, "world": record.world, "spares": record.spares, "shards": record.shards}
    facts = {name: str(value) for name, value in {**shape, **dotted(configuration(record.config))}.items()}
    return Begun(record.run, f"{record.run}@{record.unix_time_s:.3f}", record.unix_time_s, facts)
