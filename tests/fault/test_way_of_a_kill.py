"""From a SIGKILL to the step of the spare that takes the place: the files that it goes through, traced in all processes that take part."""

from __future__ import annotations

import functools
from pathlib import Path

from fleet.settings.run import RunSettings, StragglerSettings, Timeouts
from tests.support import kill_way, trains
from tests.support.kill_way import MADE, WORDS
from tests.support.plain import PlainFleet

PATIENT = Timeouts(heartbeat_s=10.0, node_s=15.0, quiesce_s=20.0, form_s=30.0, progress_s=60.0, start_s=120.0)
BORNE = StragglerSettings(enabled=False)
"""Traced code is slow, and the loss is to be the only thing that happens."""
BOUND_S = 120.0


def test_a_kill_crosses_the_files_that_the_protocol_page_names(tmp_path: Path) -> None:
    flags, traces = tmp_path / "flags", tmp_path / "traces"
    flags.mkdir()
    traces.mkdir()
    options = {"flags": str(flags), "steps": "400", "pause_s": "0.2", "norm": "layer"}
    chosen = RunSettings(world=3, spares=1, shards=8, nodes=2, options=options, timeouts=PATIENT, straggler=BORNE)
    with PlainFleet(trains.plain, chosen, tmp_path, respawn=False, first=functools.partial(kill_way.trace, traces)) as fleet:
        roster = fleet.coordinator.machine.state.roster
        fleet.wait_for(lambda: sum(rank.phase == "standby" for rank in roster.by_slot.values()) == 1 and fleet.step >= 4, BOUND_S)
        places = {in_view: member.slot for member, _, in_view in fleet.census()}
        fleet.kill(places[True])
        fleet.wait_for(lambda: kill_way.way(traces, f"rank{places[False]}"), BOUND_S)
    crossed = kill_way.way(traces, f"rank{places[False]}")
    assert {crossing.word for crossing in crossed if crossing.what == MADE} == {word.__name__ for word in WORDS}
    assert any(crossing.word == "Formed" and crossing.process == f"rank{places[False]}" for crossing in crossed)
    files = kill_way.files(crossed)
    assert len(files) <= kill_way.MOST_FILES, files
    assert sorted(files) == sorted(kill_way.documented())
