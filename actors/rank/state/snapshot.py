"""Snapshots of the training state that cost the loop next to nothing.

The state after step k is copied in the background while step k+1 computes; :meth:`Snapshotter.settle`, called just before the optimizer
changes it, waits only for the rest of the copy, and helps with it. Memory for two snapshots is taken once and reused.

Small buffers, which a forward may change before that, are copied at once in :meth:`Snapshotter.begin`.

Large tensors are copied past the caches (``_stream.c``), not by ``Tensor.copy_``: that would start a team of threads beside the computing
thread. Where ``_stream.c`` was not compiled, the C library copies them. It also writes past the caches from a size on (the tunable
``glibc.cpu.x86_non_temporal_threshold``), and takes half as long again.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch

from actors.rank.state.tracked import Flat, TrackedState
from fleet.host.cores import BesideThread
from fleet.protocol.types import StateId

copy: Callable[[int, int, int], object]
try:
    from actors.rank.state._stream import copy
except ImportError:  # installed without a C compiler
    copy = ctypes.memmove

CHUNK_BYTES = 8 << 20
"""The loop waits for at most one chunk that the other thread has begun, less than a millisecond. Smaller chunks the C library would copy by
two pages at once, not four (``actors.rank.environment``)."""

SMALL_BYTES = 64 << 10
"""Tensors up to this size are copied many at a time: one by one they would take the interpreter's lock as often."""

AT_ONCE_BYTES = 2 << 20
"""A state up to this size is copied before ``begin`` returns: to wake a thread takes as long."""

GROUP = 512
ALIGNMENT = 64
PAGE_BYTES = 4096
"""A processor compares a load with earlier stores by the address within a page.

If a copy's target lies a little further on in its page than its source, each load waits for an unrelated store. On a Zen 3 the copy then
takes
4 times as long.
"""

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")

Task = Callable[[], Any]
Pair = tuple[torch.Tensor, torch.Tensor]


