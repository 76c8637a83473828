"""The reducer over a real network, the bookkeeping of partial sums, and gradients of real models."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from actors.rank.data.sampling import seed_shard
from actors.rank.membership.process_group import Forming, Group, GroupBroken, StoreServer
from actors.rank.step import reduction
from actors.rank.step.clipping import SplitNorms, block_norms
from actors.rank.step.gradients import GradientBuffers
from actors.rank.step.reduction import Chunk, Reducer, SideChannel
from actors.rank.step.sums import ShardSums
from actors.rank.verify import sumcheck
from actors.rank.verify.sumcheck import SLICES, SumCheck
from fleet.errors import ConfigError, ProtocolError
from fleet.protocol.shards import blocks, cover
from tests.unit.test_process_group import LostSend

BOUND_S = 30.0
SHARDS = 16


class Buffers:
    def __init__(self, length: int) -> None:
        self.flats = [torch.zeros(length)]


def with_groups(size: int, fn: Callable[[Group], object], sites: Sequence[str] = (), cores: float = math.inf) -> list[object]:
    """``fn(group)`` on ``size`` ranks, each in a thread, over gloo. ``sites`` says where each is, ``cores`` how many each may use."""
    store = StoreServer("127.0.0.1")
    reported = {"store": store.address, "generation": 1, "size": size, "device": torch.device("cpu"), "timeout_s": BOUND_S}
    reported |= {"host": "127.0.0.1", "cores": cores}
    parts = [Forming(rank=rank, site=sites[rank] if sites else "", **reported) for rank in range(size)]  # type: ignore[arg-type]
    groups = [part.wait() for part in parts]
    try:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(fn, groups, timeout=BOUND_S))
    finally:
        for group in groups:
            group.close()
        store.close()


class Forgetful:
    """A gloo group that forgets what this rank sends: it arrives, and nothing wakes who waits for it."""

    def __init__(self, wires: Any, lost: LostSend) -> None:
        self._wires, self._lost, self._sent = wires, lost, []

    def recv(self, *args: Any) -> Any:
        return self._wires.recv(*args)

    def send(self, *args: Any) -> LostSend:
        self._sent.append(self._wires.send(*args))
        return self._lost


@pytest.fixture(params=[1, 2], ids=["aside", "handed over"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways in which a rank waits: see ``Group.in_background``."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("size", "length"), [(2, 100), (2, 500_000), (3, 5_000)])
def test_a_rank_that_waits_for_a_send_that_gloo_has_lost_can_be_called_out(size: int, length: int) -> None:
    """A loss at the end of a reduction: gloo loses a send whose connection ends before it knows of that, though it was asked for."""
    lost = LostSend()

    def rank(group: Group) -> str:
        if group.rank == 0:
            group._gloo = Forgetful(group._gloo, lost)
            threading.Timer(1.0, group.interrupt, ["told to leave"]).start()
        reducer = Reducer(SHARDS, "ordered", 1 << 18)
        reducer.bind(group, [cover(range(*bounds), SHARDS) for bounds in ranges_of(size)])
        sums, mean = ShardSums(SHARDS, lambda: Buffers(length)), Buffers(length)
        for shard in range(*ranges_of(size)[group.rank]):
            sums.add(shard, sums.take())
        began_s = time.monotonic()
        try:
            reducer.reduce(sums, mean)
        except GroupBroken as error:
            return str(error) if time.monotonic() - began_s < BOUND_S / 2 else "too late"
        finally:
            if group.rank == 0:
                lost.released.set()
        return "done"

    first, *others = with_groups(size, rank)
    assert "told to leave" in str(first) and set(others) == {"done"}


def ranges_of(size: int) -> list[tuple[int, int]]:
    return list(itertools.pairwise([SHARDS * i // size for i in range(size + 1)]))


def gradient(shard: int, length: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(shard))


def summed(group: Group, length: int, reducer: Reducer, assigned: list[list[int]] | None = None) -> ShardSums[Buffers]:
    """The sums of this rank's shards, of which the reducer knows; ``dealt[r]`` are those of rank r, in the order of computing them."""
    assigned = assigned or [list(range(*bounds)) for bounds in ranges_of(group.size)]
    reducer.bind(group, [cover(shards, SHARDS) for shards in assigned])
    sums = ShardSums(SHARDS, lambda: Buffers(length))
    for shard in assigned[group.rank]:
        buffers = sums.take()
        buffers.flats[0].copy_(gradient(shard, length))
        sums.add(shard, buffers)
    return sums


