"""What Fleet asks of a communicator, and the communicators that it is asked of.

Cases are plain functions, so that they run under pytest (``test_communicator.py``) and without it, on a machine with a GPU and little else:
``python -m tests.contract.communicators [--device]``, which says what failed and what was left out. With ``--device`` it is asked of what
needs a GPU alone. Each place then has a process of its own, as what hangs in NCCL, or ends the process, is to cost that place only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import itertools
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from actors.rank.membership import nccl, process_group
from actors.rank.membership.process_group import Forming, Group, GroupBroken, StoreServer
from actors.rank.membership.store import StoreClient, TorchStore
from actors.rank.mesh.torch_group import TensorGroup
from tests.support.recorded_nccl import RECORDINGS, RecordedNccl, Recording, Stage
from tests.support.waiting import until

HOST = "127.0.0.1"
BOUND_S = 30.0
PLACE_S = 90.0
"""How long the cases of one place may take without pytest."""
ROUNDS, WARM, FEW = 20, 10, 3
"""What is left over by each round is many after all of them; CUDA and NCCL now and then begin a thread of their own, which stays."""
OURS = ("fleet-form", "fleet-group", "fleet-nccl")
"""Threads that end with the group that they were for."""
SLEEP_CYCLES = 1_000_000_000
"""Some half a second of a GPU."""


class Place:
    """Ranks that are threads of this process, and exchange in one way: here by gloo, on the host."""

    size = 2
    device = "cpu"
    gpus = 0

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name

    @property
    def missing(self) -> str:
        """What this machine has not, and the place needs."""
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return "" if there >= self.gpus else "CUDA GPU" if self.gpus == 1 else f"{self.gpus} CUDA GPUs"

    @contextlib.contextmanager
    def opened(self) -> Iterator[Place]:
        """With a store, and whatever else a case needs here. In the end nothing is held back any more."""
        self.store, self._generations = StoreServer(HOST), itertools.count(1)
        try:
            with self.patched():
                yield self
                self.free()
                self.check()
        finally:
            self.free()
            self.store.close()

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        yield

    def device_of(self, rank: int) -> torch.device:
        return torch.device(self.device)

    def form(self) -> list[Group]:
        """The next view's groups, by rank."""
        generation = next(self._generations)
        reported = {"store": self.store.address, "generation": generation, "size": self.size, "timeout_s": BOUND_S, "host": HOST}
        parts = [Forming(rank=rank, device=self.device_of(rank), **reported) for rank in range(self.size)]  # type: ignore[arg-type]
        return [part.wait() for part in parts]

    def hang(self, groups: Sequence[Group]) -> Callable[[], None]:
        """Begin something on rank 0 that nothing ends: what to call to wait for it."""
        return groups[0].start([], [(torch.zeros(4, device=groups[0].device), 1 % self.size)]).wait

    def lose(self, groups: Sequence[Group]) -> None:
        """The peer of rank 0. Rank 0 is told where nothing else tells it."""
        groups[1].close()

    def free(self) -> None:
        """What comes late comes now."""

    def check_still_leaving(self) -> None:
        """That the abort of the first view is not back, where it is held back."""

    def check(self) -> None:
        """What else is known here of what was left, in the end."""


@contextlib.contextmanager
def each_has_its_own() -> Iterator[None]:
    """Every rank says so of its device."""
    with mock.patch.object(nccl, "device_name", side_effect=map(str, itertools.count())):
        yield


