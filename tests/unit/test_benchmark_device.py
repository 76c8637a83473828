"""What `device` makes of what ranks logged, and what it says where it cannot run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import device, device_ranks, harness
from benchmarks.device_ranks import Ran, Sizes, Text, events_against_walls, noticed_s, recoveries
from benchmarks.peers.common import Commit, Kill, Timeline
from fleet.protocol.causes import ProcessEnded
from fleet.protocol.records import ProcessLost, ProcessUp
from fleet.protocol.types import Member, Process


def commits() -> list[Commit]:
    """Steps of 0.1 s on two ranks; at 0.55 s one is killed, and the next commit takes 0.3 s more; at 1.2 s its replacement is there."""
    both, one, new = {0: 10, 1: 11}, {1: 11}, {0: 12, 1: 11}
    at = [(0.1 * step, both, 1) for step in range(1, 6)] + [(0.9, one, 2), (1.0, one, 2), (1.2, new, 3), (1.3, new, 3)]
    return [Commit(t_s, step, 64, epoch, members) for step, (t_s, members, epoch) in enumerate(at)]


def test_a_kill_costs_the_gap_around_it_and_the_time_until_all_train_again() -> None:
    found = recoveries(commits(), [Kill(0.55, 0, 10)], 2)
    assert found["fleet_stall_s"] == [pytest.approx(0.3)]
    assert found["fleet_full_again_s"] == [pytest.approx(0.65)]


def test_what_is_never_whole_again_has_no_such_time() -> None:
    assert recoveries(commits()[:7], [Kill(0.55, 0, 10)], 2)["fleet_full_again_s"] == []


def test_a_kill_is_noticed_when_its_own_process_is_lost() -> None:
    member, other = Member(0, 0), Member(1, 0)
    up = [ProcessUp(one, Process("node0", pid, 1), "token", 0.0) for one, pid in ((member, 10), (other, 11))]
    lost = [ProcessLost(one, ProcessEnded(), None, 1, 4, -1, "", at_s=at_s) for one, at_s in ((other, 0.2), (member, 0.56))]
    assert noticed_s([*up, *lost], [Kill(0.55, 0, 10)]) == [pytest.approx(0.01)]


def test_events_are_compared_with_the_clock_of_the_same_step(tmp_path: Path) -> None:
    events = {(0, step): 10.0 + step for step in range(14)}
    walls = {(0, step): 20.0 + 2 * step for step in range(13)}
    alone = Ran("completed", "d", [], [], Timeline(tmp_path), events, walls)
    samples: dict[str, list[float]] = {}
    found = events_against_walls(alone, samples)
    assert samples["fleet_events_step_ms"] == [20.0, 21.0, 22.0], "the first steps warm up, and of the last there is no clock"
    assert found["fleet_events_over_wall_ratio"] == 0.5


def test_samples_are_functions_of_their_number() -> None:
    data = Text()
    assert torch.equal(data[5], Text()[5]) and not torch.equal(data[5], data[6])
    assert data[5].shape == (device_ranks.CONTEXT + 1,) and int(data[5].max()) < device_ranks.BYTES


def test_a_part_that_fails_leaves_the_others_and_fails_the_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good = {"figures": {"nccl_new_s_median": 1.0}, "samples": {}, "notes": []}

    def fails(*_: Any) -> Any:
        raise TimeoutError("too long")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    for name, found in (("_ranks", fails), ("_nccl", lambda *_: good), ("_snapshot", fails), ("_gpu", list), ("_as_rank", lambda: None)):
        monkeypatch.setattr(device, name, found)
    monkeypatch.setattr(sys, "argv", ["device", "--quick", "--json", str(tmp_path / "device.json")])
    with pytest.raises(SystemExit) as end:
        device.main()
    assert end.value.code == 1
    result = json.loads((tmp_path / "device.json").read_text())
    assert result["figures"] == good["figures"] and result["settings"]["device"] == "Some GPU"
    assert "snapshot left out: failed: TimeoutError: too long" in result["notes"]


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "_as_rank", lambda: None)
    monkeypatch.setattr(harness, "run", lambda *_: pytest.fail("something was measured"))
    monkeypatch.setattr(sys, "argv", ["device", "--json", str(tmp_path / "device.json")])
    device.main()
    assert capsys.readouterr().out == "not run: no CUDA device\n"
    assert not (tmp_path / "device.json").exists()


def test_kills_leave_room_in_the_budgets(tmp_path: Path) -> None:
    chosen = device_ranks.settings_of(Sizes(4, 20, 450, 0.1, 256, 4), 4, 20, "cpu", tmp_path)
    assert min(chosen.budgets.slot, chosen.budgets.node, chosen.budgets.total) > 20
