"""The status line of a run that goes on: its parts, its columns, and a forecast of the first fault. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fleet.ledger.figures import figure
from fleet.ledger.report import duration

MARGIN = 1.2
"""The forecast of a run's length is multiplied by it, as it is not exact."""
SPACE = "  "


@dataclass(frozen=True, slots=True)
class Status:
    """A run as it stands. ``total`` and ``batch_size`` are 0 and ``per_s`` None while they are unknown."""

    step: int
    total: int
    per_s: float | None
    batch_size: int
    goodput: float
    ranks: int
    world: int
    survived: int
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step, at this pace."""
        return (self.total - self.step) / self.per_s if self.total and self.per_s else None


def parts(status: Status) -> list[tuple[int, str]]:
    """(number, text) of the line's parts in their order. Where there is no room, the part with the highest number is left out first."""
    faults = f"{status.survived} fault{'' if status.survived == 1 else 's'} survived"
    found = [(0, f"step {status.step:,}/{status.total:,}" if status.total else f"step {status.step:,}")]
    found += [(1 if name == "loss" else 6, f"{name} {figure(value)}") for name, value in status.figures.items()]
    if status.per_s is not None:
        found.append((4, f"{status.per_s:.3g} steps/s"))
        found += [(7, f"{status.per_s * status.batch_size:,.0f} samples/s")] if status.batch_size else []
    found += [(3, f"ETA {duration(status.left_s)}")] if status.left_s is not None else []
    return [*found, (2, f"goodput {status.goodput:.1%}"), (5, f"{status.ranks} of {status.world} ranks"), (8, faults)]


def in_columns(found: Sequence[tuple[int, str]], width: int | None = None) -> str:
    """The parts as one line of at most ``width`` columns, the first part at least; None: all of them."""
    kept = list(found)
    while width is not None and len(kept) > 1 and len(SPACE.join(text for _, text in kept)) > width:
        kept.remove(max(kept))
    return SPACE.join(text for _, text in kept)


def hung(text: str, width: int | None, indent: int) -> str:
    """``text`` in lines of ``width`` columns, all but the first indented. No word is broken: paths can be copied. None: one line."""
    if width is None:
        return text
    lines = textwrap.wrap(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True)
    return "\n".join(lines)


def forewarning(status: Status, trained_s: float, first_fault_s: float) -> str:
    """A warning when the run will be over before the first fault, due ``first_fault_s`` after its training began; else empty."""
    if status.left_s is None or MARGIN * (trained_s + status.left_s) >= first_fault_s:
        return ""
    lasts, due = duration(trained_s + status.left_s), duration(first_fault_s)
    return f"this run lasts some {lasts}; the first fault is due after {due}: no fault will strike"
