"""For `price`: the train functions of Fleet's ranks and of PyTorch's DistributedDataParallel, and two hosts with a slow link between them.

Both train one model on the same number of samples a rank, with one thread, and clip its gradient. They take turns as in
:mod:`benchmarks.mesh_ranks`.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from actors.node import socket_path
from actors.rank.main import run_rank
from benchmarks.device_ranks import SEED, Text, Transformer
from benchmarks.mesh_ranks import Memory, Turns, batches
from fleet.settings.run import RunSettings
from storage.checkpoint.parts import Parts
from tests.support.spaces import Space

CLIP_NORM = 1.0
LINK, SWITCH, BURST, LATENCY = "price0", "switch0", "128kb", "50ms"
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Place:
    """The place of a rank: its address, the link that has it, and a process with its network namespace; None: this machine's."""

    address: str = "127.0.0.1"
    link: str = "lo"
    holder: int | None = None

    def enter(self) -> None:
        """Move this thread, and the processes that it starts, there."""
        if self.holder is None:
            return
        with open(f"/proc/{self.holder}/ns/net", "rb") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")


HERE = (Place(), Place())


@contextmanager
def slow_link(rate: str, burst: str = BURST) -> Iterator[tuple[Place, Place]]:
    """Two hosts, which are network namespaces, joined by a link that carries ``rate`` in each direction, and ``burst`` at once after a
    pause. Needs root."""
    spaces = [_alone() for _ in range(2)]
    try:
        spaces[0].do("ip", "link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", str(spaces[1].pid))
        first, second = (_joined(space, number, rate, burst) for number, space in enumerate(spaces, 1))
        yield first, second
    finally:
        for space in spaces:
            space.end()


@contextmanager
def slow_links(hosts: int, rate: str, burst: str = BURST) -> Iterator[tuple[Place, ...]]:
    """``hosts`` hosts, each with a link as in :func:`slow_link` of its own to a fast switch. Needs root."""
    switch, *spaces = (_alone() for _ in range(hosts + 1))
    try:
        switch.do("ip", "link", "add", SWITCH, "type", "bridge")
        switch.do("ip", "link", "set", SWITCH, "up")
        for number, space in enumerate(spaces, 1):
            port = f"port{number}"
            space.do("ip", "link", "add", LINK, "type", "veth", "peer", "name", port, "netns", str(switch.pid))
            switch.do("ip", "link", "set", port, "master", SWITCH)
            switch.do("ip", "link", "set", port, "up")
            _slow(switch, port, rate, burst)
        yield tuple(_joined(space, number, rate, burst) for number, space in enumerate(spaces, 1))
    finally:
        for space in (switch, *spaces):
            space.end()


def _alone() -> Space:
    return Space.alone(("--net",), [["ip", "link", "set", "lo", "up"]])


def _joined(space: Space, number: int, rate: str, burst: str) -> Place:
    """A host with its end of a link."""
    address = f"10.78.0.{number}"
    space.do("ip", "address", "add", f"{address}/24", "dev", LINK)
    space.do("ip", "link", "set", LINK, "up")
    _slow(space, LINK, rate, burst)
    return Place(address, LINK, space.pid)


def _slow(space: Space, device: str, rate: str, burst: str) -> None:
    space.do("tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", burst, "latency", LATENCY)


def build(given: Mapping[str, str]) -> tuple[Transformer, torch.optim.Optimizer]:
    model = Transformer(int(given["width"]), int(given["layers"]))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def paired(run: Any) -> None:
    """Fleet's side: a user's train function, with turns."""
    options, last = run.options, int(run.options["steps"]) - 1
    side = options.get("side", "fleet")
    memory, turns = Memory(options, side, run.slot), Turns(options, side, run.slot)
    model, optimizer = build(options)
    data, batch = Text(), run.config.world * int(options["samples"])
    for step in run.steps(run.track(model=model, optimizer=optimizer), total=last + 1, clip_norm=CLIP_NORM):
        if step.number == last:
            memory.write()
        turns.before(step.number)
        for text in step.batches(data, batch_size=batch):
            step.backward(model.train()(text))
        step.commit()


def started(train: Callable[[Any], None], settings: RunSettings, slot: int, node: str, folder: Path, url: str, place: Place) -> None:
    """Run a rank of Fleet's at its place."""
    multiprocessing.set_start_method("fork", force=True)
    place.enter()
    run_rank(train, settings, slot, node, folder, place.address, Parts(url), socket_path(folder, node))


def ddp(given: Mapping[str, str], rank: int, world: int, place: Place) -> None:
    """PyTorch's side, as its documentation has it."""
    place.enter()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    os.environ["GLOO_SOCKET_IFNAME"] = place.link
    memory, turns = Memory(given, "ddp", rank), Turns(given, "ddp", rank)
    dist.init_process_group("gloo", init_method=f"file://{given['folder']}/store", rank=rank, world_size=world)
    whole, optimizer = build(given)
    model = DistributedDataParallel(whole)
    for text in batches(given, rank, world, memory, turns):
        optimizer.zero_grad()
        model.train()(text).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
    dist.destroy_process_group()
