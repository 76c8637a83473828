"""Snapshots hold the state they say, whatever the optimizer does to it meanwhile, in memory that is taken once."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import shutil
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import actors.rank.state.snapshot as snapshot_module
from actors.rank.state.saving import Saver, StatePart, WholeTensors
from actors.rank.state.snapshot import CHUNK_BYTES, PAGE_BYTES, SMALL_BYTES, Snapshot, Snapshotter
from actors.rank.state.tracked import TrackedState
from fleet.protocol.levels import STORE, request_number
from fleet.protocol.types import Member, Part, StateId

BOUND_S = 30.0
COMPILES = platform.machine() == "x86_64" and shutil.which("cc") is not None and Path(sysconfig.get_path("include"), "Python.h").exists()
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


class Training:
    """A model with all sorts of tensors: large and tiny, channels last, not dense, bfloat16, buffers that a forward changes."""

    def __init__(self, device: str, width: int = 300) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = nn.Sequential(nn.Conv2d(3, 64, 7), nn.BatchNorm2d(64), nn.Flatten(), nn.Linear(64 * 4, width), nn.Linear(width, 1))
        self.model[0].to(memory_format=torch.channels_last)
        self.model.register_parameter("gaps", nn.Parameter(torch.randn(400, 300)[:, ::2]))
        self.model.register_buffer("table", torch.randn(40_000).bfloat16())
        self.model.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        self.state = TrackedState(model=self.model, optimizer=self.optimizer)
        self.change()

    def forward(self) -> None:
        (self.model(torch.randn(4, 3, 8, 8, device=self.device)).sum() + self.model.get_parameter("gaps").square().sum()).backward()

    def change(self) -> None:
        self.forward()
        self.optimizer.step()

    def copy(self) -> list[torch.Tensor]:
        return [tensor.cpu().clone() for tensor in self.state.flatten()[1]]


@pytest.fixture(params=DEVICES)
def training(request: pytest.FixtureRequest) -> Training:
    return Training(request.param)


@pytest.fixture
def snapshots(monkeypatch: pytest.MonkeyPatch) -> Iterator[Snapshotter]:
    monkeypatch.setattr(snapshot_module, "AT_ONCE_BYTES", 0)
    made = Snapshotter()
    yield made
    made._thread.shutdown()


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def copied() -> None:
    """On a device, the copy goes on after ``settle``."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def newest(snapshots: Snapshotter) -> Snapshot:
    """It stays as it is until the next one is begun."""
    copied()
    found = snapshots.hold_settled()
    assert found is not None
    found.release()
    return found


def take(snapshots: Snapshotter, training: Training, step: int) -> bool:
    """A snapshot of the state at ``step``, which the optimizer then changes."""
    copied()
    begun = snapshots.begin(StateId(0, step), training.state)
    training.forward()
    snapshots.settle()
    training.change()
    return begun


