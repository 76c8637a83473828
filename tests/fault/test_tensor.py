"""Ranks that compute shards together, as real processes: one, or several, are lost at any moment, and no bit is changed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fleet.protocol.decisions import DomainLost
from fleet.protocol.events import SettingChanged
from fleet.protocol.records import DecisionMade, HistoryBegun, ProcessLost, ViewPublished
from fleet.protocol.types import Member, columns
from fleet.settings.run import CheckpointSettings, RunSettings, VerifySettings
from storage.checkpoint.parts import newest_checkpoint
from tests.fault.test_bad_luck import after, of, settings, survived, train_through
from tests.support import tensors
from tests.support.plain import PlainFleet
from tests.support.undisturbed import Undisturbed

HOWS = ("layers", "sequence", "units")
SHARDINGS = ("none", "zero1", "fsdp")


def meshed(folder: Path, world: int = 4, tensor: int = 2, how: str = "layers", **changes: Any) -> RunSettings:
    options = {"how": how, "steps": "12", **changes.pop("options", {})}
    chosen = {"nodes": 1, "shards": 4, "mesh": {"tensor": tensor}, "peer_copies": 0, "options": options}
    return settings(folder, world, **{**chosen, **changes})


@pytest.fixture(scope="module")
def truths(undisturbed: Undisturbed) -> dict[str, str]:
    """By way of dividing the model, the digest of one replica."""
    return {how: undisturbed(lambda folder, how=how: meshed(folder, 2, how=how), tensors.train) for how in HOWS}  # type: ignore[misc]


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("world", [4, 6])
def test_no_number_of_replicas_changes_a_bit(world: int, how: str, sharding: str, tmp_path: Path, truths: dict[str, str]) -> None:
    chosen = meshed(tmp_path, world, how=how, optimizer_sharding=sharding)
    outcome, records, digest = train_through(tensors.train, chosen, tmp_path)
    survived(outcome, records, digest, truths[how], other_ratio=0.05)
    (view,) = [one.view for one in of(ViewPublished, records)]
    assert [len(places) for places in columns(view.members).values()] == [world // 2] * 2


@pytest.mark.parametrize("victim", [1, 2])
@pytest.mark.parametrize("name", tensors.MOMENTS)
def test_a_member_is_killed(name: str, victim: int, tmp_path: Path, truths: dict[str, str]) -> None:
    _dies_at(name, meshed(tmp_path, how="sequence", options={"moment": name, "victim": str(victim)}), tmp_path, truths["sequence"])


@pytest.mark.parametrize("victim", [1, 2])
@pytest.mark.parametrize(("sharding", "name"), [(sharding, name) for sharding in SHARDINGS[1:] for name in tensors.FOUND[sharding]])
def test_a_member_is_killed_whose_column_spreads_its_state(
    name: str, sharding: str, victim: int, tmp_path: Path, truths: dict[str, str]
) -> None:  # fmt: skip
    options = {"moment": name, "victim": str(victim)}
    changes = {"checkpoint": CheckpointSettings(policy="fixed", interval_s=0.05)} if "a-checkpoint" in name else {}
    copies = 2 if tensors.FOUND[sharding][name].second else 1  # of what both of them kept there is a third
    chosen = meshed(tmp_path, 6, how="units", optimizer_sharding=sharding, optimizer_copies=copies, options=options, **changes)
    _dies_at(name, chosen, tmp_path, truths["units"])


def _dies_at(name: str, chosen: RunSettings, tmp_path: Path, truth: str) -> None:
    outcome, records, digest = train_through(tensors.dies_at, chosen, tmp_path)
    assert (tmp_path / "flags" / "second").exists(), "no rank ever came to the moment"
    survived(outcome, records, digest, truth, other_ratio=0.05)
    assert len(of(ViewPublished, records)) >= 2
    twice = tensors.FOUND[chosen.optimizer_sharding][name].second
    assert bool(of(HistoryBegun, records)) <= twice, "of each column a rank was left"


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("victim", [0, 3])
def test_two_members_are_killed_in_one_step(victim: int, spares: int, tmp_path: Path, truths: dict[str, str]) -> None:
    """Of one group, or of two with different losses: then the rest is one whole group."""
    chosen = meshed(tmp_path, spares=spares, options={"victim": str(victim)})
    outcome, records, digest = train_through(tensors.two_die, chosen, tmp_path)
    survived(outcome, records, digest, truths["layers"], other_ratio=0.05)


def _members(fleet: PlainFleet) -> tuple[Member, ...]:
    view = fleet.coordinator.machine.state.view
    return view.members if view is not None else ()


def test_a_spare_takes_the_coordinate_of_a_member_that_is_lost(tmp_path: Path, truths: dict[str, str]) -> None:
    victim = 1

    def misfortune(fleet: PlainFleet) -> None:
        nonlocal victim
        after(4)(fleet)
        victim = _members(fleet)[1].slot
        fleet.kill(victim)

    chosen = meshed(tmp_path, spares=1, options={"pause_s": "0.2"})
    outcome, records, digest = train_through(tensors.train, chosen, tmp_path, misfortune)
    survived(outcome, records, digest, truths["layers"], other_ratio=0.05)
    views = [one.view for one in of(ViewPublished, records)]
    assert [len(view.members) for view in views[:3]] == [4, 2, 4], "the other group goes on alone at once"
    first, alone, again = (view.members for view in views[:3])
    (lost,) = [member for member in first if member.slot == victim]
    (called,) = [member for member in again if member not in first]
    assert called.coordinate == lost.coordinate
    assert set(again) - {called} == set(first) - {lost}, "the rest of the broken group is in it again"
    assert all(member in again for member in alone)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_group_leaves_a_node_that_goes_and_spares_come(sharding: str, tmp_path: Path, truths: dict[str, str]) -> None:
    """The node has a whole group. Its ranks leave between two steps."""
    leaving: set[Member] = set()

    def misfortune(fleet: PlainFleet) -> None:
        after(2)(fleet)
        leaving.update(member for member in _members(fleet) if member.slot % 3 == 0)  # on node0
        fleet.loop.call_soon_threadsafe(fleet.coordinator.announce, "node0", 60.0, "maintenance")
        fleet.wait_for(lambda: bool(_members(fleet)) and not leaving & set(_members(fleet)))

    options = {"pause_s": "0.3", "steps": "12"}
    chosen = meshed(tmp_path, how="units", spares=2, nodes=3, optimizer_sharding=sharding, options=options)
    outcome, records, digest = train_through(tensors.train, chosen, tmp_path, misfortune)
    survived(outcome, records, digest, truths["units"], other_ratio=0.05)
    assert len(leaving) == 2 and len({member.coordinate for member in leaving}) == 2, "a node has a whole group"
    views = of(ViewPublished, records)
    assert all(one.graceful and len(one.view.members) == 4 for one in views[1:]) and len(views) >= 2
    assert not of(HistoryBegun, records)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_world_shrinks_and_grows_by_whole_groups(sharding: str, tmp_path: Path, truths: dict[str, str]) -> None:
    def misfortune(fleet: PlainFleet) -> None:
        for step, world in ((2, 4), (5, 6)):
            after(step)(fleet)
            fleet.loop.call_soon_threadsafe(fleet.coordinator._driver.submit, SettingChanged("world", float(world)))
            fleet.wait_for(lambda world=world: len(_members(fleet)) == world)  # type: ignore[misc]

    chosen = meshed(tmp_path, 6, how="units", optimizer_sharding=sharding, options={"pause_s": "0.3", "steps": "12"})
    outcome, records, digest = train_through(tensors.train, chosen, tmp_path, misfortune)
    survived(outcome, records, digest, truths["units"], other_ratio=0.05)
    assert [(len(one.view.members), one.graceful) for one in of(ViewPublished, records)] == [(6, False), (4, True), (6, True)]
    assert not of(ProcessLost, records)


def test_a_node_is_lost_with_a_whole_group(tmp_path: Path, truths: dict[str, str]) -> None:
    """The other group goes on in the same history, and the loss is one line."""

    def misfortune(fleet: PlainFleet) -> None:
        after(3)(fleet)
        fleet.call(fleet.agents["node1"].stop())
        for slot in (1, 3):
            fleet.kill(slot)
        fleet.wait_for(lambda: not {1, 3} & set(fleet.coordinator.machine.state.roster.by_slot))
        fleet.call(fleet.start_agent(1))

    chosen = meshed(tmp_path, nodes=2, options={"pause_s": "0.2"})
    outcome, records, digest = train_through(tensors.train, chosen, tmp_path, misfortune)
    survived(outcome, records, digest, truths["layers"], other_ratio=0.1)
    assert not of(HistoryBegun, records)
    [gone] = [one.payload for one in of(DecisionMade, records) if isinstance(one.payload, DomainLost)]
    assert gone.level == "node" and len(gone.members) == 2


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_others_go_on_from_what_two_replicas_have_written(sharding: str, tmp_path: Path, truths: dict[str, str]) -> None:
    """With one and three replicas the bits are the same, also where the state lies otherwise. Other sizes of the axis get their parts."""
    first = tmp_path / "first"
    saves = CheckpointSettings(policy="fixed", interval_s=0.05)
    written = meshed(first, how="units", options={"pause_s": "0.1"}, optimizer_sharding=sharding, checkpoint=saves)
    with PlainFleet(tensors.train, written, first) as fleet:
        fleet.wait_for(lambda: (found := newest_checkpoint(fleet.url)) is not None and found[1].step >= 4)
        begin = newest_checkpoint(fleet.url)
    assert begin is not None
    ends = {}
    for world, tensor, other in ((2, 2, sharding), (6, 2, sharding), (4, 2, "none"), (4, 4, sharding), (1, 1, "none")):
        folder = tmp_path / f"{world}-{tensor}"
        place = f"file://{first}/{begin[0]}"
        chosen = meshed(folder, world, tensor, how="units", optimizer_sharding=other)
        with PlainFleet(tensors.train, chosen, folder, begin=(place, begin[1])) as fleet:
            assert fleet.wait().status == "completed"
            ends[world, tensor] = fleet.coordinator.machine.state.ending.record.digest
    assert ends[2, 2] == ends[6, 2] == ends[4, 2] == truths["units"]
    assert len(set(ends.values())) == 3, "ranks of another size add up in another order"


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_the_model_is_saved_whole_and_evaluated_by_whole_groups(sharding: str, tmp_path: Path, truths: dict[str, str]) -> None:
    file = tmp_path / "model.pt"
    chosen = meshed(tmp_path, how="units", optimizer_sharding=sharding, options={"saves": str(file), "evaluates": "yes"})
    outcome, records, digest = train_through(tensors.train, chosen, tmp_path)
    survived(outcome, records, digest, truths["units"], other_ratio=0.05)
    saved, plain = torch.load(file, weights_only=True), tensors.Model().state_dict()
    assert {name: value.shape for name, value in saved.items()} == {name: value.shape for name, value in plain.items()}
    found = {path.name: path.read_text() for path in (tmp_path / "flags").glob("figure-4-*")}
    assert len(found) == 4 and len(set(found.values())) == 1


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_each_rank_reads_its_part_of_the_weights(sharding: str, tmp_path: Path, truths: dict[str, str]) -> None:
    torch.manual_seed(1)
    file = tmp_path / "model.safetensors"
    save_file(tensors.Model().state_dict(), file)
    chosen = meshed(tmp_path, how="units", optimizer_sharding=sharding, options={"weights": str(file)})
    outcome, records, digest = train_through(tensors.train, chosen, tmp_path)
    survived(outcome, records, digest, truths["units"], other_ratio=0.05)


@pytest.mark.parametrize("what", ["flip_weight", "flip_optimizer"])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_rank_whose_bits_flip_is_named_by_its_column(sharding: str, what: str, tmp_path: Path, truths: dict[str, str]) -> None:
    """Ranks of a column compare what they have alike. With two of them a tie is told apart where the state is in chunks."""
    world = 6 if sharding == "none" else 4
    chosen = meshed(tmp_path, world, how="units", optimizer_sharding=sharding, options={"flips": what}, verify=VerifySettings(replicas=1.0))
    outcome, records, digest = train_through(tensors.train, chosen, tmp_path)
    survived(outcome, records, digest, truths["units"], other_ratio=0.05)
    [lost] = of(ProcessLost, records)
    assert lost.member.slot == 1 and "silent corruption" in str(lost.cause)
    assert not of(HistoryBegun, records)


def test_a_step_that_overflows_is_skipped_by_all_columns(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Also where a rank is lost."""

    def scaled(folder: Path, world: int = 2) -> RunSettings:
        return meshed(folder, world, how="sequence", options={"scaled": "yes"})

    def misfortune(fleet: PlainFleet) -> None:
        after(4)(fleet)
        fleet.kill(2)

    truth = undisturbed(scaled, tensors.train)
    outcome, records, digest = train_through(tensors.train, scaled(tmp_path, 4), tmp_path, misfortune)
    survived(outcome, records, digest, truth, other_ratio=0.05)
    scales = [float(next((tmp_path / "flags").glob(f"scale-{step}-*")).read_text()) for step in range(12)]
    assert any(later < earlier for earlier, later in itertools.pairwise(scales)), scales
