"""`reconfigure`: how soon has a group of gloo other members when one is killed, with PyTorch's own groups and with Fleet's?

PyTorch 2.14 has groups of gloo that take other members, by `torch.distributed._reconfigure`; older versions have none. Four ranks add ten
megabytes again and again on the loopback interface. One of them is killed at a random moment. This process tells the others at once who is
left, as Fleet's agents and torchft's lighthouse would. Systems take turns, with new processes for each kill.

- fleet: the word interrupts the group, and a new one is formed.
- torch: the rank's loop waits for the sum in PyTorch, and the word calls `abort`, before the group is reconfigured. Handles of all members
  are known before the kill.
- torch_beside: the same, but another thread waits for the sum. The word wakes the loop, which leaves that thread behind.
- noticed: from the kill until the last survivor's sum has ended. formed: until it has the new group. working: until a first sum is
  there. Each sum is checked.
- allreduce: a rank's median time of such a sum before the kill.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist

from actors.rank.membership.process_group import Forming, Group, GroupBroken, StoreServer, warm_up
from benchmarks import harness
from benchmarks.harness import Form, left_out, on_the_way
from fleet.host import secret
from fleet.simulation.rng import stream

HOST, SEED, WORLD = "127.0.0.1", 7, 4
LENGTH = 10_000_000 // 4
"""Numbers of four bytes in a sum."""
BOUND_S = 10.0
"""Most seconds of a sum, and of the forming of a group."""
PAUSE_S = 0.05
"""A kill comes up to so many seconds after the steady sums."""


Samples = dict[str, list[float]]


class Members(Protocol):
    """The groups of one rank, one after the other. ``broken`` are the errors of a group that has lost a member."""

    broken: tuple[type[Exception], ...]

    def form(self, generation: int, members: Sequence[int]) -> None:
        """Meet the others of ``members``, which are the numbers of all ranks."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over the members, in place."""

    def wake(self) -> None:
        """Let a sum that another thread waits for end with an error."""


class OfFleet:
    """Fleet's groups: each is formed anew."""

    broken = (GroupBroken,)

    def __init__(self, store: str, rank: int) -> None:
        self._store, self._rank, self._group = store, rank, Group(0, 0, 1, torch.device("cpu"))
        warm_up()

    def form(self, generation: int, members: Sequence[int]) -> None:
        old, place, size = self._group, members.index(self._rank), len(members)
        forming = Forming(
            store=self._store, generation=generation, rank=place, size=size, device=old.device, timeout_s=BOUND_S, host=HOST
        )  # fmt: skip
        self._group = forming.wait()
        old.close()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._group.all_reduce(tensor)

    def wake(self) -> None:
        self._group.interrupt()


class OfTorch:
    """PyTorch's group, which stays and is reconfigured. Ranks tell their handles through the store that the groups have anyway."""

    broken = (RuntimeError,)

    def __init__(self, store: str, rank: int) -> None:
        host, _, port = store.rpartition(":")
        self._rank, bound = rank, timedelta(seconds=BOUND_S)
        self._store = dist.TCPStore(host, int(port), is_master=False, timeout=bound)
        dist.init_process_group("gloo", store=self._store, rank=rank, world_size=WORLD, timeout=bound, enable_reconfigure=True)
        self._exchange(0, range(WORLD))

    def form(self, generation: int, members: Sequence[int]) -> None:
        handles = [self._handles[member] for member in members]
        dist._reconfigure(generation, handles, timeout=timedelta(seconds=BOUND_S)).wait()
        self._exchange(generation, members)

    def _exchange(self, generation: int, members: Sequence[int]) -> None:
        """Learn the members' handles for the next group: then none has to be asked for when a member is lost."""
        names = [f"handle/{generation}/{member}" for member in members]
        self._store.set(names[members.index(self._rank)], dist._get_reconfigure_handle())
        self._handles = dict(zip(members, map(bytes.decode, self._store.multi_get(names)), strict=True))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)

    def wake(self) -> None:
        dist.group.WORLD.abort()


class OfTorchBeside(OfTorch):
    """The same, where another thread waits for a sum. A wait whose member is lost is left behind."""

    def form(self, generation: int, members: Sequence[int]) -> None:
        self._waiting, self._ended = ThreadPoolExecutor(1), SimpleQueue[BaseException | None]()
        super().form(generation, members)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        work, ended = dist.all_reduce(tensor, async_op=True), self._ended  # the next group has a queue of its own
        self._waiting.submit(work.wait).add_done_callback(lambda done: ended.put(done.exception()))
        if (error := ended.get()) is not None:
            raise error

    def wake(self) -> None:
        self._ended.put(RuntimeError("a member is lost"))


SYSTEMS: dict[str, Callable[[str, int], Members]] = {"fleet": OfFleet, "torch": OfTorch, "torch_beside": OfTorchBeside}


def _rank(system: str, store: str, rank: int, steady: int, parent: Connection) -> None:
    """Process of a rank: steady sums, then sums until a member is lost, and one with those that are left."""
    torch.set_num_threads(1)
    groups, numbers = SYSTEMS[system](store, rank), torch.zeros(LENGTH)
    groups.form(1, range(WORLD))
    times = [_sum(groups, numbers, rank, range(WORLD)) for _ in range(steady + 1)][1:]
    parent.send(times)
    left: list[Sequence[int]] = []
    waking = threading.Thread(target=_listen, args=(parent, groups, left))
    waking.start()
    with contextlib.suppress(*groups.broken):  # a member is lost: the word says which
        while not left:
            _sum(groups, numbers, rank, range(WORLD))
    noticed_s = time.monotonic()
    waking.join()
    groups.form(2, left[0])
    formed_s, numbers = time.monotonic(), torch.zeros(LENGTH)  # a sum that was left behind may still write into the other one
    _sum(groups, numbers, rank, left[0])
    parent.send((noticed_s, formed_s, time.monotonic()))
    parent.recv()  # a rank that ended sooner would break the others' sums


