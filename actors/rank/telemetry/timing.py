"""Ring rows -> a rank's own time in each committed step, without waiting for its peers. Used by the node agent; pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from actors.rank.telemetry.recorder import OWN, Row
from fleet.protocol.records import ABANDON, CHECKPOINT, COMM, COMMIT, COMPUTE, DATA, GARBAGE, HOLD, STRAGGLER, VERIFY
from fleet.protocol.slowness import RankTimes
from fleet.protocol.types import Member

KEPT = 256
"""At most so many steps of one rank wait while the agent cannot report them."""

MOST = 32
"""Steps of one rank in one report. Of more steps the agent reports each second, fourth, ... one, the same ones on each node."""


@dataclass(slots=True)
class OwnTime:
    """One step of one rank, in microseconds."""

    generation: int = -1
    step: int = -1
    shards: int = 0
    compute_us: int = 0
    data_us: int = 0
    network_us: int = 0
    fixed_us: int = 0


class StepTimer:
    """Adds up one process's times in each step. A step in which a peer was lost, or that began in another view, is left out.

    So is the first step in which a process computes a shard, as it loads and compiles there.

    Computing right after a shard's data came is the shard's time. All other computing is the step's own work, except comparisons with other
    ranks in some steps. If the accelerator reports its time for the shards, that counts.
    """

    def __init__(self) -> None:
        self._done: deque[OwnTime] = deque(maxlen=KEPT)
        self._now = OwnTime()
        self._open: Row | None = None
        self._doing = ""  # the last code but GARBAGE
        self._in_shard = self._torn = False
        self._first = True
        self._accelerator_us = 0

    def add(self, rows: Iterable[Row]) -> None:
        """Rows of the ring, in order of time."""
        for row in rows:
            if row.code == OWN:
                self._accelerator_us += row.step
                continue
            if self._open is not None:
                self._close(self._open.code, max(0, row.at_us - self._open.at_us))
            if row.code in (COMMIT, ABANDON, HOLD):
                self._mark(row)
                continue
            self._now.shards += row.code == DATA
            self._open = row
            if row.code != GARBAGE:
                self._in_shard, self._doing = row.code == COMPUTE and self._doing == DATA, row.code

    def _mark(self, row: Row) -> None:
        if row.code == COMMIT:
            if not self._torn and self._now.shards and not self._first:
                self._now.generation, self._now.step = row.generation, row.step
                self._now.compute_us = self._accelerator_us or self._now.compute_us
                self._done.append(self._now)
            self._first = self._first and not self._now.shards
            self._now, self._torn, self._accelerator_us = OwnTime(), False, 0
        elif self._now.shards:
            self._torn = True
        if self._open is not None:
            self._open = self._open._replace(at_us=max(row.at_us, self._open.at_us))
        self._in_shard = False

    def _close(self, code: str, us: int) -> None:
        now = self._now
        if code == COMPUTE and self._in_shard:
            now.compute_us += us
        elif code == COMPUTE:
            now.fixed_us += us
        elif code == DATA:
            now.data_us += us
        elif code == COMM:
            now.network_us += us
        elif code not in (STRAGGLER, CHECKPOINT, VERIFY, GARBAGE) and now.shards:
            self._torn = True

    def take(self) -> list[OwnTime]:
        """Take the steps that were committed since the last call, oldest first."""
        done = list(self._done)
        self._done.clear()
        return done


def thinned(steps: list[OwnTime], most: int = MOST) -> list[OwnTime]:
    """At most ``most`` of ``steps``, evenly spaced."""
    stride = 1
    while len(steps) > most * stride:
        stride *= 2
    return [time for time in steps if time.step % stride == 0][-most:]


def summary(member: Member, steps: list[OwnTime], waited_us: int = 0) -> RankTimes:
    """The report on one rank, of steps of one view. ``waited_us``: in each step it waited so long for a core."""
    columns = ("step", "shards", "compute_us", "data_us", "network_us", "fixed_us")
    step, shards, compute_us, data_us, network_us, fixed_us = (tuple(getattr(time, name) for time in steps) for name in columns)
    return RankTimes(member, step, shards, compute_us, data_us, network_us, fixed_us, (waited_us,) * len(steps))
