"""Steps with sharded optimizer state over a real network: the bits of whole replicas, at any number of ranks."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from actors.rank.membership.process_group import Group
from actors.rank.membership.view_groups import ViewGroups
from actors.rank.state.tracked import TrackedState
from actors.rank.step.outcome import ReductionOutcome
from actors.rank.step.train_step import TrainStep
from actors.rank.telemetry.recorder import Recorder
from actors.rank.zero1 import resharding
from actors.rank.zero1.resharding import Resharding
from fleet.errors import ConfigError
from fleet.protocol.moves import Advance, Apply, CastVote, Reduce
from fleet.protocol.recut import Recut
from fleet.protocol.types import Member, StateId, View
from fleet.settings.run import RunSettings
from policies.placement import ranges
from tests.unit.test_reduction import with_groups

SHARDS, STEPS = 8, 3
START = StateId(0, 0)
ONE_AT_A_TIME = threading.Lock()
"""The random generators are those of the process, which the ranks of this test share."""


def tracked() -> TrackedState:
    """Five blocks of parameters, and batch norm, whose statistics go to all ranks."""
    with ONE_AT_A_TIME, torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(16, 250), nn.BatchNorm1d(250), nn.Tanh(), nn.Linear(250, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return TrackedState(model=model, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2))


def compute(train: TrainStep, state: TrackedState, step: int, shards: Sequence[int]) -> None:
    for shard in shards:
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + shard))
        train.begin_shard(shard)
        loss = (state.objects["model"](x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        train.end_shard(shard, float(loss.detach()))


def take(train: TrainStep) -> ReductionOutcome:
    """The step of which all shards are computed; it becomes whole everywhere when it is published."""
    outcome = train.alone()
    assert outcome.doubt is None
    train.apply(Apply(outcome))
    return outcome


def take_all(train: TrainStep, state: TrackedState) -> list[int]:
    """All steps; returns how often each was told to be whole."""
    reported = []
    for step in range(STEPS):
        compute(train, state, step, train.assigned)
        take(train)
        train.layout.publish(lambda step=step: reported.append(step))  # type: ignore[misc]
    return reported


def reshard(train: TrainStep, group: Group, view: View, replica_size: int = 1, column: Group | None = None) -> StateId:
    """Where all are then."""
    protocol = cast(Any, SimpleNamespace(process=SimpleNamespace(node=f"node-{group.rank % 2}"), receiving=lambda: None))
    resharding = Resharding(train, protocol, 1, lambda: train.apply(Advance()), replica_size=replica_size)
    return resharding.exchange(ViewGroups(group, column or group), view).state


def join(train: TrainStep, group: Group, replica_size: int = 1, shards: int = SHARDS) -> View:
    members = tuple(Member(slot, 0) for slot in range(group.size))
    view = View(1, members, ranges(shards, group.size), 0, tuple(range(1, group.size)), START, "")
    if train.vote.spread:
        if group.rank == 0:
            train.begin(START)
        assert reshard(train, group, view, replica_size) == START
    train.join(group, view.column_of(members[group.rank]), group.rank, START, True)
    return view


def trained(sharding: str, size: int, folder: Path) -> list[tuple[str, int]]:
    """(digest, bytes of optimizer state) of each rank."""
    settings = RunSettings(world=size, shards=SHARDS, optimizer_sharding=sharding)

    def rank(group: Group) -> tuple[str, int]:
        state = tracked()
        train = TrainStep(state, settings, Recorder(folder / f"{sharding}-{size}-{group.rank}", 0), 0.5)
        join(train, group)
        assert take_all(train, state) == list(range(STEPS))
        values = train.update.optimizers[0].state.values()
        return train.layout.digest(STEPS), sum(value.nbytes for each in values for value in each.values())

    return with_groups(size, rank)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def unsharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int]:
    return trained("none", 1, tmp_path_factory.mktemp("unsharded"))[0]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_bits_are_those_of_whole_replicas(size: int, tmp_path: Path, unsharded: tuple[str, int]) -> None:
    """And the memory is that of a chunk and of its copies, within a block or two."""
    digest, whole_bytes = unsharded
    for found, state_bytes in trained("zero1", size, tmp_path):
        assert found == digest
        assert state_bytes <= whole_bytes * min(1.0, 2 / size) + 4 * 2 * 1024 * 4


@pytest.mark.parametrize("informed", [(0, 1), (0,), (0, 1, 2)])
def test_a_rank_that_missed_the_vote_takes_the_step_behind_the_others(informed: tuple[int, ...], tmp_path: Path) -> None:
    """From the sums that it has kept, and clipped as they have."""

    def rank(group: Group) -> tuple[str, float]:
        state, settings = tracked(), RunSettings(world=group.size, shards=SHARDS, optimizer_sharding="zero1" if group.size > 1 else "none")
        train = TrainStep(state, settings, Recorder(tmp_path / f"{group.size}-{group.rank}", 0), 0.5)
        view = join(train, group)
        compute(train, state, 0, train.assigned)
        reduced = train.reduce(Reduce((-1, 0, 0)))
        assert reduced.doubt is None
        train.vote.ready()
        words = train.cast_vote(CastVote(reduced))
        if group.rank in informed:
            assert train.vote.decide(words, math.inf) is None
            train.apply(Apply(reduced))
            train.vote.begin()
        else:  # its group was lost, and it leaves
            train.vote.lost()
            train.hold()
        if train.vote.spread:
            assert train.layout.kept.claim(0).ready == (group.rank not in informed)
            assert reshard(train, group, view) == StateId(0, 1)
        return train.layout.digest(1), train.vote.factor

    [(right, _)] = cast(list[tuple[str, float]], with_groups(1, rank))
    found = cast(list[tuple[str, float]], with_groups(3, rank))
    assert [digest for digest, _ in found] == [right] * 3
    [factor] = {factor for _, factor in found}
    assert 0 < factor < 1, "nothing was clipped"


def test_replicas_are_compared_in_what_all_hold_and_not_in_chunks(tmp_path: Path) -> None:
    def rank(group: Group) -> list[float]:
        state = tracked()
        settings = RunSettings(world=3, shards=SHARDS, optimizer_sharding="zero1")
        train = TrainStep(state, settings, Recorder(tmp_path / f"{group.rank}", 0), 0.5)
        join(train, group)
        take_all(train, state)
        seen = [train.verify.replicas.look(StateId(0, STEPS))[2]]
        for spoiled in (train.update.moments[0], train.parameters[0]):
            spoiled.detach().reshape(-1)[0] += 1
            seen.append(train.verify.replicas.look(StateId(0, STEPS))[2])
        return seen

    found = cast(list[list[float]], with_groups(3, rank))
    assert len({right for right, _, _ in found}) == 1
    assert all(right == with_moment != with_parameter for right, with_moment, with_parameter in found)


def scaled(sharding: str, size: int, folder: Path, clip_norm: float | None) -> set[tuple[str, float]]:
    """(digest, scale) of all ranks after steps of which the first overflow, by a scale whose inverse is rounded."""

    def rank(group: Group) -> tuple[str, float]:
        state = tracked()
        del state.objects["scheduler"]  # PyTorch warns of one that is stepped where the scaler skips the first step
        state.objects["scaler"] = scaler = torch.amp.GradScaler("cpu", init_scale=3e37, backoff_factor=0.1, growth_interval=2)
        settings, recorder = (
            RunSettings(world=size, shards=SHARDS, optimizer_sharding=sharding),
            Recorder(folder / f"{sharding}-{size}-{group.rank}", 0),
        )
        train = TrainStep(state, settings, recorder, clip_norm)
        join(train, group)
        for step in range(6):
            for shard in train.assigned:
                x = torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + shard))
                train.begin_shard(shard)
                loss = (state.objects["model"](x) - x.sum(1, keepdim=True)).square().mean()
                train.scaled(loss).backward()  # type: ignore[union-attr]
                train.end_shard(shard, float(loss.detach()))
            take(train)
            train.layout.publish(lambda: None)
        return train.layout.digest(6), scaler.get_scale()

    return set(with_groups(size, rank))  # type: ignore[arg-type]


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a_gradient_scaler_skips_and_unscales_as_without_sharding(clip_norm: float | None, tmp_path: Path) -> None:
    """An infinity in one rank's chunk has all of them skip the step."""
    [(digest, scale)] = scaled("none", 1, tmp_path, clip_norm)
    assert 0 < scale < 3e36, "no step was skipped"
    for size in (1, 3):
        assert scaled("zero1", size, tmp_path, clip_norm) == {(digest, scale)}


