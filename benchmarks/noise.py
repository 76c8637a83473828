"""Records how long equal work takes, again and again, in real processes: ``python -m benchmarks.noise [--out FILE]``.

``benchmarks.detect`` lays these series over its simulated ranks: its detectors see recorded noise, and not draws from a distribution of our
choice. Each regime is a piece of work of a few milliseconds, done by some processes that share one core:

- ``compute_quiet``: a fixed chain of matrix products, one process.
- ``compute_shared``: the same, two processes; the scheduler decides which one waits.
- ``compute_gc``: the same with Python objects in reference cycles, so that the garbage collector runs now and then.
- ``network_quiet`` and ``network_shared``: 4 MiB there and back over TCP on the loopback interface, one pair and two at once.
- ``data_cache``: reads of 64 KiB at random places of a file; every 61 steps the process drops the file from the page cache.

A process that is slowed down by others on the machine *is* slow, so its times must not count as noise. Our processes run at the highest
priority that they may have. A take is kept when others used almost no time of the core in it. Another virtual machine on the same host
shows in no counter. So a short loop of fixed length and a copy of 1 MiB are timed before and after each step. A step is left out when they
show that the core or the memory was slow. The times of the steps have no part in either choice.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import platform
import random
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness

FILE = Path(__file__).parent / "data" / "noise.npz"
STEPS, TAKE_STEPS, WARM_UPS = 16_000, 200, 50
PROBE_LOOPS, PROBE_BYTES, PROBED_BYTES, PROBES = 3000, 1 << 20, 32 << 20, 3
SLOW = 1.12
"""A core, or memory, is slow when it takes so many times its best time."""
OTHERS_CORES, GLANCE_S, PATIENCE_S = 0.12, 0.25, 3600.0
BOUND_S = 300.0
MESSAGE_BYTES = 4 << 20
DATA_BYTES, READ_BYTES, READS, DROP_EVERY = 128 << 20, 64 << 10, 24, 61

Work = Callable[[], None]


@contextlib.contextmanager
def _matmul(number: int) -> Iterator[Work]:
    left = np.random.default_rng(0).standard_normal((240, 240))

    def work() -> None:
        value = left
        for _ in range(8):
            value = left @ value / 240.0

    yield work


@contextlib.contextmanager
def _garbage(number: int) -> Iterator[Work]:
    with _matmul(number) as product:

        def work() -> None:
            product()
            for index in range(2000):
                cycle: dict[str, Any] = {"index": index, "text": str(index)}
                cycle["self"] = cycle

        yield work


def _receive(connection: socket.socket, count: int) -> None:
    while count:
        part = connection.recv(count)
        if not part:
            raise ConnectionError("the other end is gone")
        count -= len(part)


def _echo(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    message = bytes(MESSAGE_BYTES)
    with connection, contextlib.suppress(ConnectionError):
        while True:
            _receive(connection, MESSAGE_BYTES)
            connection.sendall(message)


@contextlib.contextmanager
def _exchange(number: int) -> Iterator[Work]:
    message = bytes(MESSAGE_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_echo, args=(listener,), daemon=True).start()
        with socket.create_connection(listener.getsockname()) as connection:

            def work() -> None:
                connection.sendall(message)
                _receive(connection, MESSAGE_BYTES)

            yield work


@contextlib.contextmanager
def _reads(number: int) -> Iterator[Work]:
    chance, done = random.Random(number), 0
    with tempfile.NamedTemporaryFile() as file:
        for _ in range(DATA_BYTES >> 20):
            file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())

        def work() -> None:
            nonlocal done
            done += 1
            if done % DROP_EVERY == 0:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            for _ in range(READS):
                os.pread(file.fileno(), READ_BYTES, chance.randrange(DATA_BYTES - READ_BYTES))

        yield work


WORKS: dict[str, Callable[[int], contextlib.AbstractContextManager[Work]]] = {
    "matmul": _matmul, "garbage": _garbage, "exchange": _exchange, "reads": _reads,
}  # fmt: skip


class _Probe:
    """Equal pieces of work that tell how fast the core and the memory are, with all of their other load."""

    def __init__(self) -> None:
        self._source, self._target = np.ones(PROBED_BYTES, dtype=np.uint8), np.ones(PROBED_BYTES, dtype=np.uint8)
        self._at = itertools.cycle(range(0, PROBED_BYTES, PROBE_BYTES))

    def __call__(self) -> tuple[int, int]:
        """Nanoseconds of a loop and of a copy: the least of several."""
        return min(self._ns(self._loop) for _ in range(PROBES)), min(self._ns(self._copy) for _ in range(PROBES))

    def _ns(self, work: Work) -> int:
        begin_ns = time.perf_counter_ns()
        work()
        return time.perf_counter_ns() - begin_ns

    def _loop(self) -> None:
        for _ in range(PROBE_LOOPS):
            pass

    def _copy(self) -> None:
        at = next(self._at)
        self._target[at : at + PROBE_BYTES] = self._source[at : at + PROBE_BYTES]


def _process(name: str, number: int, core: int, parent: Connection) -> None:
    os.sched_setaffinity(0, {core})
    with contextlib.suppress(PermissionError):
        os.nice(-20)
    with WORKS[name](number) as work:
        probe = _Probe()
        for _ in range(WARM_UPS):
            work()
        parent.send("ready")
        while parent.recv() == "go":
            own_s, probes_ns, steps_ns = time.process_time(), [probe()], []
            for _ in range(TAKE_STEPS):
                begin_ns = time.perf_counter_ns()
                work()
                steps_ns.append(time.perf_counter_ns() - begin_ns)
                probes_ns.append(probe())
            parent.send((np.array(steps_ns), np.array(probes_ns), time.process_time() - own_s))


def _busy_s(core: int) -> float:
    """Seconds that a core has spent at work since the machine started."""
    line = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith(f"cpu{core} "))
    user, nice, system, _, _, interrupt, soft, stolen, *_ = map(int, line.split()[1:])
    return (user + nice + system + interrupt + soft + stolen) / os.sysconf("SC_CLK_TCK")


def _idlest() -> int:
    cores = sorted(os.sched_getaffinity(0))
    before = {core: _busy_s(core) for core in cores}
    time.sleep(GLANCE_S)
    return min(cores, key=lambda core: _busy_s(core) - before[core])


Take = list[tuple[np.ndarray, np.ndarray, float]]


def _take(pipes: list[Connection], core: int) -> tuple[float, Take]:
    """(share of the core that others used; for each process its steps, its probes, and its processor time)."""
    busy_s, begin_s = _busy_s(core), time.perf_counter()
    for pipe in pipes:
        pipe.send("go")
    answers = [pipe.recv() for pipe in pipes]
    others_s = _busy_s(core) - busy_s - sum(own_s for _, _, own_s in answers)
    return others_s / (time.perf_counter() - begin_s), answers


def _on_a_fast_machine(takes: list[Take], process: int) -> np.ndarray:
    """Nanoseconds of the steps of one process between two probes that are near the best of all."""
    best_ns = np.percentile(np.concatenate([take[process][1] for take in takes]), 5, axis=0)
    fast = [(take[process][1] <= SLOW * best_ns).all(axis=1) for take in takes]
    return np.concatenate([take[process][0][well[1:] & well[:-1]] for take, well in zip(takes, fast, strict=True)])


def _takes(pipes: list[Connection], core: int) -> tuple[list[Take], dict[str, float]]:
    until_s, spoiled, most, takes = time.perf_counter() + PATIENCE_S, 0, 0.0, []
    while not takes or min(len(_on_a_fast_machine(takes, process)) for process in range(len(pipes))) < STEPS:
        if time.perf_counter() > until_s:
            raise SystemExit(f"core {core} was never quiet for long within {PATIENCE_S} s: end other programs on the machine")
        others, take = _take(pipes, core)
        if others <= OTHERS_CORES:
            takes.append(take)
            most = max(most, others)
        else:
            spoiled += 1
    return takes, {"takes_kept": len(takes), "takes_spoiled": spoiled, "others_cores_max": round(most, 3)}


def record(name: str, processes: int) -> tuple[np.ndarray, dict[str, float]]:
    """Microseconds of each step of ``processes`` that do the work ``name`` at once, uint32 of shape [processes, steps], and the shares that
    were left out."""
    context, core = multiprocessing.get_context("spawn"), _idlest()
    pipes = [context.Pipe() for _ in range(processes)]
    started = [context.Process(target=_process, args=(name, i, core, theirs), daemon=True) for i, (_, theirs) in enumerate(pipes)]
    for process in started:
        process.start()
    mine = [pipe for pipe, _ in pipes]
    for pipe in mine:
        pipe.recv()
    takes, about = _takes(mine, core)
    for pipe in mine:
        pipe.send("stop")
    for process in started:
        process.join(BOUND_S)
    kept = [_on_a_fast_machine(takes, number) for number in range(processes)]
    left_out = 1 - sum(map(len, kept)) / (processes * len(takes) * TAKE_STEPS)
    series = np.array([steps_ns[:STEPS] for steps_ns in kept])
    return (series // 1000).astype(np.uint32), about | {"steps_on_a_slow_machine_ratio": round(left_out, 3)}


def regimes() -> dict[str, tuple[str, int]]:
    """Regime -> (work, processes at once)."""
    return {
        "compute_quiet": ("matmul", 1),
        "compute_shared": ("matmul", 2),
        "compute_gc": ("garbage", 1),
        "network_quiet": ("exchange", 1),
        "network_shared": ("exchange", 2),
        "data_cache": ("reads", 1),
    }


def load(path: Path = FILE) -> dict[str, np.ndarray]:
    """Regime -> microseconds, of shape [processes, steps]."""
    with np.load(path) as file:
        return {name: file[name] for name in file.files if name != "provenance"}


def provenance(path: Path = FILE) -> dict[str, Any]:
    """Where and how the file was recorded."""
    with np.load(path) as file:
        return dict(json.loads(str(file["provenance"])))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.noise", description=__doc__)
    parser.add_argument("--out", type=Path, default=FILE)
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    series, choices = {}, {}
    for name, (work, processes) in regimes().items():
        series[name], choices[name] = record(work, processes)
        low, median, high = np.percentile(series[name], [1, 50, 99]) / 1e3
        print(f"{name}: {processes} processes, {median:.3f} ms (1%: {low:.3f}, 99%: {high:.3f}), {choices[name]}", flush=True)
    about = {
        "what": "microseconds of each repetition of equal work, [processes, steps]", "recorded_by": "python -m benchmarks.noise",
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "machine": harness.machine(), "system": platform.platform(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__}, "left_out": choices,
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(options.out, provenance=json.dumps(about), **series)


if __name__ == "__main__":
    main()