def mean_over(
    size: int, length: int, bucket_bytes: int, kind: str = "ordered", assigned: list[list[int]] | None = None
) -> list[torch.Tensor]:
    """Each rank's mean; ``assigned`` as in :func:`summed`."""

    def rank(group: Group) -> torch.Tensor:
        reducer, mean = Reducer(SHARDS, kind, bucket_bytes), Buffers(length)
        sums = summed(group, length, reducer, assigned)
        for _ in range(3):  # the sums are the same after a reduction
            reducer.reduce(sums, mean)
        return mean.flats[0].clone()

    return with_groups(size, rank)  # type: ignore[return-value]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("bucket_bytes", [1 << 12, 1 << 20])
def test_worlds_agree_bit_for_bit_over_gloo(bucket_bytes: int) -> None:
    expected = mean_over(1, 30_001, bucket_bytes)[0]
    for size in (2, 3, 4, 5):
        for mean in mean_over(size, 30_001, bucket_bytes):
            assert torch.equal(mean, expected)


@pytest.mark.usefixtures("threads")
def test_shards_dealt_anew_after_a_loss_agree_bit_for_bit() -> None:
    """What survivors held, in any order, and the lost shards one by one, wherever they were put."""
    expected = mean_over(1, 30_001, 1 << 20)[0]
    for assigned in ([[0, 1, 2, 3, 12], [8, 9, 10, 11, 13], [4], [7, 6, 5, 15, 14]], [[15, 0, 7], [*range(1, 7), *range(8, 15)]]):
        for bucket_bytes in (1 << 12, 1 << 20):
            for mean in mean_over(len(assigned), 30_001, bucket_bytes, assigned=assigned):
                assert torch.equal(mean, expected)


@pytest.mark.parametrize("bucket_bytes", [1 << 14, 1 << 20])
@pytest.mark.parametrize("length", [700, 30_001])
def test_norms_of_parts_are_those_of_the_whole_bit_for_bit(bucket_bytes: int, length: int) -> None:
    """Each rank takes those of what it adds up. Two with little to sum add up all, and a rank may have nothing to add up."""
    extent = length - 100  # what comes after it counts in no norm

    def rank(group: Group) -> bool:
        reducer, mean, side = Reducer(SHARDS, "ordered", bucket_bytes), Buffers(length), SideChannel(group)
        sums = summed(group, length, reducer)
        split = SplitNorms(reducer.parts(mean.flats), [extent])
        reducer.reduce(sums, mean, lambda: [side.start(split.take(mean.flats, group.rank))])
        found, whole = split.in_order(side.take()), block_norms(mean.flats[0][:extent])
        return torch.equal(torch.cat([one.norms for one in found]), whole) if found else not reducer.parts(mean.flats)[0]

    for size in (1, 2, 3, 4, 5):
        assert with_groups(size, rank) == [True] * size


@pytest.mark.parametrize("bucket_bytes", [1 << 14, 1 << 20])
def test_who_is_done_early_sends_while_others_compute(bucket_bytes: int) -> None:
    """Rank 0 has all that the others bring before it reduces; then once more, with nothing asked for ahead."""
    expected, computing = mean_over(1, 30_001, bucket_bytes)[0], threading.Event()

    def rank(group: Group) -> bool:
        reducer, mean = Reducer(SHARDS, "ordered", bucket_bytes), Buffers(30_001)
        sums = summed(group, 30_001, reducer)
        reducer._staging._stages[group.device] = torch.zeros(1 << 20, dtype=torch.uint8)
        reducer.expect(mean.flats)
        if group.rank == 0:
            assert reducer._expected is not None
            coming = [part for bucket in reducer._expected.buckets for part in bucket.incoming]
            bound_s = time.monotonic() + BOUND_S / 2
            while not all(bool(part.all()) for part in coming) and time.monotonic() < bound_s:
                time.sleep(0.001)
            assert coming and time.monotonic() < bound_s
            computing.set()
        found = []
        for _ in range(2):
            reducer.reduce(sums, mean)
            found.append(torch.equal(mean.flats[0], expected))
        return all(found) and (computing.is_set() or group.rank != 0)

    for size in (3, 4):
        computing.clear()
        assert with_groups(size, rank) == [True] * size