def test_optimizers_that_look_at_more_than_an_element_are_refused(tmp_path: Path) -> None:
    settings, recorder = RunSettings(optimizer_sharding="zero1"), Recorder(tmp_path / "ring", 0)
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="LBFGS"):
        TrainStep(TrackedState(model=model, optimizer=torch.optim.LBFGS(model.parameters())), settings, recorder, None)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"optimizer_sharding": "zero3"}, "optimizer_sharding"),
        ({"optimizer_sharding": "zero1", "reduction": "native"}, "reduction"),
        ({"optimizer_copies": 9}, "optimizer_copies"),
    ],
)
def test_impossible_settings_are_refused_before_anything_starts(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        RunSettings(**changes)


def test_a_loss_moves_no_chunk_before_the_next_step_and_all_are_in_place_a_few_steps_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 begins anew, as a spare would in the place of a lost rank. Slices are so few that they take several steps."""
    monkeypatch.setattr(resharding, "Recut", functools.partial(Recut, slices=8))
    monkeypatch.setattr(resharding, "first_elements", lambda claims: 128)
    monkeypatch.setattr(resharding, "exchange_pieces", refused := _Refused(resharding.exchange_pieces))
    steps = 14

    def rank(group: Group) -> tuple[str, list[int]]:
        settings = RunSettings(world=3, shards=SHARDS, optimizer_sharding="zero1" if group.size > 1 else "none")
        state, recorder = tracked(), Recorder(tmp_path / f"{group.size}-{group.rank}", 0)
        train = TrainStep(state, settings, recorder, 0.5)
        view, moving = join(train, group), []
        for step in range(steps):
            if step == 2 and group.size > 1:
                refused.now = True
                if group.rank == 2:
                    state = tracked()
                    train = TrainStep(state, settings, recorder, 0.5)
                before = train.layout.kept.chunks.chunks if group.rank != 2 else ()
                view = dataclasses.replace(view, generation=2, receivers=(2,))
                assert reshard(train, group, view) == StateId(0, 2)
                assert train.layout.kept.chunks.chunks == before
                train.join(group, view.column_of(view.members[group.rank]), group.rank, StateId(0, 2), False)
            compute(train, state, step, train.assigned)
            take(train)
            train.layout.publish(lambda: None)
            train.layout.go_on()
            if step >= 2 and group.size > 1 and train.layout.kept.moving is not None:
                moving.append(step)
        if group.size > 1:
            kept = train.layout.kept
            assert set(kept.chunks.chunks) == set(kept.cut.kept(group.rank)) and all(len(keepers) == 2 for keepers in kept.cut.keepers)
        return train.layout.digest(steps), moving

    [(right, _)] = cast(list[Any], with_groups(1, rank))
    found = cast(list[Any], with_groups(3, rank))
    assert [digest for digest, _ in found] == [right] * 3
    assert len({tuple(moving) for _, moving in found}) == 1 and len(found[0][1]) >= 2, "all turn to the new cut behind one step"


class _Refused:
    """A function that may not be called any more once ``now`` is set."""

    def __init__(self, call: Any) -> None:
        self._call, self.now = call, False

    def __call__(self, *given: Any) -> Any:
        assert not self.now, "chunks move before the next step"
        return self._call(*given)
