"""Buckets of gradients that travel while the backward of a rank's last shard still runs: the bits stay, whatever a loop body does."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from actors.rank.membership.process_group import Group, GroupBroken
from actors.rank.step.gradients import GradientBuffers
from actors.rank.step.habits import BucketOrder, Countdown, Habits
from actors.rank.step.reduction import Chunk, Reducer
from fleet.protocol.shards import cover
from tests.unit.test_reduction import sum_up, with_groups

SHARDS, STEPS, WIDTH = 8, 5, 40
WORLDS = (1, 2, 3, 5)
ONE_GENERATOR = threading.Lock()
Backward = Callable[[nn.Module, int], None]


class Net(nn.Module):
    """The first layer is the last one too; ``beside`` takes no part; of two types, so that there are two flat buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.narrow = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.beside = nn.Linear(WIDTH, 3)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.inner:
            x = x + torch.tanh(layer(x))
        return self.last(x + self.narrow(x.bfloat16()).float())


def loss_of(model: nn.Module, shard: int, step: int = 0) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + shard))
    return model(x).square().mean()


def once(model: nn.Module, shard: int, step: int) -> None:
    loss_of(model, shard, step).backward()


def thrice(model: nn.Module, shard: int, step: int) -> None:
    """From the beginning: so it is learnt."""
    for part in range(3):
        loss_of(model, shard + 10 * part, step).backward()


