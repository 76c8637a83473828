"""A node that the run has lost, and that comes back by itself, commits nothing more: what the run has on it ends."""

from __future__ import annotations

from pathlib import Path

from fleet.protocol.records import ViewPublished
from tests.fault.test_bad_luck import after, of, settings
from tests.support import trains
from tests.support.plain import PlainFleet


def test_what_runs_on_a_node_that_was_taken_out_ends_when_its_line_is_back(tmp_path: Path) -> None:
    chosen = settings(tmp_path, nodes=3, options={"steps": "4000"})
    with PlainFleet(trains.plain, chosen, tmp_path, respawn=False) as fleet:
        after(5)(fleet)
        agent, process = fleet.agents["node1"], fleet.processes[1]
        assert not fleet.call(_dismiss(fleet)), "it is here"
        fleet.call(_fall_silent(fleet))
        fleet.wait_for(lambda: fleet.coordinator.lost_nodes().keys() == {"node1"})
        assert fleet.call(_dismiss(fleet))
        fleet.wait_for(agent.dismissed.is_set)
        process.join(30)
        assert process.exitcode == -9
        fleet.wait_for(lambda: all(member.slot != 1 for member in of(ViewPublished, fleet.records())[-1].view.members))
        fleet.call(agent.stop())
        fleet.call(fleet.start_agent(1))  # as Ray does for an actor that ended
        fleet.wait_for(fleet.agents["node1"].dismissed.is_set)
        assert fleet.call(_lines(fleet)) == {"node0", "node2"}


async def _fall_silent(fleet: PlainFleet) -> None:
    """The line stays up, as across a cut."""
    _, report = fleet.agents["node1"]._tasks
    report.cancel()


async def _dismiss(fleet: PlainFleet) -> bool:
    return fleet.coordinator.dismiss("node1")


async def _lines(fleet: PlainFleet) -> set[str]:
    return set(fleet.coordinator._lines.by_node)
