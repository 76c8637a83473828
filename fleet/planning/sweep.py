"""The same question for many values of one field. ``gpus=8:131072:x2`` doubles, ``detect_s=0:60:+10`` adds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from fleet.errors import ConfigError
from fleet.planning.inputs import PlanInput, fields, parse
from fleet.planning.plan import FleetPlan, make_plan

FORM = re.compile(r"(?P<field>\w+)=(?P<low>[^:]+):(?P<high>[^:]+):(?P<kind>[x+])(?P<step>.+)")
MAX_POINTS = 100_000


@dataclass(frozen=True, slots=True)
class Point:
    """One value, and its plan or the reason why there is none."""

    value: Any
    plan: FleetPlan | None
    refusal: str


@dataclass(frozen=True, slots=True)
class Sweep:
    """A field and the values it takes."""

    field: str
    values: tuple[Any, ...]


def parse_sweep(text: str) -> Sweep:
    """The sweep that ``text`` describes, ends included where a step meets them.

    Raises:
        ConfigError: another form, an unknown field, a field that is no number, a step that never reaches the last value, too many points.
    """
    match = FORM.fullmatch(text)
    if match is None:
        reason = "not of the form field=low:high:xN (multiply) or field=low:high:+N (add)"
        raise ConfigError("--sweep", text, reason, "For example gpus=8:131072:x2.")
    name = match["field"]
    low, high = float(parse(name, match["low"])), float(parse(name, match["high"]))
    if isinstance(fields()[name].default, str):
        raise ConfigError("--sweep", text, f"{name} is no number", "Run it once for each name.")
    step, times = _number(text, match["step"]), match["kind"] == "x"
    if (times and (step <= 1.0 or low <= 0.0)) or (not times and step <= 0.0) or high < low:
        raise ConfigError("--sweep", text, "never reaches the last value from the first", "Multiply by more than 1, or add more than 0.")
    whole = isinstance(fields()[name].default, int)
    values = [*_values(low, high, step, times)]
    return Sweep(name, tuple(dict.fromkeys(round(value) if whole else value for value in values)))


def _number(text: str, step: str) -> float:
    try:
        return float(step)
    except ValueError as error:
        raise ConfigError("--sweep", text, f"the step {step!r} is not a number", "For example x2, or +10.") from error


def _values(low: float, high: float, step: float, times: bool) -> Iterator[float]:
    value, count = low, 0
    while value <= high * (1 + 1e-12):
        if count >= MAX_POINTS:
            raise ConfigError("--sweep", f"{low:g}:{high:g}", f"more than {MAX_POINTS} points", "Take a larger step.")
        yield value
        count += 1
        value = low * step**count if times else low + step * count


def run_sweep(asked: PlanInput, sweep: Sweep) -> Iterator[Point]:
    """One point at a time, in order, so that the caller can show progress, or stop and keep the points so far."""
    for value in sweep.values:
        try:
            yield Point(value, make_plan(replace(asked, **{sweep.field: value}), levers=False), "")
        except ConfigError as error:
            yield Point(value, None, str(error))
