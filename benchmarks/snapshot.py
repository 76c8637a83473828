"""`snapshot`: the cost of a snapshot of the state after every step for the loop, against other copies of the same bytes.

Accounting: a step is compute on all cores, about twice as long as the plain copy, and then the state changes. With a snapshot, the copy of
the state runs beside the compute. ``blocked`` is all the time that the loop itself spends on it: to begin, and to wait before the state
changes. The copy also takes a core and memory bandwidth from the compute. With ``n`` busy cores, a copy that keeps one core for ``c``
lengthens a step by ``c / n`` at best. The inflation shows this; ``c`` is ``fleet_copy``, a snapshot's copy of the same bytes by one core.
``core_time`` is the same in core-seconds, which other processes disturb less. Steps with and without snapshots take turns. ``adamw`` is the
same with the optimizer's own step instead of a token change.
"""

from __future__ import annotations

import ctypes
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from actors.rank.environment import RANK_ENVIRONMENT
from actors.rank.state.snapshot import Snapshotter, copy
from actors.rank.state.tracked import TrackedState
from benchmarks import harness
from benchmarks.harness import Form, on_the_way
from fleet.protocol.types import StateId

WIDTH = 2048
BLOCKS, STEPS, SAVES = 16, 30, 5
QUICK_BLOCKS, QUICK_STEPS, QUICK_SAVES = 4, 12, 3
SMOKE_BLOCKS, SMOKE_STEPS, SMOKE_SAVES = 1, 2, 1
COPIES, CALIBRATIONS = 5, 3
STEP_OVER_MEMCPY = 2.0
MATRIX = 768

Samples = dict[str, list[float]]


def _timed_ms(fn: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    fn()
    return (time.perf_counter() - begin_s) * 1e3


class Training:
    """A model with AdamW state, compute that keeps all cores or the GPU busy, and a change of all tensors."""

    def __init__(self, blocks: int, device: str = "cpu", matrix: int = MATRIX) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(blocks))).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()
        self.state = TrackedState(model=self.model, optimizer=self.optimizer)
        self.tensors = self.state.flatten()[1]
        self.bytes = sum(tensor.nbytes for tensor in self.tensors)
        self.rounds = 1
        self._heads = [tensor.view(-1)[:1] for tensor in self.tensors]
        self._left, self._right, self._product = (torch.randn(matrix, matrix, device=device) for _ in range(3))

    def compute(self) -> None:
        for _ in range(self.rounds):
            torch.mm(self._left, self._right, out=self._product)

    def touch(self) -> None:
        torch._foreach_add_(self._heads, 1.0)


def _memcpy(training: Training, samples: Samples) -> float:
    """Milliseconds of the faster copy of the same bytes from one reused buffer to another. Sets the length of a step by it."""
    source, target = (torch.from_numpy(np.full(training.bytes, value, dtype=np.uint8)) for value in (1, 2))
    training.rounds, fastest_ms = 8, 0.0
    for _ in range(CALIBRATIONS):
        step_ms = []
        for _ in range(COPIES):
            samples["tensor_copy_ms"].append(_timed_ms(lambda: target.copy_(source)))
            samples["memmove_ms"].append(_timed_ms(lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), training.bytes)))
            samples["fleet_copy_ms"].append(_timed_ms(lambda: copy(target.data_ptr(), source.data_ptr(), training.bytes)))
            step_ms.append(_timed_ms(training.compute))
        fastest_ms = min(statistics.median(samples["tensor_copy_ms"]), statistics.median(samples["memmove_ms"]))
        training.rounds = max(1, round(training.rounds * STEP_OVER_MEMCPY * fastest_ms / statistics.median(step_ms)))
    return fastest_ms


class Fleet:
    """A step with a snapshot of the state before it."""

    def __init__(self, training: Training) -> None:
        self._training, self._snapshots, self._step, self.skipped = training, Snapshotter(), 0, 0

    def step(self, change: Callable[[], object]) -> float:
        """Take a step; returns the milliseconds that the loop was blocked."""
        self._step += 1
        begin_ms = _timed_ms(self._begin)
        self._training.compute()
        blocked_ms = self._snapshots.settle() * 1e3
        change()
        return begin_ms + blocked_ms

    def _begin(self) -> None:
        self.skipped += not self._snapshots.begin(StateId(0, self._step), self._training.state)


def _steps(training: Training, fleet: Fleet, change: Callable[[], object], name: str, count: int, samples: Samples) -> None:
    def plain() -> None:
        training.compute()
        change()

    def ours() -> None:
        samples[f"fleet_{name}blocked_ms"].append(fleet.step(change))

    for _ in range(2):
        fleet.step(change)
    for turn in range(count):
        for kind, step in ((("plain", plain), ("fleet", ours)), (("fleet", ours), ("plain", plain)))[turn % 2]:
            begin_s = time.process_time()
            samples[f"{kind}_{name}step_ms"].append(_timed_ms(step))
            samples[f"{kind}_{name}core_ms"].append((time.process_time() - begin_s) * 1e3)


