"""Groups form, break at once when told to, and leave nothing behind. Ranks are threads here, and processes where they must be."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.rank.membership import nccl
from actors.rank.membership.connections import LOCAL_SEND_BYTES
from actors.rank.membership.process_group import Forming, Group, GroupBroken, StoreServer, Work
from actors.rank.membership.store import GlooStore, StoreClient
from fleet.host import secret
from tests.support.waiting import until

BOUND_S = 30.0
HOST = "127.0.0.1"


@pytest.fixture
def store() -> Iterator[StoreServer]:
    server = StoreServer(HOST)
    yield server
    server.close()


def forming(store: str, rank: int, size: int, generation: int = 1, timeout_s: float = BOUND_S) -> Forming:
    return Forming(store=store, generation=generation, rank=rank, size=size, device=torch.device("cpu"), timeout_s=timeout_s, host=HOST)


def form_all(store: StoreServer, size: int, generation: int = 1) -> list[Group]:
    parts = [forming(store.address, rank, size, generation) for rank in range(size)]
    return [part.wait() for part in parts]


def on_all(groups: list[Group], fn: Callable[[Group], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(fn, groups, timeout=BOUND_S))


def client_of(store: StoreServer, generation: int, timeout_s: float = BOUND_S) -> contextlib.closing[StoreClient]:
    return contextlib.closing(StoreClient(store.address, generation, timeout_s))


def close_all(groups: list[Group]) -> None:
    for group in groups:
        group.close()


def test_collectives_and_messages(store: StoreServer) -> None:
    groups = form_all(store, 3)

    def talk(group: Group) -> tuple[list[float], list[list[float]], list[float]]:
        total = torch.full((5,), float(group.rank))
        group.all_reduce(total)
        everyone = torch.empty(3, 2)
        group.all_gather(everyone, torch.full((2,), float(group.rank)))
        got = torch.empty(2, 1)
        right, left = (group.rank + 1) % 3, (group.rank - 1) % 3
        one, two = torch.tensor([group.rank * 10.0]), torch.tensor([group.rank * 10.0 + 1])
        group.start([(one, right), (two, right)], [(got[0], left), (got[1], left)], tag=7).wait()
        return total.tolist(), everyone.tolist(), got.flatten().tolist()

    for rank, (total, everyone, got) in enumerate(on_all(groups, talk)):
        assert total == [3.0] * 5
        assert everyone == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
        left = (rank - 1) % 3
        assert got == [left * 10.0, left * 10.0 + 1]
    close_all(groups)


def test_one_rank_needs_no_store() -> None:
    group = Forming(store="nowhere:1", generation=3, rank=0, size=1, device=torch.device("cpu"), timeout_s=BOUND_S, host=HOST).wait()
    value = torch.ones(3)
    group.all_reduce(value)
    out = torch.empty(1, 3)
    group.all_gather(out, value)
    assert out.tolist() == [[1.0, 1.0, 1.0]]
    group.close()
    with pytest.raises(GroupBroken, match="closed"):
        group.all_reduce(value)


def test_many_views_leak_neither_descriptors_nor_threads(store: StoreServer) -> None:
    def round_trip(generation: int) -> tuple[int, int]:
        groups = form_all(store, 2, generation)
        on_all(groups, lambda group: group.all_reduce(torch.ones(10)))
        close_all(groups)
        until(lambda: f"fleet-group-{generation}" not in {thread.name for thread in threading.enumerate()}, "its threads have ended")
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    seen = [round_trip(generation) for generation in range(25)]
    assert max(seen[15:]) <= max(seen[5:15])


def test_a_refused_store_is_a_broken_group() -> None:
    with socket.create_server((HOST, 0)) as gone:
        address = f"{HOST}:{gone.getsockname()[1]}"
    with pytest.raises(GroupBroken, match="forming at"):
        forming(address, 0, 2).wait()


def test_several_keys_are_answered_once_all_are_there(store: StoreServer) -> None:
    with (
        contextlib.closing(StoreClient(store.address, 5, BOUND_S)) as asking,
        contextlib.closing(StoreClient(store.address, 5, BOUND_S)) as saying,
    ):
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(asking.get_all, ["b", "a", "b"])
            saying.set("a", b"one")
            assert not answer.done()
            saying.set("b", b"")
            assert answer.result(BOUND_S) == [b"", b"one", b""]
        assert asking.get("a") == b"one"


def test_who_waits_for_what_an_old_generation_left_is_not_answered_with_less(store: StoreServer) -> None:
    with (
        contextlib.closing(StoreClient(store.address, 1, 0.5)) as old,
        contextlib.closing(StoreClient(store.address, 0, BOUND_S)) as others,
    ):
        others.set("x", b"0")
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(old.get_all, ["x", "y"])
            for generation in range(2, 7):
                with client_of(store, generation) as client:
                    client.set("x", b"new")
                    assert client.get("x") == b"new"
            with pytest.raises(OSError):
                answer.result(BOUND_S)


def test_one_round_trip_tells_a_rank_of_all_others(store: StoreServer) -> None:
    reported: list[list[bytes]] = [[], []]

    def learn(rank: int, said: bytes, address: bytes) -> bytes:
        reported[rank].append(said)
        return address + b"!"

    with (
        contextlib.closing(StoreClient(store.address, 1, BOUND_S)) as one,
        contextlib.closing(StoreClient(store.address, 1, BOUND_S)) as two,
    ):
        exchanges = [
            GlooStore(client, "p", 2, mine, functools.partial(learn, rank))
            for rank, (client, mine) in enumerate([(one, b"here"), (two, b"")])
        ]
        for rank, exchange in enumerate(exchanges):
            exchange.set(f"g/{rank}", bytes([rank]) * 3)
        exchanges[0].wait(["g/1"])
        one.interrupt()  # what follows needs no store
        assert [exchanges[0].get(f"g/{rank}") for rank in range(2)] == [b"\0\0\0!", b"\1\1\1!"]
        assert reported == [[b"here", b""], []]


def test_a_store_that_dies_breaks_the_forming(store: StoreServer) -> None:
    part = forming(store.address, 0, 2)
    with client_of(store, 1) as client:
        client.get("gloo/0/0")
    store.close()
    with pytest.raises(GroupBroken, match="forming at"):
        part.wait()


def test_a_forming_whose_peer_never_comes_ends_by_itself(store: StoreServer) -> None:
    with pytest.raises(GroupBroken):
        forming(store.address, 0, 2, timeout_s=0.2).wait()


def test_a_forming_can_be_interrupted(store: StoreServer) -> None:
    part = forming(store.address, 0, 2)
    assert not part.done
    part.interrupt("the view is gone")
    with pytest.raises(GroupBroken, match="the view is gone"):
        part.wait()
    names = {thread.name: thread for thread in threading.enumerate()}
    if "fleet-form-1" in names:
        names["fleet-form-1"].join(BOUND_S)
        assert not names["fleet-form-1"].is_alive()


class LostSend:
    """A send, or a receive, that gloo has forgotten: nothing wakes who waits for it."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def wait(self) -> bool:
        return self.released.wait(BOUND_S)


