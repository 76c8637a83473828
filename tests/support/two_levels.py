"""A train function whose ranks sum in two levels, and may die of it."""

from __future__ import annotations

from typing import Any

from actors.rank.step.levels import Levels
from tests.support import trains


def sums_in_levels(run: Any) -> None:
    """It says so. Slot 1 is killed in the sum of step 10, once, where ``dies_in`` names a method of :class:`Levels`: as it is called."""

    def watched(name: str) -> Any:
        original = getattr(Levels, name)

        def call(self: Any, *arguments: Any) -> Any:
            trains.once(run, "levels")
            here = run._loop.client.protocol.state  # None of a newcomer whose state is on its way
            due = run.slot == 1 and here is not None and here.step == 10 and name == run.options.get("dies_in")
            if due and trains.once(run, name):
                trains.die()
            return original(self, *arguments)

        return call

    for name in ("_combined", "leaves", "pass_on"):
        setattr(Levels, name, watched(name))
    trains.plain(run)
