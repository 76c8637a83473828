"""The agent's record of one rank process of its node."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from actors.rank.telemetry.recorder import RingReader
from actors.rank.telemetry.spans import SpanBuilder
from actors.rank.telemetry.timing import StepTimer
from fleet.host.proc import core_wait_us
from fleet.protocol.types import Member, Process


@dataclass(slots=True)
class LocalRank:
    """A rank process of this node, from its first hello until its death is reported."""

    process: Process
    token: str
    ring: RingReader
    pidfd: int
    writer: asyncio.StreamWriter | None = None
    member: Member | None = None
    builder: SpanBuilder | None = None
    timer: StepTimer = field(default_factory=StepTimer)
    waited_us: int | None = None

    def waited(self, steps: int) -> int:
        """How long it waited for a core, in microseconds for each of the ``steps`` since the last call; 0 the first time."""
        before, self.waited_us = self.waited_us, core_wait_us(self.process.pid)
        return (self.waited_us - before) // steps if before is not None and self.waited_us > before else 0