class Recorded(Place):
    """A communicator that fails as it was recorded."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(f"recorded: {recording.name}")
        self._recording, self._stages = recording, list[Stage]()

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        self._stages = []
        with (
            each_has_its_own(),
            mock.patch.object(nccl, "wires", side_effect=self.wires),
            mock.patch.object(process_group, "MAKING_SHARE", 0.01 if self._recording.making == "never back" else 1.0),
        ):
            yield

    def form(self) -> list[Group]:
        self._stages.append(Stage(self._recording))
        groups = super().form()
        assert [group.receives_ahead for group in groups] == [self._recording.making != "made"] * self.size, "who carries it"
        return groups

    def wires(self, *reported: Any) -> RecordedNccl:
        return self._stages[-1].wires(*reported)

    def lose(self, groups: Sequence[Group]) -> None:
        if self._recording.making != "made":
            super().lose(groups)
            return
        self._stages[-1].injected.set()
        if self._recording.operation != "fails":
            groups[0].interrupt("rank 1 is lost")

    def free(self) -> None:
        for stage in self._stages:
            stage.free()

    def check_still_leaving(self) -> None:
        if self._recording.abort == "late":
            assert not any(made.left for made in self._stages[0].made), "somebody has waited for an abort"

    def check(self) -> None:
        """Each was aborted, those too that came late, and no more than once: two aborts at a time lock each other up."""
        refused = {"refused": self.size, "refused on one": 1}.get(self._recording.making, 0)
        for stage in self._stages:
            until(lambda stage=stage: len(stage.made) == self.size - refused, "the end of all makings", BOUND_S)  # type: ignore[misc]
            until(lambda stage=stage: all(made.aborts for made in stage.made), "an abort of each", BOUND_S)  # type: ignore[misc]
            assert [made.aborts for made in stage.made] == [1] * len(stage.made)
            assert all(made.looks_after_abort <= 1 for made in stage.made), "who was called out looked on"


class SharedGpu(Place):
    """Two ranks on one GPU: gloo, through pinned memory."""

    device, gpus = "cuda:0", 1


class RefusedByNccl(SharedGpu):
    """They say that each has its own: NCCL itself finds out, and refuses."""

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        with each_has_its_own():
            yield

    def form(self) -> list[Group]:
        groups = super().form()
        assert all(group.receives_ahead for group in groups), "gloo carries it"
        return groups


class NcclAlone(Place):
    """NCCL with one rank, which exchanges with itself. What hangs is a stream that is busy."""

    size, device, gpus = 1, "cuda:0", 1

    def form(self) -> list[Group]:
        generation, device = next(self._generations), self.device_of(0)
        with contextlib.closing(StoreClient(self.store.address, generation, BOUND_S)) as client:
            made = nccl.Making(TorchStore(client, "nccl"), 0, 1, device, BOUND_S, "fleet-nccl").wait(BOUND_S)
        group = Group(generation, 0, 1, device)
        group.carry_by(made)
        return [group]

    def hang(self, groups: Sequence[Group]) -> Callable[[], None]:
        torch.cuda._sleep(SLEEP_CYCLES)
        tensor = torch.zeros(4, device=groups[0].device)
        return groups[0].start([(tensor, 0)], [(torch.zeros_like(tensor), 0)]).wait

    def lose(self, groups: Sequence[Group]) -> None:
        groups[0].interrupt("told, as there is no peer here")


class NcclPair(Place):
    """NCCL with two ranks, each with a GPU of its own."""

    device, gpus = "cuda", 2

    def device_of(self, rank: int) -> torch.device:
        return torch.device("cuda", rank)

    def form(self) -> list[Group]:
        groups = super().form()
        assert not any(group.receives_ahead for group in groups), "NCCL carries it"
        return groups

    def lose(self, groups: Sequence[Group]) -> None:
        groups[1].close()
        groups[0].interrupt("rank 1 is lost")


PLACES: tuple[Place, ...] = (
    Place("gloo"),
    *map(Recorded, RECORDINGS),
    SharedGpu("gloo over pinned memory"),
    RefusedByNccl("NCCL that refuses two ranks on one GPU"),
    NcclAlone("NCCL with one rank"),
    NcclPair("NCCL with two ranks"),
)


def on_all(groups: Sequence[Group], fn: Callable[[Group], None]) -> None:
    with ThreadPoolExecutor(len(groups)) as pool:
        list(pool.map(fn, groups, timeout=BOUND_S))


def exchanges_rightly(groups: Sequence[Group]) -> Callable[[], None]:
    """Messages to and from every peer, and a sum: what to call to see that they still are what they were."""
    size, kept = len(groups), list[tuple[torch.Tensor, torch.Tensor]]()

    def exchange(group: Group) -> None:
        mine = torch.arange(1000, dtype=torch.float32, device=group.device) + group.rank
        peers = group.peers or [0]
        got = {peer: torch.zeros_like(mine) for peer in peers}
        group.start([(mine, peer) for peer in peers], [(got[peer], peer) for peer in peers]).wait()
        total = mine.clone()
        group.all_reduce(total)
        plain = torch.arange(1000, dtype=torch.float32)
        kept.extend((got[peer], plain + peer) for peer in peers)
        kept.append((total, size * plain + sum(range(size))))

    def are_right() -> None:
        for found, right in kept:
            assert torch.equal(found.cpu(), right), (found, right)

    on_all(groups, exchange)
    are_right()
    return are_right


@contextlib.contextmanager
def waiting(place: Place, groups: Sequence[Group]) -> Iterator[Future[None]]:
    """Rank 0 waits, in a thread, for what nothing ends."""
    hung = place.hang(groups)
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(hung)
        try:
            until(lambda: groups[0]._waits or wait.done(), "rank 0 waits", BOUND_S)
            assert not wait.done(), wait.exception()
            yield wait
        finally:
            groups[0].interrupt("the case is over")


def broken(wait: Future[None]) -> str:
    """Why it is: the wait ends within a number of looks, and with no other error."""
    until(wait.done, "the end of the wait", BOUND_S / 2)
    error = wait.exception()
    assert isinstance(error, GroupBroken), repr(error)
    return error.reason


def close_all(groups: Sequence[Group]) -> None:
    for group in groups:
        group.close()


# ---- the cases ---------------------------------------------------------------------------------------------------------------------------


def pairs_and_sums_are_right(place: Place) -> None:
    """And not the first time only."""
    groups = place.form()
    for _ in range(3):
        exchanges_rightly(groups)
    close_all(groups)


def a_wait_that_hangs_is_left_from_another_thread(place: Place) -> None:
    """By the abort, not by a time-out: it says why. Whoever comes later hears the same."""
    groups = place.form()
    exchanges_rightly(groups)
    with waiting(place, groups) as wait:
        groups[0].interrupt("told to leave")
        assert broken(wait) == "told to leave"
    assert "told to leave" in refusal(lambda: groups[0].all_reduce(torch.ones(1, device=groups[0].device)))
    assert "told to leave" in refusal(lambda: groups[0].send(torch.ones(1, device=groups[0].device), 0))
    close_all(groups)


def refusal(operation: Callable[[], None]) -> str:
    """What the group says to an operation that comes later."""
    try:
        operation()
    except GroupBroken as error:
        return error.reason
    return ""


def a_lost_peer_breaks_the_group_and_nothing_else(place: Place) -> None:
    groups = place.form()
    exchanges_rightly(groups)
    with waiting(place, groups) as wait:
        place.lose(groups)
        assert broken(wait)
    close_all(groups)


def a_new_one_works_while_the_old_one_is_still_being_left(place: Place) -> None:
    """On a new prefix. What the old one comes to late neither breaks the new one nor reaches its memory."""
    old = place.form()
    exchanges_rightly(old)
    with waiting(place, old) as wait:
        for group in old:
            group.interrupt("told to leave")
        broken(wait)
        new = place.form()
        are_right = exchanges_rightly(new)
        place.check_still_leaving()
        place.free()
        are_right()
        for _ in range(3):
            exchanges_rightly(new)
    close_all(old)
    exchanges_rightly(new)
    close_all(new)


def a_tensor_group_computes_what_pytorch_does(place: Place) -> None:
    """In view after view. Where a member is lost in a collective, the others know, and what comes late reaches no later view."""
    groups = place.form()
    own = [TensorGroup(group.rank, group.size) for group in groups]
    meet(own, groups)
    computes_rightly(own, groups)
    if place.size > 1:
        with ThreadPoolExecutor(1) as pool:
            alone = pool.submit(own[0].allreduce, [torch.ones(1000, device=groups[0].device)], Operator(dist.ReduceOp.MAX))
            until(lambda: groups[0]._waits or alone.done(), "rank 0 waits", BOUND_S)
            assert own[0].lost == ""
            place.lose(groups)
            until(alone.done, "the end of the wait", BOUND_S / 2)
        assert alone.exception() is None and own[0].lost
        close_all(groups)
        groups = place.form()
        meet(own, groups)
        are_right = computes_rightly(own, groups)
        place.free()
        are_right()
        computes_rightly(own, groups)
    close_all(groups)


class Operator:
    """As PyTorch gives it."""

    def __init__(self, op: Any = dist.ReduceOp.SUM) -> None:
        self.reduceOp = op


def meet(own: Sequence[TensorGroup], groups: Sequence[Group]) -> None:
    for each, group in zip(own, groups, strict=True):
        each.meet(group)


def computes_rightly(own: Sequence[TensorGroup], groups: Sequence[Group]) -> Callable[[], None]:
    """Sums, maxima, parts: what to call to see that they still are what they were."""
    size, kept = len(own), list[tuple[torch.Tensor, torch.Tensor]]()
    plain = torch.arange(1000 * size, dtype=torch.float32)

    def compute(group: Group) -> None:
        mine, each = plain.to(group.device) + group.rank, own[group.rank]
        total, largest, part, gathered = mine.clone(), mine.clone(), torch.empty_like(mine[:1000]), torch.empty_like(mine)
        each.allreduce([total], Operator())
        each.allreduce([largest], Operator(dist.ReduceOp.MAX))
        each._reduce_scatter_base(part, mine, Operator())
        each._allgather_base(gathered, mine[:1000].contiguous())
        right = size * plain + sum(range(size))
        kept.extend([(total, right), (largest, plain + size - 1), (part, right[1000 * group.rank : 1000 * group.rank + 1000])])
        kept.append((gathered, torch.cat([plain[:1000] + rank for rank in range(size)])))
        assert each.lost == ""

    def are_right() -> None:
        for found, right in kept:
            assert torch.equal(found.cpu(), right), (found, right)

    on_all(groups, compute)
    are_right()
    return are_right


def closing_is_idempotent(place: Place) -> None:
    """From several threads, after an interrupt, and with an operation under way."""
    groups = place.form()
    exchanges_rightly(groups)
    with waiting(place, groups) as wait:
        groups[0].interrupt("told to leave")
        on_all([*groups] * 4, lambda group: group.close())
        broken(wait)
    close_all(groups)


def nothing_is_left_over(place: Place) -> None:
    """Neither threads nor descriptors, over 20 rounds that each end with an operation under way."""
    warm = [0, 0]
    for number in range(ROUNDS):
        groups = place.form()
        exchanges_rightly(groups)
        with waiting(place, groups) as wait:
            close_all(groups)
            broken(wait)
        del groups, wait
        place.free()
        until(lambda: not any(thread.name.startswith(OURS) for thread in threading.enumerate()), "the end of Fleet's threads", BOUND_S)
        if number < WARM:
            warm = [max(pair) for pair in zip(warm, open_now(), strict=True)]
            continue
        most = [now + FEW for now in warm]
        until(functools.partial(no_more_than, most), f"no more than {most} threads and descriptors after round {number}", BOUND_S / 3)


def no_more_than(most: Sequence[int]) -> bool:
    return all(now <= before for now, before in zip(open_now(), most, strict=True))


def open_now() -> list[int]:
    """Threads, those of libraries too, and descriptors."""
    return [len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))]


Case = Callable[[Place], None]
CASES: tuple[Case, ...] = (
    pairs_and_sums_are_right,
    a_wait_that_hangs_is_left_from_another_thread,
    a_lost_peer_breaks_the_group_and_nothing_else,
    a_new_one_works_while_the_old_one_is_still_being_left,
    a_tensor_group_computes_what_pytorch_does,
    closing_is_idempotent,
    nothing_is_left_over,
)


# ---- without pytest ----------------------------------------------------------------------------------------------------------------------


def ask(place: Place) -> bool:
    """Whether all cases hold at ``place``, in this process. Prints what does not."""
    held = True
    for case in CASES:
        begin_s = time.monotonic()
        try:
            with place.opened():
                case(place)
        except Exception:  # noqa: BLE001 - it is printed, and told by how this process ends
            traceback.print_exc()
            held = False
            print(f"FAILED  {place.name}: {case.__name__}, {time.monotonic() - begin_s:.1f} s", flush=True)
        else:
            print(f"holds   {place.name}: {case.__name__}, {time.monotonic() - begin_s:.1f} s", flush=True)
    return held


def ask_in_background(place: Place) -> tuple[bool, str]:
    """The same in a process of its own, which may hang; and what it printed."""
    if place.missing:
        return True, f"left out: {len(CASES)} cases, {place.name} (this machine has no {place.missing})\n"
    command = [sys.executable, "-m", "tests.contract.communicators", "--place", place.name]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    ended = f"FAILED  {place.name}: its process ended with {done.returncode}\n" if done.returncode else ""
    return not done.returncode, done.stdout + ended


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--place"]:
        faulthandler.dump_traceback_later(PLACE_S, exit=True)
        held = ask(next(place for place in PLACES if place.name == arguments[1]))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(not held)  # what hangs in NCCL must not hold up the end
    asked = [place for place in PLACES if place.gpus or arguments != ["--device"]]
    with ThreadPoolExecutor(max((os.cpu_count() or 1) // 4, 1)) as pool:
        answers = []
        for held, said in pool.map(ask_in_background, asked):
            print(said, end="", flush=True)
            answers.append(held)
    return int(not all(answers))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
