"""For `device`: the cost of a snapshot of a GPU's state for the step, against torch.distributed.checkpoint and the wire to the host.

A step is compute about twice as long as the plain copy of the same bytes to pinned memory, and then the state changes. ``blocked`` is all
the time that the step waits: the host within the calls and, for Fleet, the stream behind them. The device's own events measure the stream:
there, later kernels wait, although the host does not. Every round takes each in turn: the plain copy, a plain step, Fleet's snapshot, and
async_save in three ways, see :class:`DcpSteps`. A save ends before the next begins. Files go to memory (/dev/shm), so that no disk decides.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

from actors.rank.state.snapshot import Snapshotter
from benchmarks.harness import left_out
from benchmarks.snapshot import STEP_OVER_MEMCPY, Training
from fleet.protocol.types import StateId

log = logging.getLogger("fleet.benchmarks")
MATRIX = 4096
SHARED = Path("/dev/shm")

Samples = dict[str, list[float]]


def _timed_ms(fn: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    fn()
    return (time.perf_counter() - begin_s) * 1e3


def _stream_ms(fn: Callable[[], object]) -> float:
    """Milliseconds of the current stream for the work that ``fn`` puts there."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    fn()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


class PinnedCopy:
    """The wire: a copy of one stretch of device memory to pinned memory, of the state's size."""

    def __init__(self, size: int) -> None:
        self._source = torch.ones(size, dtype=torch.uint8, device="cuda")
        self._target = torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def __call__(self) -> float:
        return _stream_ms(lambda: self._target.copy_(self._source, non_blocking=True))


class FleetSteps:
    """A step with a snapshot of the state before it."""

    def __init__(self, training: Training) -> None:
        self._training, self._snapshots, self._step, self.skipped = training, Snapshotter(), 0, 0

    def step(self, samples: Samples, change: Callable[[], object]) -> None:
        """Add the times that the step was blocked: the host in ``begin`` and ``settle``, and the stream between the compute and the
        change."""
        self._step += 1
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        host_ms = _timed_ms(self._begin)
        self._training.compute()
        before.record()
        host_ms += _timed_ms(self._snapshots.settle)
        after.record()
        change()
        torch.cuda.synchronize()
        stream_ms = float(before.elapsed_time(after))
        samples["fleet_snapshot_host_ms"].append(host_ms)
        samples["fleet_snapshot_stream_ms"].append(stream_ms)
        samples["fleet_snapshot_blocked_ms"].append(host_ms + stream_ms)

    def _begin(self) -> None:
        self.skipped += not self._snapshots.begin(StateId(0, self._step), self._training.state)

    def exact(self, change: Callable[[], object]) -> bool:
        """Whether a snapshot has the bits from before the change that follows at once."""
        before = [tensor.clone() for tensor in self._training.tensors]
        self.step({name: [] for name in NAMES}, change)
        snapshot = self._snapshots.hold_settled()
        if snapshot is None or snapshot.state_id != StateId(0, self._step):
            return False
        with snapshot:
            snapshot.arrive()
            return all(torch.equal(one.cpu(), copied) for one, copied in zip(before, snapshot.tensors, strict=True))


class DcpSteps:
    """Steps with ``async_save`` of the state before them. Methods return the milliseconds that it blocked."""

    def __init__(self, training: Training, folder: Path) -> None:
        self._training, self._folder = training, folder
        self._parts = {name: tracked.state_dict() for name, tracked in training.state.objects.items()}
        self._kept = BlockingAsyncStager(cache_staged_state_dict=True)
        self.change = training.optimizer.step
        self.failed: dict[str, str] = {}

    def async_ms(self, change: Callable[[], object]) -> float:
        """The default: the call returns once it has copied all to memory that is not pinned."""
        return self._copied_first(None, change)

    def kept_ms(self, change: Callable[[], object]) -> float:
        """To pinned memory that is kept from save to save; the call returns once it has copied all."""
        return self._copied_first(self._kept, change)

    def _copied_first(self, stager: Any, change: Callable[[], object]) -> float:
        saving: list[Any] = []
        blocked_ms = _timed_ms(lambda: saving.append(self._save(stager)))
        self._training.compute()
        change()
        torch.cuda.synchronize()
        saving[0].result()
        return blocked_ms

    def beside_ms(self, change: Callable[[], object]) -> float:
        """To pinned memory, filled beside the compute; the change waits for that. With torch 2.11, such a stager works only once, so each
        save pins its memory anew."""
        stager = DefaultStager(StagingOptions(use_shared_memory=False))
        saving: list[Any] = []
        blocked_ms = _timed_ms(lambda: saving.append(self._save(stager)))
        self._training.compute()
        torch.cuda.synchronize()  # up to here, the host waits as it does without a save
        blocked_ms += _timed_ms(saving[0].staging_completion.result)
        change()
        torch.cuda.synchronize()
        saving[0].upload_completion.result()
        stager.close()
        return blocked_ms

    def _save(self, stager: Any) -> Any:
        path = self._folder / type(stager).__name__
        return dcp.async_save(self._parts, checkpoint_id=path, **({} if stager is None else {"async_stager": stager}))


