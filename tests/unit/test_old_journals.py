"""Journals of version 1 are read as what they meant, and any journal as far as it is good."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleet.app.follow import good_records, open_report
from fleet.errors import JournalError
from fleet.protocol import causes as c
from fleet.protocol import decisions as d
from fleet.protocol.causes import EndWhy
from fleet.protocol.decisions import figures
from fleet.protocol.journal import JournalWriter, decode_line, encode_line, read_journal
from fleet.protocol.old_journals import cause_of, end_of
from fleet.protocol.records import VERSION, CheckpointRecord, Committed, DecisionMade, ProcessLost, Record, RunEnded, RunStarted
from fleet.protocol.types import StateId

CAUSES: list[tuple[str, c.Cause, str]] = [
    ("its process ended", c.ProcessEnded(), "lost"),
    ("its cluster ended", c.ClusterEnded(), ""),
    ("not heard of since the coordinator restarted", c.NotHeardOf(), ""),
    ("its agent hung up", c.AgentHungUp(), "lost"),
    ("its agent hung up, and its ranks are missed", c.AgentHungUp(missed=True), "lost"),
    ("its agent was silent for 12.5 s", c.AgentSilent(12.5), "lost"),
    ("the train function raised ValueError: no\nheartbeat", c.TrainRaised("ValueError: no\nheartbeat"), ""),
    ("evicted: no heartbeat for 3.2 s", c.Evicted(c.NoHeartbeat(3.2)), "hang"),
    ("evicted: no heartbeat for 3 s", c.Told("evicted: no heartbeat for 3 s", "hang"), "hang"),
    ("evicted: no progress for 9.0 s at step StateId(lineage=0, step=5)",
     c.Told("evicted: no progress for 9.0 s at step StateId(lineage=0, step=5)", "hang"), "hang"),
    ("evicted: did not leave its process group when told to", c.Evicted(c.DidNotLeave()), "hang"),
    ("evicted: superseded by a newer process of the same slot", c.Evicted(c.Superseded()), ""),
    ("evicted: silent corruption: shard 5 at step 12 differ from the majority's", c.Evicted(c.Outvoted("shard 5", 12)), "corruption"),
    ("evicted: silent corruption: the final state differs from the majority's", c.Evicted(c.Outvoted("the final state")), "corruption"),
    ("evicted: a fresh process must begin: no state is left, and there is no checkpoint", c.Evicted(c.FreshWanted()), ""),
    ("evicted: it is slow: evict costs 3", c.Told("evicted: it is slow: evict costs 3"), ""),
    ("signal 9", c.Told("signal 9"), ""),
    ("", c.Told(""), ""),
]  # fmt: skip


@pytest.mark.parametrize(("text", "cause", "incident"), CAUSES, ids=[text[:40] for text, _, _ in CAUSES])
def test_a_sentence_of_version_1_is_its_fact_and_its_fact_is_the_sentence(text: str, cause: c.Cause, incident: str) -> None:
    assert cause_of(text) == cause
    assert str(cause) == text
    assert c.incident(cause) == incident


PRICES = {
    "cost_tolerate": 40.0, "cost_rebalance": 16.0, "slowdown": 2.0, "slow_ranks": 1.0, "expected_left_s": 600.0, "elapsed_s": 2.0,
    "spares": 0.0, "changes": 1.0, "saved": 24.0, "shard_s": 0.02, "fixed_s": 0.01, "step_now_s": 0.17, "step_even_s": 0.17,
    "step_well_s": 0.09, "step_then_s": 0.12, "speed 2.1": 0.5,
}  # fmt: skip
SLOW = {
    "slot": 2.0,
    "incarnation": 1.0,
    "score": 0.5,
    "confidence": 0.99,
    "since_step": 40.0,
    "step": 60.0,
    "kind compute": 1.0,
    "noise": 0.1,
}
BACK = {
    "steps_lost": 0.0,
    "residual": 0.0,
    "generation": 3,
    "lineage": 0,
    "found": 9,
    "doubted_lineage": 0,
    "doubted_step": 7,
    "resumed": 9,
}
STEPS = d.StepFigures(0.02, 0.01, 0.17, 0.17, 0.09, 0.12)
DECISIONS: list[tuple[str, str, dict[str, float], d.Payload | None]] = [
    ("recovery", "gather", {}, None),
    ("recovery", "form", {"candidates": 3.0, "world": 4.0}, d.Candidates(3.0, 4.0)),
    ("recovery", "restart", {"survivors": 3.0, "world": 4.0}, d.Survivors(3.0, 4.0)),
    ("recovery", "enter", {"generation": 7}, d.OfView(7)),
    ("recovery", "give_up", {"count": 5.0, "limit": 5.0}, d.Budget(5.0, 5.0)),
    ("recovery", "excuse", {"gap_s": 4.5}, d.StoodStill(4.5)),
    ("recovery", "wait", {"delay_s": 4.5}, d.Delay(4.5)),
    ("straggler", "accuse", SLOW, d.Suspect(2.0, 1.0, 0.5, 0.99, 40.0, 60.0, "compute", {"noise": 0.1})),
    ("straggler", "rebalance", PRICES,
     d.Prices({"tolerate": 40.0, "rebalance": 16.0}, 2.0, 1.0, 600.0, 2.0, 0.0, 1.0, None, 24.0, STEPS, (((2, 1), 0.5),))),
    ("straggler", "evict", {"cost_evict": 3.0, "slowdown": 2.0, "shun node-3": 50.0},
     d.Prices({"evict": 3.0}, 2.0, shunned=(("node-3", 50.0),))),
    ("corruption", "evict", {"digests": 2.0, "voters": 3.0, "idle": 0.0, "guilty": 1.0}, d.Votes(2.0, 3.0, 0.0, 1.0)),
    ("corruption", "carry_on", BACK, d.TakenBack(3, (0, 9), (0, 7), 9, {"steps_lost": 0.0, "residual": 0.0})),
    ("corruption", "recompute", {"step": 9.0, "shard": 2.0, "slot": 1.0}, d.Doubtful(9.0, 2.0, 1.0)),
    ("ending", "conclude", {"generation": 3.0, "kept": 1.0}, d.Concluded(3.0, kept=True)),
    ("settings", "set", {"straggler.gain": 0.2}, d.SettingTo("straggler.gain", 0.2)),
    ("progress", "set", {"steps": 20.0, "quantile_s": 0.1, "wanted_s": 5.0, "progress_s": 50.0, "present_s": 60.0},
     d.TimeOut(20.0, 50.0, 60.0, 0.1, 5.0)),
    ("interval", "wait", {"interval_s": 10.0}, d.Interval(10.0)),
    ("store", "warn", {"since_s": 3.0, "outage_s": 60.0, "away_s": 70.0, "steps": 12.0}, d.StoreOutage(3.0, 60.0, 70.0, 12.0)),
    ("lemons", "keep_out", {"faults": 6.0, "node": 2.0}, d.KeptOut(2.0, {"faults": 6.0})),
    ("straggler", "tolerate", {"of": 1.0, "another": 2.0}, d.Figures({"of": 1.0, "another": 2.0})),
]  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "action", "fields", "payload"), DECISIONS, ids=[f"{policy} {action}" for policy, action, *_ in DECISIONS]
)
def test_the_figures_of_version_1_are_a_payload_with_these_figures(
    policy: str, action: str, fields: dict[str, float], payload: d.Payload | None
) -> None:
    record = decode_line(json.dumps(["DecisionMade", policy, action, "why", fields, 2.5]).encode())
    assert isinstance(record, DecisionMade)
    assert record.payload == payload and figures(payload) == fields
    assert decode_line(encode_line(record)) == record


@pytest.mark.parametrize(
    ("status", "reason", "why"),
    [
        ("completed", "all steps are committed", EndWhy.ALL_STEPS),
        ("completed, not saved", "all steps are committed, and", EndWhy.NOT_SAVED),
        ("stopped", "crash loop", EndWhy.STOPPED),
        ("failed", "a mistake of the train function, not the hardware: weights", EndWhy.LOOP_WRONG),
        ("failed", "the train function raised behind the loop in slot 1: x", EndWhy.RAISED_BEHIND),
        ("failed", "the train function raised at step 1 in slot 1: x", EndWhy.TRAIN_RAISED),
        ("failed", "crash loop: slot 1", EndWhy.CRASH_LOOP),
        ("failed", "who knows", EndWhy.OTHER),
    ],
)
def test_how_a_run_of_version_1_ended(status: str, reason: str, why: EndWhy) -> None:
    assert end_of(status, reason) == why


def line(*value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


START = ("RunStarted", 1, "old", 0.0, 1.7e9, 2, 0, 16, "{}")
OLD = [
    line(*START),
    line("Committed", [0, 1], 1.0),
    line("ProcessLost", [1, 0], "its process ended", 2.0, None, 1, 1, -1, ""),
    line("CheckpointRecord", "request-1", "failed", [0, 0], 2.0, 0, 0.0, 0.0, "the view changed", "store"),
    line("DataRead", 512, 64, 2.0),
    line("RunEnded", "failed", "crash loop: slot 1", 3.0, "", ""),
]


def test_old_records_are_read_and_new_ones_follow_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"".join(OLD[:-1]))
    writer = JournalWriter(path)
    new: list[Record] = [Committed(StateId(0, 2), 3.0, 17), RunEnded("stopped", "", 4.0, "", "", EndWhy.STOPPED, 18)]
    for record in new:
        writer.append(record)
    writer.close()
    started, commit, lost, saved, data, *rest = read_journal(path)
    assert isinstance(started, RunStarted) and started.version == 1
    assert isinstance(lost, ProcessLost) and lost.cause == c.ProcessEnded()
    assert isinstance(saved, CheckpointRecord) and saved.view_changed
    assert rest == new and [record.event for record in rest] == [17, 18]  # type: ignore[attr-defined]
    assert [record.event for record in (commit, lost, saved, data)] == [0, 0, 0, 0]  # type: ignore[union-attr]


def whole(version: int, tmp_path: Path) -> bytes:
    if version == 1:
        return b"".join(OLD)
    path = tmp_path / "whole.jsonl"
    path.write_bytes(b"".join(OLD))
    records = list(read_journal(path))
    first = records[0]
    assert isinstance(first, RunStarted)
    return b"".join(map(encode_line, [RunStarted(VERSION, "new", 0.0, 1.7e9, 2, 0, 16, "{}"), *records[1:]]))


@pytest.mark.parametrize("version", [1, 2])
def test_a_journal_that_is_cut_off_anywhere_is_read_as_far_as_it_is_good_and_says_so(version: int, tmp_path: Path) -> None:
    data, path = whole(version, tmp_path), tmp_path / "journal.jsonl"
    path.write_bytes(data)
    records = list(read_journal(path))
    for length in range(1, len(data)):
        path.write_bytes(data[:length])
        said: list[str] = []
        good = data.count(b"\n", 0, length)
        assert list(read_journal(path, on_torn=said.append)) == records[:good]
        torn = not data[:length].endswith(b"\n")
        assert [f"{path}:{good + 1}: the last line is incomplete" in each for each in said] == [True] * torn


@pytest.mark.parametrize("at", range(1, len(OLD)))
def test_what_comes_from_the_future_ends_what_is_read_and_is_named(at: int, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    future = line("ProcessLost", [1, 0], ["AbductedByAliens"], 2.0, None, 1, 1, -1, "", 5)
    path.write_bytes(b"".join([*OLD[:at], future, *OLD[at:]]))
    records, damage = good_records(path)
    assert len(records) == at and f"{path}:{at + 1}" in damage and "unknown kind 'AbductedByAliens'" in damage
    assert f"{path}:{at + 1}" in open_report(path)[1]
    path.write_bytes(b"".join([line("RunStarted", VERSION + 1, "later"), *OLD[1:]]))
    with pytest.raises(JournalError, match=rf":1: .*version \[{VERSION + 1}\], this Fleet reads versions 1 to {VERSION}"):
        good_records(path)