def test_what_is_gathered_meanwhile_is_not_taken_for_what_was_expected() -> None:
    """The whole state, and its digest, are gathered between steps. (Seen: sharded runs hung in that until they were given up.)"""
    expected = mean_over(1, 30_001, 1 << 14)[0]

    def rank(group: Group) -> bool:
        reducer, mean, ranks = Reducer(SHARDS, "ordered", 1 << 14), Buffers(30_001), torch.empty(group.size, 1)
        sums = summed(group, 30_001, reducer)
        reducer._staging._stages[group.device] = torch.zeros(1 << 20, dtype=torch.uint8)
        reducer.expect(mean.flats)
        group.all_gather(ranks, torch.tensor([float(group.rank)]))
        reducer.reduce(sums, mean)
        return ranks.flatten().tolist() == list(range(group.size)) and torch.equal(mean.flats[0], expected)

    assert with_groups(3, rank) == [True] * 3


def test_what_was_expected_is_not_mixed_with_anything_else() -> None:
    def rank(group: Group) -> list[str]:
        reducer, said = Reducer(SHARDS), []
        sums = summed(group, 5_000, reducer)
        reducer.expect(Buffers(4_000).flats)
        for attempt in (lambda: summed(group, 5_000, reducer), lambda: reducer.reduce(sums, Buffers(5_000))):
            with pytest.raises((GroupBroken, ProtocolError)) as refused:
                attempt()
            said.append(str(refused.value))
        return said

    for said in with_groups(3, rank):
        assert "after expect()" in said[0] and "other parameters train" in said[1]


def test_two_ranks_agree_bit_for_bit_when_they_swap_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sum each, and several as after a loss; the pieces are not equally long."""
    expected = mean_over(1, 30_001, 1 << 20)[0]
    monkeypatch.setattr(reduction, "SWAP_BYTES", 1 << 14)
    assert len({hi - lo for lo, hi in reduction._stretches(expected, reduction.SWAP_BYTES)}) == 3
    for assigned in (None, [[0, 2, 5, *range(8, SHARDS)], [1, 3, 4, 6, 7]]):
        for mean in mean_over(2, 30_001, 1 << 20, assigned=assigned):
            assert torch.equal(mean, expected)


def test_two_ranks_that_swap_find_their_way_about_any_buffers() -> None:
    """More sets than a reducer remembers, again and again, and some that are gone when the next ones come."""
    many, length = reduction.SWAPS_KEPT + 1, 700

    def rank(group: Group) -> bool:
        reducer = Reducer(SHARDS)
        sums, found = summed(group, length, reducer), []
        [held] = sums.partials(reducer.blocks)
        first = held.flats[0].clone()
        kept = [Buffers(length) for _ in range(many)]
        for factor, mean in enumerate([*kept, *kept, *(Buffers(length) for _ in range(many))], start=1):
            held.flats[0].copy_(first).mul_(factor)
            reducer.reduce(sums, mean)
            found.append(torch.allclose(mean.flats[0], expected * factor))
            assert len(reducer._cut) <= reduction.SWAPS_KEPT
        return all(found) and len(found) == 3 * many

    expected = mean_over(1, length, 1 << 20)[0]
    assert with_groups(2, rank) == [True, True]


def test_native_is_close_and_not_equal() -> None:
    ordered, native = mean_over(3, 30_001, 1 << 20)[0], mean_over(3, 30_001, 1 << 20, "native")[0]
    assert torch.allclose(ordered, native, atol=1e-6)
    assert not torch.equal(ordered, native)


def test_side_channel_travels_beside_the_buckets() -> None:
    def rank(group: Group) -> list[list[float]]:
        side, reducer, ranges = SideChannel(group), Reducer(SHARDS), ranges_of(3)
        reducer.bind(group, [blocks(*bounds, SHARDS) for bounds in ranges])
        sums = ShardSums(SHARDS, lambda: Buffers(100))
        for shard in range(*ranges[group.rank]):
            sums.add(shard, sums.take())
        reducer.reduce(sums, sums.take(), lambda: [side.start([group.rank, 0.5])])
        return side.take().tolist()

    assert with_groups(3, rank) == [[[0.0, 0.5], [1.0, 0.5], [2.0, 0.5]]] * 3


def test_a_shard_counts_once() -> None:
    sums = ShardSums(SHARDS, lambda: Buffers(1))
    for shard in (5, 4):
        sums.add(shard, sums.take())
    with pytest.raises(ProtocolError, match="shard 4 of 16 was added"):
        sums.target(4)
    with pytest.raises(ProtocolError, match="were due"):
        sums.partials([(4, 8)])


def test_buffers_are_made_once() -> None:
    made: list[Buffers] = []
    sums = ShardSums(SHARDS, lambda: made.append(Buffers(1)) or made[-1])
    counts = []
    for _ in range(3):
        for shard in range(SHARDS):
            sums.add(shard, sums.take())
        counts.append(len(made))
        sums.keep(())
    assert counts == [5, 5, 5]


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="reduction = 'sorted'"):
        Reducer(SHARDS, "sorted")


# ---- gradients of models ----------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """BatchNorm, dropout, a tied weight, a parameter that is not used, a frozen one, an infinite mask, and two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)
        self.last.weight = nn.Parameter(torch.randn(6, 8))
        self.tied = self.last.weight
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.norm(self.first(x)), 0.2) + self.mask[0]
        return (self.last(hidden) * self.frozen) @ self.tied


