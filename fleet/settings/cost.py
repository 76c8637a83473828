"""The cost of a slot of a run, as the user states it. A cost that the user does not state is in no bill."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fleet.errors import ConfigError
from fleet.settings.fields import setting, within


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSettings:
    """Money, energy and emissions of a slot: a rank or a spare. Fleet guesses nothing: an item without a figure here is not in the bill."""

    usd_per_rank_hour: float | None = setting(None, "Rent of a slot for an hour, in USD.", least=0)
    usd_per_gb_month: float | None = setting(None, "Price of a GB (10^9 bytes) of durable checkpoints for a month, in USD.", least=0)
    usd_per_gb_read: float | None = setting(None, "Price of a GB of checkpoints that a rank reads back (egress), in USD.", least=0)
    usd_per_kwh: float | None = setting(None, "Price of a kWh in USD, where the rent does not include energy.", least=0)
    device: str = setting("", "Accelerator of a slot, for the watts of its data sheet, such as h100; empty: watts_per_rank says it.")
    watts_per_rank: float | None = setting(
        None, "Power of a slot in watts, without the building. It wins over its GPU's own figure, and that over the data sheet.", least=0
    )
    budget_usd: float | None = setting(None, "A run that has cost so much stops in order and keeps its last state.", live=True, above=0)
    pue: float = setting(1.0, "Energy of the building over that of its machines (power usage effectiveness).", least=1)
    g_co2_per_kwh: float | None = setting(None, "Emissions of the grid, in grams of CO2.", least=0)
    g_co2_per_kwh_by_hour: tuple[str, ...] = setting((), "The same for each hour of the day, 24 numbers, from 0 o'clock UTC on; it wins.")
    embodied_g_co2_per_rank_hour: float = setting(0.0, "Emissions of making the hardware, spread over its life, in grams of CO2.", least=0)

    def __post_init__(self) -> None:
        within(self, "cost.")
        self._check_hours()
        if self.budget_usd is not None and self.usd_per_rank_hour is None and self.usd_per_kwh is None:
            reason = "no setting gives the cost of a slot in USD"
            raise ConfigError("cost.budget_usd", self.budget_usd, reason, "Add cost.usd_per_rank_hour, or cost.usd_per_kwh.")
        if self.device:
            from fleet.laws.hardware import accelerator

            accelerator(self.device)
        drawn = self.watts_per_rank is not None or self.device
        for name in ("usd_per_kwh", "g_co2_per_kwh", "g_co2_per_kwh_by_hour"):
            if getattr(self, name) not in (None, ()) and not drawn:
                reason = "no setting gives the power of a slot"
                raise ConfigError(f"cost.{name}", getattr(self, name), reason, "Add cost.watts_per_rank, or cost.device.")

    def _check_hours(self) -> None:
        try:
            good = not self.g_co2_per_kwh_by_hour or [0 <= float(each) < math.inf for each in self.g_co2_per_kwh_by_hour] == [True] * 24
        except ValueError:
            good = False
        if not good:
            name, reason = "cost.g_co2_per_kwh_by_hour", "must be 24 finite numbers, at least 0, one for each hour of the day"
            raise ConfigError(name, ",".join(self.g_co2_per_kwh_by_hour), reason, "Leave the setting out where the numbers are not known.")
