"""A process group that lives for one view: formed in milliseconds, broken from any thread, closed without leaks.

Ranks do not use ``torch.distributed``'s default group, which cannot be left once a peer has died. A :class:`Group` always has gloo for
tensors in host memory. On CUDA it has NCCL beside it where each rank has a GPU of its own: NCCL refuses two ranks on one. Where they share
one, and when asked for ``backend="gloo"``, it stages through pinned host memory.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from actors.rank.membership import nccl as _nccl
from actors.rank.membership.store import Exchange, StoreClient, StoreServer, TorchStore
from actors.rank.tags import Tag
from actors.rank.telemetry.usage import RECEIVED, SENT
from fleet.cluster.scheduling import be_prompt
from fleet.errors import GroupLost

__all__ = ["Forming", "Group", "GroupBroken", "StoreServer", "Work", "warm_up"]

Address = tuple[str, int]
_one_device_at_a_time = threading.Lock()
Transfer = tuple[torch.Tensor, int]
LOCAL_SEND_BYTES = 256 << 10
"""Between ranks of one machine a message is copied from memory to memory. The kernel lets megabytes of it be under way, and its copies then
come from memory each time; with so much the reader still finds them in a cache, and a reduction takes a third less time."""
Signal = queue.SimpleQueue[None]
"""For one who waits, once: ``put`` wakes it. An event does the same with two locks and some 20 us of the interpreter."""
Errand = tuple[Callable[[], None], Signal]


class GroupBroken(GroupLost):
    """A group of real connections is broken, or could not be formed."""


def _tcp_sockets() -> Iterator[socket.socket]:
    """A duplicate of each TCP socket that this process has open. The duplicate cannot be reused under us; the number could."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                with socket.socket(fileno=os.dup(int(name))) as duplicate:
                    if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
                        yield duplicate


def _listening() -> set[Address]:
    return {s.getsockname()[:2] for s in _tcp_sockets() if s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}


@dataclass
class _Ends:
    """The TCP addresses by which a group's own connections are known: ``near`` on this rank, ``far`` on its peers."""

    near: set[Address] = field(default_factory=set)
    far: set[Address] = field(default_factory=set)

    def shut_down(self) -> None:
        """End those connections. Nothing else wakes a thread that waits in gloo.

        A listening socket has no peer and is left alone: gloo ends the process when one fails.
        """
        for connection in self._connections():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def keep_cached(self) -> None:
        """Of the connections within this machine: less is on its way at a time, see :data:`LOCAL_SEND_BYTES`."""
        for connection in self._connections():
            with contextlib.suppress(OSError):
                if connection.getpeername()[0] == connection.getsockname()[0]:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_SEND_BYTES)

    def _connections(self) -> Iterator[socket.socket]:
        for connection in _tcp_sockets():
            with contextlib.suppress(OSError):
                if connection.getpeername()[:2] in self.far or connection.getsockname()[:2] in self.near:
                    yield connection


def _gloo(store: Any, rank: int, size: int, device: Any, timeout_s: float) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's stub
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [device]
    return dist.ProcessGroupGloo(store, rank, size, options)


def warm_up(host: str = "127.0.0.1") -> None:
    """Pay gloo's first-use cost (0.1 to 0.4 s a process) ahead of the first view."""
    _gloo(dist.HashStore(), 0, 1, dist.ProcessGroupGloo.create_device(hostname=host), 30.0)


class Work:
    """Operations under way. Keep the tensors as they are, and this object, until :meth:`wait` returns.

    gloo loses what is on its way when its connection ends: a send that the peer has just asked for, and a receive of which a part is here.
    They are in no list then, and nothing ever wakes who waits for them, no interrupt either. (Seen: of 400 sends that the peer had asked
    for, whose connection was ended just then, 35 were lost; and two of three receives of 256 MB whose sender was killed meanwhile.) So the
    loop does not wait in gloo: another thread does, which is back with the time-out. See :meth:`Group.watched` and :meth:`Group.aside`.
    """

    __slots__ = ("_after", "_group", "_receives", "_sends", "_stream")

    def __init__(
        self,
        group: Group,
        receives: Sequence[Any],
        sends: Sequence[Any] = (),
        after: Callable[[], None] | None = None,
        stream: bool = False,
    ) -> None:
        self._group, self._receives, self._sends, self._after = group, receives, sends, after
        self._stream = stream  # NCCL: it is the caller's stream that waits, and an interrupt ends that

    def arrived(self) -> None:
        """Block until all receives are complete. Raises GroupBroken when a peer is lost, on time-out, and on ``Group.interrupt``."""
        self._group.watched(self._awaited)()
        self._land()

    def wait(self) -> None:
        """Block until all are complete; raises as :meth:`arrived` does."""
        self._group.complete([self])

    @property
    def _awaited(self) -> Sequence[Any]:
        """The receives that another thread waits for."""
        return () if self._stream else self._receives

    def _land(self) -> None:
        """What the caller has to do itself, once what is waited for elsewhere is complete."""
        if self._stream:
            self._group._complete(self._receives)
        if self._after is not None:
            self._after()