@pytest.mark.parametrize("lost_is_a", ["send", "receive"])
def test_an_interrupt_wakes_who_waits_for_what_is_lost(store: StoreServer, lost_is_a: str) -> None:
    groups = form_all(store, 2)
    lost = LostSend()
    work = Work(groups[0], [], [lost]) if lost_is_a == "send" else Work(groups[0], [lost])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(work.wait if lost_is_a == "send" else work.arrived)
        with contextlib.suppress(TimeoutError):
            waiting.result(0.2)
        assert not waiting.done()
        groups[0].interrupt("told to leave")
        with pytest.raises(GroupBroken, match="told to leave"):
            waiting.result(BOUND_S / 2)
    with pytest.raises(GroupBroken, match="told to leave"):
        work.wait()
    lost.released.set()
    close_all(groups)


def test_who_waits_for_a_lost_send_holds_up_no_other(store: StoreServer) -> None:
    groups = form_all(store, 2)
    lost = LostSend()
    groups[0].sending([Work(groups[0], [], [lost])])
    for _ in range(3):
        on_all(groups, lambda group: group.start([(torch.ones(3), 1 - group.rank)], [(torch.empty(3), 1 - group.rank)]).wait())
    waiting = [thread for thread in threading.enumerate() if thread.name == "fleet-group-1"]
    assert len(waiting) == 3, "one for the send that is lost, and one in each rank for all others"
    close_all(groups)
    lost.released.set()
    until(lambda: not any(thread.is_alive() for thread in waiting), "the threads have ended with their groups")


class Hanging:
    """What waits at its end, as gloo's object does for a sum of its own that is lost."""

    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended

    def allreduce(self, _: list[torch.Tensor]) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: True)

    def __del__(self) -> None:
        self._ended.wait(BOUND_S)