class Gate:
    """Holds up the background copy until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        self._tasks = snapshot_module._host_tasks
        monkeypatch.setattr(snapshot_module, "_host_tasks", self._gated)

    def _gated(self, pairs: Any) -> Any:
        return [self._wait, *self._tasks(pairs)]

    def _wait(self) -> None:
        self.reached.set()
        assert self.open.wait(BOUND_S)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 4096, 100_003])
@pytest.mark.parametrize(("to", "source"), [(0, 0), (0, 1), (17, 0), (63, 62)])
def test_all_bytes_are_copied_and_no_others(size: int, to: int, source: int) -> None:
    """Whatever the lines of the cache that the stretch begins and ends in."""
    room = size + 256
    generator = torch.Generator().manual_seed(size)
    given = torch.randint(0, 256, (room,), dtype=torch.uint8, generator=generator)
    taken = torch.full((room,), 7, dtype=torch.uint8)
    snapshot_module.copy(taken.data_ptr() + to, given.data_ptr() + source, size)
    assert torch.equal(taken[to : to + size], given[source : source + size])
    assert (taken[:to] == 7).all() and (taken[to + size :] == 7).all()


def test_snapshots_are_copied_past_the_caches_where_there_is_a_compiler() -> None:
    past_the_caches = getattr(snapshot_module.copy, "__module__", None) == "actors.rank.state._stream"
    assert past_the_caches or not COMPILES, "python -m pip install -e . compiles it"
    if past_the_caches:
        with pytest.raises(ValueError, match="size = -1: must not be negative"):
            snapshot_module.copy(0, 0, -1)


@pytest.mark.parametrize("copy", [snapshot_module.copy, ctypes.memmove])
def test_a_snapshot_is_the_state_as_it_was(
    snapshots: Snapshotter, training: Training, copy: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_module, "copy", copy)
    for step in range(3):
        expected = training.copy()
        skeleton = training.state.flatten()[0]
        take(snapshots, training, step)
        found = newest(snapshots)
        assert (found.state_id, found.skeleton) == (StateId(0, step), skeleton)
        assert equal(found.tensors, expected)
        assert not equal(found.tensors, training.copy())


def test_a_state_can_be_made_from_it(snapshots: Snapshotter, training: Training) -> None:
    digest = training.state.digest_parts()
    take(snapshots, training, 0)
    training.state.load(newest(snapshots).skeleton, [tensor.clone() for tensor in newest(snapshots).tensors])
    assert {**training.state.digest_parts(), "rng": ""} == {**digest, "rng": ""}


def test_buffers_that_a_forward_changes_are_copied_before_begin_returns(
    snapshots: Snapshotter, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    expected = training.copy()
    assert snapshots.begin(StateId(0, 0), training.state)
    training.forward()  # batch norm's statistics and count are others now
    gate.open.set()
    snapshots.settle()
    assert equal(newest(snapshots).tensors, expected)


def test_large_tensors_are_copied_in_chunks(snapshots: Snapshotter) -> None:
    model = nn.Linear(1, 5 * CHUNK_BYTES // 8, bias=False)
    state = TrackedState(model=model)
    assert snapshots.begin(StateId(0, 0), state)
    snapshots.settle()
    assert torch.equal(newest(snapshots).tensors[0], model.weight)
    assert len(snapshots._slots[0].tasks) == 3


def test_a_small_state_is_copied_at_once(training: Training) -> None:
    small = Snapshotter()
    expected = training.copy()
    assert small.begin(StateId(0, 0), training.state)
    training.change()
    assert small.settle() >= 0
    assert equal(newest(small).tensors, expected)
    assert take(small, training, 1)
    small._thread.shutdown()


def test_a_thread_that_has_not_begun_is_not_waited_for(snapshots: Snapshotter, training: Training) -> None:
    busy, done = threading.Event(), threading.Event()
    snapshots._thread.submit(lambda: (busy.set(), done.wait(BOUND_S)))
    assert busy.wait(BOUND_S)
    expected = training.copy()
    assert snapshots.begin(StateId(0, 0), training.state)
    snapshots.settle()
    assert equal(newest(snapshots).tensors, expected)
    done.set()


@pytest.mark.parametrize("offset", [0, 1, 16, 1000])
def test_a_large_tensor_is_copied_to_another_half_of_its_page(offset: int) -> None:
    def weight(value: float) -> nn.Parameter:
        """Its memory begins ``offset`` elements further on than an allocator would begin it."""
        return nn.Parameter(torch.full((offset + SMALL_BYTES,), value)[offset:])

    model, snapshots = nn.Linear(1, 1), Snapshotter()
    state = TrackedState(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    for step in range(4):
        model.weight = weight(float(step))  # as when a state is loaded: other memory
        assert snapshots.begin(StateId(0, step), state)
        snapshots.settle()
        copy = next(tensor for tensor in newest(snapshots).tensors if tensor.numel() == SMALL_BYTES)
        assert torch.equal(copy, model.weight.detach())
        assert (copy.data_ptr() - model.weight.data_ptr()) % PAGE_BYTES == PAGE_BYTES // 2
    snapshots._thread.shutdown()


def test_memory_is_taken_once(snapshots: Snapshotter, training: Training) -> None:
    seen, last = [], contextlib.ExitStack()
    for step in range(6):
        assert take(snapshots, training, step)
        copied()
        held = snapshots.hold_settled()
        assert held is not None
        last.close()
        last.enter_context(held)
        seen.append([tensor.data_ptr() for tensor in held.tensors])
    size = sum(tensor.nbytes for tensor in training.copy())
    assert seen[0] == seen[2] == seen[4] != seen[1] == seen[3] == seen[5]
    taken = sum(slot.memory.numel() for slot in snapshots._slots)
    assert 2 * size <= taken < 2 * size + 2 * (64 + PAGE_BYTES) * len(seen[0])


def test_it_follows_tensors_that_are_replaced_and_shapes_that_change(snapshots: Snapshotter, training: Training) -> None:
    take(snapshots, training, 0)
    training.state.load(training.state.flatten()[0], training.copy())  # the optimizer's state lies elsewhere now
    with torch.no_grad():
        training.model[4].weight.data = torch.randn(1, 300, device=training.device)
    expected = training.copy()
    take(snapshots, training, 1)
    assert equal(newest(snapshots).tensors, expected)
    larger = Training(training.device, width=500)
    expected = larger.copy()
    take(snapshots, larger, 2)
    assert equal(newest(snapshots).tensors, expected)


def test_what_is_held_stays_while_newer_ones_are_taken(snapshots: Snapshotter, training: Training) -> None:
    expected = training.copy()
    take(snapshots, training, 0)
    copied()
    held = snapshots.hold_settled()
    assert held is not None
    with held:
        for step in range(1, 4):
            newer = training.copy()
            assert take(snapshots, training, step)
            assert newest(snapshots).state_id == StateId(0, step)
            assert equal(newest(snapshots).tensors, newer)
        assert equal(held.tensors, expected)
    with pytest.raises(RuntimeError, match="released more often than held"):
        held.release()


def test_nothing_is_overwritten_while_both_are_held(snapshots: Snapshotter, training: Training) -> None:
    held = []
    for step in range(2):
        take(snapshots, training, step)
        copied()
        held.append(snapshots.hold_settled())
    assert not take(snapshots, training, 2)
    assert newest(snapshots).state_id == StateId(0, 1)
    assert held[0] is not None
    held[0].release()
    assert take(snapshots, training, 3)
    assert newest(snapshots).state_id == StateId(0, 3)


def test_a_copy_under_way_makes_the_next_one_skip_not_wait(
    snapshots: Snapshotter, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert snapshots.hold_settled() is None
    gate = Gate(monkeypatch)
    assert snapshots.begin(StateId(0, 0), training.state)
    assert not snapshots.begin(StateId(0, 0), training.state)
    assert snapshots.hold_settled() is None, "what is not settled is not there"
    gate.open.set()
    assert snapshots.settle() > 0
    assert snapshots.settle() == 0
    assert newest(snapshots).state_id == StateId(0, 0)


def test_the_loop_helps_with_what_is_left(snapshots: Snapshotter, training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    assert snapshots.begin(StateId(0, 0), training.state)
    assert gate.reached.wait(BOUND_S)
    job = snapshots._job
    assert job is not None
    waiting = threading.Thread(target=job._work)
    waiting.start()
    waiting.join(BOUND_S)
    assert not job._tasks and job._left == 1, "all but the one that is held up"
    gate.open.set()
    snapshots.settle()


class SlowDevice:
    """As a GPU, which copies on after ``settle``: until somebody waits for it."""

    def __init__(self, tasks: list[Any]) -> None:
        self._tasks, self.done = tasks, False

    def begin(self) -> None: ...

    def copy(self) -> None:
        """It is asked for."""

    def order(self) -> None: ...

    def wait(self) -> None:
        for task in self._tasks:
            task()
        self.done = True


def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = snapshot_module._Slot._plan

    def on_device(slot: Any, flat: Any) -> None:
        plan(slot, flat)
        slot.device, slot.tasks = SlowDevice(slot.tasks), []

    monkeypatch.setattr(snapshot_module._Slot, "_plan", on_device)


def test_a_checkpoint_is_written_of_what_a_device_still_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_device(monkeypatch)
    training, written, reported = Training("cpu"), list[list[torch.Tensor]](), list[Any]()

    def write(state: StateId, generation: int, index: int, count: int, tensors: Any, place: str = "") -> tuple[str, Part]:
        written.append([tensor.clone() for _, tensor, _, _ in tensors])
        return "id", Part("name", 1, "sum", (0,))

    protocol = SimpleNamespace(written=reported.append, member=Member(0, 0))
    client: Any = SimpleNamespace(protocol=protocol, lock=threading.RLock(), say=lambda event=None: None)
    recorder: Any = SimpleNamespace(now_us=lambda: 0, during=contextlib.nullcontext)
    parts: Any = SimpleNamespace(write=write)
    saver, expected = Saver(client, recorder, parts, {}), training.copy()
    view: Any = SimpleNamespace(generation=1)
    saver.begin(request_number(STORE, 1), StateId(0, 4), view, WholeTensors(training.state, StatePart(0, 1, 0, 1)))
    saver.settle()
    for thread in saver._threads.values():
        thread.shutdown()
    assert len(written) == 1 and equal(written[0], expected)
    assert [one.state for one in reported] == [StateId(0, 4)]


def test_what_was_settled_is_held_while_a_device_still_copies_it(snapshots: Snapshotter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is written from it, in another thread, which can wait. A snapshot that is complete only then must not be lost."""
    as_on_a_device(monkeypatch)
    training = Training("cpu")
    expected = training.copy()
    assert snapshots.begin(StateId(0, 4), training.state)
    snapshots.settle()
    held = snapshots.hold_settled()
    assert held is not None and held.state_id == StateId(0, 4)
    held.arrive()
    assert equal(held.tensors, expected)
    assert snapshots.begin(StateId(0, 5), training.state), "into the other memory"
    snapshots.settle()
    assert equal(held.tensors, expected)
    held.release()


