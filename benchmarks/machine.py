"""`machine`: how much one core of control plane carries, and how much time the instrumentation takes in a step.

- heartbeats: pulses that a live ``FleetMachine`` takes in a second, ticks included. They are aggregated by node, as agents send them, and
  made beforehand; decoding is measured beside it. 100,000 ranks at one pulse in 5 s are 20,000 a second.
- fold: recorded events (a span or a mark is one) that a ledger takes from a journal on disk in a second.
- step overhead: all of the recorder's work in one step of four shards, on tmpfs.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from actors.messages import UP
from actors.rank.telemetry.recorder import Recorder, RingReader
from benchmarks import harness
from benchmarks.fold import fold_events_per_s, write_journal
from benchmarks.harness import Form, on_the_way
from fleet.host.clock import now_us
from fleet.machine.core import FleetMachine
from fleet.protocol.events import Event, Formed, Heartbeat, Joined, NodeJoined, Ready, Tick
from fleet.protocol.instructions import Publish
from fleet.protocol.records import COMM, COMPUTE, DATA, STRAGGLER
from fleet.protocol.types import Member, Process, Pulse, StateId, View
from fleet.settings.run import Budgets, RunSettings
from policies import placement
from policies.interval import CheckpointInterval
from policies.recovery import ReformPromoteRegrow

RANKS_PER_NODE = 8
HEARTBEATS_PER_TICK = 125


def measure(form: Form) -> dict[str, Any]:
    """Measure control plane and instrumentation; every repetition is a sample."""
    repetitions, ranks, events = form.of((7, 8_192, 1_000_000), (3, 1_024, 200_000), (1, 64, 2_000))
    measures: dict[str, Callable[[], list[float]]] = {
        "fleet_heartbeats_per_s": lambda: [heartbeats_per_s(ranks) for _ in range(repetitions)],
        "fleet_decoded_heartbeats_per_s": lambda: [decoded_per_s() for _ in range(repetitions)],
        "fleet_step_overhead_us": lambda: [step_overhead_us() for _ in range(repetitions)],
        **{f"fleet_fold_batch_{batch}_events_per_s": partial(_folds, events, batch, repetitions) for batch in (20, 100)},
    }
    samples = {name: measures[name]() for name in on_the_way("machine", measures)}
    figures = {name: statistics.median(values) for name, values in samples.items()}
    figures["fleet_fold_events_per_s"] = min(value for name, value in figures.items() if "fold_batch" in name)
    settings = {"ranks": ranks, "ranks_per_node": RANKS_PER_NODE, "fold_events": events, "heartbeats_per_tick": HEARTBEATS_PER_TICK}
    return {"settings": settings, "figures": figures, "samples": samples, "notes": ["medians; fold_events is the slower batch size"]}


def _folds(events: int, batch: int, repetitions: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        write_journal(path, events, batch)
        return [fold_events_per_s(path) for _ in range(repetitions)]


def running_machine(ranks: int) -> FleetMachine:
    """A machine whose view of ``ranks`` ranks is formed and runs."""
    settings = RunSettings(world=ranks, shards=ranks)
    machine = FleetMachine(settings, ReformPromoteRegrow(Budgets(), 60.0), placement, CheckpointInterval(), now_s=0.0)
    for event in _arrivals(ranks):
        for instruction in machine.handle(event, 0.0):
            if isinstance(instruction, Publish):
                _form(machine, instruction.view)
    return machine


def _arrivals(ranks: int) -> Iterator[Event]:
    for slot in range(ranks):
        node = f"node{slot // RANKS_PER_NODE}"
        if slot % RANKS_PER_NODE == 0:
            yield NodeJoined(node, slot // RANKS_PER_NODE)
        yield Joined(slot, f"token{slot}", Process(node, slot + 1, 1), f"{node}:1")
        yield Ready(Member(slot, 0))
    yield Tick()


def _form(machine: FleetMachine, view: View) -> None:
    for member in view.members:
        machine.handle(Formed(member, view.generation, view.state), 0.0)


def _heartbeats(ranks: int, step: int) -> list[Heartbeat]:
    state = StateId(0, step)
    slots = range(0, ranks, RANKS_PER_NODE)
    members = [[Member(slot, 0) for slot in range(first, min(first + RANKS_PER_NODE, ranks))] for first in slots]
    return [Heartbeat(f"node{i}", tuple(Pulse(member, 1, state, 0.05, 0.2) for member in node)) for i, node in enumerate(members)]


def heartbeats_per_s(ranks: int, rounds: int = 8) -> float:
    """Pulses handled in a second of one core, ticks included. In every round all ranks are a step further."""
    machine = running_machine(ranks)
    messages = [_heartbeats(ranks, step) for step in range(rounds)]
    begin = time.perf_counter()
    for number, beats in enumerate(messages):
        for index, beat in enumerate(beats):
            machine.handle(beat, number * 0.1)
            if index % HEARTBEATS_PER_TICK == 0:
                machine.handle(Tick(), number * 0.1)
    taken_s = time.perf_counter() - begin
    if machine.state.committed.step < rounds - 2:
        raise RuntimeError(f"the machine committed {machine.state.committed.step} of {rounds} steps: it did not take the heartbeats in")
    return rounds * ranks / taken_s


def decoded_per_s(messages: int = 2_000) -> float:
    """Pulses decoded from the wire in a second: the coordinator has to decode each, too."""
    frames = [UP.encode(beat) for beat in _heartbeats(RANKS_PER_NODE * 100, 1)]
    begin = time.perf_counter()
    for index in range(messages):
        UP.decode(frames[index % len(frames)])
    return messages * RANKS_PER_NODE / (time.perf_counter() - begin)


def step_overhead_us(steps: int = 2_000, shards: int = 4) -> float:
    """Microseconds that recording takes in one step of ``shards`` shards; the ring is drained outside the clock, as its agent would."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        recorder = Recorder(Path(folder) / "ring", now_us())
        reader = RingReader(recorder.path)
        recorder.place(1, 0, 0)
        taken_s = 0.0
        for _ in range(steps):
            begin = time.perf_counter()
            one_step(recorder, shards)
            taken_s += time.perf_counter() - begin
            reader.drain()
        return taken_s / steps * 1e6


def one_step(recorder: Recorder, shards: int) -> None:
    """The calls of the recorder in one step."""
    for shard in range(shards):
        recorder.switch(DATA)
        recorder.switch(COMPUTE)
        recorder.shard(shard)
        recorder.shard(-1)
    recorder.worked()
    recorder.switch(STRAGGLER)
    recorder.switch(COMM)
    recorder.commit(recorder.switch(COMPUTE))


if __name__ == "__main__":
    harness.run("machine", measure)
