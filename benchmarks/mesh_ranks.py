"""For `mesh`: the train functions of Fleet's ranks and of PyTorch's own FSDP2.

Both train one model, which ``fully_shard`` cuts block by block, on the same number of samples a rank, with one thread. They take *turns* in
blocks of steps. A block begins when the driver calls for it by a file, and ends when a rank comes to the step after it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import default_collate

from actors.rank.fsdp.layout import FsdpLayout
from benchmarks.device_ranks import SEED, Block, Text, Transformer
from benchmarks.peers.common import EventLog

POLL_S = 0.002


@dataclass(frozen=True)
class Shape:
    """A transformer's width and layers, and the samples that a rank computes in a step."""

    width: int
    layers: int
    samples: int

    def options(self) -> dict[str, str]:
        return {name: str(value) for name, value in asdict(self).items()}


def cut(given: Mapping[str, str], mesh: DeviceMesh) -> tuple[Transformer, torch.optim.Optimizer]:
    """A model in which each block is a unit, and the parameters around them are one, with its optimizer."""
    model = Transformer(int(given["width"]), int(given["layers"]))
    for block in model.blocks:
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


# ---- in turns ----------------------------------------------------------------------------------------------------------------------------


class Turns:
    """One rank's turns. A block has ``steps`` steps; ``SIDE-BLOCK`` is the file that calls for it."""

    def __init__(self, given: Mapping[str, str], side: str, rank: int) -> None:
        self._folder, self._side, self._steps = Path(given["folder"]), side, int(given["block"])
        self._log = (self._folder / f"{side}-{rank}.turns").open("a", buffering=1)

    def before(self, step: int) -> None:
        """Note when a block has ended, and the processor time of all threads until then; and wait for the next one."""
        block, within = divmod(step, self._steps)
        if within:
            return
        if block:
            self._log.write(f"{time.monotonic():.6f} {time.process_time():.6f}\n")
        while not (self._folder / f"{self._side}-{block}").exists():
            time.sleep(POLL_S)


class Memory:
    """Resident memory of a rank when it began, and at most, as the kernel counts it."""

    def __init__(self, given: Mapping[str, str], side: str, rank: int) -> None:
        self._file, self._before = Path(given["folder"]) / f"{side}-{rank}.memory", _status_bytes("VmRSS")

    def write(self, **beside: int) -> None:
        found = {"before": self._before, "resident": _status_bytes("VmRSS"), "peak": _status_bytes("VmHWM"), **beside}
        self._file.write_text(json.dumps(found))


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def paired(run: Any) -> None:
    """Fleet's side."""
    options, last = run.options, int(run.options["steps"]) - 1
    memory, turns = Memory(options, "fleet", run.slot), Turns(options, "fleet", run.slot)
    model, optimizer = cut(options, run.mesh)
    data, batch = Text(), run.shards * int(options["samples"])
    for step in run.steps(run.track(model=model, optimizer=optimizer), total=last + 1):
        if step.number == last:
            layout = cast(FsdpLayout, run._train_step.layout)
            memory.write(weights=sum(one.nbytes for one in layout.weights), state=layout.kept.chunks.state_bytes)
        turns.before(step.number)
        for text in step.batches(data, batch_size=batch):
            step.backward(model.train()(text))
        step.commit()


def batches(given: Mapping[str, str], rank: int, world: int, memory: Memory, turns: Turns) -> Iterator[torch.Tensor]:
    """Batches of a peer's rank, one a step: the samples are taken in order, and not drawn, which costs it no time."""
    data, samples, last = Text(), int(given["samples"]), int(given["steps"]) - 1
    for step in range(last + 1):
        if step == last:
            memory.write()
        turns.before(step)
        first = (step * world + rank) * samples
        yield default_collate([data[number] for number in range(first, first + samples)])


def native(given: Mapping[str, str], rank: int, world: int) -> None:
    """PyTorch's side: its gathering, its reduce-scatter, no copies."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    memory, turns = Memory(given, "native", rank), Turns(given, "native", rank)
    dist.init_process_group("gloo", init_method=f"file://{given['folder']}/store", rank=rank, world_size=world)
    model, optimizer = cut(given, init_device_mesh("cpu", (world,)))
    for text in batches(given, rank, world, memory, turns):
        model.train()(text).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


# ---- through kills -----------------------------------------------------------------------------------------------------------------------


def with_faults(run: Any) -> None:
    train_through(run, *cut(run.options, run.mesh))


def train_through(run: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train, log each commit, and wait after it while ranks are killed, so that steps are left for all kills.

    The wait is between steps: within one, each new attempt at the step would wait again.
    """
    options, folder = run.options, Path(run.options["folder"])
    log, calm, pause_s = EventLog(folder / "events", run.slot), folder / "calm", float(options["pause_s"])
    data, batch = Text(), run.shards * int(options["samples"])
    for step in run.steps(run.track(model=model, optimizer=optimizer), total=int(options["steps"]), clip_norm=1.0):
        for text in step.batches(data, batch_size=batch):
            step.backward(model.train()(text))
        if step.commit():
            log.write(step.number, batch, "commit", run.generation)
            if pause_s and not calm.exists():
                time.sleep(pause_s)
