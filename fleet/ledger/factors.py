"""Goodput as a product of three shares. Pure.

* Scheduling: the world's part of all time that was held or queued for.
* Runtime: the part of the world's time that went into kept steps.
* Program: the MFU of those steps, their part of the hardware's peak. It needs FLOPs, which the train model's count or the train function
  (``run.steps(flops=)``) gives.

The peak is that of the data sheet (``cost.device``), or the one that the first rank has measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fleet.ledger.figures import share, with_prefix
from fleet.protocol.records import FLOPS, PEAK


@dataclass(frozen=True, slots=True)
class Factors:
    """Shares from 0 to 1. ``program`` is a share of the peak that ``rests_on`` names, or None where it is unknown."""

    scheduling: float
    runtime: float
    program: float | None
    rests_on: str = ""

    @property
    def product(self) -> float:
        """The product of the known shares."""
        return self.scheduling * self.runtime * (1.0 if self.program is None else self.program)

    def plain(self) -> dict[str, Any]:
        """For the report's JSON."""
        shares = {"scheduling": self.scheduling, "runtime": self.runtime, "program": self.program, "product": self.product}
        return shares | {"rests_on": self.rests_on}

    def __str__(self) -> str:
        program = f" x program {share(self.program)} ({self.rests_on})" if self.program is not None else ""
        return f"scheduling {self.scheduling:.1%} x runtime {self.runtime:.1%}{program} = {share(self.product)}"


def factors(s: Any) -> Factors | None:
    """The factors of a ``LedgerSummary``; None before any of its time has a category."""
    held_s = s.decided_s + (s.world + s.spares) * s.queued_s
    if s.decided_s <= 0:
        return None
    return Factors(s.world_s / held_s, s.goodput, *_program(s, s.kept_s))


def _program(s: Any, kept_s: float) -> tuple[float | None, str]:
    """MFU: FLOPs of the model in kept steps over the FLOPs of the ranks' peak in that time; and the name of that peak."""
    peak, rests_on = _peak(s)
    if FLOPS not in s.measurements or not peak or kept_s <= 0:
        return None, ""
    used: float = s.measurements[FLOPS][1] * s.steps
    return used / (kept_s * peak), f"of the {rests_on} peak of {with_prefix(peak, 'FLOP/s')}"


def _peak(s: Any) -> tuple[float, str]:
    """FLOP/s of a rank's device, and its basis; 0 where it is unknown."""
    if s.device:
        from fleet.laws.hardware import accelerator  # it takes numpy, which a summary does without

        return accelerator(s.device).peak_flop_per_s, "data sheet's"
    return (float(s.measurements[PEAK][1]), "measured") if PEAK in s.measurements else (0.0, "")
