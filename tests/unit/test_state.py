"""Tracked state: what it holds, what tells two of them apart, and how it travels."""

from __future__ import annotations

import collections
import itertools
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import actors.rank.state.tracked as state_module
from actors.rank.data.sampling import seed_step
from actors.rank.device import rank_device
from actors.rank.membership.process_group import Forming, Group, GroupBroken, StoreServer
from actors.rank.state.tracked import TrackedState, checksum, receive_state, send_state, slices
from actors.rank.state.tracking import tracked
from fleet.errors import ConfigError, ProtocolError
from fleet.settings.run import RunSettings

BOUND_S = 30.0


class Cursor:
    def __init__(self, position: int = 0) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "history": [(1, 2.5), None]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def build(seed: int, steps: int, width: int = 9) -> TrackedState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.Linear(width, 1).double().float())
    model[0].register_buffer("table", torch.randn(3).bfloat16())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 5)).sum().backward()
        optimizer.step()
        scheduler.step()
    return TrackedState(model=model, optimizer=optimizer, scheduler=scheduler, cursor=Cursor(steps))


def digest(state: TrackedState) -> str:
    seed_step(0, 0)
    return state.digest(step=3)


def moved(skeleton: str, tensors: list[torch.Tensor]) -> tuple[str, list[torch.Tensor]]:
    return skeleton, [tensor.clone() for tensor in tensors]


def test_the_data_cursor_is_in_the_digest() -> None:
    state = build(0, 3)
    assert state.digest(step=3) != state.digest(step=4)


def test_a_fresh_optimizer_takes_over_what_it_has_not_created_yet() -> None:
    donor, fresh = build(0, 3), build(1, 0)
    assert digest(donor) != digest(fresh)
    fresh.load(*moved(*donor.flatten()))
    assert digest(donor) == digest(fresh)
    assert fresh.objects["cursor"].position == 3
    for state in (donor, fresh):
        model, optimizer = state.objects["model"], state.objects["optimizer"]
        optimizer.zero_grad()
        model(torch.ones(4, 5)).square().sum().backward()
        optimizer.step()
    assert digest(donor) == digest(fresh)


class WithMasters(torch.optim.Optimizer):
    """Weights of 16 bits, of which it keeps those of 32."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            master = self.state[parameter].setdefault("master", parameter.float())
            parameter.copy_(master.sub_(parameter.grad.float(), alpha=0.01))


@pytest.mark.parametrize(
    ("kind", "dtype"), [(torch.optim.NAdam, torch.float64), (torch.optim.ASGD, torch.float64), (WithMasters, torch.bfloat16)]
)
def test_what_an_optimizer_holds_keeps_its_type(kind: Any, dtype: torch.dtype) -> None:
    """PyTorch's load_state_dict casts it to that of the parameter. One that goes on and one that takes over then take different steps."""

    def begin() -> TrackedState:
        torch.manual_seed(1)
        model = nn.Linear(3, 2, dtype=dtype)
        return TrackedState(model=model, optimizer=kind(model.parameters()))

    def step(state: TrackedState) -> None:
        for parameter in state.modules["model"].parameters():
            parameter.grad = torch.full_like(parameter, 0.3)
        state.optimizers["optimizer"].step()

    first, second = begin(), begin()
    for _ in range(3):
        step(first)
    second.load(*moved(*first.flatten()))
    assert second.digest_parts() == first.digest_parts()
    step(first)
    step(second)
    assert second.digest_parts() == first.digest_parts()


def test_parts_name_what_differs() -> None:
    one, other = build(0, 3), build(0, 3)
    seed_step(0, 0)
    before = one.digest_parts()
    other.objects["optimizer"].param_groups[0]["lr"] *= 2
    seed_step(0, 0)
    after = other.digest_parts()
    assert {name for name in before if before[name] != after[name]} == {"optimizer"}
    torch.rand(1)
    assert other.digest_parts()["rng"] != after["rng"]