class Snapshot:
    """A copy of the state, in host memory. It is complete once it has :meth:`arrived <arrive>`.

    Attributes:
        state_id: of the state.
        skeleton, tensors: as :meth:`TrackedState.flatten` gives them; ``TrackedState.load`` takes copies of them.
    """

    def __init__(self, owner: Snapshotter, slot: _Slot, state_id: StateId, skeleton: str) -> None:
        self.state_id, self.skeleton, self.tensors = state_id, skeleton, slot.tensors
        self._owner, self._slot = owner, slot

    def arrive(self) -> None:
        """Block until the copy is complete. After ``settle`` a GPU may still copy; a state in host memory is complete then."""
        if self._slot.device is not None:
            self._slot.device.wait()

    def release(self) -> None:
        """Allow reuse of the memory. Call it once for each :meth:`Snapshotter.hold_settled`; a further call raises RuntimeError."""
        with self._owner._lock:
            if not self._slot.holders:
                raise RuntimeError(f"the snapshot of {self.state_id} was released more often than held")
            self._slot.holders -= 1

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Snapshotter:
    """Takes snapshots, one at a time. The loop's thread calls ``begin`` and ``settle``; any thread may call the rest.

    At most two snapshots are in memory. While one is held, newer snapshots use the other's memory. When both are held, or the last copy is
    not finished, the next snapshot is skipped. So ``begin`` never waits, and a step waits once at most, in ``settle``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: tuple[_Slot, _Slot] = (_Slot(), _Slot())
        self._job: _Job | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")

    def hold_settled(self) -> Snapshot | None:
        """The snapshot that was begun last, once it is settled; None without one. A GPU may still copy it: see :meth:`Snapshot.arrive`.

        It does not change before its ``release``.
        """
        with self._lock:
            if self._job is None or not self._job.settled:
                return None
            self._job.slot.holders += 1
            return self._job.snapshot

    def begin(self, state_id: StateId, state: TrackedState, part: Callable[[], Flat] | None = None) -> bool:
        """Begin to copy the state, or its tensors from ``part``; returns at once. Until :meth:`settle` only a forward may change the state.

        ``state.load`` settles by itself. Returns False when this snapshot is skipped.
        """
        with self._lock:
            under_way = self._job is not None and not self._job.complete
            slot = next((slot for slot in self._slots if not slot.holders), None)
            if under_way or slot is None:
                return False
            self._job = None
        state.before_load = self.settle
        flat = (part or state.flat)()
        try:
            slot.aim(flat)
            job = _Job(slot, Snapshot(self, slot, state_id, flat.skeleton), flat.tensors)
            job.start(self._thread)
        except BaseException:
            slot.forget()
            raise
        self._job = job
        return True

    def settle(self) -> float:
        """Call it before a change of the state. Blocks until the copy is done; returns for how many seconds.

        Raises the error of the copy: that snapshot does not exist then, and the next one may begin.
        """
        job = self._job
        if job is None or job.settled:
            return 0.0
        began_s = time.perf_counter()
        try:
            job.settle()
        except BaseException:
            job.slot.forget()
            self._job = None
            raise
        return time.perf_counter() - began_s


class _Slot:
    """Memory for one snapshot, and the tasks that fill it."""

    def __init__(self) -> None:
        self.holders = 0
        self.memory = _NOTHING
        self.tensors: list[torch.Tensor] = []
        self.device: _DevicePart | None = None
        self.tasks: list[Task] = []
        self._layout: list[Any] = []
        self._sources: list[weakref.ref[torch.Tensor]] = []
        self._volatile: frozenset[int] = frozenset()
        self._at_once: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])

    def aim(self, flat: Flat) -> None:
        """Plan the copy of these tensors. It costs no time when they are the same as last time."""
        if flat.volatile == self._volatile and self._are_sources(flat.tensors):
            return
        layout = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in flat.tensors]
        if layout != self._layout:
            self.memory, self.tensors, self.tasks, self._at_once = _NOTHING, [], [], ([], [])  # before there is new memory
            self.memory = _allocate(sum(map(_room, flat.tensors)), pinned=any(tensor.is_cuda for tensor in flat.tensors))
            self._layout = layout
        self.tensors = _spread(self.memory, flat.tensors)
        self._sources, self._volatile = [weakref.ref(tensor) for tensor in flat.tensors], flat.volatile
        self._plan(flat)

    def forget(self) -> None:
        """The plan failed: make a new one next time."""
        self._sources = []

    def _are_sources(self, tensors: Sequence[torch.Tensor]) -> bool:
        return len(tensors) == len(self._sources) and all(ref() is tensor for ref, tensor in zip(self._sources, tensors, strict=True))

    def _plan(self, flat: Flat) -> None:
        pairs = [(into, tensor) for into, tensor in zip(self.tensors, flat.tensors, strict=True) if tensor.numel()]
        changing = {id(flat.tensors[index]) for index in flat.volatile}
        later = [pair for pair in pairs if id(pair[1]) not in changing]
        at_once = [pair for pair in pairs if id(pair[1]) in changing]
        self._at_once = _unzip([pair for pair in at_once if not pair[1].is_cuda])
        self.tasks = _host_tasks([pair for pair in later if not pair[1].is_cuda])
        on_device = [[pair for pair in some if pair[1].is_cuda] for some in (later, at_once)]
        self.device = _DevicePart(*on_device) if any(on_device) else None

    def copy_at_once(self) -> None:
        if self._at_once[0]:
            torch._foreach_copy_(*self._at_once)
        if self.device is not None:
            self.device.begin()


class _Job:
    """One snapshot that is being taken. The background thread does its tasks, and the loop helps once it has to wait."""

    def __init__(self, slot: _Slot, snapshot: Snapshot, alive: Sequence[torch.Tensor]) -> None:
        self.slot, self.snapshot = slot, snapshot
        self.settled = False
        self._alive = alive
        self._lock = threading.Lock()
        self._tasks = deque(slot.tasks if slot.device is None else [slot.device.copy, *slot.tasks])
        self._left = len(self._tasks)
        self._future: Future[None] | None = None

    def start(self, thread: ThreadPoolExecutor) -> None:
        self.slot.copy_at_once()
        if self.slot.memory.numel() <= AT_ONCE_BYTES:
            self._work()
        else:
            self._future = thread.submit(self._work_beside, threading.get_native_id())

    @property
    def complete(self) -> bool:
        """Whether the whole copy is in host memory."""
        return not self._left and (self.slot.device is None or self.slot.device.done)

    def settle(self) -> None:
        try:
            self._work()
        finally:
            if self._future is not None and not self._future.cancel():
                self._future.result()
        if self.slot.device is not None:
            self.slot.device.order()
        self.settled = True
        self._alive = ()

    def _work_beside(self, loop: int) -> None:
        """Do tasks in the background thread. At first it and the loop exchange the interpreter's lock; after one task each works by
        itself."""
        cores = BesideThread(loop)
        self._work_once()
        cores.keep()
        self._work()
        cores.leave()

    def _work(self) -> None:
        while self._work_once():
            pass

    def _work_once(self) -> bool:
        """Do the next task. False: there was none."""
        if (task := self._next()) is None:
            return False
        task()
        with self._lock:
            self._left -= 1
        return True

    def _next(self) -> Task | None:
        with self._lock:
            return self._tasks.popleft() if self._tasks else None


class _DevicePart:
    """Tensors of a CUDA device, copied to pinned memory on a stream of their own: the host never waits, later kernels do.

    Tensors that a forward changes are first copied on the device, in the order of its work.
    """

    def __init__(self, later: list[Pair], at_once: list[Pair]) -> None:
        self._stream = torch.cuda.Stream(device=(later + at_once)[0][1].device)
        self._ready, self._copied = torch.cuda.Event(), torch.cuda.Event(blocking=True)  # a waiting thread gives up its core
        self._changing = [source for _, source in at_once]
        self._staged = [torch.empty_like(source) for source in self._changing]
        self._into, self._sources = _unzip(later + [(into, staged) for (into, _), staged in zip(at_once, self._staged, strict=True)])

    def begin(self) -> None:
        if self._staged:
            torch._foreach_copy_(self._staged, self._changing)
        self._ready.record(torch.cuda.current_stream(self._stream.device))

    def copy(self) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            torch._foreach_copy_(self._into, self._sources, non_blocking=True)
            self._copied.record(self._stream)

    def order(self) -> None:
        """Let later work of the loop's stream wait for the copy."""
        torch.cuda.current_stream(self._stream.device).wait_event(self._copied)

    @property
    def done(self) -> bool:
        return bool(self._copied.query())

    def wait(self) -> None:
        """Wait for the copy, after :meth:`copy`. From any thread."""
        self._copied.synchronize()