def test_who_closes_a_group_does_not_wait_for_a_sum_that_is_lost() -> None:
    ended = threading.Event()
    group = Group(1, 0, 2, torch.device("cpu"), gloo=Hanging(ended))
    group.all_reduce(torch.ones(3))
    begin_s = time.monotonic()
    group.close()
    assert time.monotonic() - begin_s < BOUND_S / 2
    ended.set()


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in ranks; more would have waits handed over one by one."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


@pytest.mark.usefixtures("one_thread")
def test_what_runs_aside_changes_nothing_once_it_was_called_out(store: StoreServer) -> None:
    """Neither what it had to do after its wait, nor, when the interrupt comes while it is at work, what it does right then."""
    groups, lost, did = form_all(store, 2), LostSend(), []
    at_work, go_on = threading.Event(), threading.Event()

    def waits() -> None:
        Work(groups[0], [lost]).arrived()
        did.append("after its wait")

    def works() -> None:
        at_work.set()
        go_on.wait(BOUND_S)
        did.append("work")
        groups[1].all_reduce(torch.ones(1))

    with ThreadPoolExecutor(2) as pool:
        waiting, working = pool.submit(groups[0].in_background, waits), pool.submit(groups[1].in_background, works)
        assert at_work.wait(BOUND_S)
        for group in groups:
            group.interrupt("told to leave")
        with pytest.raises(GroupBroken, match="told to leave"):
            waiting.result(BOUND_S / 2)
        with contextlib.suppress(TimeoutError):
            working.result(0.2)
        assert not working.done()
        go_on.set()
        with pytest.raises(GroupBroken, match="told to leave"):
            working.result(BOUND_S / 2)
    leftover = [thread for thread in threading.enumerate() if thread.name == "fleet-group-1"]
    lost.released.set()
    close_all(groups)
    until(lambda: not any(thread.is_alive() for thread in leftover), "the threads have ended with their groups")
    assert did == ["work"]


def test_connections_within_a_machine_hold_little(store: StoreServer) -> None:
    allowed = int(Path("/proc/sys/net/core/wmem_max").read_text())
    groups = form_all(store, 3)

    def sizes() -> list[int]:
        return [sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for group in groups for sock in group._ends.connections()]

    until(lambda: set(sizes()) == {2 * min(LOCAL_SEND_BYTES, allowed)}, "all of them do")  # Linux doubles it, for what it notes itself
    assert on_all(groups, lambda group: group.all_reduce(torch.ones(1 << 20))) == [None] * 3
    close_all(groups)


@pytest.mark.usefixtures("one_thread")
def test_what_runs_aside_raises_its_own_error_and_waits_by_itself(store: StoreServer) -> None:
    groups = form_all(store, 2)

    def talks(group: Group) -> set[str]:
        seen, got = set[str](), torch.empty(1)

        def talk() -> None:
            seen.add(threading.current_thread().name)
            group.start([(torch.ones(1), 1 - group.rank)], [(got, 1 - group.rank)]).wait()

        for _ in range(3):
            group.in_background(talk)
        with pytest.raises(ZeroDivisionError):
            group.in_background(lambda: 1 / 0)
        return seen if got else set()

    assert on_all(groups, talks) == [{"fleet-group-1"}] * 2
    assert len([thread for thread in threading.enumerate() if thread.name == "fleet-group-1"]) == 2, "one for each rank"
    close_all(groups)


def test_who_waits_for_a_send_hears_that_it_failed(store: StoreServer) -> None:
    groups = form_all(store, 2)
    on_all(groups, lambda group: group.start([(torch.ones(3), 1 - group.rank)], [(torch.empty(3), 1 - group.rank)]).wait())
    unasked = groups[0].start([(torch.ones(3), 1)], [], tag=9)
    groups[1].close()
    with pytest.raises(GroupBroken):
        unasked.wait()
    close_all(groups)


def test_old_generations_do_not_meet_new_ones(store: StoreServer) -> None:
    early = forming(store.address, 0, 2, generation=1, timeout_s=0.3)
    late = forming(store.address, 1, 2, generation=2, timeout_s=0.3)
    for part in (early, late):
        with pytest.raises(GroupBroken):
            part.wait()