def test_a_state_that_is_replaced_meanwhile_is_copied_first(snapshots: Snapshotter, training: Training) -> None:
    busy, done = threading.Event(), threading.Event()
    snapshots._thread.submit(lambda: (busy.set(), done.wait(BOUND_S)))
    assert busy.wait(BOUND_S)
    expected, (skeleton, _) = training.copy(), training.state.flatten()
    assert snapshots.begin(StateId(0, 0), training.state)
    training.state.load(skeleton, [torch.zeros_like(tensor) for tensor in expected])
    assert equal(newest(snapshots).tensors, expected)
    done.set()


def test_an_error_of_the_copy_surfaces_and_the_next_one_is_taken(
    snapshots: Snapshotter, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Any) -> None:
        raise OSError("no such page")

    with monkeypatch.context() as patched:
        patched.setattr(snapshot_module, "_host_tasks", lambda pairs: [lambda: broken(pairs)])
        assert snapshots.begin(StateId(0, 0), training.state)
        with pytest.raises(OSError, match="no such page"):
            snapshots.settle()
    assert snapshots.hold_settled() is None
    expected = training.copy()
    assert take(snapshots, training, 1)
    assert equal(newest(snapshots).tensors, expected)


def test_flat_says_what_a_forward_may_change(training: Training) -> None:
    flat = training.state.flat()
    changing = {training.model[1].running_mean.data_ptr(), training.model[1].num_batches_tracked.data_ptr()}
    volatile = {flat.tensors[index].data_ptr() for index in flat.volatile}
    assert changing < volatile
    assert not volatile & {parameter.data_ptr() for parameter in training.model.parameters()}


def test_flat_finds_a_tensor_that_was_exchanged_under_its_parameter(training: Training) -> None:
    training.state.flat()
    weight = training.model[4].weight
    weight.data = torch.full_like(weight, 7.0)
    assert any(tensor.data_ptr() == weight.data_ptr() for tensor in training.state.flat().tensors)
