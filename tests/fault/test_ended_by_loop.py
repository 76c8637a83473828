"""A loop ends its run before the last step: by ``run.stop``, by ``break``, and on one rank alone; with kills, and on a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fleet
from fleet.protocol.causes import EndWhy
from fleet.protocol.decisions import LoopEnded
from fleet.protocol.records import CheckpointRecord, DecisionMade, ProcessLost, RunEnded, ViewPublished
from fleet.settings.run import CheckpointSettings, RunSettings
from tests.support import trains
from tests.support.plain import PlainFleet
from tests.zoo.harness import PATIENT

AT = 6
STEPS = 1000


def settings(folder: Path, how: str, world: int = 3, sharding: str = "none", **options: str) -> RunSettings:
    (folder / "flags").mkdir(parents=True, exist_ok=True)
    given = {"how": how, "flags": str(folder / "flags"), **options}
    rarely = CheckpointSettings(policy="fixed", interval_s=3600.0)
    return RunSettings(world=world, shards=8, options=given, timeouts=PATIENT, checkpoint=rarely, optimizer_sharding=sharding)


def play(run: fleet.Run) -> None:
    """The loop is left behind step ``AT``, in the way that the option ``how`` names."""
    how, kill = run.options["how"], int(run.options.get("kill", "-1"))
    model, optimizer, scheduler = trains.build(16, "layer")
    state = run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in run.steps(state, total=STEPS):
        if how == "on top" and step.number == AT:
            run.stop("enough is enough")
        for x, y in step.batches(trains.Numbers(), batch_size=32):
            step.backward((model(x) - y).square().mean())
            if step.number == kill and run.slot == 1 and trains.once(run, "killed"):
                trains.die()
        committed = step.commit()
        if how in ("stop", "stop, break") and step.number == AT - 1:  # where it is not committed it does nothing
            run.stop("enough is enough")
            if how == "stop, break" and committed:
                break
        if how == "alone" and step.number == AT - 1 and run.slot == 1:
            run.stop("my loss is flat")
        if how == "break" and committed and step.number == AT - 1:
            break
        if how == "return" and committed and step.number == AT - 1:
            return
    if "die_behind" in run.options and trains.once(run, f"behind-{run.slot}"):
        trains.die()
    run.once(lambda: (Path(run.options["flags"]) / "behind").write_text(str(run.steps_taken)), name="behind")


def ended(chosen: RunSettings, folder: Path, **more: Any) -> tuple[RunEnded, list[Any]]:
    with PlainFleet(play, chosen, folder, **more) as one:
        one.wait(240.0)
        records = one.records()
    return next(record for record in reversed(records) if isinstance(record, RunEnded)), records


@pytest.mark.parametrize(
    ("how", "sharding"), [("stop", "none"), ("on top", "zero1"), ("stop, break", "none"), ("break", "none"), ("return", "zero1")]
)
def test_a_run_is_completed_at_one_step_and_a_kill_in_it_changes_nothing(how: str, sharding: str, tmp_path: Path) -> None:
    """The rank is lost in the last step, so that it is attempted twice; what replaces it has been through no body that ends the run."""
    record, records = ended(settings(tmp_path, how, sharding=sharding, kill=str(AT - 1)), tmp_path)
    assert any(isinstance(each, ProcessLost) for each in records)
    assert (record.status, record.why) == ("completed", EndWhy.LOOP_ENDED)
    assert (
        f"behind step {AT}" in record.reason
        and ("enough is enough" if "stop" in how or how == "on top" else "left by break") in record.reason
    )
    kept = [each.state.step for each in records if isinstance(each, CheckpointRecord) and each.phase == "durable" and each.level == "store"]
    assert kept[-1] == AT
    if how != "return":
        assert (tmp_path / "flags" / "behind").read_text() == str(AT), "the code behind the loop has run on its last state"
    quiet = tmp_path / "quiet"
    other, _ = ended(settings(quiet, how, world=1, sharding="none"), quiet)
    assert record.digest == other.digest or sharding != "none"


def test_one_rank_alone_is_refused_with_its_name_the_step_and_the_reason(tmp_path: Path) -> None:
    record, records = ended(settings(tmp_path, "alone"), tmp_path)
    assert (record.status, record.why) == ("failed", EndWhy.LOOP_WRONG)
    assert f"step {AT}: the loop of rank 1.0 has ended the run there (my loss is flat), and that of rank" in record.reason
    assert any(isinstance(each, DecisionMade) and isinstance(each.payload, LoopEnded) for each in records)


def test_all_are_lost_behind_the_end_and_the_run_is_over_there_still(tmp_path: Path) -> None:
    """In the code behind the loop: new processes begin from the final checkpoint, and take no further step."""
    record, records = ended(settings(tmp_path, "stop", die_behind="yes"), tmp_path)
    assert (record.status, record.why) == ("completed", EndWhy.LOOP_ENDED)
    assert max(each.view.state.step for each in records if isinstance(each, ViewPublished)) == AT
