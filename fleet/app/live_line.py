"""The one line that lives while a run goes on: what is in it, in how many columns, and what can be foreseen. Pure."""

from __future__ import annotations

import textwrap
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fleet.ledger.report import duration

PACE_S = 20.0
"""Steps of the last so many seconds say how fast it goes: long enough for what one loss costs to be in it."""
SOONEST_S, LEAST_STEPS = 2.0, 3
"""From then on the pace says something about the rest."""
MARGIN = 1.2
"""What is foreseen of a run's length is not exact."""
SPACE = "  "


class StepPace:
    """How fast steps are committed, from the times of the last ones."""

    def __init__(self) -> None:
        self._commits: deque[tuple[float, int]] = deque()

    def add(self, at_s: float, step: int) -> None:
        """``step`` steps were committed at ``at_s``. A step that is taken back begins anew."""
        if self._commits and step <= self._commits[-1][1]:
            self._commits.clear()
        self._commits.append((at_s, step))
        while at_s - self._commits[0][0] > PACE_S:
            self._commits.popleft()

    def per_s(self, now_s: float) -> float | None:
        """Steps a second; None before it can be told. ``now_s`` counts too: a run that stands still gets slower."""
        if len(self._commits) < 2 or self._commits[-1][1] - self._commits[0][1] < LEAST_STEPS:
            return None
        first_s, first = self._commits[0]
        took_s = max(now_s, self._commits[-1][0]) - first_s
        return (self._commits[-1][1] - first) / took_s if took_s >= SOONEST_S else None


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
    """The line's parts in their order, each with its rank: what has the highest goes first where there is no room."""
    faults = f"{status.survived} fault{'' if status.survived == 1 else 's'} survived"
    found = [(0, f"step {status.step:,}/{status.total:,}" if status.total else f"step {status.step:,}")]
    found += [(1 if name == "loss" else 6, f"{name} {value:.4g}") for name, value in status.figures.items()]
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
    """What to say where the run is over before the first fault is due, ``first_fault_s`` after its training began; else nothing."""
    if status.left_s is None or MARGIN * (trained_s + status.left_s) >= first_fault_s:
        return ""
    lasts, due = duration(trained_s + status.left_s), duration(first_fault_s)
    return f"this run lasts some {lasts}; the first fault is due after {due}: no fault will strike"
