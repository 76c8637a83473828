"""The curves of a run's page as plain data of bounded size: goodput and speed over time, what the program reports over steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from fleet.ledger.pace import Floor
from fleet.ledger.report import Report
from fleet.protocol.records import STEADY

MAX_POINTS = 240
MAX_FAULT_MARKS = 200
TIME, STEPS = "time", "step"
STRETCHES = 80
"""Goodput is that of a stretch of time, and a run has so many at most."""


def curves(report: Report, floor: float | None = None) -> list[dict[str, Any]]:
    """Each curve is ``{name, unit, x, series, points}``: ``x`` says what it is drawn over, a point is [x, the other of the two, values...].

    Times are seconds since the run started. The other of time and step is what is shown beside a value. ``floor`` is the share of the pace
    below which chaos stops, where it has one.
    """
    reported = report.history["measurements"].items()
    measured = [_measurement(report, name, points) for name, points in reported if name not in STEADY]
    against = [] if floor is None else [_against_floor(report, floor)]
    return [each for each in (*measured, _goodput(report), *against, _speed(report)) if each["points"]]


def fault_marks(report: Report) -> list[dict[str, Any]]:
    """Where what struck lies on the curves, by time and by step; the newest, oldest first."""
    incidents = [item for item in report.summary.incidents if not item.phases or any(phase == "executed" for phase, _, _ in item.phases)]
    marks = sorted(incidents, key=lambda item: item.at_s)[-MAX_FAULT_MARKS:]
    steps = _steps_at(report, [item.at_s for item in marks])
    started_s = report.summary.started_s
    return [
        {"id": item.id, "text": f"{item.id}: {item.kind} ({item.component})", "time": item.at_s - started_s, "step": step}
        for item, step in zip(marks, steps, strict=True)
    ]


def thinned(points: Sequence[Any], most: int = MAX_POINTS) -> list[Any]:
    """At most ``most`` of the points and the last one, evenly."""
    stride = max(1, -(-len(points) // most))
    return [*points[: len(points) - 1 : stride], *points[-1:]]


def newest(points: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """(step, value) in order of steps; a step that was repeated has its newest value, and what is not finite is left out."""
    return sorted({step: value for step, value in points if math.isfinite(value)}.items())


def _measurement(report: Report, name: str, points: Sequence[Sequence[float]]) -> dict[str, Any]:
    kept = thinned(newest(points))
    times = _times_of(report, [step for step, _ in kept])
    rows = [[step, at_s, value] for (step, value), at_s in zip(kept, times, strict=True)]
    return {"name": name, "unit": "", "x": STEPS, "series": [name], "points": rows}


def _goodput(report: Report) -> dict[str, Any]:
    """Of each stretch of time and so far. The last of the latter is the run's goodput, once all of its time is reported."""
    s, shares = report.summary, report.timeline.shares()
    together = max(1, -(-len(shares) // STRETCHES))
    groups = [shares[at : at + together] for at in range(0, len(shares), together)]
    sums = [(sum(part[1] for part in group), sum(part[2] for part in group)) for group in groups]
    so_far = accumulate(sums, lambda before, new: (before[0] + new[0], before[1] + new[1]))
    times = [(group[0][0] + group[-1][0] + _width_s(report)) / 2 for group in groups]
    world_share = s.world / max(1, s.world + s.spares)
    rows = [
        [min(at_s, s.now_s) - s.started_s, step, _share(*own, world_share), _share(*all_before, world_share)]
        for at_s, step, own, all_before in zip(times, _steps_at(report, times), sums, so_far, strict=True)
    ]
    return {"name": "goodput", "unit": "%", "x": TIME, "series": ["now", "so far"], "points": rows}


def _against_floor(report: Report, share: float) -> dict[str, Any]:
    """What is left of the run's pace over a trailing window, beside the floor of its chaos."""
    floor, rows, started_s = Floor(share), list[list[float]](), report.summary.started_s
    first_s = min((at_s for item in report.summary.incidents for phase, at_s, _ in item.phases if phase == "executed"), default=math.inf)
    shown = set(thinned(range(len(report.commits)))) if report.commits else set()
    for number, (at_s, step) in enumerate(report.commits):
        if at_s >= first_s:
            floor.injected()
        floor.see(at_s, step)
        if number in shown and (kept := floor.kept(at_s)) is not None:
            rows.append([at_s - started_s, step, 100 * share, 100 * kept])
    return {"name": "pace", "unit": "%", "x": TIME, "series": ["floor", "over 30 s"], "points": rows}


def _width_s(report: Report) -> float:
    return report.timeline.width_us / 1e6


def _share(steps_s: float, all_s: float, world_share: float) -> float | None:
    return 100 * min(1.0, steps_s / (all_s * world_share)) if all_s > 0 else None


def _speed(report: Report) -> dict[str, Any]:
    """Steps that were kept, per second, in stretches of at least a hundredth of the time from the first to the last."""
    s, commits = report.summary, report.commits
    least_s = (commits[-1][0] - commits[0][0]) / 100 if commits else 0.0
    kept = list(commits[:1])
    for at_s, step in commits[1:]:
        if at_s - kept[-1][0] >= max(least_s, 1e-6):
            kept.append((at_s, step))
    rows = [
        [(before[0] + after[0]) / 2 - s.started_s, after[1], (after[1] - before[1]) / (after[0] - before[0])]
        for before, after in pairwise(kept)
    ]
    return {"name": "speed", "unit": "steps/s", "x": TIME, "series": ["steps/s"], "points": thinned(rows) if len(rows) > 1 else []}


def _steps_at(report: Report, times_s: Sequence[float]) -> list[float | None]:
    """The last step that was committed at each of ``times_s`` on the run's clock."""
    if not report.commits:
        return [None] * len(times_s)
    at_s, steps = zip(*report.commits, strict=True)
    return [steps[place - 1] if place else 0 for place in np.searchsorted(at_s, times_s, side="right")]


def _times_of(report: Report, steps: Sequence[float]) -> list[float | None]:
    """Seconds since the run started at which each of ``steps`` was committed, None where that is not known."""
    if not report.commits:
        return [None] * len(steps)
    at_s, committed = zip(*report.commits, strict=True)
    return [float(found) - report.summary.started_s for found in np.interp(steps, committed, at_s)]
