"""Two systems that take blocks of the same steps in turn: the driver's part, for `mesh` and `price`.

The ranks' part is :class:`benchmarks.mesh_ranks.Turns`: a block begins when its file ``SIDE-BLOCK`` appears, and each rank notes its end.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
from scipy import stats

from fleet.settings.run import RunSettings
from tests.support.plain import PlainFleet
from tests.support.waiting import until

SEED, LIMIT_S = 7, 120.0
Turn = Callable[[str, int], float]
"""Lets one side take a block, by its number, and returns the seconds that it took."""


@dataclass
class Side:
    """Measurements of one system: by pair, ms a step by the clock and of the processors in all ranks; by rank, memory."""

    step_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    memory: list[dict[str, int]] = field(default_factory=list)


@contextmanager
def both(fleet: PlainFleet, peers: Sequence[BaseProcess], sides: Sequence[str], settings: RunSettings, folder: Path) -> Iterator[Turn]:
    """Start Fleet's ranks and the peer's."""
    world, last = settings.world, (int(settings.options["steps"]) - 1) // int(settings.options["block"])

    def turn(side: str, block: int) -> float:
        begin_s = time.monotonic()
        (folder / f"{side}-{block}").touch()
        until(lambda: len(_ends(folder, side, block)) == world, f"the end of block {block} of {side}", LIMIT_S, tick_s=0.005)
        return max(end_s for end_s, _ in _ends(folder, side, block)) - begin_s

    with fleet:
        for peer in peers:
            peer.start()
        try:
            yield turn
            for side in sides:
                (folder / f"{side}-{last}").touch()
            fleet.wait(LIMIT_S)
        finally:
            for peer in peers:
                peer.join(10)
                peer.kill()


def _ends(folder: Path, side: str, block: int) -> list[tuple[float, float]]:
    """(time of a block's end, seconds of processors until then) of each rank that has come there."""
    logs = [path.read_text().splitlines() for path in folder.glob(f"{side}-*.turns")]
    pairs = [log[block].split() for log in logs if len(log) > block]
    return [(float(pair[0]), float(pair[1])) for pair in pairs if len(pair) == 2]


def steps_of(pairs: int, block: int) -> int:
    """Steps of a run: one pair warms up before those that count, and one step follows the last block."""
    return (pairs + 1) * block + 1


def in_turns(started: AbstractContextManager[Turn], sides: Sequence[str], pairs: int, block: int, folder: Path) -> dict[str, Side]:
    """Let both sides take blocks in turn; one pair warms up before those that count."""
    found = {side: Side() for side in sides}
    with started as turn:
        for number in range(pairs + 1):
            for side in sides[:: -1 if number % 2 else 1]:
                found[side].step_ms.append(turn(side, number) * 1e3 / block)
    for side, one in found.items():
        used_s = [sum(cpu_s for _, cpu_s in _ends(folder, side, number)) for number in range(pairs + 1)]
        one.cpu_ms = [(after - before) * 1e3 / block for before, after in itertools.pairwise(used_s)]
        one.step_ms = one.step_ms[1:]
        one.memory = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{side}-*.memory"))]
    return found


def ratio_of(name: str, fleet: Sequence[float], peer: Sequence[float]) -> dict[str, float]:
    """Median of the pairs' ratios, and its 95% interval where there are two pairs or more."""
    ratios = np.array(fleet) / np.array(peer)
    found = {name: float(np.median(ratios))}
    if len(ratios) > 1:
        interval = stats.bootstrap((ratios,), np.median, n_resamples=10_000, method="percentile", rng=SEED).confidence_interval
        found |= {f"{name}_low": float(interval.low), f"{name}_high": float(interval.high)}
    return found