def _unzip(pairs: Sequence[Pair]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [into for into, _ in pairs], [source for _, source in pairs]


def _host_tasks(pairs: Sequence[Pair]) -> list[Task]:
    """Tasks: chunks of the large tensors; then groups of small tensors, and of those whose memory has gaps."""
    large = [pair for pair in pairs if _moves(pair[1])]
    chunked = {id(into) for into, _ in large}
    others = [pair for pair in pairs if id(pair[0]) not in chunked]
    groups = [others[start : start + GROUP] for start in range(0, len(others), GROUP)]
    chunks = [(into.data_ptr() + at, source.data_ptr() + at, size) for into, source in large for at, size in _stretches(source.nbytes)]
    return [*(partial(copy, *chunk) for chunk in chunks), *(partial(torch._foreach_copy_, *_unzip(group)) for group in groups)]


def _stretches(size: int) -> list[tuple[int, int]]:
    return [(start, min(CHUNK_BYTES, size - start)) for start in range(0, size, CHUNK_BYTES)]


def _dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill one stretch of memory, in any order."""
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _allocate(size: int, pinned: bool) -> torch.Tensor:
    """Memory of ``size`` bytes, from numpy, which asks for huge pages. torch would round pinned memory up to a power of two."""
    array = np.empty(size, dtype=np.uint8)
    memory = torch.from_numpy(array)
    if pinned and array.size:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), array.size, 0))
        weakref.finalize(array, torch.cuda.cudart().cudaHostUnregister, memory.data_ptr())
    return memory


def _moves(tensor: torch.Tensor) -> bool:
    """Whether the tensor is copied in chunks, by ``copy``."""
    return tensor.nbytes > SMALL_BYTES and not tensor.is_cuda and _dense(tensor)


def _room(tensor: torch.Tensor) -> int:
    """Bytes for a copy of the tensor, with one page more so that the copy's begin within a page can be chosen."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT + (PAGE_BYTES if _moves(tensor) else 0)


def _spread(memory: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A tensor in ``memory`` for each of ``like``. Large ones begin half a page away from their source's place in its page."""
    tensors, at = [], 0
    for tensor in like:
        begin = at
        if _moves(tensor):
            off = (tensor.data_ptr() + PAGE_BYTES // 2 - memory.data_ptr() - at) % PAGE_BYTES
            begin += off - off % tensor.element_size()
        tensors.append(_place(memory[begin : begin + tensor.nbytes], tensor))
        at += _room(tensor)
    return tensors


def _place(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    flat = memory.view(like.dtype)
    return flat.as_strided(like.shape, like.stride()) if _dense(like) else flat.view(like.shape)
