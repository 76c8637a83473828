"""A spare comes and a rank leaves between two steps, because the rank's node will be taken away; or ranks leave a world that shrinks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fleet.protocol.decisions import Gathering
from fleet.protocol.events import SettingChanged
from fleet.protocol.records import DecisionMade, HistoryBegun, ProcessLost, ViewPublished
from fleet.protocol.types import Member
from tests.fault.test_bad_luck import after, of, settings, survived, train_through
from tests.fault.test_fsdp import CUT
from tests.support import trains
from tests.support.plain import PlainFleet
from tests.support.undisturbed import Undisturbed

MODES = pytest.mark.parametrize("sharding", ["none", "zero1", "fsdp"])


@pytest.fixture(scope="module")
def truth(undisturbed: Undisturbed) -> str:
    return undisturbed(lambda folder: settings(folder, world=2, options=CUT))


def members(fleet: PlainFleet) -> list[Member]:
    return [member for member, _, in_view in fleet.census() if in_view]


def released(fleet: PlainFleet) -> bool:
    return bool(fleet.coordinator.machine.state.roster.released)


def computed(folder: Path) -> Counter[str]:
    """How often each shard of each step was computed. A rehearsal computes one of step 0."""
    lines = [line for path in (folder / "flags").glob("shards-*") for line in path.read_text().splitlines()]
    return Counter(line for line in lines if not line.startswith("0 "))


def nothing_was_lost(records: list[Any], folder: Path) -> None:
    assert not [one for one in of(DecisionMade, records) if isinstance(one.payload, Gathering)], "no rank was called out of a view"
    assert not of(HistoryBegun, records)
    assert set(computed(folder).values()) == {1}, "no shard was computed again"


@MODES
def test_a_rank_leaves_a_node_that_goes_and_a_spare_comes(sharding: str, tmp_path: Path, truth: str) -> None:
    leaving: list[Member] = []

    def misfortune(fleet: PlainFleet) -> None:
        state = fleet.coordinator.machine.state

        def spared() -> bool:
            """The spare is ready; of a sharded run it is in the view."""
            return any(rank.phase == "standby" for rank in state.roster.by_slot.values()) or bool(state.view and state.view.spares)

        fleet.wait_for(lambda: fleet.step >= 4 and spared())
        leaving.append(next(member for member in members(fleet) if member not in state.view.spares))
        fleet.loop.call_soon_threadsafe(fleet.coordinator.announce, f"node{leaving[0].slot}", 60.0, "maintenance")
        fleet.wait_for(lambda: released(fleet))
        after(fleet.step + 3)(fleet)
        fleet.kill(leaving[0].slot)

    chosen = settings(tmp_path, world=2, spares=1, nodes=3, optimizer_sharding=sharding, options={**CUT, "pause_s": "0.2"})
    outcome, records, digest = train_through(trains.with_shards_noted, chosen, tmp_path, misfortune)
    survived(outcome, records, digest, truth)
    views = of(ViewPublished, records)
    assert [(len(one.view.computing), one.graceful) for one in views] == [(2, False), *[(2, True)] * (len(views) - 1)]
    assert leaving[0] in views[0].view.members and leaving[0] not in views[-1].view.members
    assert [(one.member, one.generation) for one in of(ProcessLost, records)] == [(leaving[0], -1)], "it stood by"
    nothing_was_lost(records, tmp_path)


@MODES
def test_a_world_shrinks_and_grows_between_steps(sharding: str, tmp_path: Path, truth: str) -> None:
    def misfortune(fleet: PlainFleet) -> None:
        for step, world in ((4, 2), (14, 3)):
            after(step)(fleet)
            fleet.loop.call_soon_threadsafe(fleet.coordinator._driver.submit, SettingChanged("world", float(world)))
            fleet.wait_for(lambda world=world: len(members(fleet)) == world)

    chosen = settings(tmp_path, world=3, nodes=1, optimizer_sharding=sharding, options={**CUT, "pause_s": "0.2"})
    outcome, records, digest = train_through(trains.with_shards_noted, chosen, tmp_path, misfortune)
    survived(outcome, records, digest, truth)
    assert [(len(one.view.members), one.graceful) for one in of(ViewPublished, records)] == [(3, False), (2, True), (3, True)]
    assert not of(ProcessLost, records)
    nothing_was_lost(records, tmp_path)
