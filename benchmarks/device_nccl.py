"""For `device`: again and again, an NCCL communicator of one rank is aborted, and a new one made on a new prefix of the store.

It runs in a process of its own, ``python -m benchmarks.device_nccl ROUNDS``, which prints its samples as JSON. So an abort that hangs, or
ends the process, costs this part alone. NCCL, torch's process group of it as Fleet makes it, and Fleet's store are real. A group of Fleet
with one rank has no communicator, so this module puts one together. ``shrink_group`` is never called.

Each round aborts three communicators. The first is idle. The stream of the second is busy for 0.2 s before its operation. After each of
them, the round makes the next communicator. The third is aborted while the next one is made, as Fleet does. The first sum of the next one
has to wait for the same stream.

One GPU cannot lose a peer in the middle of an operation. The nearest case is a communicator of two ranks whose other rank never comes:
``nccl_lonely_abort_s`` is the time until the abort returns, and ``nccl_lonely_waiter_s`` the time until the rank that made the communicator
returns. A call that does not return has no figure. ``nccl_lonely_unblocked`` is the same for a communicator with ``blocking = 0``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from actors.rank.membership import nccl
from actors.rank.membership.process_group import Group, StoreServer
from actors.rank.membership.store import StoreClient, TorchStore
from benchmarks.harness import left_out

HOST = "127.0.0.1"
LIMIT_S = 30.0
LONELY_S, LONELY_AFTER_S = 6.0, 2.0
"""Most seconds of the abort, and seconds that a lonely rank has waited before it."""
SLEEP_CYCLES = 400_000_000
"""About 0.2 s of a GPU."""
ELEMENTS = 1 << 20
NAMES = ("nccl_new_s", "nccl_idle_abort_s", "nccl_busy_abort_s", "nccl_abort_and_new_s", "nccl_interrupt_s", "nccl_new_beside_abort_s")
LONELY = ("lonely", "lonely_unblocked")

Samples = dict[str, list[float]]


class Wires:
    """The wires of NCCL; an abort returns when it is over."""

    def __init__(self, made: Any) -> None:
        self._nccl, self.ended = made, threading.Event()

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        return self._nccl.allreduce(tensors)

    def abort(self) -> None:
        self._nccl.abort()
        self.ended.set()


class Communicators:
    """Communicators, one after the other, each on the next prefix of one store."""

    def __init__(self) -> None:
        self._store = StoreServer(HOST)
        self._device = torch.device("cuda", 0)
        self._generation = 0

    def new(self, size: int = 1) -> Group:
        """Make a communicator; it is ready when this returns."""
        self._generation += 1
        client = StoreClient(self._store.address, self._generation, LIMIT_S)
        try:
            made = nccl.wires(TorchStore(client, "nccl"), 0, size, self._device, LIMIT_S)
        finally:
            client.close()
        group = Group(self._generation, 0, size, self._device)
        group.carry_by(Wires(made))
        return group

    def close(self) -> None:
        self._store.close()


def sums_right(group: Group, busy: bool = False) -> Callable[[], bool]:
    """Begin an all-reduce, behind a wait of the GPU when ``busy``. Returns a function that says whether the sum is right."""
    value = torch.arange(ELEMENTS, dtype=torch.float32, device=group.device)
    if busy:
        torch.cuda._sleep(SLEEP_CYCLES)
    work = group._nccl.allreduce([value])

    def right() -> bool:
        work.wait()
        torch.cuda.synchronize(group.device)
        return bool(torch.equal(value.cpu(), torch.arange(ELEMENTS, dtype=torch.float32)))

    return right


def _timed_s(fn: Callable[[], Any]) -> tuple[float, Any]:
    begin_s = time.perf_counter()
    found = fn()
    return time.perf_counter() - begin_s, found


def refuses(group: Group) -> str:
    """The error of an aborted communicator at another operation; empty when it does the operation."""
    try:
        group._nccl.allreduce([torch.ones(1, device=group.device)]).wait()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def rounds(count: int) -> Iterator[dict[str, Any]]:
    """Seconds, and whether sums are right before and after, and aborted communicators refuse. Each round yields twice, the second time with
    Fleet's own way, as that may hang."""
    made, samples, held = Communicators(), Samples({name: [] for name in NAMES}), list[bool]()
    group = made.new()
    for _ in range(count):
        group = _abort_then_make(made, group, False, samples["nccl_idle_abort_s"], samples, held)
        group = _abort_then_make(made, group, True, samples["nccl_busy_abort_s"], samples, held)
    yield {"samples": {name: values for name, values in samples.items() if values}, "held": held}
    for _ in range(count):
        group = _make_beside(made, group, samples, held)
    yield {"samples": samples, "held": held}