@pytest.mark.parametrize(
    "change", [lambda t: t.view(2, 3), lambda t: t.double(), lambda t: t.clone().index_fill_(0, torch.tensor([5]), 9.0)]
)
def test_shape_dtype_and_value_show_in_the_digest(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Holder(Cursor):
        def state_dict(self) -> dict[str, Any]:
            return {"value": self.position}

    one = TrackedState(x=Holder(torch.arange(6.0)))  # type: ignore[arg-type]
    other = TrackedState(x=Holder(change(torch.arange(6.0))))  # type: ignore[arg-type]
    assert one.digest_parts()["x"] != other.digest_parts()["x"]


def test_the_digest_is_the_same_in_another_process() -> None:
    code = "from test_state import build, digest; print(digest(build(0, 3)))"
    path = [__file__.rpartition("/")[0], *sys.path]
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {code}"], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == digest(build(0, 3))


def test_tied_weights_travel_once() -> None:
    model = nn.ModuleDict({"one": nn.Linear(4, 4, bias=False), "two": nn.Linear(4, 4, bias=False)})
    model["two"].weight = model["one"].weight
    assert len(TrackedState(model=model).flatten()[1]) == 1


def test_what_cannot_be_tracked_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="step = 'int'"):
        TrackedState(step=3)
    with pytest.raises(ConfigError, match="track"):
        TrackedState(model=nn.Linear(1, 1)).load(*TrackedState(other=nn.Linear(1, 1)).flatten())


class Holder:
    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def test_what_is_not_plain_is_refused_when_it_is_tracked() -> None:
    with pytest.raises(ConfigError) as refused:
        TrackedState(model=nn.Linear(1, 1), loader=Holder(seen={"of": [1, Holder()]}))
    assert "test_state.Holder" in str(refused.value.value)
    assert refused.value.field == "loader"
    assert "['seen']['of'][1] is of class" in refused.value.reason
    assert "plain" in refused.value.reason
    assert "state_dict()" in refused.value.way_out


def test_what_becomes_unplain_later_is_refused_by_name() -> None:
    holder = Holder(rate=1.0)
    state = TrackedState(holder=holder)
    holder.values["rate"] = lambda: 1.0
    with pytest.raises(ConfigError, match=r"\['rate'\] is of class function"):
        state.flatten()


def test_a_skeleton_that_is_written_again_is_what_it_would_be_anew() -> None:
    """Parts that have not changed are not written anew."""
    state = build(0, 3)
    holder = Holder(rate=1.0, names=["a"], shape=torch.Size([2]))
    state = TrackedState(**state.objects, holder=holder)
    for rate in (1.0, 2.0, 2.0, -0.0, 0.0, float("nan")):
        holder.values["rate"] = state.optimizers["optimizer"].param_groups[0]["lr"] = rate
        anew = TrackedState(**state.objects).flatten()
        assert state.flatten()[0] == anew[0]


def test_what_no_rank_has_written_is_refused() -> None:
    for text in ("gASVBQAAAAAAAAB9lC4=", "", '{"extra":{}}'):
        with pytest.raises(ProtocolError, match="no text of plain values"):
            TrackedState(extra=Holder()).load(text, [])


@pytest.mark.parametrize("value", [collections.deque(["ab", "ab"]), {"x", "yy", "zzz"}, np.float64(1.5), [torch.Size([2]), torch.float32]])
def test_the_digest_of_a_copy_is_the_same(value: Any) -> None:
    """Whatever objects it shares, and in whatever order its sets are: what a receiver has is a copy."""
    one, other = TrackedState(x=Holder(value=value, word="a" * 3)), TrackedState(x=Holder())
    other.load(*one.flatten())
    assert other.digest_parts()["x"] == one.digest_parts()["x"]


@pytest.mark.parametrize("count", [1, 3, 4])
def test_slices_are_balanced_and_make_up_the_state(count: int) -> None:
    tensors = [torch.randn(3000, 40), torch.tensor(3.0), torch.zeros(0, 4), torch.randn(7), torch.randn(90_001), torch.randn(1, 50_000)]
    parts = slices(tensors, count)
    loads = [sum(item[1].numel() for item in part) for part in parts]
    assert sum(loads) == sum(tensor.numel() for tensor in tensors)
    assert max(loads) - min(loads) <= (0 if count == 1 else 100_000), "a tensor of one row is not cut"
    for index, tensor in enumerate(tensors):
        mine = [item for part in parts for item in part if item[0] == index]
        if tensor.numel():
            assert [item[2][:1] for item in mine] == sorted(item[2][:1] for item in mine)
            assert torch.equal(torch.cat([item[1].reshape(-1) for item in mine]), tensor.reshape(-1))
    assert sum(item[0] == 2 for part in parts for item in part) == 1, "an empty tensor has to be in one of them"
    assert slices([], 2) == [[], []]


