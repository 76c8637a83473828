"""Journals written by hand, for tests of the ledger, the report and the page. Durations are in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence

from fleet.protocol import records as r
from fleet.protocol.causes import Cause, EndWhy, ProcessEnded
from fleet.protocol.types import Fault, FaultPhase, Member, StateId, View

KILLED = ProcessEnded(-9)


class Story:
    """Writes a journal one happening at a time. Each process's spans start where its last ones ended."""

    def __init__(self, world: int, spares: int = 0) -> None:
        self.records: list[r.Record] = [r.RunStarted(r.VERSION, "story", 0.0, 1.7e9, world, spares, 16, "{}")]
        self.ends_us: dict[Member, int] = {}

    def spans(
        self, slot: int, incarnation: int, text: str, *, generation: int = 1, history: int = 0, step: int = 0, at: float = 0.0
    ) -> None:
        """``text``: codes with their milliseconds, such as ``c60 x40 K``. ``at``: milliseconds, where a process begins."""
        member = Member(slot, incarnation)
        start_us = self.ends_us.get(member, round(at * 1000))
        words = text.split()
        durations = tuple(round(float(word[1:] or 0) * 1000) for word in words)
        self.records.append(r.Spans(member, generation, history, step, start_us, durations, "".join(word[0] for word in words)))
        self.ends_us[member] = start_us + sum(durations)

    def view(
        self,
        generation: int,
        members: Sequence[tuple[int, int]],
        at: float,
        step: int = 0,
        *,
        history: int = 0,
        graceful: bool = False,
        causes: tuple[str, ...] = (),
        group: int = 1,
        spares: int = 0,
    ) -> None:
        """``group``: so many ranks in a row compute a shard together. ``spares``: so many of the last members compute none."""
        places = [(("tensor", rank % group),) if group > 1 else () for rank in range(len(members))]
        in_view = tuple(Member(slot, incarnation, place) for (slot, incarnation), place in zip(members, places, strict=True))
        computing = len(in_view) - spares
        ranges = tuple((16 * i // computing, 16 * (i + 1) // computing) for i in range(computing)) + ((16, 16),) * spares
        view = View(generation, in_view, ranges, 0, (), StateId(history, step), "127.0.0.1:1")
        self.records.append(r.ViewPublished(view, at / 1e3, "because", graceful, causes))

    def lost(self, slot: int, incarnation: int, at: float, *, generation: int = 1, fault: str | None = None, cause: Cause = KILLED) -> None:
        self.records.append(r.ProcessLost(Member(slot, incarnation), cause, fault, generation, -1, -1, "", at_s=at / 1e3))

    def fault(self, name: str, kind: str, phase: FaultPhase, at: float, slot: int = 0, detail: str = "") -> None:
        fault = Fault(name, at / 1e3, "gpu", kind, slot=slot)
        self.records.append(r.FaultRecord(fault, phase, (Member(slot, 0),), detail, at_s=at / 1e3))

    def committed(self, step: int, at: float, history: int = 0) -> None:
        self.records.append(r.Committed(StateId(history, step), at / 1e3))

    def history(self, history: int, step: int, at: float) -> None:
        self.records.append(r.HistoryBegun(history, StateId(history - 1, step), at / 1e3, "no rank holds a clean state"))

    def durable(self, step: int, at: float, history: int = 0) -> None:
        self.records.append(r.CheckpointRecord(f"step-{step}", "durable", StateId(history, step), at / 1e3, 1_000, 0.002, 0.1))

    def resumed(self, at: float, *, gap: bool = True) -> None:
        self.records.append(r.Resumed(at / 1e3, 1.7e9 + at / 1e3, "resume", "cluster", gap))

    def ended(self, at: float, status: r.EndStatus = "completed") -> None:
        self.records.append(r.RunEnded(status, "all steps are committed", at / 1e3, "ab" * 32, "", EndWhy.ALL_STEPS))


def one_loss(fault: str | None = None) -> Story:
    """Two ranks; rank 1 is lost at 2150 ms, half a step after step 10; rank 0 goes on alone; the replacement joins at step 30."""
    story = Story(world=2)
    story.view(1, [(0, 0), (1, 0)], 1000)
    for slot in (0, 1):
        story.spans(slot, 0, "i1000", generation=-1)
        story.spans(slot, 0, "f100 " + "c60 x40 K " * 10)
    for step in range(1, 11):
        story.committed(step, 1100 + 100 * step)
    if fault is not None:
        story.fault(fault, "kill_rank", "executed", 2149, slot=1)
    story.spans(0, 0, "c60 x60 A f80", step=10)
    story.lost(1, 0, 2150, fault=fault)
    story.view(2, [(0, 0)], 2250, 10, causes=("1.0",))
    story.spans(1, 0, "c50", step=10)
    story.spans(0, 0, "f20 " + "c60 x40 K " * 20, generation=2, step=10)
    for step in range(11, 31):
        story.committed(step, 2320 + 100 * (step - 10))
    story.spans(1, 1, "i800 s100", generation=-1, at=3150)
    story.view(3, [(0, 0), (1, 1)], 4200, 28, graceful=True)
    story.spans(1, 1, "f70 r200", generation=3, step=30)
    for slot, incarnation in ((0, 0), (1, 1)):
        story.spans(slot, incarnation, "c60 x40 K " * 30 + "e10", generation=3, step=30)
    for step in range(31, 61):
        story.committed(step, 4320 + 100 * (step - 30))
    story.ended(7340)
    return story