def test_staging_through_host_memory(store: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of CUDA tensors over gloo, taken by host tensors."""
    monkeypatch.setattr(Group, "_staged", lambda *_: True)
    groups = form_all(store, 2)

    def talk(group: Group) -> list[float]:
        got, total = torch.empty(2), torch.ones(2)
        peer = 1 - group.rank
        group.start([(torch.full((2,), float(group.rank)), peer)], [(got, peer)]).wait()
        group.all_reduce(total)
        return (got + 10 * total).tolist()

    assert on_all(groups, talk) == [[21.0, 21.0], [20.0, 20.0]]
    close_all(groups)


# ---- NCCL, where there is none: what Fleet does around it --------------------------------------------------------------------------------


class FakeNccl:
    """Of one rank. ``held`` keeps an abort from coming back."""

    def __init__(self) -> None:
        self.aborts, self.aborted, self.held = list[str](), threading.Event(), threading.Event()
        self.held.set()

    def abort(self) -> None:
        self.aborts.append(threading.current_thread().name)
        self.held.wait(BOUND_S)
        self.aborted.set()


def fake_nccl(monkeypatch: pytest.MonkeyPatch, devices: list[str], wires: Callable[..., Any] = lambda *_: FakeNccl()) -> None:
    """Ranks, in the order in which they form, have these devices; ``wires`` makes their communicators."""
    names, given = iter(devices), dict[int, str]()
    lock = threading.Lock()

    def name(_: torch.device) -> str:
        with lock:
            return given.setdefault(threading.get_ident(), next(names))

    monkeypatch.setattr(nccl, "device_name", name)
    monkeypatch.setattr(nccl, "wires", wires)


def form_on_gpus(store: StoreServer, size: int = 2) -> list[Forming]:
    reported = {"generation": 1, "size": size, "device": torch.device("cuda"), "timeout_s": BOUND_S, "host": HOST}
    return [Forming(store=store.address, rank=rank, **reported) for rank in range(size)]


@pytest.mark.parametrize(("devices", "has_nccl"), [(["a", "b"], True), (["a", "a"], False)])
def test_ranks_that_share_a_device_exchange_by_gloo(
    store: StoreServer, monkeypatch: pytest.MonkeyPatch, devices: list[str], has_nccl: bool
) -> None:
    """NCCL refuses two ranks on one GPU."""
    fake_nccl(monkeypatch, devices)
    groups = [part.wait() for part in form_on_gpus(store)]
    assert [group.receives_ahead for group in groups] == [not has_nccl] * 2
    close_all(groups)


def test_an_interrupt_does_not_wait_for_the_abort_which_comes_once(store: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort takes a second; and two of one communicator at a time lock each other up."""
    fake_nccl(monkeypatch, ["a", "b"])
    groups = [part.wait() for part in form_on_gpus(store)]
    wires = groups[0]._nccl.made
    wires.held.clear()
    groups[0].interrupt("a peer is lost")
    groups[0].close()
    assert not wires.aborted.is_set()
    wires.held.set()
    assert wires.aborted.wait(BOUND_S)
    assert len(wires.aborts) == 1 and wires.aborts != [threading.current_thread().name]
    close_all(groups)


def test_a_forming_can_be_interrupted_while_nccl_waits_for_a_rank(store: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing calls a thread back from there. What it comes to later is aborted."""
    reached, comes, made = threading.Semaphore(0), threading.Event(), FakeNccl()

    def wires(*_: Any) -> FakeNccl:
        reached.release()
        assert comes.wait(BOUND_S)
        return made

    fake_nccl(monkeypatch, ["a", "b"], wires)
    parts = form_on_gpus(store)
    assert all(reached.acquire(timeout=BOUND_S) for _ in parts)
    for part, why in zip(parts, ("the view is gone", "the view is gone|rank 0 was lost"), strict=True):  # its peer may have seen it leave
        part.interrupt("the view is gone")
        with pytest.raises(GroupBroken, match=why):
            part.wait()
    until(lambda: not any(thread.name == "fleet-form-1" for thread in threading.enumerate()), "the end of both threads", BOUND_S)
    assert not made.aborts
    comes.set()
    until(lambda: len(made.aborts) == 2, "both aborts", BOUND_S)


def test_where_nccl_refuses_all_exchange_by_gloo_and_say_why(
    store: StoreServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those who have made theirs leave it: all do the same."""
    made = FakeNccl()

    def wires(_: object, rank: int, *__: Any) -> FakeNccl:
        if rank == 0:
            raise RuntimeError("Duplicate GPU detected\nand more")
        return made

    fake_nccl(monkeypatch, ["a", "b", "c"], wires)
    groups = [part.wait() for part in form_on_gpus(store, 3)]
    assert all(group.receives_ahead for group in groups)
    until(lambda: len(made.aborts) == 2, "both aborts", BOUND_S)
    said = [record.getMessage() for record in caplog.records]
    assert any("exchanges by gloo" in line and line.endswith("Duplicate GPU detected") for line in said)
    assert len([line for line in said if "exchanges by gloo" in line]) == 3
    close_all(groups)


def test_a_peer_that_is_lost_while_nccl_waits_ends_the_forming(store: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections say so; NCCL would wait, and the time for it is not over."""
    reached, comes = threading.Semaphore(0), threading.Event()

    def wires(*_: Any) -> FakeNccl:
        reached.release()
        comes.wait(BOUND_S)
        return FakeNccl()

    fake_nccl(monkeypatch, ["a", "b"], wires)
    stays, lost = form_on_gpus(store)
    assert all(reached.acquire(timeout=BOUND_S) for _ in range(2))
    lost.interrupt("it is lost")
    until(lambda: stays.done, "the end of the forming", BOUND_S / 4)  # half of the bound is for NCCL
    with pytest.raises(GroupBroken, match="forming at"):
        stays.wait()
    comes.set()


def rank_that_waits(store: str, rank: int, size: int, parent: Connection) -> None:
    """In a process: form, say so, then wait in an all-reduce that cannot end, and report how it ended."""
    group = forming(store, rank, size).wait()
    parent.send("formed")
    if parent.recv() == "interrupt":
        threading.Thread(target=group.interrupt, args=("told to leave",)).start()
    try:
        group.all_reduce(torch.ones(1 << 20))
        parent.send("reduced")
    except GroupBroken as error:
        parent.send(f"broken: {error.reason}")
    group.close()


def answer(connection: Connection) -> str:
    assert connection.poll(BOUND_S), "no answer within the bound"
    return str(connection.recv())


def ends_after(store: StoreServer, fault_planned: signal.Signals, order: str) -> list[str]:
    """Three ranks form; the third gets ``fault_planned``, the others ``order``. How the wait of those two ended."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(3)]
    ranks = [
        context.Process(target=secret.holding, args=(secret.held(), rank_that_waits, store.address, rank, 3, pipes[rank][1]))
        for rank in range(3)
    ]
    for process in ranks:
        process.start()
    try:
        assert [answer(mine) for mine, _ in pipes] == ["formed"] * 3
        pid = ranks[2].pid
        assert pid is not None
        os.kill(pid, fault_planned)
        for mine, _ in pipes[:2]:
            mine.send(order)
        return [answer(mine) for mine, _ in pipes[:2]]
    finally:
        ranks[2].kill()
        for process in ranks:
            process.join(BOUND_S)


def rank_that_sends(store: str, elements: int) -> None:
    """In a process: send all at once, and stay."""
    group = forming(store, 1, 2).wait()
    work = group.start([(torch.ones(elements), 0)], [])
    threading.Event().wait(BOUND_S)
    del work  # which has to be kept until then


def test_a_rank_whose_peer_dies_in_the_middle_of_a_message_can_be_called_out(store: StoreServer) -> None:
    """gloo tells those who wait for messages that have not begun to arrive, and no other."""
    elements = 1 << 26
    sender = multiprocessing.get_context("spawn").Process(
        target=secret.holding, args=(secret.held(), rank_that_sends, store.address, elements)
    )
    sender.start()
    group, arriving = forming(store.address, 0, 2).wait(), torch.zeros(elements)
    work = group.start([], [(arriving, 1)])
    bound_s = time.monotonic() + BOUND_S
    while not arriving[0]:
        assert time.monotonic() < bound_s  # it takes some 0.1 s in all
    sender.kill()
    sender.join(BOUND_S)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(work.arrived)
        group.interrupt("told to leave")
        with pytest.raises(GroupBroken):
            waiting.result(BOUND_S / 2)
    assert not arriving[-1]
    group.close()


def test_a_killed_peer_breaks_the_group(store: StoreServer) -> None:
    assert all(end.startswith("broken: ") for end in ends_after(store, signal.SIGKILL, "wait"))


def test_interrupt_wakes_a_rank_whose_peer_is_stopped(store: StoreServer) -> None:
    """A stopped peer closes nothing, so only the interrupt can end the wait within this test's bound."""
    assert ends_after(store, signal.SIGSTOP, "interrupt") == ["broken: told to leave"] * 2
