"""The price of rank-seconds in money, energy and emissions: of a run, of each category, and of each fault. Pure.

An amount is the tariff of a slot's second times the slots' seconds, so amounts add up as the ledger does. The bill leaves out an amount
without a tariff. Each amount has a basis: ``declared`` by the user, ``measured`` by the devices, or a ``data sheet``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fleet.ledger.figures import figure
from fleet.ledger.health import HOUR_S
from fleet.protocol.levels import STORE
from fleet.protocol.records import CheckpointRecord, Record, Usage
from fleet.protocol.types import Member

DECLARED, MEASURED, DATA_SHEET = "declared", "measured", "data sheet"
UNITS = {"usd": "USD", "kwh": "kWh", "kg_co2": "kg CO2"}


@dataclass(frozen=True, slots=True)
class Tariff:
    """``per_s``: amount of a slot's second, by name of ``UNITS``; ``basis``: the basis of each amount.

    ``grid_kg_per_s``: the part of ``kg_co2`` that comes with the energy, by hour of the day in UTC; empty where all hours are the same.
    """

    per_s: Mapping[str, float]
    basis: Mapping[str, str]
    grid_kg_per_s: tuple[float, ...] = ()

    def between(self, unix_s: float, seconds: float) -> Tariff:
        """The tariff of a run from ``unix_s`` on for ``seconds``. A slot's power is the same at all hours; the grid's emissions change."""
        if not self.grid_kg_per_s:
            return self
        usual = sum(self.grid_kg_per_s) / len(self.grid_kg_per_s)
        return replace(self, per_s={**self.per_s, "kg_co2": self.per_s["kg_co2"] - usual + _mean(self.grid_kg_per_s, unix_s, seconds)})

    def of(self, rank_s: float) -> dict[str, float]:
        """Amounts of so many rank-seconds."""
        return {name: rank_s * amount for name, amount in self.per_s.items()}


def _mean(by_hour: Sequence[float], unix_s: float, seconds: float) -> float:
    """The mean of an hourly amount, over ``seconds`` from ``unix_s`` on."""
    end_s, at_s, total = unix_s + max(seconds, 1e-6), unix_s, 0.0
    days, rest_s = divmod(end_s - at_s, len(by_hour) * HOUR_S)
    total, end_s = days * sum(by_hour) * HOUR_S, at_s + rest_s
    while at_s < end_s:
        until_s = min(end_s, (at_s // HOUR_S + 1) * HOUR_S)
        total += by_hour[int(at_s // HOUR_S) % len(by_hour)] * (until_s - at_s)
        at_s = until_s
    return total / (days * len(by_hour) * HOUR_S + rest_s)


def tariff(cost: Mapping[str, Any], measured_w: float | None = None) -> Tariff | None:
    """From a run's settings in its journal (see ``fleet.settings.cost``); None when they have no cost.

    Args:
        cost: the user's own figures win.
        measured_w: a slot's mean power, where devices measure it. It wins over the data sheet.
    """
    watts, rests_on = _watts(cost, measured_w)
    on_energy = _on_energy(cost, watts) if watts is not None else {}
    declared: dict[str, float] = {}
    if any(cost.get(name) is not None for name in ("usd_per_rank_hour", "usd_per_gb_month", "usd_per_gb_read")):
        declared["usd"] = (cost.get("usd_per_rank_hour") or 0.0) / HOUR_S
    if made_g := cost.get("embodied_g_co2_per_rank_hour"):
        declared["kg_co2"] = made_g / 1000.0 / HOUR_S
    known = [name for name in UNITS if name in on_energy or name in declared]
    basis = {name: rests_on if name in on_energy else DECLARED for name in known}
    hours = [float(each) / 1000.0 * on_energy["kwh"] for each in cost.get("g_co2_per_kwh_by_hour") or ()] if on_energy else []
    return Tariff({name: on_energy.get(name, 0.0) + declared.get(name, 0.0) for name in known}, basis, tuple(hours)) if known else None


def _watts(cost: Mapping[str, Any], measured_w: float | None) -> tuple[float | None, str]:
    """Power of a slot, and its basis; None where it is unknown."""
    if (said := cost.get("watts_per_rank")) is not None:
        return said, DECLARED
    if measured_w is not None:
        return measured_w, MEASURED
    if not cost.get("device"):
        return None, ""
    from fleet.laws.hardware import accelerator  # it takes numpy, which most ledgers do without

    return accelerator(cost["device"]).power_w, DATA_SHEET


def _on_energy(cost: Mapping[str, Any], watts: float) -> dict[str, float]:
    """Energy of a slot's second, its price and its emissions."""
    from fleet.laws.energy import carbon_kg, energy_kwh, energy_usd, facility_w

    hours = [float(each) for each in cost.get("g_co2_per_kwh_by_hour") or ()]
    price, grid = cost.get("usd_per_kwh"), sum(hours) / len(hours) if hours else cost.get("g_co2_per_kwh")
    kwh = energy_kwh(facility_w(watts, cost.get("pue", 1.0)), 1.0)
    amounts = {"kwh": kwh}
    if price is not None:
        amounts["usd"] = energy_usd(kwh, price)
    if grid is not None:
        amounts["kg_co2"] = carbon_kg(kwh, grid)
    return amounts