def _abort_then_make(made: Communicators, group: Group, busy: bool, aborts_s: list[float], samples: Samples, held: list[bool]) -> Group:
    held.append(sums_right(group)())
    pending = sums_right(group, busy=True) if busy else None
    abort_s, _ = _timed_s(group._nccl.abort)
    refused = refuses(group)
    held.append(bool(refused))
    torch.cuda.synchronize()
    del pending
    new_s, new = _timed_s(made.new)
    held.append(sums_right(new)())
    aborts_s.append(abort_s)
    samples["nccl_new_s"].append(new_s)
    samples["nccl_abort_and_new_s"].append(abort_s + new_s)
    print(f"an aborted communicator says: {refused}", file=sys.stderr)
    return new


def _make_beside(made: Communicators, group: Group, samples: Samples, held: list[bool]) -> Group:
    """Leave a group and form the next one as Fleet does. The first sum of the next one is part of the time."""
    pending = sums_right(group, busy=True)
    begin_s = time.perf_counter()
    interrupt_s, _ = _timed_s(group.interrupt)
    new = made.new()
    held.append(sums_right(new)())
    samples["nccl_new_beside_abort_s"].append(time.perf_counter() - begin_s)
    samples["nccl_interrupt_s"].append(interrupt_s)
    held.append(group._nccl.ended.wait(LIMIT_S) and bool(refuses(group)))
    torch.cuda.synchronize()
    del pending
    return new


def lonely(blocking: bool) -> dict[str, float]:
    """For a communicator whose other rank never comes: seconds until its abort returns, and until the waiting rank returns. A call that
    does not return in time is missing."""
    wires, back, begun = list[Any](), dict[str, float](), list[float]()
    made = Communicators()

    def wait_alone() -> None:
        _wait_alone(made, wires, blocking)
        if begun:  # else it has not waited
            back["waiter_s"] = time.perf_counter() - begun[0]

    def abort() -> None:
        wires[0].abort()
        back["abort_s"] = time.perf_counter() - begun[0]

    threads = [threading.Thread(target=work, daemon=True) for work in (wait_alone, abort)]
    threads[0].start()
    time.sleep(LONELY_AFTER_S)
    begun.append(time.perf_counter())
    threads[1].start()
    for thread in threads:
        thread.join(LONELY_S)
    return dict(back)


def _wait_alone(made: Communicators, wires: list[Any], blocking: bool) -> None:
    """Wait until the abort, which should make the wait raise an error."""
    for name in nccl.OFF:
        os.environ[name] = "0"
    store = TorchStore(StoreClient(made._store.address, 1, LIMIT_S), "nccl")
    options = dist.ProcessGroupNCCL.Options()
    options.config.blocking = int(blocking)
    wires.append(dist.ProcessGroupNCCL(store, 0, 2, options))
    try:
        wires[0].eager_connect_single_device(torch.device("cuda", 0))
        wires[0].allreduce([torch.ones(1, device="cuda")]).wait()
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"the lonely rank was told: {str(error).splitlines()[0]}", file=sys.stderr)


def measure(count: int) -> dict[str, Any]:
    """Measure in processes of their own: samples, whether all checks held, and notes of calls that did not return."""
    found = _asked(str(count), LIMIT_S + 8.0 * count)
    samples, notes = dict(found.get("samples", {})), list(found["notes"])
    for kind in LONELY:
        alone = _asked(kind, 3 * LONELY_S + LIMIT_S)
        notes += alone["notes"]
        for what in ("abort_s", "waiter_s"):
            if what in alone:
                samples[f"nccl_{kind}_{what}"] = [alone[what]]
            else:
                notes.append(left_out(f"nccl_{kind}_{what}", f"it had not returned {LONELY_S:g} s after the abort"))
    return {"samples": samples, "held": found.get("held", []), "notes": notes}


def _asked(what: str, limit_s: float) -> dict[str, Any]:
    """The last output of ``python -m benchmarks.device_nccl WHAT``, and notes when it failed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.device_nccl", what], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    notes: list[str] = []
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        notes.append(f"nccl {what}: not done within {limit_s:g} s")
    sys.stderr.write(err)
    if process.returncode > 0:
        notes.append(f"nccl {what}: the process ended with {process.returncode}: {(err.splitlines() or [''])[-1][:300]}")
    lines = out.splitlines()
    return {"notes": notes, **(json.loads(lines[-1]) if lines else {})}


def main() -> None:
    """Run one part in this process, which then ends at once: a call that hangs in NCCL must not hold up its end."""
    if sys.argv[1] in LONELY:
        print(json.dumps(lonely(blocking=sys.argv[1] == "lonely")), flush=True)
    else:
        for answer in rounds(int(sys.argv[1])):
            print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
