"""A rank's accounting beside its steps, with all of it on: states, the user's figures, the hidden exchange, and figures of the program.

Recorder, client and counter are those of ranks. A thread at the other end of the line welcomes the client, and reads.
"""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from actors.rank.membership.client import Client
from actors.rank.step.flops import FlopCount
from actors.rank.step.landed import Landing
from actors.rank.step.reports import MEASURE_EVERY_US
from actors.rank.telemetry import usage
from actors.rank.telemetry.exchanged import Before, Exchanged
from actors.rank.telemetry.recorder import Recorder, RingReader
from benchmarks.machine import one_step
from fleet.host.clock import now_us
from fleet.host.wire import frame
from fleet.protocol.facts import Measurement, Usage
from fleet.protocol.instructions import INSTRUCTIONS, Welcome
from fleet.protocol.types import Member, StateId

STEP_S = 0.05
"""Seconds of the measured steps. Figures are reported twice a second, so a longer step carries more of them, and each is a smaller part."""
REPORT_EVERY = round(MEASURE_EVERY_US / 1e6 / STEP_S)
USED_EVERY = round(usage.EVERY_US / 1e6 / STEP_S)
OF_FLEET = {"loss": 1.5, "grad_norm": 0.7, "learning_rate": 1e-3, "tokens": 4096.0, "flops": 1e9, "peak_flop_per_s": 1e12}
OF_USER = {"entropy": 1.2, "accuracy": 0.9}
MESSAGES = [torch.zeros(1024) for _ in range(6)]
"""Messages that a rank asks for ahead of a reduction among four ranks: two buckets, each from three others."""
START_S = 10.0


def step_overhead_all_us(steps: int = 2_000, shards: int = 4) -> float:
    """Microseconds of accounting in a step of ``shards`` shards: the mean over steps with and without a report."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, _agent(Path(folder) / "agent") as path:
        recorder = Recorder(Path(folder) / "ring", now_us())
        reader, counter = RingReader(recorder.path), FlopCount(OF_FLEET["flops"])
        client = Client(0, "token", "node", str(path), "", recorder)
        client.start(START_S)
        recorder.place(1, 0, 0)
        exchanged, taken_s = Exchanged(), 0.0
        for step in range(steps):
            begin = time.perf_counter()
            _account(step, recorder, counter, client, exchanged, shards)
            taken_s += time.perf_counter() - begin
            reader.drain()
        client.close()
        return taken_s / steps * 1e6


def _account(step: int, recorder: Recorder, counter: FlopCount, client: Client, exchanged: Exchanged, shards: int) -> None:
    counter.step_begins()
    for _ in range(shards):
        with counter.shard():
            pass
        counter.shard_ends()
    one_step(recorder, shards)
    landing = Landing(MESSAGES)
    exchanged.note(Before(landing.asked_bytes, landing.landed_bytes, 0), 1, 1)
    figures = OF_FLEET | OF_USER
    member, state = Member(0, 1), StateId(0, step)
    if step % REPORT_EVERY == 0:
        client.say(*(Measurement(member, state, name, value) for name, value in figures.items()))
    if step % USED_EVERY == 0:
        client.say(Usage(member, *usage.used(), *exchanged.counts))


@contextmanager
def _agent(path: Path) -> Iterator[Path]:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(1)
        thread = threading.Thread(target=_welcome_and_read, args=(listening,), daemon=True)
        thread.start()
        yield path
        thread.join(START_S)


def _welcome_and_read(listening: socket.socket) -> None:
    line, _ = listening.accept()
    with line:
        line.recv(1 << 16)
        line.sendall(frame(INSTRUCTIONS.encode(Welcome(0, "token", 1))))
        while line.recv(1 << 16):
            pass
