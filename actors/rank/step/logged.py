"""The figures that the loop logs in a step, by shard, until the step is taken; and in which steps ranks report them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import SupportsFloat

EVERY_US = 500_000
RANKS_A_SECOND = 400
"""At most so many ranks a second report figures to the coordinator: in a run of 10,000 ranks, figures come every 25 s."""


class ShardLog:
    """The figures of the shards that one rank has computed, of the current step and of the step that was taken last.

    Attributes:
        due: whether ranks report the figures of the step that was summed last. ``some``: a rank has logged some.
    """

    def __init__(self, world: int) -> None:
        self._every_us = max(EVERY_US, world * 1_000_000 // RANKS_A_SECOND)
        self._now: dict[int, dict[str, SupportsFloat]] = {}
        self._before: tuple[Mapping[int, float], Mapping[int, Mapping[str, SupportsFloat]]] = {}, {}
        self._reported_us: float | None = None
        self.some = self.due = False

    def __bool__(self) -> bool:
        return any(self._now.values())

    def note(self, shard: int, figures: Mapping[str, SupportsFloat]) -> None:
        self._now.setdefault(shard, {}).update(figures)

    def keep(self, shards: Collection[int]) -> None:
        self._now = {shard: figures for shard, figures in self._now.items() if shard in shards}

    def forget(self) -> None:
        """Nothing of the step at hand remains."""
        self._now = {}

    def begin_view(self) -> None:
        """A view begins. Figures of its first step are reported, so that its ranks go on alike."""
        self._reported_us = None

    def look(self, first_us: float, *, some: bool) -> None:
        """A step was summed; the view's first rank came to it at ``first_us``. ``some``: a rank has logged figures. All ranks decide
        alike."""
        self.some, self.due = some, self._reported_us is None or first_us - self._reported_us >= self._every_us
        if self.due:
            self._reported_us = first_us

    def take(self, weights: Mapping[int, float]) -> None:
        """The step is taken. ``weights``: of the shards that this rank has computed of it."""
        self._before, self._now = (weights, self._now), {}

    @property
    def reported(self) -> tuple[tuple[int, ...], tuple[float, ...], tuple[tuple[str, tuple[float | None, ...]], ...]]:
        """Shards, weights and figures of the step that was taken last, as :class:`fleet.protocol.events.Logged` has them."""
        weights, logged = self._before
        shards = tuple(sorted(weights))
        names = dict.fromkeys(name for shard in shards for name in logged.get(shard, {}))
        values = {(shard, name): float(value) for shard in shards for name, value in logged.get(shard, {}).items()}
        figures = tuple((name, tuple(values.get((shard, name)) for shard in shards)) for name in names)
        return shards, tuple(weights[shard] for shard in shards), figures
