"""Metrics of money, energy and emissions, and of how well the hardware is used. What nobody has said, or counted, has no series."""

from __future__ import annotations

from collections.abc import Callable

from dashboards.metrics.spec import MetricSpec, Samples, optional
from fleet.ledger.summary import LedgerSummary

FACTORS = ("scheduling", "runtime", "program", "product")


def _settled(unit: str) -> Callable[[LedgerSummary], Samples]:
    """Of each category, in a unit of ``fleet.ledger.bill``. By the mean of the day: what is settled may not become less."""

    def samples(summary: LedgerSummary) -> Samples:
        per_s = summary.tariff.per_s.get(unit) if summary.tariff is not None else None
        return [] if per_s is None else [((name,), per_s * rank_s) for name, rank_s in summary.settled.items()]

    return samples


def _per_s(summary: LedgerSummary, unit: str) -> float | None:
    """Of a slot's second, as the report's bill has it."""
    found = summary.tariff_now
    return found.per_s.get(unit) if found is not None else None


def _spent(unit: str) -> Callable[[LedgerSummary], Samples]:
    """As the bill has it, with what the store has cost."""
    return optional(lambda summary: None if (bill := summary.bill) is None else bill["total"].get(unit))


def _of_faults(unit: str) -> Callable[[LedgerSummary], Samples]:
    """By kind, so that the number of series does not grow with the number of faults."""

    def samples(summary: LedgerSummary) -> Samples:
        per_s, sums = _per_s(summary, unit), dict[str, float]()
        if per_s is None:
            return []
        for item in summary.incidents:
            sums[item.kind] = sums.get(item.kind, 0.0) + per_s * item.cost_s
        return [((kind,), amount) for kind, amount in sums.items()]

    return samples


def _factors(summary: LedgerSummary) -> Samples:
    found = summary.factors
    known = found.plain() if found is not None else {}
    return [((name,), known[name]) for name in FACTORS if known.get(name) is not None]


COST_METRICS = (
    MetricSpec(
        "fleet_cost_usd_total",
        "USD of the rank-seconds decided so far, by ledger category; where `cost.*` says what a slot costs.",
        _settled("usd"),
        labels=("category",),
    ),
    MetricSpec(
        "fleet_energy_kwh_total",
        "Energy of the rank-seconds decided so far, in kWh, by ledger category; where `cost.*` says what a slot draws.",
        _settled("kwh"),
        labels=("category",),
    ),
    MetricSpec(
        "fleet_emissions_kg_total",
        "Emissions of the rank-seconds decided so far, in kg of CO2, by ledger category; where `cost.*` says what they are.",
        _settled("kg_co2"),
        labels=("category",),
    ),
    MetricSpec(
        "fleet_spent_usd",
        "USD of the run so far, what is not decided yet included.",
        _spent("usd"),
    ),
    MetricSpec("fleet_spent_kwh", "The same of energy, in kWh.", _spent("kwh")),
    MetricSpec("fleet_emitted_kg", "The same of emissions, in kg of CO2.", _spent("kg_co2")),
    MetricSpec(
        "fleet_store_cost_usd",
        "USD for the durable store: what lay there, and what was read from it; where `cost.usd_per_gb_*` says what that costs.",
        optional(lambda s: s.store_bill["usd"] if s.store_bill is not None else None),
    ),
    MetricSpec(
        "fleet_fault_cost_usd",
        "USD charged to faults and losses, by kind: what they took in rank-seconds, priced.",
        _of_faults("usd"),
        labels=("kind",),
    ),
    MetricSpec("fleet_fault_energy_kwh", "The same of energy, in kWh.", _of_faults("kwh"), labels=("kind",)),
    MetricSpec("fleet_fault_emissions_kg", "The same of emissions, in kg of CO2.", _of_faults("kg_co2"), labels=("kind",)),
    MetricSpec(
        "fleet_budget_usd",
        "What the run may cost: `cost.budget_usd`, as it is now.",
        optional(lambda s: s.budget_usd),
    ),
    MetricSpec(
        "fleet_factor_ratio",
        "The factors of goodput and their product: scheduling x runtime x program. The last is the MFU of kept steps, where it is known.",
        _factors,
        labels=("factor",),
    ),
    MetricSpec(
        "fleet_tokens_per_second",
        "Tokens a second at the median step, where the train function says how many a sample has.",
        optional(lambda s: s.tokens_per_s),
    ),
)
