"""Resumes on real processes, without Ray: what resumes is what ran, what is bad is not tried for ever, a slow first step is no fault."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fleet
from fleet.ledger.goodput import Ledger
from fleet.machine.sessions import Sessions
from fleet.protocol.causes import EndWhy, GatherWhy
from fleet.protocol.decisions import Gathering
from fleet.protocol.instructions import EndRun
from fleet.protocol.records import (
    COMPLETED,
    Committed,
    DecisionMade,
    HistoryBegun,
    ProcessLost,
    Resumed,
    RunBuilt,
    ViewPublished,
)
from fleet.protocol.types import Member
from fleet.settings.run import CheckpointSettings, RunSettings, Timeouts
from storage.checkpoint.store import CheckpointStore
from tests.support.plain import PlainFleet
from tests.support.waiting import until

FAST = Timeouts(heartbeat_s=2.0, node_s=3.0, quiesce_s=5.0, form_s=10.0, progress_s=30.0, start_s=60.0)
HASTY = Timeouts(heartbeat_s=0.6, node_s=1.0, quiesce_s=0.7, form_s=1.0, progress_s=2.0, start_s=30.0)
COLD_S = 4.0
"""Longer than any time-out above, but the one for a process to start."""
HELD_AT = {5: 1, 9: 2}
"""By step of a run that will fail, how many checkpoints it waits for: there is always an older one."""
COLD = [True]
"""Of this process."""


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index % 7))


def await_checkpoints(url: str, count: int) -> None:
    until(lambda: len(CheckpointStore(url).list()) >= count, f"{count} checkpoints are durable")


def loop(run: fleet.Run) -> None:
    options = run.options
    model = nn.Linear(4, 1)
    kind = getattr(torch.optim, options.get("optimizer", "SGD"))
    optimizer = kind(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    data = Numbers(int(options.get("samples", "1000")))
    for step in run.steps(run.track(model=model, optimizer=optimizer, schedule=schedule), total=int(options.get("steps", "20"))):
        for batch in step.batches(data, batch_size=16):
            if COLD[0]:
                time.sleep(float(options.get("cold_s", "0")))
                COLD[0] = False
            time.sleep(0.01)
            if "fails_at" in options and step.number in HELD_AT:
                await_checkpoints(options["store"], HELD_AT[step.number])
            if step.number == int(options.get("fails_at", "-1")):
                raise ValueError("what the checkpoint holds is bad")
            step.backward(model(batch).square().mean())
        step.commit()


def train(folder: Path, *, resume: bool = False, world: int = 2, timeouts: Timeouts = FAST, **options: str) -> tuple[EndRun, list[Any]]:
    """(how the session ended, its records)."""
    settings = RunSettings(
        world=world, shards=4, nodes=1, peer_copies=0, options={"store": f"file://{folder}", **options}, timeouts=timeouts,
        checkpoint=CheckpointSettings(policy="fixed", interval_s=0.05),
    )  # fmt: skip
    with PlainFleet(loop, settings, folder, resume=resume) as run:
        return run.wait(), run.records()


def session(records: list[Any]) -> list[Any]:
    """The records of the last one."""
    last = max((number for number, record in enumerate(records) if isinstance(record, Resumed)), default=0)
    return records[last:]


def of(kind: type, records: list[Any]) -> list[Any]:
    return [record for record in records if isinstance(record, kind)]


def test_a_run_goes_on_with_what_it_was_built_of_or_not_at_all(tmp_path: Path) -> None:
    failed, records = train(tmp_path, fails_at="9")
    assert failed.why is EndWhy.TRAIN_RAISED
    assert [record.build.samples for record in of(RunBuilt, records)] == [1000]
    for options, words in (
        ({"samples": "500"}, "the data set had 1000 samples and has 500"),
        ({"optimizer": "AdamW"}, "the optimizer was SGD and is AdamW"),
    ):
        refused, records = train(tmp_path, resume=True, **options)
        assert (refused.status, refused.why) == ("failed", EndWhy.REFUSED) and words in refused.reason
        assert not of(ViewPublished, session(records)), "nobody was called into a view"
    longer, records = train(tmp_path, resume=True, steps="30")
    assert longer.status == COMPLETED
    reported = [record.reason for record in of(DecisionMade, session(records)) if record.policy == "resume"]
    assert len(reported) == 1 and reported[0].startswith("CosineAnnealingLR.T_max is 20 and the run has 30 steps")
    first_step_s = min(record.at_s for record in of(Committed, session(records)))
    assert next(record.at_s for record in of(DecisionMade, session(records)) if record.policy == "resume") < first_step_s


def test_a_checkpoint_that_leads_nowhere_is_left_for_an_older_one(tmp_path: Path) -> None:
    store = CheckpointStore(f"file://{tmp_path}")
    train(tmp_path, fails_at="9", world=1)
    held = store.list()
    _, records = train(tmp_path, resume=True, fails_at="9", world=1)
    [first] = Sessions().note_all(records).returns
    assert first.checkpoint == held[-1] and first.step == 9
    _, records = train(tmp_path, resume=True, fails_at="9", world=1)
    returns = Sessions().note_all(records).returns
    assert [each.checkpoint for each in returns] == [held[-1], returns[1].checkpoint] and returns[1].checkpoint < held[-1]
    assert returns[1].checkpoint in store.list(), "what newer ones that lead nowhere have not pushed out"
    mended, records = train(tmp_path, resume=True, world=1)
    assert mended.status == COMPLETED and not Sessions().note_all(records).returns


def test_a_first_step_that_takes_long_is_start_up_and_no_fault(tmp_path: Path) -> None:
    """No view could form while a rank was at its first step: it was evicted for that, and so was each that came in its place."""
    settings = RunSettings(
        world=2, shards=4, nodes=1, peer_copies=0, timeouts=HASTY, options={"cold_s": str(COLD_S), "steps": "300"}
    )  # fmt: skip
    with PlainFleet(loop, settings, tmp_path) as run:
        run.wait_for(lambda: run.coordinator.machine.state.committed.step > 5)
        run.kill(1)
        outcome, records = run.wait(), run.records()
    assert outcome.status == COMPLETED and not of(HistoryBegun, records)
    [lost] = of(ProcessLost, records)
    assert lost.member == Member(1, 0), "the one that was killed, and nobody after that"
    gathered = [record.payload.why for record in of(DecisionMade, records) if isinstance(record.payload, Gathering)]
    assert len(gathered) == 1, "once, for its loss"
    assert gathered[0] in (GatherWhy.LOST, GatherWhy.LEFT), "its agent may say it first, or the rank that misses it"
    assert len(of(ViewPublished, records)[-1].view.members) == 2, "its replacement trains"
    ledger = Ledger()
    for record in records:
        ledger.apply(record)
    assert ledger.summary().categories["init"] > 3 * COLD_S
