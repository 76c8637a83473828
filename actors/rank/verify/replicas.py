"""All ranks hold the same state, bit for bit. Before each step they compare digests of it, so no sum of a wrong state is used.

The digest travels beside the gradients, or with sharded state beside the vote, a few numbers a rank. It is compared before the step changes
the state. If the whole state would take more than its share of a step, each digest covers one part of it, in turn. The ranks agree on the
number of parts in the same message.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash

from actors.rank.membership.process_group import GroupBroken
from actors.rank.mesh.parts import local
from actors.rank.state.tracked import TrackedState, flat_bytes
from fleet.protocol.replica_check import ReplicaCheck
from fleet.protocol.types import Finding, StateId

BITS = 52
"""Bits of a digest: it travels as a double, which holds integers up to 53 bits."""
REFRESH_STEPS = 64
"""Once in so many steps the tensors are looked up again, and values that are no tensors (counters, learning rates) are compared."""
SAMPLES = 8
MOST_PARTS = 64
FIRST_PART_BYTES = 256 << 20
WIDTH = 3
"""Numbers that each rank sends: wanted number of parts, present number of parts, digest."""


class DigestShare:
    """How often, or in how many parts, something is digested, so that digests take at most the share ``budget`` of a step's time."""

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._costs_s: deque[float] = deque(maxlen=SAMPLES)
        self._steps_s: deque[float] = deque(maxlen=SAMPLES)
        self._last_s: float | None = None

    def begin(self) -> None:
        """A view begins: the time since the last step says nothing."""
        self._last_s = None

    def divided(self, present: int, most: int, cost_s: float | None) -> int:
        """``present``, doubled until it keeps within the budget by the median times of the last digests and steps; at most ``most``.

        Call it once a step. ``cost_s``: the time of the whole digest; None: it is not known in this step.
        """
        now_s = time.perf_counter()
        if self._last_s is not None:
            self._steps_s.append(now_s - self._last_s)
        self._last_s = now_s
        if cost_s is not None:
            self._costs_s.append(cost_s)
        if len(self._steps_s) < SAMPLES or len(self._costs_s) < SAMPLES:
            return present
        needed = statistics.median(self._costs_s) / (self._budget * statistics.median(self._steps_s))
        while present < needed and present < most:
            present *= 2
        return present


class StatesDiffer(GroupBroken):
    """The ranks hold different states."""


