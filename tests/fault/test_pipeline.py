"""Ranks that have the layers of a model one after the other, as real processes: no number of stages or replicas changes a bit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fleet.protocol.records import HistoryBegun, ViewPublished
from fleet.protocol.types import columns
from fleet.settings.run import CheckpointSettings, RunSettings
from storage.checkpoint.parts import newest_checkpoint
from tests.fault.test_bad_luck import after, of, settings, survived, train_through
from tests.support import stages
from tests.support.plain import PlainFleet
from tests.support.undisturbed import Undisturbed


def staged(folder: Path, world: int = 2, stage: int = 2, tensor: int = 0, **changes: Any) -> RunSettings:
    options = {"steps": "10", **changes.pop("options", {})}
    mesh = {"stage": stage} | ({"tensor": tensor} if tensor else {})
    chosen = {"nodes": 1, "shards": 8, "mesh": mesh, "peer_copies": 0, "options": options}
    return settings(folder, world, **{**chosen, **changes})


@pytest.fixture(scope="module")
def truth(undisturbed: Undisturbed) -> str:
    """The digest of one rank with the whole model."""
    return undisturbed(lambda folder: staged(folder, 1, 1), stages.train)


@pytest.mark.parametrize(("world", "stage"), [(2, 1), (2, 2), (4, 2), (4, 4), (6, 2)])
def test_no_number_of_stages_or_replicas_changes_a_bit(world: int, stage: int, tmp_path: Path, truth: str) -> None:
    chosen = staged(tmp_path, world, stage)
    outcome, records, digest = train_through(stages.train, chosen, tmp_path)
    survived(outcome, records, digest, truth, other_ratio=0.05)
    (view,) = [one.view for one in of(ViewPublished, records)]
    assert [len(places) for places in columns(view.members).values()] == [world // stage] * stage


@pytest.fixture(scope="module")
def divided(undisturbed: Undisturbed) -> str:
    """The digest of one tensor group with the whole model."""
    return undisturbed(lambda folder: staged(folder, 2, 1, 2), stages.train)


@pytest.mark.parametrize(("world", "stage"), [(4, 1), (4, 2), (8, 2), (8, 4)])
def test_stages_of_tensor_groups_change_no_bit(world: int, stage: int, tmp_path: Path, divided: str) -> None:
    outcome, records, digest = train_through(stages.train, staged(tmp_path, world, stage, 2), tmp_path)
    survived(outcome, records, digest, divided, other_ratio=0.05)
    (view,) = [one.view for one in of(ViewPublished, records)]
    assert [len(places) for places in columns(view.members).values()] == [world // stage // 2] * 2 * stage


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("name", ["between-its-halves", "a-unit-is-done", "behind-ready"])
def test_a_rank_of_a_tensor_group_of_a_stage_is_killed(name: str, victim: int, tmp_path: Path, divided: str) -> None:
    chosen = staged(tmp_path, 8, 2, 2, options={"moment": name, "victim": str(victim)})
    records = _dies_at(stages.dies_at, chosen, tmp_path, divided)
    first, second = [one.view for one in of(ViewPublished, records)][:2]
    assert len(second.members) == len(first.members) - 2, "of one stage a group is broken"


def _dies_at(train: Any, chosen: RunSettings, tmp_path: Path, truth: str, back: bool = False) -> list[Any]:
    outcome, records, digest = train_through(train, chosen, tmp_path)
    survived(outcome, records, digest, truth, other_ratio=0.05)
    assert len(of(ViewPublished, records)) >= 2
    assert bool(of(HistoryBegun, records)) <= back, "of each stage a rank was left"
    return records


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("name", stages.MOMENTS)
def test_a_rank_is_killed(name: str, victim: int, tmp_path: Path, truth: str) -> None:
    """In either stage."""
    chosen = staged(tmp_path, 6, options={"moment": name, "victim": str(victim)})
    _dies_at(stages.dies_at, chosen, tmp_path, truth)
    assert (tmp_path / "flags" / "second").exists(), "no rank ever came to the moment"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_rank_costs_its_units_alone(victim: int, tmp_path: Path, truth: str) -> None:
    """Its sibling computes them in the same step. The other stage computes nothing again, and gives again what it had given."""
    chosen = staged(tmp_path, 4, options={"victim": str(victim)})
    records = _dies_at(stages.counted, chosen, tmp_path, truth)
    first, second = [one.view for one in of(ViewPublished, records)][:2]
    (lost,) = [place for place, member in enumerate(first.members) if member not in second.members]
    stage = dict(first.members[lost].coordinate)["stage"]
    lines = [line.split() for line in stages.written(tmp_path / "flags", "begun")]
    computed = Counter((int(at), int(shard)) for step, at, shard in lines if int(step) == second.state.step)
    again = {(stage, shard) for shard in range(*first.ranges[lost])}
    assert computed == Counter({(at, shard): 1 + ((at, shard) in again) for at in range(2) for shard in range(8)})


@pytest.mark.parametrize("victims", ["0,1", "0,2", "0,3", "1,3"])
def test_two_ranks_are_killed_in_one_step(victims: str, tmp_path: Path, truth: str) -> None:
    """Of one replica or two, of one stage or two."""
    _dies_at(stages.several_die, staged(tmp_path, 6, options={"victims": victims}), tmp_path, truth)


def test_a_stage_that_is_lost_goes_back_to_the_newest_checkpoint(tmp_path: Path, truth: str) -> None:
    _dies_at(stages.several_die, staged(tmp_path, 4, options={"victims": "1,3"}), tmp_path, truth, back=True)


def test_weights_of_shards_count_in_all_stages(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """A loss is the mean over its tokens, of which shards have different numbers."""
    truth = undisturbed(lambda folder: staged(folder, 1, 1, options={"weighted": "1"}), stages.train)
    outcome, records, digest = train_through(stages.train, staged(tmp_path, 4, options={"weighted": "1"}), tmp_path)
    survived(outcome, records, digest, truth, other_ratio=0.05)


def test_the_model_is_saved_whole(tmp_path: Path) -> None:
    found = []
    for world, stage in ((1, 1), (4, 2)):
        folder, saved = tmp_path / f"of-{stage}", tmp_path / f"{stage}.pt"
        outcome, *_ = train_through(stages.train, staged(folder, world, stage, options={"saves": str(saved)}), folder)
        assert outcome.status == "completed", outcome
        found.append(torch.load(saved, weights_only=True))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_checkpoint_goes_on_at_another_cut(tmp_path: Path, truth: str) -> None:
    """And with another number of replicas: it is that of the whole model."""
    first = tmp_path / "first"
    saves = CheckpointSettings(policy="fixed", interval_s=0.05)
    with PlainFleet(stages.train, staged(first, 4, options={"pause_s": "0.1"}, checkpoint=saves), first) as fleet:
        fleet.wait_for(lambda: (found := newest_checkpoint(fleet.url)) is not None and found[1].step >= 4)
        begin = newest_checkpoint(fleet.url)
    assert begin is not None
    for world, stage in ((1, 1), (6, 2), (4, 4)):
        folder = tmp_path / f"{world}-{stage}"
        with PlainFleet(stages.train, staged(folder, world, stage), folder, begin=(f"file://{first}/{begin[0]}", begin[1])) as fleet:
            assert fleet.wait().status == "completed"
            assert fleet.coordinator.machine.state.ending.record.digest == truth


def test_each_stage_reads_its_weights(tmp_path: Path, truth: str) -> None:
    """The model is built without memory. No rank has all of it."""
    torch.manual_seed(1)
    file = tmp_path / "model.safetensors"
    save_file(stages.Model().state_dict(), file)
    outcome, records, digest = train_through(stages.train, staged(tmp_path, 4, options={"weights": str(file)}), tmp_path)
    survived(outcome, records, digest, truth, other_ratio=0.05)


def test_a_spare_takes_the_coordinate(tmp_path: Path, truth: str) -> None:
    def misfortune(fleet: PlainFleet) -> None:
        after(4)(fleet)
        fleet.kill(0)

    chosen = staged(tmp_path, 4, spares=1, options={"pause_s": "0.2"})
    outcome, records, digest = train_through(stages.train, chosen, tmp_path, misfortune)
    survived(outcome, records, digest, truth, other_ratio=0.05)
    views = [one.view for one in of(ViewPublished, records)]
    assert [len(view.members) for view in views[:3]] == [4, 3, 4]
    assert not of(HistoryBegun, records)