WAYS = {"async": DcpSteps.async_ms, "kept": DcpSteps.kept_ms, "beside": DcpSteps.beside_ms}
NAMES = (
    *("pinned_copy_snapshot_ms", "plain_snapshot_step_ms", "fleet_snapshot_step_ms", "fleet_snapshot_blocked_ms"),
    *("fleet_snapshot_host_ms", "fleet_snapshot_stream_ms"),
    *(f"dcp_{way}_snapshot_blocked_ms" for way in WAYS),
)
FIRST_TIME = ("fleet_snapshot_host_ms", "dcp_kept_snapshot_blocked_ms")
"""Samples that are larger the first time, when memory is taken and pinned."""


def _calibrate(training: Training, wire: PinnedCopy) -> None:
    """Set the rounds of compute so that a step is about twice as long as the plain copy."""
    copy_ms = statistics.median(wire() for _ in range(3))
    training.rounds = 4
    training.compute()
    round_ms = _stream_ms(training.compute) / training.rounds
    training.rounds = max(1, round(STEP_OVER_MEMCPY * copy_ms / round_ms))


def _round(training: Training, wire: PinnedCopy, fleet: FleetSteps, saves: DcpSteps, samples: Samples) -> None:
    change = training.optimizer.step

    def plain() -> None:
        training.compute()
        change()
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    samples["pinned_copy_snapshot_ms"].append(wire())
    samples["plain_snapshot_step_ms"].append(_timed_ms(plain))
    samples["fleet_snapshot_step_ms"].append(_timed_ms(lambda: fleet.step(samples, change)))
    for name, way in WAYS.items():
        _save(saves, name, way, samples)


def _save(saves: DcpSteps, name: str, way: Callable[[DcpSteps, Callable[[], object]], float], samples: Samples) -> None:
    """Save in one way. Releases of torch have errors there: a way that has failed is left out, with a note."""
    if name in saves.failed:
        return
    try:
        samples[f"dcp_{name}_snapshot_blocked_ms"].append(way(saves, saves.change))
    except Exception as error:  # noqa: BLE001 - it is told in the result
        saves.failed[name] = f"{type(error).__name__}: {error}"[:200]
        log.warning("async_save, %s: %s", name, saves.failed[name])


def measure(blocks: int, rounds: int) -> dict[str, Any]:
    """Figures, samples and notes. The first round, which takes memory and pins it, has a note and counts in no figure."""
    warnings.simplefilter("ignore")
    training = Training(blocks, "cuda", MATRIX)
    wire, fleet = PinnedCopy(training.bytes), FleetSteps(training)
    _calibrate(training, wire)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    first, samples = Samples({name: [] for name in NAMES}), Samples({name: [] for name in NAMES})
    with tempfile.TemporaryDirectory(dir=SHARED) as folder:
        saves = DcpSteps(training, Path(folder))
        for number in range(rounds + 2):
            _round(training, wire, fleet, saves, first if number < 2 else samples)
    exact = [fleet.exact(training.optimizer.step) for _ in range(2)]
    dist.destroy_process_group()
    words = ", ".join(f"{name} {', '.join(f'{value:.4g}' for value in values)}" for name, values in first.items() if name in FIRST_TIME)
    state = f"{training.bytes:,} bytes in {len(training.tensors)} tensors, {fleet.skipped} skipped"
    note = f"snapshot: {state}; the two rounds before those that count, in which memory is taken and pinned: {words}"
    failed = [left_out(f"dcp_{name}_snapshot", why) for name, why in saves.failed.items()]
    samples = {name: values for name, values in samples.items() if values}
    return {"figures": _figures(samples, training.bytes, exact), "samples": samples, "notes": [note, *failed]}


def _figures(samples: Samples, size: int, exact: list[bool]) -> dict[str, float]:
    medians = {name: statistics.median(values) for name, values in samples.items()}
    blocked, copy_ms = medians["fleet_snapshot_blocked_ms"], medians["pinned_copy_snapshot_ms"]
    return {
        **medians,
        "pinned_copy_snapshot_bytes_per_s": size / copy_ms * 1e3,
        "fleet_snapshot_exact_ratio": statistics.fmean(exact),
        "fleet_snapshot_blocked_over_pinned_copy_ratio": blocked / copy_ms,
        **{
            f"fleet_snapshot_blocked_over_dcp_{way}_ratio": blocked / medians[f"dcp_{way}_snapshot_blocked_ms"]
            for way in WAYS
            if f"dcp_{way}_snapshot_blocked_ms" in medians
        },
        "fleet_snapshot_step_inflation_ratio": medians["fleet_snapshot_step_ms"] / medians["plain_snapshot_step_ms"],
    }
