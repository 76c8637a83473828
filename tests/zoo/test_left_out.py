"""A run that goes back to a checkpoint and leaves out samples is, from there on, a plain loop that leaves out the same samples."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fleet.ledger.lineage import DataHistory
from fleet.protocol.causes import ClusterEnded
from fleet.protocol.decisions import GoneBack
from fleet.protocol.records import HistoryBegun, ProcessLost
from tests.support.plain import PlainFleet
from tests.zoo import harness
from tests.zoo.feed import Feed
from tests.zoo.harness import Ran, all_of, by_one_rank, differences, one_thread
from tests.zoo.loops import LOOPS

NAME, SHARDS = "classifier", 16


def stopped(folder: Path, at: int, *, resume: bool) -> int:
    """The run up to a stop: the step of the checkpoint that it leaves."""
    chosen = harness.settings(NAME, folder, 2, SHARDS, stop=str(at))
    with PlainFleet(harness.play, chosen, folder, resume=resume) as fleet:
        fleet.wait_for(lambda: fleet.step >= at, 240.0)
        fleet.loop.call_soon_threadsafe(fleet.coordinator.stop_run, "enough")
        assert fleet.wait(240.0).status == "stopped"
        return fleet.step


def completed(folder: Path, back: GoneBack, **options: str) -> Ran:
    chosen = dataclasses.replace(harness.settings(NAME, folder, 2, SHARDS, **options), left_out=back.left_out)
    with PlainFleet(harness.play, chosen, folder, resume=True, back=back) as fleet:
        outcome = fleet.wait(240.0)
        assert outcome.status == "completed", outcome
        return Ran(fleet.coordinator.machine.state.ending.record.digest, fleet.records(), {})


@pytest.mark.parametrize("kill", ["", "behind"])
def test_from_the_checkpoint_on_it_is_the_plain_loop_without_these_samples(kill: str, tmp_path: Path) -> None:
    kept = stopped(tmp_path, 5, resume=False)
    newer = stopped(tmp_path, kept + 5, resume=True)
    first, end = kept + 2, kept + 4
    back = GoneBack(0, kept, (f"{first}:{end}",), "word")
    ran = completed(tmp_path, back, **({"kill": str(newer + 3)} if kill else {}))
    assert ran.of(HistoryBegun)[-1].from_state.step == kept
    assert any(not isinstance(lost.cause, ClusterEnded) for lost in ran.of(ProcessLost)) == bool(kill)
    order = [step for step in range(1000) if not first <= step < end]
    with one_thread():
        right = LOOPS[NAME].plain(Feed(SHARDS, order=order.__getitem__))
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    one = by_one_rank(LOOPS[NAME].train, SHARDS, tmp_path / "one", left_out=back.left_out)
    assert ran.digest == one.digest
    state = harness.state_of(one._trained.state.objects)
    assert not differences(state, {path: value for path, value in all_of(right).items() if path in state}, exact=False)
    assert by_one_rank(LOOPS[NAME].train, SHARDS, tmp_path / "other").digest != ran.digest, "the samples make a difference"
    stretches = DataHistory().apply_all(ran.records).stretches()
    assert [each.left_out for each in stretches if each.counts][-1] == ((first, end),) and stretches[0].left_out == ()
