"""What of a run's forecast is a metric: see ``fleet.ledger.forecast``."""

from __future__ import annotations

from collections.abc import Callable

from dashboards.metrics.spec import Samples
from fleet.ledger.forecast import Forecast, MeanInterval, forecast
from fleet.ledger.summary import LedgerSummary


def foretold(read: Callable[[Forecast], MeanInterval]) -> Callable[[LedgerSummary], Samples]:
    """A mean, and the bounds of its 90% interval; nothing before training has begun."""

    def samples(summary: LedgerSummary) -> Samples:
        found = forecast(summary)
        return [] if found is None else [((name,), getattr(read(found), name)) for name in ("mean", "low", "high")]

    return samples


def rates(summary: LedgerSummary) -> Samples:
    """Faults a second of each kind, with bounds."""
    found = forecast(summary)
    known = found.rates.items() if found is not None else ()
    return [((kind, bound), getattr(rate, bound)) for kind, rate in known for bound in ("mean", "low", "high")]


def scores(summary: LedgerSummary) -> Samples:
    """Forecasts whose time is over, by whether they held the truth."""
    return [(("inside",), float(summary.met.inside)), (("outside",), float(summary.met.scored - summary.met.inside))]
