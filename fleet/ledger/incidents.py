"""Faults and losses with their costs, as :class:`fleet.ledger.summary.Incident`. Used by ``fleet.ledger.goodput``."""

from __future__ import annotations

from collections.abc import Iterable

from fleet.ledger.costs import CostBook, LossCost
from fleet.ledger.slots import NAMES
from fleet.ledger.summary import COST_NAMES, Incident

Charged = dict[str, list[int]]
"""Microseconds by category, by the id of the loss that is charged with them."""


def seconds(us: Iterable[int]) -> dict[str, float]:
    """Microseconds in the order of the categories, as seconds by name."""
    return {name: value / 1e6 for name, value in zip(NAMES, us, strict=True)}


def incidents(book: CostBook, charged: Charged, median_us: float) -> list[Incident]:
    """Faults in the order in which they were first heard of, then losses that no fault explains, and outages.

    What one domain has taken along when it was lost is one loss.
    """
    explained: dict[str, list[LossCost]] = {name: [] for name in book.faults}
    alone: list[list[LossCost]] = []
    together: dict[int, list[LossCost]] = {}
    for loss in book.losses.values():
        if loss.fault in explained:
            explained[loss.fault].append(loss)
        elif loss.together in together:
            together[loss.together].append(loss)
        else:
            alone.append([loss])
            if loss.together:
                together[loss.together] = alone[-1]
    incidents = [_of_fault(book, charged, name, losses, median_us) for name, losses in explained.items()]
    return incidents + [_of_losses(book, charged, losses, median_us) for losses in alone]


def _of_fault(book: CostBook, charged: Charged, name: str, losses: list[LossCost], median_us: float) -> Incident:
    records = book.faults[name]
    fault = records[-1].fault
    phases = tuple((record.phase, record.at_s, record.detail) for record in records)
    at_s = next((at for phase, at, _ in phases if phase == "executed"), fault.at_s)
    lost, costs = tuple(loss.id for loss in losses), _costs(book, charged, losses, median_us)
    return Incident(
        name, at_s, fault.component, fault.kind, fault.slot, fault.node, phases, lost, tuple(loss.cause for loss in losses), *costs,
        in_view=_members(losses), like=fault.kind, domain=next((loss.domain for loss in losses if loss.domain), ""),
    )  # fmt: skip


def _of_losses(book: CostBook, charged: Charged, losses: list[LossCost], median_us: float) -> Incident:
    """Of one loss, or of all that one domain has taken along."""
    loss, costs = losses[0], _costs(book, charged, losses, median_us)
    if loss.id.startswith("outage-"):
        return Incident(loss.id, loss.at_us / 1e6, "run", "outage", None, None, (), (), (loss.cause,), *costs, loss.down_us / 1e6)
    slot, lost, causes = int(loss.id.partition(".")[0]), tuple(loss.id for loss in losses), tuple(loss.cause for loss in losses)
    return Incident(
        f"loss-{loss.id}", loss.at_us / 1e6, "unknown", "loss", slot, None, (), lost, causes, *costs,
        in_view=_members(losses), like=loss.like, domain=loss.domain,
    )  # fmt: skip


def _members(losses: list[LossCost]) -> int:
    return sum(loss.generation >= 0 for loss in losses)


def _costs(
    book: CostBook, charged: Charged, losses: list[LossCost], median_us: float
) -> tuple[dict[str, float], float, float | None, float | None]:
    """Cost by category, the replacements' start-up, stall and excess, all in seconds."""
    sums = seconds([sum(column) for column in zip(*(charged[loss.id] for loss in losses), strict=True)] if losses else [0] * len(NAMES))
    stalls = [stall for loss in losses if (stall := book.stall_us(loss, median_us)) is not None]
    excesses = [excess for loss in losses if (excess := book.excess_us(loss, median_us)) is not None]
    cost = {name: sums[name] for name in COST_NAMES}
    return cost, sums["init"], max(stalls, default=0.0) / 1e6 if stalls else None, max(excesses) / 1e6 if excesses else None
