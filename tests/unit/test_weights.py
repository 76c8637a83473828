"""Weights of shards, and parameters without a gradient: what plain PyTorch would do, with any number of ranks."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from actors.rank.membership.process_group import Group
from actors.rank.state.tracked import TrackedState
from actors.rank.step.train_step import TrainStep
from actors.rank.step.weights import NONE, ShardWeights, agreed, divisor, mean_of
from actors.rank.telemetry.recorder import Recorder
from fleet.errors import ConfigError, LoopError
from fleet.protocol.moves import Apply
from fleet.settings.run import RunSettings
from tests.unit.test_reduction import with_groups
from tests.unit.test_sharded_engine import join

SHARDS, STEPS = 8, 4
TOKENS = (1, 5, 0, 17, 2, 3, 40, 9)
ONE_AT_A_TIME = threading.Lock()
NOTHING_COUNTS = "the weights of all its shards are 0, so that nothing is updated"
LAYOUTS = "none", "zero1"


def model_of() -> nn.ModuleDict:
    with ONE_AT_A_TIME, torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.ModuleDict({"trunk": nn.Linear(6, 30), "a": nn.Linear(30, 1), "b": nn.Linear(30, 1)}).double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def rows(step: int, shard: int, count: int) -> torch.Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(100 * step + shard), dtype=torch.float64)


def loss_of(model: nn.ModuleDict, x: torch.Tensor, head: str) -> torch.Tensor:
    """The mean over rows; not a number where there are none, as of a batch that is all padding."""
    return (model[head](torch.tanh(model["trunk"](x))).squeeze(-1) - x.sum(1)).square().mean()


def head_of(step: int) -> str:
    return "ab"[step % 2]


def plain(steps: int, counts: Sequence[int], frozen: Callable[[int], str | None] = lambda step: None) -> dict[str, torch.Tensor]:
    """All rows of a step at once."""
    model = model_of()
    optimizer = optimizer_of(model)
    for step in range(steps):
        for name in model:
            model[name].requires_grad_(name != frozen(step))
        optimizer.zero_grad()
        loss_of(model, torch.cat([rows(step, shard, count) for shard, count in enumerate(counts)]), head_of(step)).backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def ranks(
    kind: str, size: int, folder: Path, steps: int, counts: Sequence[int], frozen: Callable[[int], str | None] = lambda step: None
) -> list[tuple[str, dict[str, torch.Tensor], list[Any]]]:  # fmt: skip
    """(digest, weights, outcomes) of each."""
    shards = len(counts)
    settings = RunSettings(world=size, shards=shards, optimizer_sharding=kind)

    def rank(group: Group) -> tuple[str, dict[str, torch.Tensor], list[Any]]:
        model = model_of()
        state = TrackedState(model=model, optimizer=optimizer_of(model))
        train = TrainStep(state, settings, Recorder(folder / f"{kind}-{size}-{group.rank}", 0), None)
        join(train, group, shards=shards)
        outcomes = []
        for step in range(steps):
            for name in model:
                model[name].requires_grad_(name != frozen(step))
            for shard in train.assigned:
                train.begin_shard(shard)
                loss = loss_of(model, rows(step, shard, counts[shard]), head_of(step))
                begin = train.scaled(loss, float(counts[shard]))
                if begin is not None:
                    begin.backward()
                train.end_shard(shard, float(loss.detach()) if begin is not None else 0.0)
            outcomes.append(train.alone())
            assert outcomes[-1].doubt is None
            assert train.verify.remark() == ("" if any(counts) else NOTHING_COUNTS)
            train.apply(Apply(outcomes[-1]))
            train.layout.publish(lambda: None)
        return train.layout.digest(steps), {name: value.clone() for name, value in model.state_dict().items()}, outcomes

    return with_groups(size, rank)  # type: ignore[return-value]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_weighted_step_is_that_of_all_rows_at_once_and_has_the_same_bits_on_any_number_of_ranks(kind: str, tmp_path: Path) -> None:
    """A shard has no rows at all: its loss is not a number, and it counts nothing."""
    right, digests = plain(STEPS, TOKENS), set()
    for size in (1, 2, 3, 5):
        for digest, weights, outcomes in ranks(kind, size, tmp_path, STEPS, TOKENS):
            digests.add(digest)
            for name, value in weights.items():
                assert torch.allclose(value, right[name], rtol=1e-9, atol=1e-12), name
            assert all(outcome.weights == tuple(map(float, TOKENS)) for outcome in outcomes)
    assert len(digests) == 1


def test_one_shard_has_the_bits_of_a_loss_without_a_weight(tmp_path: Path) -> None:
    [(_, weights, _)] = ranks("none", 1, tmp_path, STEPS, (37,))
    assert all(torch.equal(value, weights[name]) for name, value in plain(STEPS, (37,)).items())


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_parameter_that_no_shard_used_has_no_gradient_and_its_moments_stay(kind: str, tmp_path: Path) -> None:
    """Plain Adam would not count a step of it, either; with the head also frozen the bits are the same."""
    right = plain(STEPS, (16,))
    for frozen in (lambda step: None, lambda step: head_of(step + 1)):
        digests = set()
        for size in (1, 2, 3):
            for digest, weights, _ in ranks(kind, size, tmp_path, STEPS, (2,) * SHARDS, frozen):
                digests.add(digest)
                assert all(torch.allclose(weights[name], value, rtol=1e-9, atol=1e-12) for name, value in plain(STEPS, (2,) * 8).items())
        assert len(digests) == 1
    [(_, weights, _)] = ranks("none", 1, tmp_path, STEPS, (16,))
    assert all(torch.equal(weights[name], value) for name, value in right.items())


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_step_without_any_weight_updates_nothing_and_says_so(kind: str, tmp_path: Path) -> None:
    before = model_of().state_dict()
    for _, weights, [outcome] in ranks(kind, 2, tmp_path, 1, (0,) * SHARDS):
        assert math.isnan(outcome.loss)
        assert all(torch.equal(weights[name], value) for name, value in before.items())


def test_chunks_cannot_be_cut_for_a_parameter_that_is_thawed_for_the_first_time(tmp_path: Path) -> None:
    model = model_of()
    model["b"].requires_grad_(False)
    state = TrackedState(model=model, optimizer=optimizer_of(model))
    train = TrainStep(state, RunSettings(world=1, shards=1, optimizer_sharding="zero1"), Recorder(tmp_path / "r", 0), None)
    model["b"].requires_grad_(True)
    with pytest.raises(ConfigError, match=r"requires_grad.*model\.b\.weight.*did not require a gradient at run\.track"):
        train.begin_shard(0)


def test_what_is_frozen_behind_run_track_may_be_thawed(tmp_path: Path) -> None:
    model = model_of()
    state = TrackedState(model=model, optimizer=optimizer_of(model))
    model["b"].requires_grad_(False)
    train = TrainStep(state, RunSettings(world=1, shards=1, optimizer_sharding="zero1"), Recorder(tmp_path / "r", 0), None)
    model["b"].requires_grad_(True)
    train.begin_shard(0)
    assert len(train.parameters) == len(list(model.parameters()))


def test_what_a_loop_has_frozen_is_part_of_the_state(tmp_path: Path) -> None:
    """A newcomer, and a run that goes back to a checkpoint, have it as it was: the line that froze it is not run again."""

    def built() -> tuple[nn.ModuleDict, TrackedState, TrainStep]:
        model = model_of()
        model["b"].requires_grad_(False)
        state = TrackedState(model=model, optimizer=optimizer_of(model))
        return model, state, TrainStep(state, RunSettings(world=1, shards=1), Recorder(tmp_path / "r", 0), None)

    model, state, train = built()
    first = state.flatten()
    model["a"].requires_grad_(False)
    model["b"].requires_grad_(True)
    train.begin_shard(0)
    train.reset()
    later = state.flatten()
    other, given, its = built()
    assert its.gradients.trained.checksum != train.gradients.trained.checksum
    given.load(*later)
    assert [one.requires_grad for one in other.parameters()] == [one.requires_grad for one in model.parameters()]
    assert its.gradients.trained.checksum == train.gradients.trained.checksum, "a parameter that was trained and is frozen keeps its place"
    given.load(*first)
    assert [name for name in other if other[name].weight.requires_grad] == ["trunk", "a"]


def test_weights_are_refused_by_name() -> None:
    weights = ShardWeights(4)
    with pytest.raises(LoopError, match="weight=-1.0"):
        weights.add(-1.0)
    with pytest.raises(LoopError, match="weight=nan"):
        weights.add(math.nan)
    weights.add(2.0)
    with pytest.raises(LoopError, match="with weight= and without it for one batch"):
        weights.add(None)
    with pytest.raises(LoopError, match="has a weight in shard 1, and none in shard 0"):
        agreed([NONE, 3.0])


def test_several_backwards_of_a_shard_add_up() -> None:
    weights = ShardWeights(2)
    assert [weights.add(3.0), weights.add(5.0), weights.add(0.0)] == [1.5, 2.5, 0.0]
    assert weights.given == 8.0
    assert weights.end(1) == (2.0, 8.0)
    assert weights.of([1]) == [8.0]


def test_means_of_shards() -> None:
    assert mean_of([1.0, 2.0], ()) == 1.5
    assert mean_of([1.0, math.nan, 4.0], (1.0, 0.0, 3.0)) == 3.25
    assert math.isnan(mean_of([1.0], (0.0,)))
    assert (divisor(()), divisor((1.0, 3.0))) == (1.0, 2.0)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_one_shard_is_clipped_as_plain_pytorch_clips(kind: str, tmp_path: Path) -> None:
    clip_norm, model = 0.1, model_of()
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, rows(step, 0, 11), head_of(step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()

    def rank(group: Group) -> dict[str, torch.Tensor]:
        mine = model_of()
        state = TrackedState(model=mine, optimizer=optimizer_of(mine))
        settings = RunSettings(world=1, shards=1, optimizer_sharding=kind)
        train = TrainStep(state, settings, Recorder(tmp_path / "recorded", 0), clip_norm)
        join(train, group, shards=1)
        for step in range(STEPS):
            train.begin_shard(0)
            loss = loss_of(mine, rows(step, 0, 11), head_of(step))
            loss.backward()
            train.end_shard(0, float(loss.detach()))
            train.apply(Apply(train.alone()))
            train.layout.publish(lambda: None)
        return dict(mine.state_dict())

    [weights] = with_groups(1, rank)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())  # type: ignore[index]
