"""Several optimizers, and gradients of gradients: the bits are the same, also through a loss, and however the state is spread."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleet.protocol.records import HistoryBegun, ViewPublished
from fleet.settings.run import RunSettings
from storage.checkpoint.parts import newest_checkpoint
from tests.fault.test_bad_luck import of, settings, survived, train_through
from tests.support import turns
from tests.support.plain import PlainFleet

Truth = Callable[[str], str]


def chosen(folder: Path, kind: str, **changes: Any) -> RunSettings:
    return settings(folder, options={"kind": kind, "steps": "24"}, **changes)


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """By kind of loop, the digest of an undisturbed run of whole replicas."""
    known: dict[str, str] = {}

    def find(kind: str) -> str:
        if kind not in known:
            folder = tmp_path_factory.mktemp(kind)
            outcome, _, known[kind] = train_through(turns.train, chosen(folder, kind, world=2), folder)
            assert outcome.status == "completed", outcome
        return known[kind]

    return find


@pytest.mark.parametrize("sharding", ["none", "zero1", "fsdp"])
@pytest.mark.parametrize("kind", turns.KINDS)
def test_a_kill_changes_no_bit(kind: str, sharding: str, tmp_path: Path, truth: Truth) -> None:
    def kill_one(fleet: PlainFleet) -> None:
        fleet.wait_for(lambda: fleet.step >= 4 or fleet.ended.done())
        fleet.kill(1)

    through = train_through(turns.train, chosen(tmp_path, kind, world=3, optimizer_sharding=sharding), tmp_path, kill_one)
    survived(*through, truth(kind))
    assert len(of(ViewPublished, through[1])) >= 2
    assert not of(HistoryBegun, through[1])


@pytest.mark.parametrize(("before", "behind"), [("none", "zero1"), ("zero1", "fsdp"), ("fsdp", "none")])
def test_a_run_stops_between_groups_and_goes_on_there(before: str, behind: str, tmp_path: Path, truth: Truth) -> None:
    """And is resumed by ranks that keep the state in another way."""
    first, then = tmp_path / "first", tmp_path / "then"
    with PlainFleet(turns.train, chosen(first, "in_turn", world=3, optimizer_sharding=before), first) as fleet:
        fleet.wait_for(lambda: fleet.step >= 4)
        fleet.loop.call_soon_threadsafe(fleet.coordinator.stop_run, "enough")
        assert fleet.wait().status == "stopped"
    found = newest_checkpoint(f"file://{first}")
    assert found is not None and 0 < found[1].step < 24 and found[1].step % turns.TOGETHER == 0
    shutil.copytree(first / "checkpoints", then / "checkpoints")
    with PlainFleet(turns.train, chosen(then, "in_turn", world=2, optimizer_sharding=behind), then, begin=found) as fleet:
        assert fleet.wait().status == "completed"
        assert fleet.coordinator.machine.state.ending.record.digest == truth("in_turn")