class _Errands:
    """Threads for calls that may hang, each kept for the next call once it is back.

    What hangs holds nobody up: neither the next call, nor, unlike in a pool of ``concurrent.futures``, the end of the process.
    """

    def __init__(self, name: str) -> None:
        self._name, self._closed = name, False
        self._idle: list[queue.SimpleQueue[Errand | None]] = []

    def run(self, call: Callable[[], None], settled: Signal) -> None:
        """From any thread; tells ``settled`` when it is done. ``call`` raises nothing."""
        try:
            calls = self._idle.pop()
        except IndexError:
            calls = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(calls,), name=self._name, daemon=True).start()
        calls.put((call, settled))

    def close(self) -> None:
        """Let the threads end, those under way when they are back. From any thread, and again."""
        self._closed = True
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().put(None)

    def _serve(self, calls: queue.SimpleQueue[Errand | None]) -> None:
        be_prompt(children=False)
        while (errand := calls.get()) is not None:
            call, settled = errand
            call()
            del errand, call  # and what it held: the next one may be long in coming
            self._idle.append(calls)
            settled.put(None)
            if self._closed:  # perhaps since before this thread was idle
                self.close()


class Group:
    """Point-to-point and collective operations among the ``size`` ranks of one view; thread-safe only as far as stated.

    Operations belong to one thread at a time; :meth:`interrupt` may be called from any thread. A group of size 1 uses no network.
    """

    def __init__(
        self, generation: int, rank: int, size: int, device: torch.device, gloo: Any = None, nccl: Any = None, ends: _Ends | None = None
    ) -> None:
        self.generation, self.rank, self.size, self.device = generation, rank, size, device
        self._gloo, self._nccl = gloo, nccl
        self._ends = ends
        self._stop = ""
        self._waits: set[Signal] = set()
        self._errands = _Errands(f"fleet-group-{generation}")
        self._aborts = [] if nccl is None else [functools.partial(_nccl.abort, nccl)]
        self._turn = threading.Lock()  # of what runs aside: held but for its waits
        self._aside = 0  # the thread that does
        self._gathered: Work | None = None

    @classmethod
    def form(
        cls,
        *,
        store: str,
        generation: int,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
        host: str,
        backend: str | None = None,
    ) -> Group:
        """Meet the other ranks of ``generation`` at ``store`` (``host:port``). Raises GroupBroken within ``timeout_s``.

        ``host`` is the address of this rank's node, on which peers connect to it. ``backend="gloo"`` keeps CUDA tensors off NCCL.
        ``timeout_s`` bounds each later operation, too. See :class:`Forming` for a forming that can be interrupted.
        """
        return Forming(
            store=store, generation=generation, rank=rank, size=size, device=device, timeout_s=timeout_s, host=host, backend=backend
        ).wait()

    @property
    def peers(self) -> list[int]:
        """All other ranks, each rank's own next one first, so that not all begin with the same."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def broken(self, reason: str) -> GroupBroken:
        """The error to raise: what interrupted the group when it was interrupted, ``reason`` otherwise."""
        return GroupBroken(self._stop or reason, self.generation)

    def _wires(self, tensor: torch.Tensor) -> Any:
        self._go_on()
        return self._nccl if tensor.is_cuda and self._nccl is not None else self._gloo

    @property
    def receives_ahead(self) -> bool:
        """True when a receive may be started before the sends that lead to it. NCCL would hold up the stream for it."""
        return self._nccl is None

    def _staged(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda and self._nccl is None

    def start(self, sends: Sequence[Transfer], receives: Sequence[Transfer], tag: int = Tag.PLAIN) -> Work:
        """Begin to send and to receive ``(tensor, peer)`` pairs; the n-th send to a peer under ``tag`` meets its n-th receive from here.

        Tensors are contiguous and may be views. All of one call are on the same device. Empty ones do not travel. Who asks for something
        long before it comes has a tag of its own: under a tag it is the next message that is taken, whoever it is for.
        """
        sends = [(tensor, peer) for tensor, peer in sends if tensor.numel()]
        receives = [(tensor, peer) for tensor, peer in receives if tensor.numel()]
        if not sends and not receives:
            return Work(self, ())
        SENT.count(sum(each.nbytes for each, _ in sends))
        RECEIVED.count(sum(each.nbytes for each, _ in receives))
        tensor = (sends or receives)[0][0]
        wires = self._wires(tensor)
        try:
            if tensor.is_cuda and wires is self._nccl:
                return self._start_nccl(wires, sends, receives)
            if self._staged(tensor):
                return self._start_staged(wires, sends, receives, tag)
            incoming = [wires.recv([t], peer, tag) for t, peer in receives]
            outgoing = [wires.send([t], peer, tag) for t, peer in sends]
        except RuntimeError as error:
            raise self.broken(str(error).splitlines()[0]) from error
        return Work(self, incoming, outgoing)

    def _complete(self, works: Sequence[Any]) -> None:
        """Block until gloo or NCCL says that they are."""
        self._go_on()
        try:
            for work in works:
                if not work.wait():
                    raise self.broken("an operation was aborted")
        except RuntimeError as error:
            raise self.broken(str(error).splitlines()[0]) from error

    def complete(self, works: Sequence[Work]) -> None:
        """Block until all sends and receives of ``works`` are complete; raises as :meth:`Work.arrived` does."""
        self.watched([operation for work in works for operation in (*work._awaited, *work._sends)])()
        for work in works:
            work._land()

    def sending(self, works: Sequence[Work]) -> Callable[[], None]:
        """What to call to block until all sends of ``works`` are complete. Asked for before the wait for what arrives, it costs no time."""
        return self.watched([send for work in works for send in work._sends])

    def watched(self, operations: Sequence[Any]) -> Callable[[], None]:
        """What to call to block until all ``operations`` of gloo are complete. It raises as :meth:`Work.arrived` does.

        Another thread waits for them from now on, so that an interrupt ends the wait, whatever gloo does; it is back with the time-out.
        In :meth:`aside` that is the thread at hand.
        """
        if not operations:
            return _nothing
        if self._aside == threading.get_ident():
            return functools.partial(self._await, operations)
        return self._errand(functools.partial(self._complete, operations))

    def aside(self, call: Callable[[], None]) -> None:
        """``call``, whose waits are those of one other thread: to hand them over one by one costs more. Raises what it raises.

        An interrupt leaves that thread behind in gloo; this method is back, with GroupBroken, once ``call`` changes nothing any more.
        """
        if self.size == 1 or self.device.type != "cpu" or torch.get_num_threads() > 1:
            call()  # there is no wait; or streams, and the workers of OpenMP, are a thread's own
            return

        def run() -> None:
            self._aside = threading.get_ident()
            try:
                with self._turn:
                    self._go_on()
                    call()
            finally:
                self._aside = 0

        try:
            self._errand(run)()
        finally:
            with self._turn:  # an interrupt may have come while it was at work
                pass

    def _go_on(self) -> None:
        if self._stop:
            raise self.broken(self._stop)

    def _await(self, operations: Sequence[Any]) -> None:
        """Within :meth:`aside`: after an interrupt nothing of it goes on."""
        self._turn.release()
        try:
            self._complete(operations)
        finally:
            self._turn.acquire()
        self._go_on()

    def _errand(self, errand: Callable[[], None]) -> Callable[[], None]:
        """Have another thread do it: what to call to block until it is done, or interrupted; that raises as the errand does."""
        settled, failed = Signal(), list[BaseException]()

        def run() -> None:
            try:
                errand()
            except BaseException as error:  # noqa: BLE001 - whoever waits for it raises it
                failed.append(error)

        def wait() -> None:
            self._waits.add(settled)
            if not self._stop:
                settled.get()
            self._waits.discard(settled)
            self._go_on()
            if failed:
                raise failed[0]

        self._errands.run(run, settled)
        return wait

    def _start_nccl(self, wires: Any, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Work:
        """One NCCL group call, as single sends and receives could wait for each other."""
        wires._start_coalescing(self.device)
        for tensor, peer in receives:
            wires.recv([tensor], peer, Tag.PLAIN)
        for tensor, peer in sends:
            wires.send([tensor], peer, Tag.PLAIN)
        return Work(self, [wires._end_coalescing(self.device)], after=self._settle, stream=True)

    def _settle(self) -> None:
        """An NCCL error shows only once the stream is idle; an interrupt ends the kernels that wait for a lost peer."""
        torch.cuda.current_stream(self.device).synchronize()
        self._go_on()

    def _start_staged(self, wires: Any, sends: Sequence[Transfer], receives: Sequence[Transfer], tag: int) -> Work:
        """By way of host memory, pinned when there is a GPU; torch's host allocator keeps pinned blocks for the next call."""
        landed = [(_host_like(t), t, peer) for t, peer in receives]
        outgoing = [(_host_like(t).copy_(t), peer) for t, peer in sends]
        incoming = [wires.recv([host], peer, tag) for host, _, peer in landed]
        sent = [wires.send([host], peer, tag) for host, peer in outgoing]

        def land() -> None:
            for host, tensor, _ in landed:
                tensor.copy_(host)

        return Work(self, incoming, sent, land)

    def send(self, tensor: torch.Tensor, to: int, tag: int = Tag.PLAIN) -> None:
        self.start([(tensor, to)], [], tag).wait()

    def recv(self, tensor: torch.Tensor, source: int, tag: int = Tag.PLAIN) -> None:
        self.start([], [(tensor, source)], tag).wait()

    def start_all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int = Tag.PLAIN) -> Work:
        """``out[r]`` becomes rank r's ``inp``: ``out`` has one more dimension, of length ``size``, in front. For small tensors."""
        out[self.rank].copy_(inp)
        return self.start([(inp, peer) for peer in self.peers], [(out[peer], peer) for peer in self.peers], tag)

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int = Tag.PLAIN) -> None:
        """Leave ``inp`` as it is until the next one: what arrives in that one says that all have got this one's."""
        work = self.start_all_gather(out, inp, tag)
        work.arrived()
        self._gathered = work

    def start_all_reduce(self, tensor: torch.Tensor) -> Work:
        """Sum over ranks, in place, in the library's own order: its bits depend on the world size."""
        wires = self._wires(tensor)
        if self.size == 1:
            return Work(self, ())
        by_a_ring = 2 * (self.size - 1) * tensor.nbytes // self.size
        SENT.count(by_a_ring)
        RECEIVED.count(by_a_ring)
        host = _host_like(tensor).copy_(tensor) if self._staged(tensor) else tensor
        try:
            work = wires.allreduce([host])
        except RuntimeError as error:
            raise self.broken(str(error).splitlines()[0]) from error
        if host is not tensor:
            return Work(self, [work], after=lambda: _discard(tensor.copy_(host)))
        nccl = wires is self._nccl
        return Work(self, [work], after=self._settle if nccl else None, stream=nccl)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.start_all_reduce(tensor).wait()

    def interrupt(self, reason: str = "interrupted") -> None:
        """Make every operation under way here, and every later one, raise GroupBroken. From any thread, at any time, at once.

        Neighbours notice too, as their connections to this rank end.
        """
        self._stop = self._stop or reason
        for settled in list(self._waits):
            settled.put(None)
        if self._ends is not None:
            self._ends.shut_down()
        with contextlib.suppress(IndexError):
            self._errands.run(self._aborts.pop(), Signal())  # once, as two at a time lock each other up; NCCL takes a second for it

    def close(self) -> None:
        """Leave the group and free its sockets and threads. An operation that is still under way raises GroupBroken."""
        self.interrupt("closed")
        self._errands.close()
        self._gloo = self._nccl = self._ends = self._gathered = None