def bill(found: Tariff, s: Any) -> dict[str, Any]:
    """The bill of a ``LedgerSummary``, as plain data: its ``categories``, ``pending`` and ``store`` add up to its ``total``."""
    faults = {item.id: found.of(sum(item.cost.values())) for item in s.incidents}
    total, store = found.of(s.rank_s), s.store_bill
    if store is not None:
        total["usd"] += store["usd"]
    return {
        "basis": dict(found.basis),
        "total": total,
        "categories": {name: found.of(rank_s) for name, rank_s in s.categories.items()},
        "pending": found.of(s.pending_s),
        "store": store,
        "faults": faults,
        "per_step": _each(total, s.steps),
        "per_million_tokens": _each(total, s.steps * (s.tokens_per_step or 0) / 1e6),
        "per_million_samples": _each(total, s.samples.seen / 1e6 if s.samples is not None else 0),
    }


def _each(total: Mapping[str, float], count: float) -> dict[str, float] | None:
    """The share of one of ``count``; None for a count of 0."""
    return {name: amount / count for name, amount in total.items()} if count else None


def for_faults(found: Mapping[str, Any]) -> dict[str, float]:
    """The part of a :func:`bill` for faults and other losses, all of them together."""
    return {name: sum(each[name] for each in found["faults"].values()) for name in found["total"]}


def in_units(amounts: Mapping[str, float]) -> str:
    """``0.42 USD, 1.2 kWh, 0.58 kg CO2``."""
    return ", ".join(f"{figure(amounts[name], 3)} {unit}" for name, unit in UNITS.items() if name in amounts)


def stored_words(store: Mapping[str, float] | None) -> str:
    """The store's part of a :func:`bill`, as a part of its line; empty without a price of the store."""
    if store is None:
        return ""
    usd, kept, read = (figure(store[name], 3) for name in ("usd", "gb_months", "gb_read"))
    return f"; of it for the store {usd} USD ({kept} GB-months, {read} GB read)"


def rests_on(basis: Mapping[str, str]) -> str:
    """``declared``, or ``USD declared, kWh and kg CO2 data sheet``."""
    bases = list(dict.fromkeys(basis.values()))
    if len(bases) == 1:
        return bases[0]
    return ", ".join(f"{' and '.join(UNITS[name] for name, of in basis.items() if of == each)} {each}" for each in bases)


GB = 1e9
MONTH_S = 730 * HOUR_S
"""A provider's month: a twelfth of 8,760 hours."""


class Stored:
    """Bytes in the durable store over time, and bytes read from it. Only checkpoints lie there.

    The newest ``keep`` durable checkpoints lie in the store; a withdrawn one stays until newer ones push it out.
    """

    def __init__(self, keep: int) -> None:
        self._kept: deque[int] = deque(maxlen=max(1, keep))
        self._byte_s, self._since_s = 0.0, 0.0
        self._read: dict[Member, int] = {}

    def add(self, record: Record) -> None:
        """Take a durable checkpoint, or a rank's count of bytes read."""
        if isinstance(record, CheckpointRecord) and record.phase == "durable" and record.level == STORE:
            self._byte_s = self.byte_s(record.at_s)
            self._since_s = record.at_s
            self._kept.append(record.bytes)
        elif isinstance(record, Usage) and record.fetched_bytes:
            self._read[record.member] = record.fetched_bytes

    def byte_s(self, now_s: float) -> float:
        """Bytes times the seconds that they have lain there, up to ``now_s``."""
        return self._byte_s + sum(self._kept) * max(0.0, now_s - self._since_s)

    @property
    def read_bytes(self) -> int:
        """Bytes that all processes have read."""
        return sum(self._read.values())


def store_bill(cost: Mapping[str, Any], byte_s: float, read_bytes: float) -> dict[str, float] | None:
    """Cost of the store: ``gb_months``, ``gb_read`` and ``usd``; None where no setting ``cost.*`` has a price of it.

    Args:
        cost: settings of a run, from its journal (see ``fleet.settings.cost``).
        byte_s: stored bytes times seconds.
        read_bytes: bytes read.
    """
    month, read = cost.get("usd_per_gb_month"), cost.get("usd_per_gb_read")
    if month is None and read is None:
        return None
    months, gb = byte_s / GB / MONTH_S, read_bytes / GB
    return {"gb_months": months, "gb_read": gb, "usd": months * (month or 0.0) + gb * (read or 0.0)}
