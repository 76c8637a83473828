"""Garbage collection on real processes: ranks make full collections in the same step, and the ledger has them."""

from __future__ import annotations

import gc
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

from fleet.ledger.goodput import Ledger
from fleet.protocol.records import COMPLETED, DecisionMade
from tests.fault.test_bad_luck import fault_free, settings, train_through
from tests.support import trains

__all__ = ["fault_free"]

LITTER = 3


def littered(run: Any) -> None:
    """One rank alone makes objects that a full collection is due for; each rank notes the steps of its full collections.

    It keeps a few of them only: the longer a full collection takes, the later the next one is due.
    """
    kept, file = deque[list[Any]](maxlen=LITTER), Path(run.options["flags"]) / f"full-{run.slot}"

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            with file.open("a") as notes:
                notes.write(f"{run.steps_taken}\n")

    def litter(run: Any, step: Any, committed: bool) -> None:
        if run.slot == 1:
            for _ in range(LITTER):
                kept.append([[number] for number in range(10_000)])
                gc.collect(1)

    gc.callbacks.append(note)
    trains.plain(run, tail=litter)


def test_ranks_make_full_collections_together_and_none_is_accused(fault_free: str, tmp_path: Path) -> None:
    outcome, records, digest = train_through(littered, settings(tmp_path, options={"pause_s": "0.1"}), tmp_path)
    assert outcome.status == COMPLETED and digest == fault_free
    steps = defaultdict(set)
    for slot in range(3):
        steps[slot] = {int(line) for line in (tmp_path / "flags" / f"full-{slot}").read_text().split()} - {0}
    assert steps[0] == steps[1] == steps[2] and len(steps[0]) > 2, steps
    summary = Ledger().apply_all(records).summary()
    assert summary.closes and summary.categories["garbage_collection"] > 0
    assert summary.slots[1]["garbage_collection"] > summary.slots[0]["garbage_collection"] > 0
    assert not [one for one in records if isinstance(one, DecisionMade) and one.policy == "straggler" and one.action != "wait"]
