"""The arithmetic of the benchmark of several hosts."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from benchmarks.harness import Form
from benchmarks.hosts import RATIO, Sizes, figures, node_of_times, plan, whole_again_s
from benchmarks.peers.common import Commit, Kill, Settings
from benchmarks.peers.on_hosts import INCARNATION, HostsRun, merged


def test_logs_of_several_hosts_are_those_of_one_job() -> None:
    one = [Commit(1.0, 1, 8, 0, {0: 50}), Commit(2.0, 2, 8, 0, {0: 50})]
    other = [Commit(0.9, 1, 8, 0, {1: 50}), Commit(2.1, 2, 8, 0, {1: 50}), Commit(3.0, 2, 4, 1, {1: 50})]
    assert merged([(0, one), (INCARNATION, other)]) == [
        Commit(0.9, 1, 8, 0, {0: 50, 1: INCARNATION + 50}),
        Commit(2.0, 2, 8, 0, {0: 50, 1: INCARNATION + 50}),
        Commit(3.0, 2, 4, 1, {1: INCARNATION + 50}),
    ]
    assert HostsRun.boot_of(INCARNATION + 50) == 1
    assert one[0].members == {0: 50}, "what was read stays as it is"


def test_the_world_is_whole_again_when_a_rank_of_the_new_machine_commits_with_the_others() -> None:
    old, new = INCARNATION, 4 * INCARNATION
    kill = Kill(10.0, 0, old + 7, "host")
    commits = [
        Commit(9.0, 1, 8, 0, {0: old + 7, 1: 5}),
        Commit(10.1, 2, 8, 0, {0: old + 7, 1: 5}),  # it was under way
        Commit(11.0, 3, 8, 1, {1: 5}),
        Commit(12.0, 4, 8, 2, {1: 5, 2: 6}),  # a spare, elsewhere
        Commit(15.0, 5, 8, 3, {1: 5, 0: new + 3}),
    ]
    assert whole_again_s(commits, kill, world=2, boot=4) == 15.0
    assert whole_again_s(commits[:-1], kill, world=2, boot=4) is None


def test_the_old_node_is_the_newest_before_the_fault_and_the_new_one_the_oldest_after_it() -> None:
    assert node_of_times([(1.0, 3.0), (4.0, 12.0), (13.0, math.inf)], at_s=10.0) == (12.0, 13.0)
    assert node_of_times([(4.0, math.inf), (13.0, math.inf)], at_s=10.0) is None
    assert node_of_times([(4.0, 12.0)], at_s=10.0) is None


def test_a_ratio_has_an_interval_when_there_are_two_pairs() -> None:
    assert figures({"fleet_hosts_step_s": [0.2], "fleet_loopback_step_s": [0.1]})[RATIO] == pytest.approx(2.0)
    found = figures({"fleet_hosts_step_s": [0.2, 0.1], "fleet_loopback_step_s": [0.1, 0.1]})
    assert found[RATIO] == pytest.approx(math.sqrt(2.0))
    assert found[f"{RATIO}_low"] < found[RATIO] < found[f"{RATIO}_high"]
    assert figures({}) == {}


def test_each_fault_comes_once_in_all_rounds_and_is_the_same_for_both_systems() -> None:
    sizes, settings = Sizes(5, 3, 2, 2, 0, 0), Settings()
    rounds = [plan("fleet", settings, sizes, number, Form.FULL) for number in range(2)]
    assert Counter(kind for faults in rounds for _, kind in faults) == {"kill": 5, "host": 3, "cut": 2}
    others = [plan("torchft", settings, sizes, number, Form.FULL) for number in range(2)]
    assert others == [[fault for fault in faults if fault[1] != "cut"] for faults in rounds]