def compute(buffers: GradientBuffers, model: nn.Module, shards: tuple[int, int]) -> None:
    buffers.begin_step()
    for shard in range(*shards):
        seed_shard(7, 0, shard)
        buffers.begin_shard()
        model(torch.randn(4, 6, generator=torch.Generator().manual_seed(shard))).square().mean().backward()
        buffers.end_shard(shard)


def trained(size: int) -> list[dict[str, torch.Tensor]]:
    """Each rank's state of the odd model after two steps at world ``size``."""
    models = [Odd() for _ in range(size)]
    one_at_a_time = threading.Lock()  # threads share the random generators

    def work(group: Group) -> dict[str, torch.Tensor]:
        model, ranges, reducer = models[group.rank], ranges_of(size), Reducer(SHARDS)
        reducer.bind(group, [blocks(*bounds, SHARDS) for bounds in ranges])
        buffers = GradientBuffers({"model": model}, SHARDS)
        optimizer = torch.optim.SGD(buffers.parameters, 0.1, momentum=0.9)
        for _ in range(2):
            with one_at_a_time:
                compute(buffers, model, ranges[group.rank])
            sum_up(buffers, reducer)
            buffers.commit()
            optimizer.step()
        return model.state_dict()

    return with_groups(size, work)  # type: ignore[return-value]


def sum_up(buffers: GradientBuffers, reducer: Reducer, added: Callable[[], Sequence[Any]] = tuple) -> None:
    """The sum of a step, as all ranks make it."""
    with buffers.summed() as (sums, mean, early):
        if early is None:
            reducer.reduce(sums, mean, added)
        else:
            early.finish(added)


def alone(model: nn.Module, attempts: int = 1) -> GradientBuffers:
    """Gradients of all shards on one rank, after ``attempts - 1`` attempts that were abandoned on the way."""
    buffers, reducer = GradientBuffers({"model": model}, SHARDS), Reducer(SHARDS)
    reducer.bind(Group(1, 0, 1, torch.device("cpu")), [[(0, SHARDS)]])
    for _ in range(attempts - 1):
        compute(buffers, model, (0, 5))
        buffers.begin_shard()
        model(torch.ones(4, 6)).sum().backward()
        buffers.abandon()
    compute(buffers, model, (0, SHARDS))
    sum_up(buffers, reducer)
    return buffers


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_a_model_with_batchnorm_has_the_same_bits_at_any_world_size() -> None:
    expected = trained(1)[0]
    assert expected["norm.num_batches_tracked"] == 2
    assert not torch.equal(expected["norm.running_mean"], torch.zeros(8))
    for size in (2, 3):
        assert all(same(state, expected) for state in trained(size))


