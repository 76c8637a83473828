"""The arithmetic on event logs that `recovery` and `storm` rest on, on histories small enough to check by hand."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import harness, reconfigure, recovery, recovery_picture
from benchmarks.harness import on_the_way
from benchmarks.peers.common import (
    MODULES,
    Commit,
    Injection,
    Kill,
    Line,
    Settings,
    Timeline,
    committed_between,
    excess_s,
    fault_free_rate,
    full_again,
    injections,
    installed_systems,
    median_step_s,
    positions,
    report,
    samples_lost,
    stall_s,
    storm_trace,
)
from benchmarks.storm import Storm, cut, figures, whole

WORLD, SAMPLES, STEP_S = 4, 100, 0.1
FULL = {slot: 10 + slot for slot in range(WORLD)}


def steps(first: int, count: int, begin_s: float, epoch: int = 1, members: dict[int, int] | None = None) -> list[Commit]:
    """``count`` commits from step ``first`` on, one each STEP_S from ``begin_s``; a missing rank leaves its quarter of the batch out."""
    members = FULL if members is None else members
    samples = SAMPLES * len(members) // WORLD
    return [Commit(begin_s + i * STEP_S, first + i, samples, epoch, dict(members)) for i in range(count)]


def back_to_a_checkpoint() -> tuple[list[Commit], Kill]:
    """Steps 1 to 30; slot 0 is killed at 3.05 s; from 10.0 s on the job goes on from step 21, with new processes."""
    renewed = {slot: 20 + slot for slot in range(WORLD)}
    return steps(1, 30, 0.1) + steps(21, 60, 10.0, epoch=2, members=renewed), Kill(3.05, 0, 10)


def one_rank_less() -> tuple[list[Commit], Kill]:
    """Steps 1 to 30; slot 0 is killed at 3.05 s; three ranks do 31 to 40 from 3.5 s on, and four the rest from 4.5 s on."""
    three = {slot: pid for slot, pid in FULL.items() if slot}
    return steps(1, 30, 0.1) + steps(31, 10, 3.5, 2, three) + steps(41, 60, 4.5, 3, {**FULL, 0: 99}), Kill(3.05, 0, 10)


def test_a_repeated_step_undoes_those_from_it_on() -> None:
    commits, _ = back_to_a_checkpoint()
    assert positions(commits)[29:31] == [3000, 2100]
    assert positions(commits)[-1] == 8000


def test_the_stall_is_the_gap_less_a_step_even_when_one_commit_more_follows_the_kill() -> None:
    commits, kill = back_to_a_checkpoint()
    assert stall_s(commits, kill.t_s, STEP_S) == pytest.approx(7.0 - STEP_S)
    assert stall_s(commits, kill.t_s - STEP_S, STEP_S) == pytest.approx(7.0 - STEP_S)
    assert stall_s(commits[:30], kill.t_s, STEP_S) is None


def test_excess_counts_steps_done_again() -> None:
    commits, kill = back_to_a_checkpoint()
    full = full_again(commits, kill, WORLD)
    assert full == 30
    # until 12.0 s: 9.0 s after step 30's commit, for 11 steps of progress
    assert excess_s(commits, kill, WORLD, SAMPLES / STEP_S) == pytest.approx(9.0 - 11 * STEP_S)


def test_excess_counts_a_smaller_world() -> None:
    commits, kill = one_rank_less()
    assert full_again(commits, kill, WORLD) == 40
    # until 6.5 s: 3.5 s for 10 steps of three quarters and 21 whole ones
    assert excess_s(commits, kill, WORLD, SAMPLES / STEP_S) == pytest.approx(3.5 - (10 * 0.75 + 21) * STEP_S)


def test_the_killed_process_does_not_make_the_world_full() -> None:
    late = steps(31, 1, 3.06)
    commits, kill = steps(1, 30, 0.1) + late, Kill(3.05, 0, 10)
    assert full_again(commits, kill, WORLD) is None
    assert excess_s(commits, kill, WORLD, SAMPLES / STEP_S) is None


def test_samples_lost_are_those_undone_dropped_and_unused() -> None:
    commits, kill = back_to_a_checkpoint()
    assert samples_lost(commits, [], kill.t_s, 99.0) == 1000
    commits, kill = one_rank_less()
    dropped = [Line(3.1, 31, 25, "drop", 1, slot, 10 + slot) for slot in (1, 2, 3)]
    unused = Line(4.4, 40, 25, "unused", 2, 0, 99)
    assert samples_lost(commits, [*dropped, unused], kill.t_s, 99.0) == 100


def test_a_drop_of_a_step_that_another_rank_committed_is_not_lost() -> None:
    commits, kill = one_rank_less()
    commits.insert(30, Commit(3.06, 31, SAMPLES, 1, {1: 11}))
    commits[31:] = steps(32, 10, 3.5, 2)
    assert samples_lost(commits, [Line(3.1, 31, 25, "drop", 1, 2, 12)], kill.t_s, 99.0) == 0


def test_the_fault_free_rate_leaves_recovery_out() -> None:
    commits, kill = back_to_a_checkpoint()
    assert fault_free_rate(commits, [kill], WORLD) == pytest.approx(SAMPLES / STEP_S)
    assert median_step_s(commits) == pytest.approx(STEP_S)


def test_a_storm_counts_no_step_that_is_undone_after_it() -> None:
    commits, _ = back_to_a_checkpoint()
    assert committed_between(commits, 1.0, 3.0) == 1000  # steps 11 to 20 of 11 to 30: the rest is done again, later
    assert committed_between(commits, 1.0, 11.05) == 2100  # steps 11 to 20, and 21 to 31 again


def test_a_job_that_ends_with_the_kill_did_not_survive_it() -> None:
    commits, kill = steps(1, 30, 0.1), Kill(3.05, 0, 10)
    (one,) = report(commits, [], [kill], WORLD)
    assert (one.survived, one.stall_s, one.excess_s, one.samples_lost) == (False, None, None, 0)


def test_the_timeline_reads_whole_lines_of_growing_logs(tmp_path: Path) -> None:
    timeline, first, second = Timeline(tmp_path), tmp_path / "0-10.log", tmp_path / "1-11.log"
    first.write_text("1.000000 1 100 commit 7\n2.000000 2 100 com")
    second.write_text("0.900000 1 100 commit 7\n1.900000 2 25 drop 7\n")
    assert timeline.commits() == [Commit(0.9, 1, 100, 7, {0: 10, 1: 11})]
    with first.open("a") as file:
        file.write("mit 7\n")
    assert [commit.step for commit in timeline.commits()] == [1, 2]
    assert [line.kind for line in timeline.lost_lines] == ["drop"]


def test_plans_depend_on_the_seed_alone() -> None:
    settings = Settings()
    assert injections(7, 10, settings.world, settings.checkpoint_steps)[:3] == injections(7, 3, settings.world, settings.checkpoint_steps)
    assert storm_trace(7, 15.0, 300.0, 4)[:3] == storm_trace(7, 15.0, 45.0, 4)
    assert len(storm_trace(7, 15.0, 300.0, 4)) >= 15
    assert storm_trace(7, 15.0, 300.0, 4) != storm_trace(8, 15.0, 300.0, 4)


def test_the_parts_of_a_trace_hold_all_of_its_faults_once() -> None:
    trace = storm_trace(7, 15.0, 300.0, 4)
    parts = cut(trace, 300.0, 3)
    assert all(0 <= at_s < 100 for part in parts for at_s, _ in part)
    again = [(number * 100.0 + at_s, rank) for number, part in enumerate(parts) for at_s, rank in part]
    assert again == [(pytest.approx(at_s), rank) for at_s, rank in trace]


def test_a_storm_in_parts_counts_all_and_divides_by_the_fastest_system() -> None:
    storm = whole([Storm((90.0, 110.0), 5_000, 3, 1), Storm((100.0, 140.0), 4_000, 2, 0)])
    assert (storm.fault_free_samples_per_s, storm.committed_samples, storm.executed, storm.suppressed) == (110.0, 9_000, 5, 1)
    found = figures({"fleet": storm, "stock": Storm((200.0,), 6_000, 4, 1)}, duration_s=100.0)
    assert found["fleet_committed_samples_ratio"] == 0.45
    assert found["common_fault_free_samples_per_s"] == 200.0
    assert found["faults_executed"] == 5


def test_fleets_groups_are_compared_with_the_best_of_pytorchs() -> None:
    samples = {"fleet_working_s": [0.2, 0.4, 0.3], "torch_working_s": [10.0], "torch_beside_working_s": [0.1], "fleet_survived": [1.0, 0.0]}
    found = reconfigure.figures(samples)
    assert found["fleet_over_torch_working_ratio"] == pytest.approx(3.0) and found["fleet_survived_ratio"] == 0.5
    assert "fleet_over_torch_working_ratio" not in reconfigure.figures({"fleet_working_s": [0.3]})


def test_a_system_not_asked_for_is_left_out_and_noted() -> None:
    systems, notes = installed_systems(only=("nothing",))
    assert systems == []
    assert len(notes) == len(MODULES)


def test_a_table_says_what_the_host_gave_to_others() -> None:
    assert harness.stolen_note((10, 1000), (110, 1500)) == ["others on the same host took 20% of this machine's processor time meanwhile"]
    assert harness.stolen_note((10, 1000), (10, 1500)) == harness.stolen_note((0, 0), (0, 0)) == []
    stolen, ticks = harness.stolen()
    assert 0 <= stolen <= ticks


class Run:
    """Steps without end, for all that is asked of it; with ``whole`` the world is full again after a fault, else never."""

    def __init__(self, whole: bool) -> None:
        self._injected_s, self._commits = 1.0 if whole else 1e9, steps(1, 100, 0.1)

    def commits(self) -> list[Commit]:
        return self._commits

    def lost_lines(self) -> list[Line]:
        return []

    def ranks(self) -> dict[int, int]:
        return FULL

    def failed(self) -> None:
        return None

    def inject(self, kind: str, slot: int) -> Kill:
        return Kill(self._injected_s, slot, FULL[slot], kind)

    def stop(self) -> None:
        return None


def test_each_fault_is_said_once_though_a_run_does_not_survive_it(capsys: pytest.CaptureFixture[str]) -> None:
    runs = iter([Run(whole=False), Run(whole=True)])
    system: Any = SimpleNamespace(name="fleet", start=lambda *_: next(runs))
    faults = [(Injection(number, 0.0, 0), "kill") for number in (1, 2, 3)]
    way, notes = on_the_way("recovery", ["first", "second", "third"]), list[str]()
    sizes = recovery.Sizes(3, 1, 0, start_limit_s=0.2, full_again_limit_s=0.2)
    reports = recovery.inject_all(recovery.Turn(system, Settings(), faults), sizes, notes, way, {})
    assert [kind for kind, _ in reports] == ["kill"] * 3
    assert [line.split()[4] for line in capsys.readouterr().err.splitlines()] == ["first", "second", "third"]
    assert notes[0] == "fleet: kill 1: the world was not full again within 0 s; still running"
    assert [note.rpartition(" steps, ")[2] for note in notes[1:]] == ["1 kill faults", "2 kill faults"]


# ---- the picture -------------------------------------------------------------------------------------------------------------------------


def around(history: tuple[list[Commit], Kill]) -> tuple[list[float], list[float]]:
    return recovery.around_kill(*history)


def test_the_commits_around_a_kill_are_told_from_it_on() -> None:
    times_s, trained = around(back_to_a_checkpoint())
    assert times_s[0] == pytest.approx(1.1 - 3.05) and times_s[-1] == pytest.approx(15.9 - 3.05)
    last = max(number for number, at_s in enumerate(times_s) if at_s <= 0)
    assert trained[last : last + 2] == [0.0, -900.0], "the state went back by nine steps"


def test_the_picture_has_a_line_for_each_system_that_is_flat_while_it_recovers() -> None:
    samples = {}
    for name, history in (("fleet", one_rank_less()), ("stock", back_to_a_checkpoint())):
        samples[f"{name}_commit_t_s"], samples[f"{name}_trained_samples"] = around(history)
    drawn = ElementTree.fromstring(recovery_picture.picture(samples, {"fleet": 0.35, "stock": 6.9}))
    found = [(line.get("class"), line.get("points", "").split()) for line in drawn.iter("{http://www.w3.org/2000/svg}polyline")]
    assert [name for name, points in found if len(points) > 2] == ["fleet", "stock"]
    flat = {
        name: max(float(right.split(",")[0]) - float(left.split(",")[0]) for left, right in pairwise(points))
        for name, points in found if len(points) > 2
    }  # fmt: skip
    assert flat["stock"] > 5 * flat["fleet"] > 0
    texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "Fleet: 0.35 s" in texts and "Ray Train, from a checkpoint: 6.9 s" in texts


def test_a_result_without_commits_gives_no_picture() -> None:
    with pytest.raises(ValueError, match="no commits around a kill"):
        recovery_picture.lines({"fleet_stall_s": [0.1]})
