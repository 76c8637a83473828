"""What a slot of a run costs, as its user says it: what nobody says is in no bill."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fleet.errors import ConfigError
from fleet.settings.fields import setting

NUMBERS = (
    "usd_per_rank_hour", "usd_per_gb_month", "usd_per_gb_read", "usd_per_kwh", "watts_per_rank", "g_co2_per_kwh",
    "embodied_g_co2_per_rank_hour",
)  # fmt: skip
"""Finite, and at least 0, where they are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSettings:
    """Money, energy and emissions of a slot: a rank or a spare. Nothing is guessed: what has no figure here is left out of the bill."""

    tables: str = setting(
        "", "File with prices and sites by name, of which price and site choose a row each; what is set beside them wins."
    )
    price: str = setting("", "Row [prices.NAME] of that file: what a slot costs.")
    site: str = setting("", "Row [sites.NAME] of that file: building, energy and emissions.")
    usd_per_rank_hour: float | None = setting(None, "Rent of a slot for an hour, in USD.")
    usd_per_gb_month: float | None = setting(None, "Price of a GB (10^9 bytes) of durable checkpoints for a month, in USD.")
    usd_per_gb_read: float | None = setting(None, "Price of a GB of them that a rank reads back (egress), in USD.")
    usd_per_kwh: float | None = setting(None, "Price of energy in USD, where the rent does not have it.")
    device: str = setting("", "Accelerator of a slot, for the watts of its data sheet, such as h100; empty: watts_per_rank says it.")
    watts_per_rank: float | None = setting(
        None, "What a slot draws, in watts, without the building; it wins over what its GPU says, and that over the data sheet."
    )
    budget_usd: float | None = setting(None, "Once it has cost so much, the run is stopped in order, and its last state kept.", live=True)
    pue: float = setting(1.0, "Energy of the building over that of its machines (power usage effectiveness).")
    g_co2_per_kwh: float | None = setting(None, "Emissions of the grid, in grams of CO2.")
    g_co2_per_kwh_by_hour: tuple[str, ...] = setting((), "The same for each hour of the day, 24 numbers, from 0 o'clock UTC on; it wins.")
    embodied_g_co2_per_rank_hour: float = setting(0.0, "Emissions of making the hardware, spread over its life, in grams of CO2.")

    def __post_init__(self) -> None:
        for name in NUMBERS:
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"cost.{name}", value, "must be a finite number, at least 0", "Leave it out where it is not known.")
        self._check_budget()
        self._check_hours()
        if not 1 <= self.pue < math.inf:
            raise ConfigError("cost.pue", self.pue, "a building needs at least the energy of its machines", "1 leaves the building out.")
        if self.device:
            from fleet.laws.hardware import accelerator

            accelerator(self.device)
        drawn = self.watts_per_rank is not None or self.device
        for name in ("usd_per_kwh", "g_co2_per_kwh"):
            if getattr(self, name) is not None and not drawn:
                reason = "nobody says how much energy a slot takes"
                raise ConfigError(f"cost.{name}", getattr(self, name), reason, "Add cost.watts_per_rank, or cost.device.")

    def _check_hours(self) -> None:
        try:
            good = not self.g_co2_per_kwh_by_hour or [0 <= float(each) < math.inf for each in self.g_co2_per_kwh_by_hour] == [True] * 24
        except ValueError:
            good = False
        if not good:
            name, reason = "cost.g_co2_per_kwh_by_hour", "must be 24 finite numbers, at least 0, one for each hour of the day"
            raise ConfigError(name, ",".join(self.g_co2_per_kwh_by_hour), reason, "Leave it out where they are not known.")
        if self.g_co2_per_kwh_by_hour and self.g_co2_per_kwh is None:
            name, reason = "cost.g_co2_per_kwh", "the hours of a day are given, and no mean of them"
            raise ConfigError(name, "none", reason, "Set it to the mean; a site in cost.tables does it by itself.")

    def _check_budget(self) -> None:
        if self.budget_usd is None:
            return
        if not 0 < self.budget_usd < math.inf:
            raise ConfigError("cost.budget_usd", self.budget_usd, "must be greater than 0 USD", "Leave it out for a run without a budget.")
        if self.usd_per_rank_hour is None and self.usd_per_kwh is None:
            reason = "nobody says what a slot costs in USD"
            raise ConfigError("cost.budget_usd", self.budget_usd, reason, "Add cost.usd_per_rank_hour, or cost.usd_per_kwh.")
