"""Whether a run is well, and what is wrong with it now, in lines that can be read without the rest of the page. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dashboards.metrics.rules import CORRUPT, LATE_S, LATE_STEPS, OVERDUE
from fleet.ledger.report import duration
from fleet.ledger.summary import LedgerSummary
from fleet.ledger.tallies import SlotStatus
from fleet.machine.budget import WARNED_AT
from fleet.protocol.records import PROGRAM

RUNNING, COMPLETED = "running", "completed"
MAX_NAMES = 4
"""So many are named, and of more it is said how many."""


class Wellness(NamedTuple):
    """``state``: starting, well, degraded or stopped. ``why``: a sentence."""

    state: str
    why: str


def verdict(s: LedgerSummary, lines: Sequence[str], *, silent: bool = False) -> Wellness:
    """Is it well? ``lines``: what is wrong, the worst first."""
    if s.status != RUNNING or silent:
        ended = f"It is {s.status}" + (f": {s.reason}." if s.reason else ".")
        return Wellness("stopped", lines[0] if silent and lines else ended)
    if s.tallies.last_commit_s is None and not lines:
        return Wellness("starting", f"No step is committed yet, {duration(s.now_s - s.started_s)} after the start.")
    if lines:
        more = f" {len(lines) - 1} more below." if len(lines) > 1 else ""
        return Wellness("degraded", lines[0] + more)
    return Wellness("well", f"{s.view_size} of {s.world} ranks train, {duration(s.median_step_s)} a step.")


def wrong(s: LedgerSummary, slots: Sequence[SlotStatus], *, silent: bool = False, injected: Sequence[str] = ()) -> list[str]:
    """A line for each thing, the worst first; empty when all is well. The limits of time are those of the alerts.

    Args:
        slots: who is where, with what strikes them.
        silent: the run has no end, and nobody writes its journal any more.
        injected: kinds of the faults that last and strike what all ranks have in common.
    """
    if s.status != RUNNING:
        found = [] if s.status == COMPLETED else [f"It is {s.status}" + (f": {s.reason}" if s.reason else "") + "."]
    elif silent:
        found = ["It has no end, and nobody writes its journal any more: its driver is gone."]
    else:
        found = [*_progress(s), *_world(s), *_injected(slots, injected), *_checkpoint(s)]
    return [*found, *_money(s), *_outcomes_of(s)]


def _progress(s: LedgerSummary) -> list[str]:
    last_s = s.started_s if s.tallies.last_commit_s is None else s.tallies.last_commit_s
    since_s = s.now_s - last_s
    return [f"No step was committed for {duration(since_s)}."] if since_s > LATE_S + LATE_STEPS * s.median_step_s else []


def _world(s: LedgerSummary) -> list[str]:
    if not s.views_total:
        return []
    missing, found = s.world - s.view_size, list[str]()
    if missing > 0:
        found.append(f"{missing} of {s.world} ranks {'does' if missing == 1 else 'do'} not train.")
    if s.spares and s.tallies.standing_by < 1:
        found.append("No spare stands by: the next loss makes the world smaller.")
    return found


def _injected(members: Sequence[SlotStatus], kinds: Sequence[str]) -> list[str]:
    """Faults that last, by kind, with the slots that they strike."""
    slots: dict[str, list[int]] = {kind: [] for kind in kinds}
    for member in members:
        for kind in member.injected:
            slots.setdefault(kind, []).append(member.slot)
    if not slots:
        return []
    return [f"Struck now: {', '.join(kind + _where(places) for kind, places in sorted(slots.items()))}."]


def _where(slots: Sequence[int]) -> str:
    if not slots:
        return ""
    return f" (slot{'s' if len(slots) > 1 else ''} {_some(slots)})"


def _some(names: Sequence[object]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(map(str, names[:MAX_NAMES])) + more


def _checkpoint(s: LedgerSummary) -> list[str]:
    if s.checkpoint_interval_s is None:
        return []
    last_s = s.started_s if s.tallies.last_durable_s is None else s.tallies.last_durable_s
    age_s = s.now_s - last_s
    if age_s <= OVERDUE * s.checkpoint_interval_s + s.checkpoint_latency_s:
        return []
    what = "No checkpoint is durable yet after" if s.tallies.last_durable_s is None else "The newest durable checkpoint is old:"
    return [f"{what} {duration(age_s)}, and one is due every {duration(s.checkpoint_interval_s)}."]


def _money(s: LedgerSummary) -> list[str]:
    found = s.tariff_now
    spent = found.of(s.rank_s).get("usd") if found is not None else None
    if spent is None or not s.budget_usd or spent < WARNED_AT * s.budget_usd:
        return []
    return [f"{spent / s.budget_usd:.0%} of the budget of {s.budget_usd:g} USD is spent."]


def _outcomes_of(s: LedgerSummary) -> list[str]:
    astray = [name for name, (_, value) in s.measurements.items() if name not in PROGRAM and not math.isfinite(value)]
    found = [f"Not finite: {_some(astray)}."] if astray else []
    acted = sum(count for (policy, action), count in s.tallies.decisions.items() if policy == "corruption" and action in CORRUPT.split("|"))
    if acted:
        found.append(f"Wrong results were found, and acted on: {acted} time{'s' if acted > 1 else ''}.")
    return found if s.closes else [*found, "The ledger does not close: its figures cannot be trusted."]
