"""For `exposed`: the ranks' train function, and the speed of the link between their hosts for a plain connection.

Each rank trains a model that ``fully_shard`` has cut. For each step it notes the bytes that it received, and the times that its forward and
backward computed.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from actors.rank.fsdp.layout import FsdpLayout
from benchmarks.device_ranks import Block, Text, Transformer
from benchmarks.mesh_ranks import cut
from benchmarks.price_ranks import Place

PORT, TRANSFERS, REACH_S, ASK_EVERY_S = 7801, 5, 30.0, 0.01
ASKED, OVER = b"?", b"."


class Filled:
    """The bytes that a rank has gathered since it began, and the seconds that it waited for them."""

    def __init__(self, layout: FsdpLayout) -> None:
        self.bytes, self.waited_s = 0, 0.0
        fetcher = layout.exchange.fetcher
        self._fill, self._fetch = layout.exchange.fill, fetcher.fetch
        for unit in (*layout.units, *layout.uncast):
            unit._fill = self.fill
        fetcher.fetch = self.fetch  # type: ignore[method-assign]

    @property
    def computed_s(self) -> float:
        """Time so far, less the waits for units."""
        return time.perf_counter() - self.waited_s

    def fill(self, flat: int, memory: torch.Tensor) -> None:
        begin_s = time.perf_counter()
        self._fill(flat, memory)
        self.waited_s += time.perf_counter() - begin_s

    def fetch(self, state: Any, stretches: Any) -> list[int]:
        missing = self._fetch(state, stretches)
        self.bytes += sum(request.into.nbytes for number, (_, request) in enumerate(stretches) if number not in missing)
        return missing


class Computes(torch.autograd.Function):
    """Waits like an accelerator's compute, without the processor, which other ranks need: ``wait_s`` forward, twice that backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wait_s: float) -> torch.Tensor:
        ctx.wait_s = wait_s
        time.sleep(wait_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.wait_s)
        return gradients[0], None


def computing(model: Transformer, wait_s: float) -> Transformer:
    """``model`` with ``wait_s`` of compute in each block."""

    def hook(module: torch.nn.Module, given: Any, output: torch.Tensor) -> Any:
        return Computes.apply(output, wait_s)  # type: ignore[no-untyped-call]

    for block in model.blocks:
        if isinstance(block, Block):
            block.register_forward_hook(hook)
    return model


def gathers(run: Any) -> None:
    """A user's train function, with notes."""
    options = run.options
    model, optimizer = cut(options, run.mesh)
    computing(model, float(options["wait_s"]))
    data, batch = Text(), run.shards * int(options["samples"])
    notes, filled = (Path(options["folder"]) / f"steps-{run.slot}").open("a", buffering=1), None
    for step in run.steps(run.track(model=model, optimizer=optimizer), total=int(options["steps"])):
        filled = filled or Filled(cast(FsdpLayout, run._train_step.layout))
        before_bytes, forward_s, backward_s = filled.bytes, 0.0, 0.0
        for text in step.batches(data, batch_size=batch):
            begin_s = filled.computed_s
            loss = model.train()(text)
            between_s = filled.computed_s
            step.backward(loss)
            forward_s, backward_s = forward_s + between_s - begin_s, backward_s + filled.computed_s - between_s
        if step.commit():
            noted = {"step": step.number, "gathered_bytes": filled.bytes - before_bytes, "forward_s": forward_s, "backward_s": backward_s}
            notes.write(json.dumps(noted) + "\n")


# ---- the link --------------------------------------------------------------------------------------------------------------------------


def link_end(place: Place, other: str, size: int, file: str) -> None:
    """Both ends send each other ``size`` bytes at once, a few times. Notes the bytes a second of one direction, and a message's latency
    then."""
    place.enter()
    asks = place.address < other
    with _met(place.address, other, PORT) as beside, _met(place.address, other, PORT + 1) as connection:
        for each in (beside, connection):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times_s, answers_s = list[float](), list[float]()
        for _ in range(TRANSFERS):
            swap = threading.Thread(target=lambda: times_s.append(_timed(lambda: _swap(connection, size))))
            swap.start()
            if asks:
                while swap.is_alive():
                    answers_s.append(_timed(lambda: _ask(beside)))
                    time.sleep(ASK_EVERY_S)
                beside.sendall(OVER)
            else:
                _answer(beside)
            swap.join()
    found = {"bytes_per_s": [size / one_s for one_s in times_s], "latency_s": [one_s / 2 for one_s in answers_s]}
    Path(file).write_text(json.dumps(found))


def _met(address: str, other: str, port: int) -> socket.socket:
    """The lower address listens."""
    if address < other:
        with socket.create_server((address, port)) as listener:
            listener.settimeout(REACH_S)
            return listener.accept()[0]
    end_s = time.monotonic() + REACH_S
    while True:
        try:
            return socket.create_connection((other, port), REACH_S)
        except ConnectionRefusedError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.05)


def _ask(connection: socket.socket) -> None:
    connection.sendall(ASKED)
    _take(connection, 1)


def _answer(connection: socket.socket) -> None:
    """Answer until the other end asks no more."""
    while (asked := connection.recv(1)) == ASKED:
        connection.sendall(asked)


def _timed(work: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


def _swap(connection: socket.socket, size: int) -> None:
    sender = threading.Thread(target=connection.sendall, args=(bytes(size),))
    sender.start()
    _take(connection, size)
    sender.join()
    connection.sendall(ASKED)  # this end has received all
    _take(connection, 1)


def _take(connection: socket.socket, size: int) -> None:
    room, at = memoryview(bytearray(size)), 0
    while at < size:
        count = connection.recv_into(room[at:])
        if not count:
            raise ConnectionError("the other end is gone")
        at += count
