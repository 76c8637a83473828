"""Steps of a model that ``fully_shard`` has cut, over a real network: the bits of whole replicas, at any number of ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from actors.rank.fsdp.layout import FsdpLayout
from actors.rank.fsdp.taken import mesh_of_one, take_over
from actors.rank.membership.process_group import Group
from actors.rank.state.tracked import TrackedState
from actors.rank.step.train_step import TrainStep
from actors.rank.telemetry.recorder import Recorder
from fleet.settings.run import RunSettings
from tests.unit.test_reduction import with_groups
from tests.unit.test_sharded_engine import SHARDS, STEPS, join, take, take_all

ONE_AT_A_TIME = threading.Lock()
CPU = torch.device("cpu")


def tracked() -> TrackedState:
    """Three units, of prime widths, one of which has batch norm, whose statistics go to all ranks."""
    with ONE_AT_A_TIME, torch.random.fork_rng():
        torch.manual_seed(1)
        first = nn.Sequential(nn.Linear(16, 251), nn.BatchNorm1d(251), nn.Tanh())
        model = nn.Sequential(first, nn.Sequential(nn.Linear(251, 127), nn.Tanh()), nn.Linear(127, 1))
        for each in (*model[:2], model):
            fully_shard(each, mesh=mesh_of_one(CPU))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    units = take_over({"model": model}, {"optimizer": optimizer})
    state = TrackedState(model=model, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2))
    state.units = units
    return state


def make(sharding: str, size: int, ring: Path, build: Callable[[], TrackedState] = tracked) -> tuple[TrainStep, TrackedState]:
    settings = RunSettings(world=size, shards=SHARDS, optimizer_sharding=sharding)
    state = build()
    return TrainStep(state, settings, Recorder(ring, 0), 0.5), state


def close(train: TrainStep) -> None:
    """Nobody asks it any more."""
    if isinstance(train.layout, FsdpLayout):
        train.layout.close()


def trained(sharding: str, size: int, folder: Path) -> list[tuple[str, int]]:
    """(digest, bytes of the parameters) of each rank."""

    def rank(group: Group) -> tuple[str, int]:
        train, state = make(sharding, size, folder / f"{sharding}-{size}-{group.rank}")
        join(train, group)
        assert take_all(train, state) == list(range(STEPS))
        found = train.layout.digest(STEPS), sum(each.nbytes for each in train.layout.weights)
        group.all_gather(torch.empty(group.size, 1), torch.zeros(1))  # a server goes when nobody asks any more
        close(train)
        return found

    return with_groups(size, rank)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int]:
    return trained("none", 1, tmp_path_factory.mktemp("whole"))[0]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_bits_are_those_of_whole_replicas(size: int, tmp_path: Path, whole: tuple[str, int]) -> None:
    """And the ranks together have each chunk of each unit twice, but for what is left free between parameters."""
    digest, whole_bytes = whole
    found = trained("fsdp", size, tmp_path)
    assert {each for each, _ in found} == {digest}
    assert sum(parameter_bytes for _, parameter_bytes in found) <= min(size, 2) * whole_bytes * 1.02


def test_what_is_frozen_behind_run_track_may_be_thawed(tmp_path: Path) -> None:
    def build() -> TrackedState:
        state = tracked()
        state.objects["model"][1].requires_grad_(False)
        return state

    train, state = make("fsdp", 1, tmp_path / "ring", build)
    assert isinstance(train.layout, FsdpLayout)
    thawed = state.objects["model"][1].requires_grad_(True)[0].weight
    train.rehearse()
    train.begin_shard(0)
    state.objects["model"](torch.ones(4, 16)).sum().backward()
    train.end_shard(0, 1.0)
    assert any(one is thawed for one in train.parameters)
    assert train.gradients.present + 1 == 1 << len(train.parameters), "each has a gradient"
    close(train)


def test_parameters_that_are_cast_have_the_gradients_of_what_stands_in_for_them(tmp_path: Path) -> None:
    def build() -> TrackedState:
        with torch.random.fork_rng():
            model = nn.Sequential(nn.Linear(16, 251), nn.Tanh(), nn.Linear(251, 1))
        for each in (model[0], model):
            fully_shard(each, mesh=mesh_of_one(CPU), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        optimizer = torch.optim.AdamW(model.parameters())
        units = take_over({"model": model}, {"optimizer": optimizer})
        state = TrackedState(model=model, optimizer=optimizer)
        state.units = units
        return state

    train, state = make("fsdp", 1, tmp_path / "ring", build)
    assert isinstance(train.layout, FsdpLayout)
    train.rehearse()
    train.begin_shard(0)
    state.objects["model"](torch.ones(4, 16)).float().sum().backward()
    train.end_shard(0, 1.0)
    assert train.gradients.present + 1 == 1 << len(train.parameters), "each has a gradient"
    close(train)


def written(sharding: str, size: int, folder: Path) -> list[tuple[int, int]]:
    """(bytes of a snapshot, of these what is written) of each rank, after all steps."""

    def rank(group: Group) -> tuple[int, int]:
        train, state = make(sharding, size, folder / f"{sharding}-{size}-{group.rank}")
        join(train, group)
        take_all(train, state)
        share = train.layout.share()
        copied = share.flat().tensors
        found = sum(each.nbytes for each in copied), sum(part.nbytes for _, part, *_ in share.items(copied))
        group.all_gather(torch.empty(group.size, 1), torch.zeros(1))
        close(train)
        return found

    return with_groups(size, rank)  # type: ignore[return-value]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_write_together_what_whole_replicas_do_and_copy_no_more_than_they_write(size: int, tmp_path: Path) -> None:
    """For the store and for the memory of others alike. A whole replica copies all of the state, and writes its share of it."""
    [(whole_bytes, written_bytes)] = written("none", 1, tmp_path)
    found = written("fsdp", size, tmp_path)
    assert whole_bytes == written_bytes
    assert sum(count for _, count in found) == whole_bytes
    assert all(copied == count <= whole_bytes / size + 3 * 3 * 1024 * 4 for copied, count in found), "a block or so of each unit and moment"


# ---- groups that keep a replica each -----------------------------------------------------------------------------------------------------


def in_groups(size: int, replica_size: int, folder: Path) -> list[tuple[str, int, set[int]]]:
    """(digest, bytes of the parameters, whom it borrowed from) of each rank."""

    def rank(group: Group) -> tuple[str, int, set[int]]:
        train, state = make("fsdp", size, folder / f"{size}-{group.rank}")
        assert isinstance(train.layout, FsdpLayout)
        join(train, group, replica_size)
        assert take_all(train, state) == list(range(STEPS))
        exchange = train.layout.exchange
        served = {exchange._addresses.index(address) for address in exchange.fetcher._connections}
        found = train.layout.digest(STEPS), sum(each.nbytes for each in train.layout.weights), served
        group.all_gather(torch.empty(group.size, 1), torch.zeros(1))
        close(train)
        return found

    return with_groups(size, rank)  # type: ignore[return-value]


@pytest.mark.parametrize(("size", "replica_size"), [(4, 2), (5, 2), (6, 3), (4, 4)])
def test_groups_have_the_bits_of_whole_replicas_and_gather_within_themselves(
    size: int, replica_size: int, tmp_path: Path, whole: tuple[str, int]
) -> None:
    """Each member of a full group has one part in their number of the parameters, and a rank beside full groups trains as well."""
    digest, whole_bytes = whole
    found = in_groups(size, replica_size, tmp_path)
    assert {each for each, _, _ in found} == {digest}
    full = size // replica_size
    copies = 1 if full > 1 else 2
    for rank, (_, parameter_bytes, served) in enumerate(found[: full * replica_size]):
        group = {each for each in range(size) if each // replica_size == rank // replica_size}
        assert served == group - {rank} or (full == 1 and served <= group), "each of its group, and nobody else"
        share = copies / replica_size + (size % replica_size > 0) / size
        assert parameter_bytes <= whole_bytes * share * 1.02 + 4 * 1024 * 8
    assert size % replica_size == 0 or found[-1][2] <= set(range(size - 1))


# ---- four million parameters, prime, tied and frozen ------------------------------------------------------------------------------------


class Words(nn.Module):
    """Its head has the embedding's weights, and its first layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(4001, 499), nn.Linear(499, 4001, bias=False)
        self.inner = nn.Sequential(nn.Linear(499, 1999), nn.Tanh(), nn.Linear(1999, 499))
        self.head.weight = self.embedding.weight
        self.inner[0].requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.inner(self.embedding(words)))