class Replicas:
    """Compares this rank's state with its peers'.

    Args:
        state: the state that all ranks hold alike. Of spread optimizer state (:mod:`actors.rank.zero1`) it has the options only.
        budget: share of a step's time that the digest may take; 0: no comparison.
    """

    def __init__(self, state: TrackedState, budget: float) -> None:
        self._state, self._share = state, DigestShare(budget)
        self.width = WIDTH if budget > 0 else 0
        self._replica_check = ReplicaCheck()
        self._memory: list[torch.Tensor] = []
        self._arrays: list[Any] | None = None  # the same memory as arrays, for a quicker loop, if all is on the host
        self._plain = self._bytes = 0
        self._fresh, self._new, self._again = -1, True, False

    def join(self, generation: int, here: StateId, receiver: bool) -> None:
        """A view begins, at state ``here``. ``receiver``: this rank got that state in it."""
        if self.width:
            self._replica_check.join(generation, here, receiver)
            self._new, self._again = True, False
            self._share.begin()

    def abstain(self) -> list[float]:
        """The numbers to send while this rank's state is still on its way to it: zeros, which are not compared."""
        self._new = False
        return [0.0] * self.width

    def look(self, here: StateId, *, uncompared: bool = False) -> list[float]:
        """The numbers to send before the step at ``here`` is taken: all tensors are as committed. ``uncompared``: see
        :meth:`ReplicaCheck.enter`."""
        begin_s = time.perf_counter()
        if self._new or self._again or (here.step % REFRESH_STEPS == 0 and here.step != self._fresh):
            self._refresh(here.step)  # after the loop body has run on all ranks: it may set a learning rate
        self._again = False
        if self._new:
            self._new = False
            self._replica_check.cut(first_parts(self._bytes))
        parts = self._replica_check.parts
        begin, end = (self._bytes * (here.step % parts + edge) // parts for edge in (0, 1))
        plain = self._plain if self._fresh == here.step else 0
        mine = (self._digest(begin, end) ^ plain) & ((1 << BITS) - 1)
        self._replica_check.enter(here, f"{mine:013x}", uncompared=uncompared)
        took_s, length = time.perf_counter() - begin_s, end - begin
        wanted = self._share.divided(parts, MOST_PARTS, took_s * self._bytes / length if length else None)
        return [float(wanted), float(parts), float(mine)]

    def _digest(self, begin: int, end: int) -> int:
        if self._arrays is None or end - begin < self._bytes:
            return digest(self._memory, begin, end)
        return of_arrays(self._arrays)

    def compare(self, rows: Sequence[Sequence[float]]) -> None:
        """Compare all ranks' numbers, in order. Raises StatesDiffer: the step must not be applied."""
        if not self.width or len(rows) < 2:
            return
        reported = [row for row in rows if row[1]]
        self._again = len(reported) < len(rows)  # some ranks begin in the next step, and all digest the same then
        comparable = len({row[1] for row in reported}) == 1  # else their digests are of different parts, for one step
        if comparable and self._replica_check.differ([row[2] for row in reported]):
            raise StatesDiffer("the ranks do not hold the same weights", self._replica_check.generation)
        self._replica_check.open = None
        parts = int(max(max(row[0], row[1]) for row in reported))
        if parts != self._replica_check.parts:
            self._replica_check.cut(parts)

    @property
    def testimony(self) -> Finding | None:
        """This rank's report if it leaves its group now."""
        return self._replica_check.open

    def _refresh(self, step: int) -> None:
        found = xxhash.xxh3_64()
        tensors: list[torch.Tensor] = []
        common = self._state.common()
        for name in sorted(common):
            _walk(common[name], found, tensors)
        self._plain, self._fresh = found.intdigest(), step
        # Flat views are kept; tensors of another layout are copied for each digest.
        self._memory = [flat_bytes(tensor) if tensor.is_contiguous() else tensor for tensor in tensors if tensor.numel()]
        flat = all(data.dtype == torch.uint8 and data.dim() == 1 and data.device.type == "cpu" for data in self._memory)
        self._arrays = [data.numpy() for data in self._memory] if flat else None
        self._bytes = sum(tensor.numel() * tensor.element_size() for tensor in self._memory)


def of_arrays(arrays: Sequence[Any]) -> int:
    """64 bits over all bytes of arrays in host memory."""
    found = xxhash.xxh3_64()
    for array in arrays:
        found.update(array)
    return found.intdigest()


def first_parts(size: int) -> int:
    """The number of parts for a state of ``size`` bytes before the time of a digest is known."""
    parts = 1
    while size > parts * FIRST_PART_BYTES and parts < MOST_PARTS:
        parts *= 2
    return parts


def _walk(value: Any, found: Any, tensors: list[torch.Tensor]) -> None:
    """Put tensors into the list, and all other values into the hash, in an order that does not depend on insertion order."""
    if isinstance(value, torch.Tensor):
        found.update(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        if not value.is_meta:
            tensors.append(local(value))
    elif isinstance(value, Mapping):
        for key in sorted(value, key=lambda k: (type(k).__name__, repr(k))):
            found.update(f"key {key!r}".encode())
            _walk(value[key], found, tensors)
    elif isinstance(value, (list, tuple)):
        found.update(f"sequence {len(value)}".encode())
        for item in value:
            _walk(item, found, tensors)
    elif isinstance(value, (str, int, float, bool, bytes, type(None))):
        found.update(f"{type(value).__name__} {value!r}".encode())
    else:
        found.update(type(value).__name__.encode())  # the bytes of equal objects may differ


def digest(memory: Sequence[torch.Tensor], begin: int, end: int) -> int:
    """64 bits over the bytes ``begin..end`` of tensors, one after the other. XXH3 in host memory; sums on a GPU."""
    host = xxhash.xxh3_64()
    device: list[torch.Tensor] = []
    for data in _stretches(memory, begin, end):
        if data.device.type == "cpu":
            host.update(data.numpy().data)
        else:
            device.append(_device_sum(data))
    if device:
        host.update(torch.stack(device).cpu().numpy().data)
    return host.intdigest()


def _stretches(memory: Sequence[torch.Tensor], begin: int, end: int) -> Iterator[torch.Tensor]:
    start = 0
    for tensor in memory:
        length = tensor.numel() * tensor.element_size()
        lo, hi = max(begin, start), min(end, start + length)
        if lo < hi:
            data = tensor if tensor.dtype == torch.uint8 and tensor.dim() == 1 else flat_bytes(tensor)
            yield data if hi - lo == length else data[lo - start : hi - start]
        start += length


def _device_sum(data: torch.Tensor) -> torch.Tensor:
    """A sum of 64-bit words, each row and column with its own odd weight: one flipped bit always changes the sum."""
    lead = -data.data_ptr() % 8
    whole = lead + (data.numel() - lead) // 4096 * 4096 if data.numel() > lead else 0
    edge = torch.cat([data[:lead], data[max(whole, lead) :]]).to(torch.int64)
    total = (edge * _odd(edge.numel(), data.device)).sum()
    if whole > lead:
        rows = data[lead:whole].view(torch.int64).view(-1, 512).sum(1)
        total = total * 1_000_003 + (rows * _odd(rows.numel(), data.device)).sum()
    return total


def _odd(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, 2 * count + 1, 2, device=device)
