"""Which samples a step takes when some samples of the data are left out.

The data's own order is a row of *draws*: draw ``k`` has the samples of step ``k`` when nothing is left out. With some draws left out, each
step takes the next draw that is kept. This changes the samples of a step alone: its random numbers still follow from the step's number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fleet.errors import ConfigError

LeftOut = tuple[tuple[int, int], ...]
"""Draws that are left out: stretches from ``first`` to ``end``, without ``end``. They are in order, and do not touch each other."""
RANGE = re.compile(r"(\d+):(\d+)")


def range_of(field: str, text: str) -> tuple[int, int]:
    """``1200:1260`` is 1200 to 1259. Raises ConfigError that names ``field``."""
    found = RANGE.fullmatch(text)
    if found is None or not int(found[1]) < int(found[2]):
        reason = "it is FIRST:END, numbers of steps of which the first is left out and the last is not"
        raise ConfigError(field, text, reason, f"For steps 1200 to 1259 say {field} 1200:1260.")
    return int(found[1]), int(found[2])


def left_out_of(texts: Iterable[str]) -> LeftOut:
    """The draws that the setting ``left_out`` names. Raises ConfigError."""
    return _merged([range_of("left_out", text) for text in texts])


def in_texts(left_out: LeftOut) -> tuple[str, ...]:
    """The draws in the form of the setting ``left_out``."""
    return tuple(f"{first}:{end}" for first, end in left_out)


def draw_of(left_out: LeftOut, step: int) -> int:
    """Which draw ``step`` takes."""
    draw = step
    for first, end in left_out:
        if draw < first:
            break
        draw += end - first
    return draw


def step_of(left_out: LeftOut, draw: int) -> int | None:
    """Which step takes ``draw``; None: it is left out."""
    before = 0
    for first, end in left_out:
        if draw < first:
            break
        if draw < end:
            return None
        before += end - first
    return draw - before


def without(left_out: LeftOut, steps: Iterable[tuple[int, int]]) -> LeftOut:
    """``left_out`` with more draws: those that the stretches ``steps`` of steps, each from first to end, take at present."""
    taken = [draw_of(left_out, step) for first, end in steps for step in range(first, end)]
    return _merged([*left_out, *((draw, draw + 1) for draw in taken)])


def _merged(stretches: Sequence[tuple[int, int]]) -> LeftOut:
    found: list[tuple[int, int]] = []
    for first, end in sorted(stretches):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((first, end))
    return tuple(found)
