"""Which of the runs that wait may start: by priority, then by age, each with all of its ranks or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiting:
    """A run that waits for ``slots`` slots since ``since_s``. The greatest ``priority`` comes first."""

    name: str
    slots: int
    priority: int
    since_s: float


def in_turn(waiting: Iterable[Waiting]) -> list[Waiting]:
    """In the order in which they will start."""
    return sorted(waiting, key=lambda one: (-one.priority, one.since_s, one.name))


def admit(waiting: Iterable[Waiting], free: int) -> list[str]:
    """Names of those that start now, when ``free`` slots are free.

    Nothing overtakes the first one that has no room: small runs would keep a large one out for as long as they come.
    """
    found: list[str] = []
    for one in in_turn(waiting):
        if one.slots > free:
            break
        free -= one.slots
        found.append(one.name)
    return found