def test_checksums_see_bits_and_order() -> None:
    data = torch.randint(0, 256, (20_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    seen = {checksum(data)}
    for place in (0, 4095, 4096, 19_999):
        changed = data.clone()
        changed[place] ^= 1
        seen.add(checksum(changed))
    seen.add(checksum(torch.cat([data[4096:8192], data[:4096], data[8192:]])))
    seen.add(checksum(data[:-1]))
    assert len(seen) == 7


def between_two(donor: Callable[[Group], Any], receiver: Callable[[Group], Any]) -> list[Any]:
    store, cpu = StoreServer("127.0.0.1"), torch.device("cpu")
    parts = [Forming(store=store.address, generation=1, rank=r, size=2, device=cpu, timeout_s=BOUND_S, host="127.0.0.1") for r in (0, 1)]
    groups = [part.wait() for part in parts]
    try:
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(donor, groups[0]), pool.submit(receiver, groups[1])]
            return [future.exception(BOUND_S) or future.result() for future in futures]
    finally:
        for group in groups:
            group.close()
        store.close()


@pytest.mark.parametrize("chunk_bytes", [64, 1 << 10, 8 << 20])
def test_state_travels(monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    monkeypatch.setattr(state_module, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(state_module, "SMALL_BYTES", chunk_bytes // 2)
    donor, fresh = build(0, 3), build(1, 0)
    calls: list[str] = []
    before = digest(fresh)
    ends = between_two(
        lambda group: send_state(group, 1, donor), lambda group: receive_state(group, 0, fresh, lambda: calls.append(digest(fresh)))
    )
    assert ends == [None, None]
    assert calls == [before], "the callback comes before the state changes"
    assert digest(fresh) == digest(donor)


def test_a_damaged_chunk_leaves_the_old_state(monkeypatch: pytest.MonkeyPatch) -> None:
    donor, fresh = build(0, 3), build(1, 2)
    before = digest(fresh)
    true_sum = state_module.checksum
    calls = itertools.count()  # donor and receiver are two threads here

    def wrong_once(data: torch.Tensor) -> int:
        return true_sum(data) ^ (next(calls) == 0)

    monkeypatch.setattr(state_module, "checksum", wrong_once)
    ends = between_two(lambda group: send_state(group, 1, donor), lambda group: receive_state(group, 0, fresh))
    assert isinstance(ends[1], GroupBroken) and "damaged" in str(ends[1])
    assert digest(fresh) == before


def test_a_broken_transfer_leaves_the_old_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "CHUNK_BYTES", 64)
    monkeypatch.setattr(state_module, "SMALL_BYTES", 32)
    donor, fresh = build(0, 3), build(1, 2)
    before = digest(fresh)

    def give_up_midway(group: Group) -> None:
        chunks = iter(range(5))
        monkeypatch.setattr(
            group, "start", lambda *a, start=group.start: start(*a) if next(chunks, None) is not None else group.interrupt()
        )
        send_state(group, 1, donor)

    ends = between_two(give_up_midway, lambda group: receive_state(group, 0, fresh))
    assert isinstance(ends[1], GroupBroken)
    assert digest(fresh) == before


def test_what_a_commit_has_nothing_to_step_with_is_refused_by_name() -> None:
    """It was stepped in the first commit, and PyTorch spoke of an argument that no line of the script gives."""
    model = nn.Linear(4, 1)
    usual = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau, cosine = torch.optim.lr_scheduler.ReduceLROnPlateau(usual), torch.optim.lr_scheduler.CosineAnnealingLR(usual, 5)
    assert tracked({"model": model, "optimizer": usual, "rates": plateau}, (), None, RunSettings(), lambda: rank_device(0.0)).optimizers
    with pytest.raises(ConfigError, match="optimizer.*LBFGS.*needs closure.*Take another optimizer"):
        tracked({"model": model, "optimizer": torch.optim.LBFGS(model.parameters())}, (), None, RunSettings(), lambda: rank_device(0.0))
    with pytest.raises(ConfigError, match="optimizer.*SparseAdam.*as dense ones.*sparse=True"):
        tracked(
            {"model": model, "optimizer": torch.optim.SparseAdam(model.parameters())}, (), None, RunSettings(), lambda: rank_device(0.0)
        )
    assert tracked({"model": model, "optimizer": usual, "rates": cosine}, (), None, RunSettings(), lambda: rank_device(0.0)).optimizers
