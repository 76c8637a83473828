"""Nodes that cannot be heard and may only be cut off: who is given up, and who is waited for."""

from __future__ import annotations

import pytest

from fleet.errors import ConfigError
from fleet.protocol.events import NodeJoined, NodeSilent
from fleet.protocol.instructions import Evict, Instruction, Publish, Quiesce
from fleet.protocol.reach import Reach
from fleet.protocol.records import DecisionMade, ProcessLost
from fleet.settings.run import RunSettings, Timeouts
from tests.unit.test_machine import STEP_3, Bench, member

N1 = (1, 3)
"""The slots of node n1: the other two are on n0."""


def begun(**settings: object) -> Bench:
    return Bench(**settings).start(STEP_3)  # type: ignore[arg-type]


def reported(bench: Bench) -> list[str]:
    return [decision.action for decision in bench.of(DecisionMade) if decision.policy == "partition"]


def evicted(said: list[Instruction]) -> list[int]:
    return [one.member.slot for one in said if isinstance(one, Evict)]


def test_stall_waits_for_a_silent_node_and_goes_on_with_the_ranks_it_had() -> None:
    bench = begun(on_partition="stall")
    timeouts = bench.settings.timeouts
    said = bench.through(timeouts.node_s + 1.0, *N1)
    assert not evicted(said) and reported(bench) == ["wait"]
    assert next(one for one in said if isinstance(one, Quiesce)).members == tuple(member(slot) for slot in range(4))
    bench.quiesce([0, 2], STEP_3)
    said = bench.through(timeouts.quiesce_s * 3, *N1)
    assert not evicted(said) and not [one for one in said if isinstance(one, Publish)]
    bench.after(0.1)  # all are heard again
    said = bench.quiesce(N1, STEP_3) + bench.through(1.0)
    [published] = [one for one in said if isinstance(one, Publish)]
    assert published.view.members == tuple(member(slot) for slot in range(4)) and published.view.state == STEP_3
    assert reported(bench) == ["wait", "recovered"] and not bench.of(ProcessLost)


def test_stall_gives_nobody_up_before_an_agent_that_is_back_has_told_of_its_ranks() -> None:
    """Its first word is that it is there; what it says of its ranks comes a moment later. Found by seed 2 of the simulated cuts."""
    bench = begun(on_partition="stall")
    bench.through(bench.settings.timeouts.node_s + 2.0, *N1)
    bench.send(NodeJoined("n1", 1))
    assert not evicted(bench.through(0.3, *N1)) and not bench.of(ProcessLost)
    assert evicted(bench.through(bench.settings.timeouts.heartbeat_s + 0.2, 3)) == [3], "who is silent while others are heard is given up"


def test_stall_waits_no_longer_than_it_may() -> None:
    bench = begun(on_partition="stall", timeouts=Timeouts(stall_s=20.0))
    bench.through(4.8, *N1)
    bench.quiesce([0, 2], STEP_3)
    assert not bench.of(ProcessLost)
    said = bench.through(16.5, *N1)
    assert {record.member.slot for record in bench.of(ProcessLost)} == set(N1)
    assert [one.view.members for one in said if isinstance(one, Publish)] == [(member(0), member(2))]
    assert reported(bench) == ["wait", "recovered"]


def test_stall_does_not_wait_for_an_agent_that_hung_up() -> None:
    bench = begun(on_partition="stall")
    bench.send(NodeSilent("n1", bench.now_s))
    bench.through(1.0, *N1)
    assert {record.member.slot for record in bench.of(ProcessLost)} == set(N1) and reported(bench) == []


def test_stall_evicts_a_rank_of_which_its_agent_says_that_it_is_silent() -> None:
    bench = begun(on_partition="stall")
    assert evicted(bench.through(bench.settings.timeouts.heartbeat_s + 0.1, 2)) == [2]


@pytest.mark.parametrize("on_partition", ["go-on", "stall"])
def test_a_connection_that_ends_after_a_silence_is_no_death(on_partition: str) -> None:
    """A link was cut and is back: the old connection is reset, and the agent has not called again yet."""
    bench = begun(on_partition=on_partition)
    bench.through(2.0, *N1)
    bench.send(NodeSilent("n1", bench.now_s))
    bench.after(0.3, *N1)
    bench.after(0.1)
    assert not bench.of(ProcessLost)


def test_go_on_gives_up_a_silent_node() -> None:
    bench = begun()
    bench.through(bench.settings.timeouts.node_s + 0.5, *N1)
    assert {record.member.slot for record in bench.of(ProcessLost)} == set(N1)


def test_a_coordinator_that_hears_nobody_is_cut_off_and_gives_up_nobody() -> None:
    bench = begun()
    assert not evicted(bench.through(60.0, *range(4))) and not bench.of(ProcessLost)
    assert reported(bench) == ["wait"]
    bench.after(0.1, *N1)
    bench.quiesce([0, 2], STEP_3)
    bench.through(bench.settings.timeouts.heartbeat_s - 1.0, *N1)
    assert not bench.of(ProcessLost), "not all come back at once"
    bench.through(bench.settings.timeouts.node_s, *N1)
    assert {record.member.slot for record in bench.of(ProcessLost)} == set(N1), "some are heard: the rest is given up"


def test_a_coordinator_that_was_restarted_waits_for_nodes_that_do_not_call() -> None:
    for on_partition, lost in (("stall", set[int]()), ("go-on", set(N1))):
        bench = begun(on_partition=on_partition)
        bench.restart()
        bench.through(bench.settings.timeouts.node_s + 1.0, *N1)
        assert {record.member.slot for record in bench.of(ProcessLost)} == lost


def test_a_lease_lapses_once_and_again_after_an_answer() -> None:
    reach = Reach(0.0, 2.0)
    assert [reach.lapses(at_s) for at_s in (1.0, 2.1, 3.0)] == [False, True, False]
    reach.answered(3.5)
    assert [reach.lapses(at_s) for at_s in (4.0, 5.6)] == [False, True]


def test_settings_of_partitions_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"on_partition = 'wait': unknown\. Choose go-on, or stall"):
        RunSettings(on_partition="wait")
    with pytest.raises(ConfigError, match=r"timeouts\.stall_s = 1\.0: less than timeouts\.node_s"):
        Timeouts(stall_s=1.0)


def test_an_old_line_that_is_reset_once_somebody_is_heard_is_no_death() -> None:
    bench = begun()
    bench.through(20.0, *range(4))
    bench.after(0.1, *N1)  # n0 is heard again
    bench.send(NodeSilent("n1", bench.now_s))
    bench.after(0.5, *N1)
    assert not bench.of(ProcessLost)


def test_a_coordinator_that_is_restarted_while_it_is_cut_off_gives_up_nobody() -> None:
    bench = begun()
    bench.restart()
    bench.through(30.0, *range(4))
    assert not bench.of(ProcessLost)


def test_stall_does_not_wait_for_a_node_without_ranks() -> None:
    bench = begun(on_partition="stall")
    bench.send(NodeJoined("n9", 9))
    bench.through(bench.settings.timeouts.node_s + 2.0)
    assert reported(bench) == [] and "n9" not in bench.machine.state.roster.nodes