def _others(training: Training, count: int, samples: Samples) -> None:
    """Measure other ways. Each save begins after a step and ends before the next save; the page cache takes the files, without a sync."""
    parts = {name: tracked.state_dict() for name, tracked in training.state.objects.items()}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for _ in range(count):
            training.compute()
            samples["torch_save_ms"].append(_timed_ms(lambda: torch.save(parts, Path(folder, "state.pt"))))
            training.compute()
            samples["dcp_save_ms"].append(_timed_ms(lambda: dcp.save(parts, checkpoint_id=Path(folder, "saved"))))
            training.compute()
            samples["dcp_async_blocked_ms"].append(_async_save(parts, Path(folder, "async"), training))
        dist.destroy_process_group()


def _async_save(parts: dict[str, Any], path: Path, training: Training) -> float:
    begin_s = time.perf_counter()
    saving: Any = dcp.async_save(parts, checkpoint_id=path)
    blocked_ms = (time.perf_counter() - begin_s) * 1e3
    training.compute()
    saving.result()
    return blocked_ms


def measure(form: Form) -> dict[str, Any]:
    """Measure a snapshot of model and AdamW state after every step, against memcpy, torch.save, dcp.save and dcp.async_save."""
    warnings.simplefilter("ignore")
    training = Training(form.of(BLOCKS, QUICK_BLOCKS, SMOKE_BLOCKS))
    names = ["tensor_copy_ms", "memmove_ms", "fleet_copy_ms", "torch_save_ms", "dcp_save_ms", "dcp_async_blocked_ms"]
    names += [f"{kind}_{change}{what}_ms" for change in ("", "adamw_") for kind in ("plain", "fleet") for what in ("step", "core")]
    samples: Samples = {name: [] for name in (*names, "fleet_blocked_ms", "fleet_adamw_blocked_ms")}
    way = on_the_way("snapshot", ["copies", "steps with a snapshot and without", "the same with AdamW", "torch.save and dcp"])
    next(way)
    memcpy_ms = _memcpy(training, samples)
    fleet, steps = Fleet(training), form.of(STEPS, QUICK_STEPS, SMOKE_STEPS)
    for name, change in (("", training.touch), ("adamw_", training.optimizer.step)):
        next(way)
        _steps(training, fleet, change, name, steps // 2 if name else steps, samples)
    next(way)
    _others(training, form.of(SAVES, QUICK_SAVES, SMOKE_SAVES), samples)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    settings = {"state_bytes": training.bytes, "tensors": len(training.tensors), "threads": torch.get_num_threads(), **RANK_ENVIRONMENT}
    at_best = 1 + medians["fleet_copy_ms"] / torch.get_num_threads() / medians["plain_step_ms"]
    notes = [
        "memcpy: the faster of Tensor.copy_ with all threads and one memmove, between two reused buffers",
        f"{fleet.skipped} snapshots were skipped",
        f"a copy that keeps one core for {medians['fleet_copy_ms']:.0f} ms lengthens this step to {at_best:.2f} times at best",
        "all processes run with the environment of a rank; torch.save and dcp write to the page cache, without fsync",
    ]
    return {"settings": settings, "figures": _figures(medians, memcpy_ms), "samples": samples, "notes": notes}


def _figures(medians: dict[str, float], memcpy_ms: float) -> dict[str, float]:
    saves = {name: medians[name] for name in ("torch_save_ms", "dcp_save_ms", "dcp_async_blocked_ms", "fleet_blocked_ms")}
    return {
        "memcpy_ms": memcpy_ms,
        "fleet_copy_ms": medians["fleet_copy_ms"],
        **saves,
        "fleet_blocked_over_memcpy_ratio": medians["fleet_blocked_ms"] / memcpy_ms,
        "fleet_blocked_over_dcp_async_ratio": medians["fleet_blocked_ms"] / medians["dcp_async_blocked_ms"],
        "fleet_step_inflation_ratio": medians["fleet_step_ms"] / medians["plain_step_ms"],
        "fleet_adamw_blocked_ms": medians["fleet_adamw_blocked_ms"],
        "fleet_adamw_step_inflation_ratio": medians["fleet_adamw_step_ms"] / medians["plain_adamw_step_ms"],
        "fleet_core_time_inflation_ratio": medians["fleet_core_ms"] / medians["plain_core_ms"],
        "plain_step_over_memcpy_ratio": medians["plain_step_ms"] / memcpy_ms,
    }


def main() -> None:
    """Run the benchmark in the environment of a rank."""
    harness.as_rank("benchmarks.snapshot")
    harness.run("snapshot", measure)


if __name__ == "__main__":
    main()
