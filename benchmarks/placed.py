"""Fleet's ranks at places: each in the network namespace of its host. See :mod:`benchmarks.price_ranks` for hosts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import price_ranks
from benchmarks.price_ranks import Place
from fleet.settings.run import RunSettings
from tests.support.plain import FORKED, PlainFleet

Places = tuple[Place, ...]


class Fleet(PlainFleet):
    """``places`` are those of nodes, in their order. Lost ranks are not replaced."""

    def __init__(
        self, settings: RunSettings, folder: Path, places: Places, train: Callable[[Any], None] = price_ranks.paired
    ) -> None:  # fmt: skip
        super().__init__(train, settings, folder, respawn=False)
        self._places = {f"node{number}": place for number, place in enumerate(places)}

    def spawn_on(self, slot: int, node: str) -> None:
        arguments = (self.train, self.settings, slot, node, self.shm, self.url, self._places[node])
        process = FORKED.Process(target=price_ranks.started, args=arguments, daemon=False)
        process.start()
        self.processes[slot] = process
        self._all.append(process)
