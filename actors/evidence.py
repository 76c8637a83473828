"""Evidence of a hanging run: the stacks of each rank, its position, and its activity.

Each rank writes its stacks into a file when it gets a message, or a signal if it does not answer the message (see
``actors.rank.telemetry.stacks``). A stopped process cannot; its process state shows why. The wait is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from actors.local_rank import LocalRank
from actors.messages import EvidenceGathered, RankEvidence
from actors.rank.telemetry.stacks import END, STACKS_SIGNAL, stacks_path
from fleet.host.clock import now_us
from fleet.host.proc import handles, stat_fields
from fleet.protocol.instructions import Inspect
from fleet.protocol.records import CATEGORIES, COMM, REFORM, STRAGGLER

LIMIT_S = 1.0
DEAF_S = 0.4
"""A rank that has written no stacks by then does not get the message, so the agent sends the signal."""
POLL_S = 0.01
GONE = "gone"
PROCESS_STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a tracer",
    "Z": "ended",
    "D": "in an uninterruptible call",
}
SILENT = (PROCESS_STATES["T"], PROCESS_STATES["t"], PROCESS_STATES["Z"], GONE)
"""Processes in these states write no stacks, so the agent does not wait for them."""


def begin(ranks: Sequence[LocalRank], folder: Path, ask: Callable[[LocalRank], None]) -> list[tuple[LocalRank, int]]:
    """Ask the ranks for their stacks now. Returns each rank with the length of its file before."""
    asked = [(rank, _size(stacks_path(folder, rank.token))) for rank in ranks if rank.member is not None]
    for rank, _ in asked:
        ask(rank)
    return asked


async def gather(node: str, order: Inspect, asked: Sequence[tuple[LocalRank, int]], folder: Path) -> EvidenceGathered:
    """Collect the evidence that :func:`begin` asked for: within about ``LIMIT_S``, for ranks in any state."""
    seen = [_where(rank) for rank, _ in asked]
    found = await asyncio.gather(*(_stacks(rank, stacks_path(folder, rank.token), before) for rank, before in asked))
    ranks = [
        RankEvidence(rank.member, *where, _process_state(rank.process.pid), stacks)
        for (rank, _), where, stacks in zip(asked, seen, found, strict=True)
        if rank.member is not None
    ]
    return EvidenceGathered(node, order.incident, order.reason, tuple(ranks))


def render(found: EvidenceGathered) -> str:
    """The text of the evidence for the run's folder."""
    parts = [f"{found.incident}, node {found.node}: {found.reason}"]
    for rank in found.ranks:
        head = f"rank {rank.member}: {rank.where}; last collective: {rank.collective}; process: {rank.process}"
        parts.append(f"{head}\n{rank.stacks or '(no stacks)'}")
    return "\n\n".join(parts) + "\n\n"


def keep(found: EvidenceGathered, folder: Path) -> Path:
    """Append the evidence to the incident's file; the nodes' agents report one after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{found.incident}.txt"
    with path.open("a", encoding="utf-8") as file:
        file.write(render(found))
    return path


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


async def _stacks(rank: LocalRank, path: Path, before: int) -> str:
    """The new part of the rank's file, once it is complete: on a busy machine the rank may pause between two lines."""
    pid, signalled = rank.process.pid, False
    for look in range(round(LIMIT_S / POLL_S)):
        await asyncio.sleep(POLL_S)
        text = path.read_bytes()[before:].decode(errors="replace") if path.exists() else ""
        if text.endswith(END) or _process_state(pid) in SILENT or (signalled and text and not handles(pid, STACKS_SIGNAL)):
            break
        if not text and not signalled and look * POLL_S >= DEAF_S:
            signalled = True
            with contextlib.suppress(OSError):  # the state of a process that has just ended shows it
                signal.pidfd_send_signal(rank.pidfd, STACKS_SIGNAL)
    return text.removesuffix(END).strip()


def _where(rank: LocalRank) -> tuple[str, str]:
    """(the rank's position and activity, its last collective). A peer that has left its view earlier may have broken the collective."""
    at, row, before = rank.ring.position(), rank.ring.last(), rank.ring.last(but=REFORM)
    doing = CATEGORIES.get(row.code, row.code) if row is not None else "nothing"
    since_s = (now_us() - row.at_us) / 1e6 if row is not None else 0.0
    shard = f", shard {at.shard}" if at.shard >= 0 else ""
    where = f"step {at.step}{shard} of generation {at.generation}, {doing} for {since_s:.1f} s"
    waits = before is not None and before.code in (COMM, STRAGGLER) and before.step == at.step
    return where, f"reduction of step {at.step}, not ended" if waits else f"reduction of step {at.step - 1}" if at.step > 0 else "none"


def _process_state(pid: int) -> str:
    try:
        state = stat_fields(pid)[0]
    except OSError:
        return GONE
    return PROCESS_STATES.get(state, "alive")