def test_gradients_are_the_mean_of_the_shards_gradients() -> None:
    model, twin = Odd(), Odd()
    buffers = alone(model)
    for shard in range(SHARDS):
        seed_shard(7, 0, shard)
        loss = twin(torch.randn(4, 6, generator=torch.Generator().manual_seed(shard))).square().mean()
        (loss / SHARDS).backward()
    for (name, mine), plain in zip(model.named_parameters(), twin.parameters(), strict=True):
        expected = torch.zeros_like(plain) if plain.grad is None and plain.requires_grad else plain.grad
        assert (mine.grad is None) == (expected is None), name
        if expected is not None:
            assert torch.allclose(mine.grad, expected, rtol=1e-4, atol=1e-6), name
    assert len(buffers.parameters) == len([p for p in twin.parameters() if p.requires_grad])


def test_an_abandoned_attempt_does_not_show() -> None:
    model, twin = Odd(), Odd()
    once, thrice = alone(model), alone(twin, attempts=3)
    for mine, other in zip(once.parameters, thrice.parameters, strict=True):
        assert torch.equal(mine.grad, other.grad)
    once.commit()
    thrice.commit()
    assert same(model.state_dict(), twin.state_dict())


def test_what_was_computed_outlives_a_broken_reduction() -> None:
    """The attempt is held in the middle of a shard; what came before it counts, and the rest follows."""
    model, twin = Odd(), Odd()
    buffers, reducer = GradientBuffers({"model": model}, SHARDS), Reducer(SHARDS)
    reducer.bind(Group(1, 0, 1, torch.device("cpu")), [[(0, SHARDS)]])
    compute(buffers, model, (0, 5))
    buffers.begin_shard()
    model(torch.ones(4, 6)).sum().backward()
    buffers.hold()
    assert buffers.sums.held == set(range(5))
    assert all(parameter.grad is None for parameter in model.parameters())
    compute(buffers, model, (5, SHARDS))
    sum_up(buffers, reducer)
    for mine, other in zip(buffers.parameters, alone(twin).parameters, strict=True):
        assert torch.equal(mine.grad, other.grad)


def test_buffers_of_a_broken_reduction_hold_nothing_until_a_step_is_committed() -> None:
    """Bytes that a peer had sent are read from the connection after it was ended."""
    model = Odd()
    buffers, reducer = GradientBuffers({"model": model}, SHARDS), Reducer(SHARDS)
    group = Group(1, 0, 1, torch.device("cpu"))
    reducer.bind(group, [[(0, SHARDS)]])
    broken = []

    def breaks() -> list[Any]:
        broken.append(buffers.mean.flats)
        raise group.broken("a peer is lost")

    for _ in range(2):
        compute(buffers, model, (0, SHARDS))
        with pytest.raises(GroupBroken):
            sum_up(buffers, reducer, breaks)
        buffers.abandon()
    for shard in range(SHARDS):
        compute(buffers, model, (shard, shard + 1))
        for flat in broken[-1]:
            flat.fill_(math.nan)
    sum_up(buffers, reducer)
    assert all(parameter.grad.isfinite().all() for parameter in buffers.parameters)


