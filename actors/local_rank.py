"""One rank process, as the agent of its node knows it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from actors.rank.telemetry.recorder import RingReader
from actors.rank.telemetry.spans import SpanBuilder
from actors.rank.telemetry.timing import StepTimer
from fleet.protocol.types import Member, Process


@dataclass(slots=True)
class LocalRank:
    """A rank process of this node, from its first hello until its death was told."""

    process: Process
    token: str
    ring: RingReader
    pidfd: int
    writer: asyncio.StreamWriter | None = None
    member: Member | None = None
    builder: SpanBuilder | None = None
    timer: StepTimer = field(default_factory=StepTimer)