def _listen(parent: Connection, groups: Members, left: list[Sequence[int]]) -> None:
    """Wait for the word who is left, and wake the loop."""
    left.append(parent.recv())
    groups.wake()


def _sum(groups: Members, numbers: torch.Tensor, rank: int, members: Sequence[int]) -> float:
    """Seconds of one all-reduce. Raises ValueError where its sum is wrong."""
    numbers.fill_(rank + 1.0)
    begin_s = time.monotonic()
    groups.all_reduce(numbers)
    took_s = time.monotonic() - begin_s
    expected = sum(member + 1.0 for member in members)
    if not bool((numbers == expected).all()):
        raise ValueError(f"the sum over ranks {list(members)} has {numbers[0].item():g} in rank {rank} instead of {expected:g}")
    return took_s


class World:
    """Context manager: the processes of one system's ranks, and the store at which they meet."""

    def __init__(self, system: str, steady: int) -> None:
        self._store: Any = StoreServer(HOST) if system == "fleet" else dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        address = self._store.address if system == "fleet" else f"{HOST}:{self._store.port}"
        context = get_context("forkserver")
        context.set_forkserver_preload(["torch", __name__])
        pipes = [context.Pipe() for _ in range(WORLD)]
        given = [(system, address, rank, steady, theirs) for rank, (_, theirs) in enumerate(pipes)]
        self.pipes = [mine for mine, _ in pipes]
        self.ranks = [context.Process(target=secret.holding, args=(secret.held(), _rank, *each), daemon=True) for each in given]
        for process, (_, theirs) in zip(self.ranks, pipes, strict=True):
            process.start()
            theirs.close()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.ranks:
            process.kill()
            process.join()
        if isinstance(self._store, StoreServer):
            self._store.close()

    def answers(self, ranks: Sequence[int]) -> list[Any]:
        """The next message of each of ``ranks``. Raises RuntimeError where one ends before, or sends nothing in time."""
        found = []
        for rank in ranks:
            if not self.pipes[rank].poll(2 * BOUND_S):
                raise RuntimeError(f"rank {rank} was not heard of within {2 * BOUND_S:.0f} s")
            try:
                found.append(self.pipes[rank].recv())
            except EOFError:
                self.ranks[rank].join()
                raise RuntimeError(f"rank {rank} ended with exit code {self.ranks[rank].exitcode}") from None
        return found


def kill_one(system: str, number: int, steady: int, samples: Samples) -> str:
    """Kill a member of a world, and add the times of the others. Returns why they did not go on, "" where they did."""
    draw = stream(SEED, "reconfigure", number)
    with World(system, steady) as world:
        samples[f"{system}_allreduce_ms"] += [1e3 * statistics.median(times) for times in world.answers(range(WORLD))]
        time.sleep(draw.random() * PAUSE_S)
        lost = draw.randrange(WORLD)
        victim = world.ranks[lost]
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        killed_s = time.monotonic()
        connection.wait([victim.sentinel])
        left = [rank for rank in range(WORLD) if rank != lost]
        for rank in left:
            world.pipes[rank].send(left)
        try:
            answers = world.answers(left)
        except RuntimeError as error:
            samples[f"{system}_survived"].append(0.0)
            return str(error)
    samples[f"{system}_survived"].append(1.0)
    for name, each in zip(("noticed", "formed", "working"), zip(*answers, strict=True), strict=True):
        samples[f"{system}_{name}_s"].append(max(each) - killed_s)
    return ""


def measure(form: Form) -> dict[str, Any]:
    """Kill a member of four, again and again, and measure how soon the others add ten megabytes, with PyTorch's groups and with Fleet's."""
    kills, steady = form.of((20, 40), (4, 20), (1, 2))
    missing = "" if hasattr(dist, "_reconfigure") else f"PyTorch {torch.__version__} has no groups that are reconfigured; 2.14 has"
    systems = ["fleet"] if missing else list(SYSTEMS)
    samples: Samples = defaultdict(list)
    notes: list[str] = []
    turns = [(name, number) for number in range(kills) for name in (systems if number % 2 == 0 else systems[::-1])]
    for name, number in on_the_way("reconfigure", turns, lambda turn: f"kill {turn[1] + 1} with {turn[0]}"):
        if why := kill_one(name, number, steady, samples):
            notes.append(f"{name} did not go on after kill {number + 1}: {why}")
    return {
        "settings": {"world": WORLD, "bytes": 4 * LENGTH, "kills": kills, "steady_sums": steady, "time_out_s": BOUND_S},
        "figures": figures(samples),
        "samples": dict(samples),
        "notes": [*notes, *([left_out("torch_", missing)] if missing else [])],
    }


def figures(samples: Samples) -> dict[str, float]:
    """Medians, the share of the kills after which the others went on, and Fleet's figures over the best of PyTorch's."""
    result = {f"{name}_median": statistics.median(values) for name, values in samples.items() if not name.endswith("_survived")}
    result |= {f"{name}_ratio": statistics.fmean(values) for name, values in samples.items() if name.endswith("_survived")}
    for what in ("working_s", "allreduce_ms"):
        theirs = [result[f"{name}_{what}_median"] for name in ("torch", "torch_beside") if f"{name}_{what}" in samples]
        if theirs and f"fleet_{what}" in samples:
            result[f"fleet_over_torch_{what.rpartition('_')[0]}_ratio"] = result[f"fleet_{what}_median"] / min(theirs)
    return result


if __name__ == "__main__":
    harness.as_rank("benchmarks.reconfigure")
    harness.run("reconfigure", measure)