def _discard(_: object) -> None:
    return None


def _nothing() -> None:
    """There is nothing to wait for."""


def _host_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())


class Forming:
    """A group being formed, in a thread of its own, so that it can be given up at any moment: also beside running steps.

    ``operation_s`` bounds each operation of the group once it is formed; ``timeout_s`` when it is None.
    A thread that was given up ends by itself, at once or within ``timeout_s``. It is no daemon: the interpreter cannot end well while a
    thread is inside gloo, so it waits for this one.
    """

    def __init__(
        self,
        *,
        store: str,
        generation: int,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
        host: str,
        backend: str | None = None,
        operation_s: float | None = None,
    ) -> None:
        self._store, self._host, self._device = store, host, device
        self._nccl = device.type == "cuda" and backend != "gloo"
        self._generation, self._rank, self._size, self._timeout_s = generation, rank, size, timeout_s
        self._operation_s = operation_s or timeout_s
        self._lock, self._settled = threading.Lock(), threading.Event()
        self._group: Group | None = None
        self._error = ""
        self._ends = _Ends()
        self._devices: dict[str, str] = {}  # by where a rank listens
        self._making: _nccl.Making | None = None
        self._client: StoreClient | None = None
        if size == 1:
            self._settle(Group(generation, rank, size, device))
        else:
            threading.Thread(target=self._run, name=f"fleet-form-{generation}").start()

    @property
    def done(self) -> bool:
        """True once :meth:`wait` will not block."""
        return self._settled.is_set()

    def wait(self) -> Group:
        """The group; raises GroupBroken when it could not be formed within ``timeout_s``, or was interrupted."""
        if not self._settled.wait(self._timeout_s):
            self.interrupt(f"not all of {self._size} ranks met within {self._timeout_s:g} s")
        if self._group is None:
            raise GroupBroken(self._error, self._generation)
        return self._group

    def interrupt(self, reason: str = "interrupted") -> None:
        """Give up, from any thread; :meth:`wait` raises. A group that was formed already is interrupted."""
        self._settle(None, reason)
        if self._making is not None:
            self._making.give_up(GroupBroken(self._error, self._generation))
        if self._client is not None:
            self._client.interrupt()
        if self._group is None:
            self._ends.shut_down()
        else:
            self._group.interrupt(reason)

    def _settle(self, group: Group | None, error: str = "") -> None:
        """The first one to settle decides; a group that comes too late is closed."""
        with self._lock:
            if not self._settled.is_set():
                self._group, self._error = group, error
                self._settled.set()
                return
        if group is not None:
            group.close()

    def _run(self) -> None:
        be_prompt(children=True)  # gloo's own threads, too
        try:
            self._settle(self._meet())
            self._ends.keep_cached()  # nobody waits for this
        except (RuntimeError, OSError, GroupBroken) as error:
            self._settle(None, f"forming at {self._store}: {str(error).splitlines()[0]}")

    def _meet(self) -> Group:
        client = self._client = StoreClient(self._store, self._generation, self._timeout_s)
        with contextlib.closing(client):
            self._go_on()
            gloo = self._gloo_wires(client)
            nccl = self._nccl_wires(client) if self._nccl and self._each_has_its_own else None
        group = Group(self._generation, self._rank, self._size, self._device, gloo, nccl, self._ends)
        try:  # nobody is done before everybody is: a rank that closed at once would break those that still connect
            group.all_gather(torch.empty(self._size, 1), torch.zeros(1))
        except GroupBroken:
            group.close()
            raise
        return group

    def _go_on(self) -> None:
        """An interrupt may have come before there was a connection to end."""
        if self.done:
            raise GroupBroken(self._error, self._generation)

    def _gloo_wires(self, client: StoreClient) -> Any:
        with _one_device_at_a_time:
            before = _listening()
            device = dist.ProcessGroupGloo.create_device(hostname=self._host)
            mine = _listening() - before
        self._ends.near |= mine
        self._go_on()
        said = json.dumps([sorted(mine), _nccl.device_name(self._device)]).encode()
        return _gloo(Exchange(client, "gloo", self._size, said, self._learn), self._rank, self._size, device, self._operation_s)

    def _learn(self, said: bytes) -> None:
        """Where a rank listens: known before there is a connection that an interrupt has to end. And which device it has."""
        ends, name = json.loads(said)
        self._ends.far |= {(host, port) for host, port in ends} - self._ends.near
        self._devices[str(ends)] = name
        self._go_on()

    def _nccl_wires(self, client: StoreClient) -> Any:
        store = TorchStore(client, "nccl")
        self._making = _nccl.Making(store, self._rank, self._size, self._device, self._operation_s, f"fleet-nccl-{self._generation}")
        if self.done:  # who interrupted it did not see that yet
            self._making.give_up(GroupBroken(self._error, self._generation))
        return self._making.wait(self._timeout_s)

    @property
    def _each_has_its_own(self) -> bool:
        """Whether no two ranks share a device: all ranks find the same, as all were told by all."""
        return len(set(self._devices.values())) == self._size
