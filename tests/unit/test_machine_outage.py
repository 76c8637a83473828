"""A store that fails during the run: it is told in time, seldom and in words; the run stops if it was told to; all survives a restart."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fleet.errors import ConfigError
from fleet.machine.stopping import ANSWER_S
from fleet.protocol.causes import ProcessEnded
from fleet.protocol.events import CheckpointDurable, CheckpointFailed, Finished, Heartbeat, PartFailed
from fleet.protocol.facts import ProcessLost
from fleet.protocol.instructions import EndRun, SaveCheckpoint
from fleet.protocol.records import CheckpointRecord, DecisionMade
from fleet.protocol.types import Pulse, StateId
from fleet.settings.run import CheckpointSettings, Timeouts
from tests.unit.test_machine import STEP_3, Bench, member, only

EXPIRED = "StoreError: store s3://bucket/run/checkpoints: credentials: ExpiredToken"
SAID_BY = "0.0: "


def bench(on_store_failure: str = "go-on", interval_s: float = 10.0) -> Bench:
    one = Bench(world=2, interval_s=interval_s, timeouts=Timeouts(store_s=60.0))
    one.settings = dataclasses.replace(one.settings, checkpoint=CheckpointSettings(on_store_failure=on_store_failure))
    one.machine = one.new_machine()
    return one.start(STEP_3)


def step_to(one: Bench, step: int) -> None:
    for slot in range(2):
        one.send(Heartbeat(f"n{slot % 2}", (Pulse(member(slot), one.machine.state.assembly.generation, StateId(0, step), 0.0, 0.0),)))


def fail_for(one: Bench, seconds: float, reason: str = EXPIRED) -> None:
    """Every checkpoint that is asked for fails at once."""
    until_s = one.now_s + seconds
    while one.now_s < until_s and one.machine.state.phase == "run":
        for asked in one.after(0.5):
            if isinstance(asked, SaveCheckpoint):
                one.send(PartFailed(member(0), asked.request, reason))


def reported(one: Bench) -> list[Any]:
    return [record for record in one.of(DecisionMade) if record.policy == "store"]


def test_it_is_told_after_a_minute_and_again_whenever_it_has_lasted_twice_as_long() -> None:
    one = bench()
    step_to(one, 820)
    fail_for(one, 600.0)
    assert [record.action for record in reported(one)] == ["warn"] * 4
    assert [record.fields["outage_s"] for record in reported(one)] == pytest.approx([60, 120, 240, 480], abs=2.0)
    assert one.machine.state.phase == "run"


def test_a_warning_says_for_how_long_how_many_steps_and_why() -> None:
    one = bench()
    one.through(9.0)
    one.send(CheckpointDurable("c3", STEP_3, 1, 0.1, latency_s=1.0))
    step_to(one, 815)
    fail_for(one, 75.0)
    [warning] = reported(one)
    assert warning.reason.startswith("no durable checkpoint for 70.0 s: ")
    assert "if the cluster were lost now, 812 steps would be lost" in warning.reason
    assert warning.reason.endswith(f"the store says: {SAID_BY}{EXPIRED}")
    assert warning.fields["steps"] == 812
    assert warning.fields["away_s"] > warning.fields["outage_s"] == pytest.approx(60.0)


def test_what_fails_and_works_at_the_next_try_is_not_told() -> None:
    one = bench()
    fail_for(one, 30.0)
    one.send(CheckpointDurable("c3", STEP_3, 1, 0.1, 0.1))
    one.through(9.0)
    assert not reported(one)


def test_views_that_change_are_no_failure_of_the_store() -> None:
    one = bench()
    one.through(11.0)
    assert one.machine.state.checkpoints.store.pending
    one.send(ProcessLost(member(1), ProcessEnded(), at_s=one.now_s))
    one.quiesce([0], STEP_3)
    one.form([member(0)], STEP_3)
    one.through(100.0)
    assert one.machine.state.checkpoints.store.failures.since_s is None and not reported(one)


def test_a_store_that_never_answers_is_told_when_its_checkpoint_is_given_up() -> None:
    one = bench()
    one.through(10.0 + one.settings.timeouts.checkpoint_s + 2.0)
    [warning] = reported(one)
    assert "the store says: not durable after 12" in warning.reason


def test_it_is_told_when_it_works_again_and_the_next_outage_is_a_new_one() -> None:
    one = bench()
    fail_for(one, 75.0)
    one.send(CheckpointFailed("c", "late word of an older one"))
    one.send(CheckpointDurable("c9", StateId(0, 9), 1, 0.1, 0.1))
    one.after(0.1)
    assert [record.action for record in reported(one)] == ["warn", "recovered"]
    assert "the store works again after 65.1 s" in reported(one)[1].reason and reported(one)[1].reason.endswith("step 9 is durable")
    fail_for(one, 50.0)
    assert len(reported(one)) == 2
    fail_for(one, 30.0)
    assert [record.action for record in reported(one)] == ["warn", "recovered", "warn"]


def test_a_run_that_is_to_stop_stops_in_order_and_says_why() -> None:
    one = bench("stop")
    step_to(one, 820)
    fail_for(one, 100.0)
    one.after(ANSWER_S + 0.1)  # ranks that are called out say nothing here
    end = only(EndRun, one.said)
    assert end.status == "stopped"
    assert "(checkpoint.on_store_failure=stop)" in end.reason and "ExpiredToken" in end.reason and "there was none yet" in end.reason
    [stop] = reported(one)
    assert stop.action == "stop" and stop.reason == end.reason
    assert stop.fields["outage_s"] == pytest.approx(60.0)


def test_a_stop_is_decided_once_however_long_its_last_checkpoint_takes() -> None:
    one = bench("stop")
    fail_for(one, 100.0)
    tiers = one.machine.state.checkpoints
    assert [record.action for record in reported(one)] == ["stop"]
    assert tiers.outage.tick(tiers.store, STEP_3, one.now_s + 1000.0) is None


def test_a_run_that_has_finished_is_not_stopped_but_tries_to_keep_its_end() -> None:
    one = bench("stop")
    fail_for(one, 30.0)
    one.send(*(Finished(member(slot), 1, StateId(0, 40), "digest") for slot in range(2)))
    one.after(0.1)
    fail_for(one, 300.0)
    assert not reported(one)
    assert {each.phase for each in one.of(CheckpointRecord)} == {"requested", "failed", "skipped"}
    assert one.machine.state.phase != "run", "it went on to the code behind the loop, without its final checkpoint"


def test_a_coordinator_that_restarts_goes_on_counting() -> None:
    one = bench()
    fail_for(one, 75.0)
    one.restart()
    assert one.machine.state.checkpoints.store.failures.last == f"{SAID_BY}{EXPIRED}"
    one.send(*(Heartbeat(f"n{slot}", (Pulse(member(slot), 1, STEP_3, 0.0, 0.0),)) for slot in range(2)))
    one.now_s = 125.0
    outage = one.machine.state.checkpoints.outage
    assert outage.tick(one.machine.state.checkpoints.store, STEP_3, 125.0) is None
    again = outage.tick(one.machine.state.checkpoints.store, STEP_3, 135.0)
    assert again is not None and again.action == "warn" and again.fields["since_s"] == reported(one)[0].fields["since_s"]


def test_a_run_that_goes_on_in_another_cluster_begins_with_a_store_that_works() -> None:
    one = bench()
    fail_for(one, 75.0)
    one.machine = one.new_machine()
    one.machine.resume(list(one.journal), one.now_s + 1000.0)
    tiers = one.machine.state.checkpoints
    assert tiers.outage.tick(tiers.store, STEP_3, one.now_s + 5000.0) is None
    assert tiers.store.durable_s == one.now_s + 1000.0


def test_what_to_do_is_one_of_two() -> None:
    with pytest.raises(ConfigError, match=r"on_store_failure = 'wait': unknown\. Choose go-on, or stop"):
        CheckpointSettings(on_store_failure="wait")
