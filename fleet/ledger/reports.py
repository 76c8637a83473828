"""Reports of train loops in a run, from its journal. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fleet.protocol.once import state_of
from fleet.protocol.records import HistoryBegun, OnceRecord, Record
from fleet.protocol.types import StateId


@dataclass(frozen=True, slots=True)
class ReportMade:
    """One report that counts. ``state`` is the state at the report: None before and behind the loop; ``outcome`` is its result."""

    state: StateId | None
    outcome: dict[str, Any]


def reports(records: Iterable[Record], name: str) -> list[ReportMade]:
    """All actions done once in a run under ``name``, in order, without those of steps that were taken back."""
    found: dict[str, ReportMade] = {}
    for record in records:
        match record:
            case OnceRecord(phase="done", key=key, result=result):
                place, _, called = key.partition("/")
                if called.rpartition("#")[0] == name:
                    found.setdefault(key, ReportMade(state_of(place), json.loads(result)))
            case HistoryBegun(from_state=start):
                found = {key: each for key, each in found.items() if each.state is None or each.state <= start}
    return list(found.values())
