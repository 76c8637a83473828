"""A train function that only waits, and the files by which a test sees and ends it. Light, because each worker imports it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.host.proc import start_ticks, stat_fields

LIMIT_S = 90.0
TICK_S = 0.02


@dataclass(frozen=True)
class Seen:
    """One start of the train function."""

    rank: int
    pid: int
    node: int


def wait_until_done(config: dict[str, Any]) -> None:
    """Tell that this rank runs, then wait for the file ``done``; return, unless ``config`` says to stay."""
    import ray.train

    folder = Path(config["folder"])
    rank = ray.train.get_context().get_world_rank()
    with open(folder / "started", "a") as file:
        file.write(f"{rank} {os.getpid()} {os.environ['FLEET_NODE_INDEX']}\n")
    if config.get("raises"):
        raise RuntimeError("on purpose")
    pause = threading.Event()
    while config.get("stays") or not (folder / "done").exists():
        pause.wait(TICK_S)


def started(folder: Path) -> list[Seen]:
    """Every start so far, in order."""
    path = folder / "started"
    lines = path.read_text().splitlines() if path.exists() else []
    return [Seen(*map(int, line.split())) for line in lines if line.count(" ") == 2]


def until(condition: Callable[[], object], what: str, limit_s: float = LIMIT_S, tick_s: float = TICK_S) -> None:
    """Wait for a condition, checked often, with a bound. Raises TimeoutError that says what did not come.

    The bound is a number of checks: a machine that stands still for minutes, as those that tests run on do, has used up one.
    """
    pause = threading.Event()
    for _ in range(round(limit_s / tick_s)):
        if condition():
            return
        pause.wait(tick_s)
    raise TimeoutError(f"{what}: not within {limit_s:g} s")


def lives(pid: int, ticks: int) -> bool:
    """Whether the process that started ``ticks`` after boot is still there, and no zombie."""
    try:
        return start_ticks(pid) == ticks and stat_fields(pid)[0] != "Z"
    except ProcessLookupError:
        return False