def test_abandoning_after_the_reduction_leaves_buffers_as_committed() -> None:
    model = Odd()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    alone(model).abandon()
    assert same(model.state_dict(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_abandoning_after_the_commit_keeps_it() -> None:
    model = Odd()
    buffers = alone(model)
    buffers.commit()
    after = {name: value.clone() for name, value in model.state_dict().items()}
    buffers.abandon()
    assert same(model.state_dict(), after)


class Lookup(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(5, 6, sparse=sparse), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(torch.tensor([1, 3, 3, 0])) * x)


def test_sparse_gradients_become_dense_ones() -> None:
    dense, sparse = Lookup(False), Lookup(True)
    for mine, other in zip(alone(sparse).parameters, alone(dense).parameters, strict=True):
        assert torch.allclose(mine.grad, other.grad)
    assert not sparse.table.weight.grad.is_sparse


def test_a_parameter_unfrozen_later_takes_part() -> None:
    model = Odd()
    buffers = GradientBuffers({"model": model}, SHARDS)
    count = len(buffers.parameters)
    model.frozen.requires_grad_(True)
    compute(buffers, model, (0, 1))
    assert len(buffers.parameters) == count + 1


def test_a_mean_that_was_taken_away_is_the_gradient_again() -> None:
    """A rank takes a step late, from the sums that it kept: other attempts have put other gradients there meanwhile."""
    model = Odd()
    buffers, reducer = GradientBuffers({"model": model}, SHARDS), Reducer(SHARDS)

    def work(group: Group) -> None:
        reducer.bind(group, [blocks(0, SHARDS, SHARDS)])
        compute(buffers, model, (0, SHARDS))
        sum_up(buffers, reducer)

    with_groups(1, work)
    buffers.keep_present(buffers.present)
    wanted = [None if one.grad is None else one.grad.clone() for one in buffers.parameters]
    assert any(one is None for one in wanted) and any(one is not None for one in wanted)
    kept = buffers.take_mean()
    buffers.abandon()
    compute(buffers, model, (0, 1))
    buffers.give_mean(kept)
    for one, before in zip(buffers.parameters, wanted, strict=True):
        assert one.grad is None if before is None else one.grad is not None and torch.equal(one.grad, before)


class Restless(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("history", torch.zeros(300, 300))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.history.add_(1)
        return super().forward(x)


def test_a_large_buffer_that_changes_is_refused_by_name() -> None:
    model = Restless()
    with pytest.raises(ConfigError, match=r"model\.history"):
        compute(GradientBuffers({"model": model}, SHARDS), model, (0, 1))


def test_a_parameter_without_a_shape_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"model\.0\.weight"):
        GradientBuffers({"model": nn.Sequential(nn.LazyLinear(3))}, SHARDS)


def checked_sums(size: int, number: int, spoil: Callable[[int, list[torch.Tensor]], None]) -> list[tuple[int | None, str]]:
    """Of each rank: whose sum is in dispute after ``spoil(rank, sum)``, and its testimony on rank 1's."""

    def rank(group: Group) -> tuple[int | None, str]:
        reducer, mean = Reducer(SHARDS, "ordered", 1 << 14), Buffers(20_000)
        sums = summed(group, 20_000, reducer)
        reducer.reduce(sums, mean)
        spoil(group.rank, mean.flats)
        owners = [(r + 1) % size for r in range(size)]
        check = SumCheck(group, reducer, owners, number, [one.flats for one in sums.partials(reducer.blocks)], mean.flats)
        return check.differs(), check.testify(1)

    return with_groups(size, rank)  # type: ignore[return-value]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_right_sums_pass_and_all_say_the_same_of_them(size: int) -> None:
    for number in (0, 3, 100):
        found = checked_sums(size, number, lambda rank, flats: None)
        assert {owner for owner, _ in found} == {None}
        assert len({reported for _, reported in found}) == 1


def test_who_adds_up_wrongly_is_found_by_its_checker_and_outvoted() -> None:
    def spoil(rank: int, flats: list[torch.Tensor]) -> None:
        if rank == 1:
            flats[0].view(torch.int32).bitwise_xor_(1)

    found = checked_sums(4, 7, spoil)
    assert {owner for owner, _ in found} == {1}
    said = [reported for _, reported in found]
    assert len(set(said)) == 2
    assert said.count(said[1]) == 1


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 1_000])
def test_every_element_of_a_chunk_has_its_turn_once(length: int) -> None:
    turns = [part for number in range(SLICES) for part in range(*sumcheck._slice(Chunk(0, 40, 40 + length), number)[1:])]
    assert turns == list(range(40, 40 + length))