def words() -> TrackedState:
    with ONE_AT_A_TIME, torch.random.fork_rng():
        torch.manual_seed(2)
        model = Words()
        for part in (model.inner, model):
            fully_shard(part, mesh=mesh_of_one(CPU))
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    units = take_over({"model": model}, {"optimizer": optimizer})
    state = TrackedState(model=model, optimizer=optimizer)
    state.units = units
    return state


def digest_of_words(sharding: str, size: int, folder: Path) -> str:
    def rank(group: Group) -> str:
        train, state = make(sharding, size, folder / f"{sharding}-{size}-{group.rank}", words)
        join(train, group)
        for step in range(2):
            for shard in train.assigned:
                draw = torch.Generator().manual_seed(100 * step + shard)
                text = torch.randint(4001, (3,), generator=draw)
                train.begin_shard(shard)
                loss = nn.functional.cross_entropy(state.objects["model"](text[:-1]), text[1:])
                loss.backward()
                train.end_shard(shard, float(loss.detach()))
            take(train)
            train.layout.publish(lambda: None)
        found = train.layout.digest(2)
        group.all_gather(torch.empty(group.size, 1), torch.zeros(1))
        close(train)
        return found

    [found] = set(with_groups(size, rank))
    return str(found)


@pytest.fixture(scope="module")
def whole_words(tmp_path_factory: pytest.TempPathFactory) -> str:
    return digest_of_words("none", 1, tmp_path_factory.mktemp("words"))


@pytest.mark.parametrize("size", range(2, 9))
def test_prime_tied_and_frozen_weights_have_one_digest_at_every_world(size: int, tmp_path: Path, whole_words: str) -> None:
    """Whether it divides the eight shards or not."""
    assert digest_of_words("fsdp", size, tmp_path) == whole_words