def ranges_of(size: int) -> list[tuple[int, ...]]:
    return [tuple(range(lo, hi)) for lo, hi in itertools.pairwise([SHARDS * i // size for i in range(size + 1)])]


class Rank:
    """What a step does around each shard, of one rank."""

    def __init__(self, group: Group, reducer: Reducer, watched: bool, assigned: Sequence[Sequence[int]]) -> None:
        with ONE_GENERATOR:
            torch.manual_seed(0)
            self.model = Net()
        self.group, self.reducer, self.mine = group, reducer, assigned[group.rank]
        self.gradients = GradientBuffers({"model": self.model}, SHARDS, watched=watched)
        self.assigned, self.overlapped = assigned, 0
        self.bind(group)

    def bind(self, group: Group) -> None:
        self.reducer.bind(group, [cover(shards, SHARDS) for shards in self.assigned])

    def compute(self, step: int, backward: Callable[..., None], shards: Sequence[int] | None = None) -> None:
        gradients = self.gradients
        mine = self.mine if shards is None else shards
        gradients.begin_step()
        for shard in mine:
            gradients.begin_shard()
            if shard == mine[-1]:
                gradients.overlap(self.reducer, shard)
                self.overlapped += gradients.ahead is not None
            backward(self.model, shard, step)
            gradients.end_shard(shard)

    def reduce(self) -> list[torch.Tensor]:
        sum_up(self.gradients, self.reducer)
        found = [flat.clone() for flat in self.gradients.mean.flats]
        self.gradients.commit()
        return found


def trained(
    size: int, backward: Callable[..., None], watched: bool, bucket_bytes: int = 1 << 13, assigned: Sequence[Sequence[int]] | None = None,
    expect: bool = True, sites: Sequence[str] = (),
) -> list[tuple[list[list[torch.Tensor]], int]]:  # fmt: skip
    """By rank: the means of all steps, and how many of them were exchanged early."""

    def rank(group: Group) -> tuple[list[list[torch.Tensor]], int]:
        reducer = Reducer(SHARDS, "ordered", bucket_bytes, two_levels=bool(sites))
        one = Rank(group, reducer, watched, assigned or ranges_of(group.size))
        means = []
        for step in range(STEPS):
            one.compute(step, backward)
            means.append(one.reduce())
            if expect:
                one.gradients.expect(one.reducer)
        return means, one.overlapped

    return with_groups(size, rank, sites)  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def same(one: Sequence[Sequence[torch.Tensor]], other: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Bit for bit."""
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize("backward", [once, thrice])
@pytest.mark.parametrize("expect", [True, False])
def test_worlds_agree_bit_for_bit_with_and_without(backward: Callable[..., None], expect: bool) -> None:
    [(expected, _)] = trained(1, backward, watched=False)
    for size in WORLDS:
        for watched in (False, True):
            for means, early in trained(size, backward, watched, expect=expect):
                assert same(means, expected)
                may = watched and backward is once and size > 1
                assert early >= STEPS - 2 if may else early == 0


def grows_late(model: nn.Module, shard: int, step: int) -> None:
    """In one step, when it is known how often a gradient comes, two shards have two backwards."""
    once(model, shard, step)
    if step == STEPS - 2 and shard in (3, 7):
        once(model, shard + 20, step)


def scaled_by_the_body(model: nn.Module, shard: int, step: int) -> None:
    """A loop body may change a gradient before it asks for its next batch."""
    once(model, shard, step)
    if step == STEPS - 2 and shard == 7:
        gradient = next(model.parameters()).grad
        assert gradient is not None
        gradient.mul_(0.5)


def replaced_by_the_body(model: nn.Module, shard: int, step: int) -> None:
    once(model, shard, step)
    if step == STEPS - 2 and shard == 7:
        parameter = next(model.parameters())
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5


def wakes_late(model: nn.Module, shard: int, step: int) -> None:
    """A part of the model takes part that never did."""
    once(model, shard, step)
    if step == STEPS - 2 and shard in (3, 7):
        model.get_submodule("beside")(torch.ones(WIDTH)).sum().backward()


@pytest.mark.parametrize("backward", [grows_late, scaled_by_the_body, replaced_by_the_body, wakes_late])
@pytest.mark.parametrize("assigned", [[(0, 1, 2, 3), (4, 5, 6, 7)], [(0, 1, 2), (3, 4, 5, 6), (7,)]])
def test_a_gradient_that_changes_after_it_was_sent_breaks_the_group_and_no_sum(
    backward: Callable[..., None], assigned: list[tuple[int, ...]]
) -> None:
    [(expected, _)] = trained(1, backward, watched=False)
    size, ranks, lost = len(assigned), dict[int, Rank](), list[int]()

    def until_it_breaks(group: Group) -> int:
        one = ranks[group.rank] = Rank(group, Reducer(SHARDS, "ordered", 1 << 13), True, assigned)
        for step in range(STEPS):
            one.compute(step, backward)
            again = tuple(shard for shard in one.mine if shard not in one.gradients.sums.held)
            lost.extend(again)
            if again:
                assert one.gradients.habits.off
                one.compute(step, backward, again)
            assert one.gradients.sums.held == set(one.mine)
            try:
                assert same([one.reduce()], [expected[step]])
            except GroupBroken:
                one.gradients.hold()
                return step
        return -1

    def goes_on(group: Group) -> bool:
        one = ranks[group.rank]
        one.bind(group)
        found = [one.reduce()]
        one.compute(STEPS - 1, backward)
        return same([*found, one.reduce()], expected[STEPS - 2 :])

    assert with_groups(size, until_it_breaks) == [STEPS - 2] * size
    assert 7 in lost
    assert with_groups(size, goes_on) == [True] * size


@pytest.mark.parametrize("when", ["before", "within", "behind"])
def test_what_a_rank_has_computed_stays_when_its_group_breaks(when: str) -> None:
    """A peer is lost while the first buckets are under way."""
    [(expected, _)] = trained(1, once, watched=False)
    ranks = dict[int, Rank]()

    def rank(group: Group) -> bool:
        one = ranks[group.rank] = Rank(group, Reducer(SHARDS, "ordered", 1 << 13), True, ranges_of(2))

        def backward(model: nn.Module, shard: int, step: int) -> None:
            if step == STEPS - 2 and shard == one.mine[-1] and group.rank == 1:
                if when == "before":
                    group.interrupt("lost")
                elif when == "within":
                    model.get_submodule("inner.3").weight.register_hook(lambda _: group.interrupt("lost"))
            once(model, shard, step)

        for step in range(STEPS - 2):
            one.compute(step, backward)
            one.reduce()
        one.compute(STEPS - 2, backward)
        if when == "behind" and group.rank == 1:
            group.interrupt("lost")
        with pytest.raises(GroupBroken):
            one.reduce()
        one.gradients.hold()
        return one.overlapped >= STEPS - 3 and one.gradients.sums.held == set(one.mine)

    def goes_on(group: Group) -> bool:
        one = ranks[group.rank]
        one.bind(group)
        return same([one.reduce()], [expected[STEPS - 2]])

    assert with_groups(2, rank) == [True, True]
    assert with_groups(2, goes_on) == [True, True]


def test_who_leaves_in_the_middle_of_a_shard_loses_the_sums_it_was_added_to() -> None:
    def rank(group: Group) -> frozenset[int]:
        one = Rank(group, Reducer(SHARDS, "ordered", 1 << 13), True, ranges_of(2))
        for step in range(2):
            one.compute(step, once)
            one.reduce()
        one.compute(2, once, one.mine[:-1])
        one.gradients.begin_shard()
        one.gradients.overlap(one.reducer, one.mine[-1])
        once(one.model, one.mine[-1], 2)
        one.gradients.hold()
        return one.gradients.sums.held

    assert with_groups(2, rank) == [frozenset(), frozenset()]


def test_what_a_broken_exchange_has_left_in_memory_is_in_no_later_sum() -> None:
    """Buffers that were to receive are marked at their ends, between parameters too, where no gradient is ever written."""
    expected = next(means for means, _ in trained(1, once, False))

    def rank(group: Group) -> tuple[bool, bool]:
        one = Rank(group, Reducer(SHARDS, "ordered", 1 << 13), True, ranges_of(2))
        for step in range(2):
            one.compute(step, once)
            one.reduce()
        one.compute(2, once, one.mine[:-1])
        one.gradients.begin_shard()
        one.gradients.overlap(one.reducer, one.mine[-1])
        once(one.model, one.mine[-1], 2)
        one.gradients.abandon()
        alone = [tuple(range(SHARDS))]
        one.assigned, one.mine = alone, alone[0]
        one.bind(Group(0, 0, 1, torch.device("cpu")))
        one.compute(2, once)
        found = one.reduce()
        free = [flat for each in one.gradients.sums._free for flat in each.flats]
        return same([found], [expected[2]]), all(bool(torch.isfinite(flat).all()) for flat in free)

    assert with_groups(2, rank) == [(True, True), (True, True)]


def test_it_is_learnt_how_often_gradients_come() -> None:
    """Twice the same, and never more than once in a shard; what came once is waited for."""
    habits = Habits(3)
    for shard in range(2):
        assert not habits.known
        habits.begin()
        habits.came(0)
        habits.came(shard + 1)
        habits.end()
    assert habits.known and habits.expected == {0, 1, 2}
    habits.begin()
    habits.came(1)
    habits.came(1)
    habits.end()
    assert not habits.known and "several times" in habits.off


def test_buckets_are_complete_in_their_order() -> None:
    """Three parameters of 100, 50 and 60 elements from 0, 128 and 192 on; the last has a part of both buckets."""
    order = BucketOrder([[Chunk(0, 200, 256)], [Chunk(0, 0, 200)]], [(0, 0), (0, 128), (0, 192)], [256])
    assert order.needs == [{2}, {0, 1, 2}]
    assert [portion.parameters for portion in order.portions] == [(2,), (0, 1)]
    assert [portion.spans for portion in order.portions] == [(Chunk(0, 192, 256),), (Chunk(0, 0, 192),)]
    down, found = Countdown(order, {0, 2}), []
    for parameter in (0, 1, 2):
        down.came(parameter)
        found.append(down.complete)
    assert found == [0, 0, 2]
    assert Countdown(order, ()).complete == 2, "what is not expected is not waited for"


def test_a_gradient_is_held_once() -> None:
    """One shard a rank: what backward has made is let go once it is collected."""

    def rank(group: Group) -> bool:
        one = Rank(group, Reducer(2, "ordered", 1 << 13), True, [(0,), (1,)])
        for step in range(3):
            one.compute(step, once)
            gradients = [parameter.grad for parameter in one.gradients.parameters if parameter.grad is not None]
            own = {flat.untyped_storage().data_ptr() for flat in one.gradients.sums.partials(one.reducer.blocks)[0].flats}
            held_once = all(gradient.untyped_storage().data_ptr() in own for gradient in gradients)
            one.reduce()
        return held_once

    assert with_groups(2, rank) == [True, True]
