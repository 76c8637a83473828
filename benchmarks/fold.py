"""How fast a journal folds into the ledger, from a file, on one core.

One event is one span or mark inside a ``Spans`` record. Used by ``benchmarks.machine``.
"""

from __future__ import annotations

import time
from pathlib import Path

from fleet.host.journal import JournalWriter, read_journal
from fleet.ledger.goodput import Ledger
from fleet.protocol.records import VERSION, Committed, Record, RunEnded, RunStarted, Spans, ViewPublished
from fleet.protocol.types import Member, StateId, View

STEP_CODES = "cxwdK"
STEP_US = (25_000, 20_000, 4_000, 1_000, 0)


def write_journal(path: Path, events: int, batch: int, world: int = 4) -> None:
    """A fault-free run of ``world`` ranks: about ``events`` spans and marks, ``batch`` of them a record, and every commit."""
    steps_per_record = max(1, batch // len(STEP_CODES))
    records = events // (world * steps_per_record * len(STEP_CODES))
    members = tuple(Member(slot, 0) for slot in range(world))
    view = View(1, members, tuple((slot, slot + 1) for slot in range(world)), 0, (), StateId(0, 0), "127.0.0.1:1")
    head: list[Record] = [RunStarted(VERSION, "fold", 0.0, 0.0, world, 0, world, "{}"), ViewPublished(view, 0.0, "start", False, ())]
    writer = JournalWriter(path)
    for record in head:
        writer.append(record)
    for number in range(records):
        step, step_s = number * steps_per_record, sum(STEP_US) / 1e6
        for member in members:
            start_us = round(step * step_s * 1e6)
            writer.append(Spans(member, 1, 0, step, start_us, STEP_US * steps_per_record, STEP_CODES * steps_per_record))
        for done in range(step + 1, step + steps_per_record + 1):
            writer.append(Committed(StateId(0, done), done * step_s))
    writer.append(RunEnded("completed", "all steps are committed", records * steps_per_record * step_s, "", ""))
    writer.close()


def count_events(path: Path) -> int:
    """Spans and marks in the journal at ``path``."""
    return sum(len(record.codes) for record in read_journal(path) if isinstance(record, Spans))


def fold_events_per_s(path: Path) -> float:
    """Read, decode and fold the journal at ``path`` from its first byte to the summary; returns events per second of wall time.

    Raises AssertionError when the ledger does not close.
    """
    events = count_events(path)
    begin = time.perf_counter()
    summary = Ledger().apply_all(read_journal(path)).summary()
    elapsed_s = time.perf_counter() - begin
    if not summary.closes:
        raise AssertionError(f"{path}: the ledger does not close")
    return events / elapsed_s
