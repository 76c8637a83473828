"""A process group that lives for one view: formed in milliseconds, broken from any thread, closed without leaks.

Ranks do not use ``torch.distributed``'s default group, which cannot be left once a peer has died. A :class:`Group` always has gloo for
tensors in host memory. On CUDA it also has NCCL where each rank has a GPU of its own: NCCL refuses two ranks on one. Where ranks share a
GPU, or one of them could not make its communicator, all stage through pinned host memory.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from actors.rank.membership import nccl as _nccl
from actors.rank.membership.connections import ConnectionEnds, listening
from actors.rank.membership.errands import Errands, Signal
from actors.rank.membership.nccl import first_line
from actors.rank.membership.store import GlooStore, StoreClient, StoreServer, TorchStore
from actors.rank.membership.tunnels import HOME, Tunnels, packed
from actors.rank.tags import Tag
from actors.rank.telemetry.usage import RECEIVED, SENT
from fleet.errors import GroupLost
from fleet.host import tls
from fleet.host.scheduling import be_prompt
from fleet.protocol.beside import RankRoom

__all__ = ["Forming", "Group", "GroupBroken", "Signal", "StoreServer", "Work", "warm_up"]

log = logging.getLogger("fleet.rank")

_one_device_at_a_time = threading.Lock()
Transfer = tuple[torch.Tensor, int]
MAKING_SHARE = 0.5
"""The share of the time for forming a group that a communicator may take. The rest is for the group without NCCL."""


class GroupBroken(GroupLost):
    """A group of real connections is broken, or could not be formed."""


class Interrupted(BaseException):
    """Work of one rank for all cannot continue in this view, and begins again in the next. ``except Exception`` does not catch it."""


def _gloo(store: Any, rank: int, size: int, device: Any, timeout_s: float) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's stub
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [device]
    return dist.ProcessGroupGloo(store, rank, size, options)


def warm_up() -> None:
    """Pay gloo's first-use cost (0.1 to 0.4 s a process) before the first view."""
    _gloo(dist.HashStore(), 0, 1, dist.ProcessGroupGloo.create_device(hostname=HOME), 30.0)


class Work:
    """Running operations. Keep the tensors as they are, and this object, until :meth:`wait` returns.

    When a connection ends, gloo loses some running operations: sends that the peer has just asked for, and receives that are partly here.
    They are in no list of gloo's then, and no event, not even an interrupt, wakes the threads that wait for them. Seen: the connections of
    400 sends were ended just after the peer had asked for them, and 35 were lost. Of three receives of 256 MB whose sender was killed
    meanwhile, two were lost. So the loop does not wait in gloo: another thread does, which returns after the time-out. See
    :meth:`Group.watched` and :meth:`Group.in_background`.
    """

    __slots__ = ("_after", "_before", "_group", "_receives", "_sends")

    def __init__(
        self,
        group: Group,
        receives: Sequence[Any],
        sends: Sequence[Any] = (),
        after: Callable[[], None] | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        self._group, self._receives, self._sends = group, receives, sends
        self._before, self._after = before, after  # the wait, in the caller's thread, as each thread has its own streams

    def arrived(self) -> None:
        """Block until all receives are complete. Raises GroupBroken when a peer is lost, on time-out, and on ``Group.interrupt``."""
        self._approach()
        self._group.watched(self._receives)()
        self._land()

    def wait(self) -> None:
        """Block until all are complete; raises as :meth:`arrived` does."""
        self._group.complete([self])

    def _approach(self) -> None:
        """Call ``before`` in the caller's thread, before the wait."""
        if self._before is not None:
            self._before()

    def _land(self) -> None:
        """Call ``after`` in the caller's thread, once the operations are complete."""
        if self._after is not None:
            self._after()


class Group:
    """Point-to-point and collective operations among the ``size`` ranks of one view; thread-safe only as far as stated.

    Operations belong to one thread at a time; :meth:`interrupt` may be called from any thread. A group of size 1 uses no network.
    """

    def __init__(
        self,
        generation: int,
        rank: int,
        size: int,
        device: torch.device,
        gloo: Any = None,
        ends: ConnectionEnds | None = None,
    ) -> None:
        self.generation, self.rank, self.size, self.device = generation, rank, size, device
        self.sites: tuple[str, ...] = ("",) * size
        self.rooms: tuple[RankRoom, ...] = (RankRoom("", math.inf),) * size
        self._gloo, self._aborts = gloo, list[Callable[[], None]]()
        self._nccl: Any = None
        self._ends = ends
        self._stop = ""
        self._waits: set[Signal] = set()
        self._errands = Errands(f"fleet-group-{generation}")
        self._turn = threading.Lock()  # held by the background thread, except while it waits
        self._detached_thread, self._summed = 0, False  # the background thread; whether gloo itself has added
        self._gathered: Work | None = None

    def carry_by(self, nccl: Any) -> None:
        """Let ``nccl``, a :class:`nccl.Communicator`, carry tensors on the group's device. Call it before the first operation with such
        tensors."""
        self._nccl = nccl
        self._aborts.append(nccl.abort)

    @property
    def peers(self) -> list[int]:
        """All other ranks, beginning with the next rank number, so that not all ranks begin with the same peer."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def broken(self, reason: str) -> GroupBroken:
        """The error to raise: with the reason of the interrupt if there was one, else with ``reason``."""
        return GroupBroken(self._stop or reason, self.generation)

    def _wires(self, tensor: torch.Tensor) -> tuple[Any, Any]:
        """(gloo, NCCL): the library that carries ``tensor``, and None for the other. Called once an operation, as the group may be
        closed."""
        gloo, nccl = self._gloo, self._nccl
        self._go_on()
        return (None, nccl) if nccl is not None and tensor.device.type == self.device.type else (gloo, None)

    @property
    def receives_ahead(self) -> bool:
        """True when a receive may start before the sends that lead to it. NCCL would block the stream for it."""
        return self._nccl is None

    def _staged(self, tensor: torch.Tensor) -> bool:
        """Whether gloo has to carry ``tensor`` and cannot reach its memory."""
        return tensor.is_cuda

    def start(self, sends: Sequence[Transfer], receives: Sequence[Transfer], tag: int = Tag.PLAIN) -> Work:
        """Begin to send and to receive ``(tensor, peer)`` pairs; the n-th send to a peer under ``tag`` meets its n-th receive from here.

        Tensors are contiguous and may be views. All of one call are on the same device. Empty ones do not travel. Each receive takes the
        next message under its tag. So a receive that is asked for long before its message needs a tag of its own.
        """
        sends = [(tensor, peer) for tensor, peer in sends if tensor.numel()]
        receives = [(tensor, peer) for tensor, peer in receives if tensor.numel()]
        if not sends and not receives:
            return Work(self, ())
        SENT.count(sum(each.nbytes for each, _ in sends))
        RECEIVED.count(sum(each.nbytes for each, _ in receives))
        tensor = (sends or receives)[0][0]
        gloo, nccl = self._wires(tensor)
        try:
            if nccl is not None:
                return self._watching(nccl.exchange(sends, receives))
            if self._staged(tensor):
                return self._start_staged(gloo, sends, receives, tag)
            incoming = [gloo.recv([t], peer, tag) for t, peer in receives]
            outgoing = [gloo.send([t], peer, tag) for t, peer in sends]
        except RuntimeError as error:
            raise self.broken(first_line(error)) from error
        return Work(self, incoming, outgoing)

    def _watching(self, operation: _nccl.NcclOperation) -> Work:
        return Work(self, [operation], before=operation.follow)

    def _complete(self, works: Sequence[Any]) -> None:
        """Block until gloo or NCCL reports that ``works`` are complete."""
        self._go_on()
        try:
            for work in works:
                if not work.wait():
                    raise self.broken("an operation was aborted")
        except RuntimeError as error:
            raise self.broken(first_line(error)) from error

    def complete(self, works: Sequence[Work]) -> None:
        """Block until all sends and receives of ``works`` are complete; raises as :meth:`Work.arrived` does."""
        for work in works:
            work._approach()
        self.watched([operation for work in works for operation in (*work._receives, *work._sends)])()
        for work in works:
            work._land()

    def sending(self, works: Sequence[Work]) -> Callable[[], None]:
        """A function that blocks until all sends of ``works`` are complete. Called before the wait for receives, it costs no time."""
        return self.watched([send for work in works for send in work._sends])

    def watched(self, operations: Sequence[Any]) -> Callable[[], None]:
        """A function that blocks until all ``operations`` are complete. It raises as :meth:`Work.arrived` does.

        Another thread waits for them from now on. So an interrupt ends the caller's wait, while that thread returns at the latest after the
        time-out. Within :meth:`in_background` the current thread waits.
        """
        if not operations:
            return _nothing
        if self._detached_thread == threading.get_ident():
            return functools.partial(self._await, operations)
        return self._errand(functools.partial(self._complete, operations))

    def in_background(self, call: Callable[[], None]) -> None:
        """Run ``call`` in one other thread, with all its waits: to hand over each wait costs more. Raises its errors.

        An interrupt leaves that thread behind in gloo. This method then raises GroupBroken, once ``call`` changes no memory any more.
        """
        if not self.works_in_background:
            call()  # a group of one has no waits; and each thread has its own streams and workers of OpenMP
            return
        self.begin_in_background(call)()

    @property
    def works_in_background(self) -> bool:
        """Whether there is another thread for :meth:`in_background`."""
        return self.size > 1 and self.device.type == "cpu" and torch.get_num_threads() == 1

    def begin_in_background(self, call: Callable[[], None]) -> Callable[[], None]:
        """Begin :meth:`in_background`; returns a function that waits for its end. One at a time, and only if the group
        :attr:`works_in_background`."""

        def run() -> None:
            self._detached_thread = threading.get_ident()
            try:
                with self._turn:
                    self._go_on()
                    call()
            finally:
                self._detached_thread = 0

        ended = self._errand(run)

        def wait() -> None:
            try:
                ended()
            finally:
                self.quiet()  # an interrupt may have come while it ran

        return wait

    def quiet(self) -> None:
        """Wait until the background thread of an interrupted group changes no memory any more."""
        with self._turn:
            pass

    def rest(self, until: Signal) -> None:
        """Within :meth:`in_background`: wait for a signal of another thread of this process. Raises GroupBroken on ``interrupt``."""
        self._waits.add(until)
        self._turn.release()
        try:
            if not self._stop:
                until.get()
        finally:
            self._turn.acquire()
            self._waits.discard(until)
        self._go_on()

    def _go_on(self) -> None:
        if self._stop:
            raise self.broken(self._stop)

    def _await(self, operations: Sequence[Any]) -> None:
        """Within :meth:`in_background`: wait for ``operations``. Raises GroupBroken after an interrupt."""
        self._turn.release()
        try:
            self._complete(operations)
        finally:
            self._turn.acquire()
        self._go_on()

    def _errand(self, errand: Callable[[], None]) -> Callable[[], None]:
        """Run ``errand`` in another thread. Gives a function that blocks until its end or an interrupt, and raises its errors."""
        settled = Signal()

        def run() -> BaseException | None:
            try:
                errand()
            except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
                return error
            return None

        def wait() -> None:
            self._waits.add(settled)
            failure = None if self._stop else settled.get()
            self._waits.discard(settled)
            try:
                self._go_on()
                if failure is not None:
                    raise failure
            finally:
                del failure

        self._errands.run(run, settled)
        return wait

    def _start_staged(self, wires: Any, sends: Sequence[Transfer], receives: Sequence[Transfer], tag: int) -> Work:
        """Send and receive through host memory, pinned when there is a GPU; torch's host allocator keeps pinned blocks for the next
        call."""
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

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int = Tag.PLAIN) -> None:
        """``out[r]`` becomes rank r's ``inp``: ``out`` has one more dimension, of length ``size``, in front. For small tensors.

        Do not change ``inp`` before the next call returns: its messages show that all ranks have received this one's.
        """
        out[self.rank].copy_(inp)
        work = self.start([(inp, peer) for peer in self.peers], [(out[peer], peer) for peer in self.peers], tag)
        work.arrived()
        self._gathered = work

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over ranks, in place, in the library's own order: its bits depend on the world size."""
        gloo, nccl = self._wires(tensor)
        if self.size == 1 and nccl is None:
            return
        self._summed = self._summed or nccl is None
        for counted in (SENT, RECEIVED):
            counted.count(2 * (self.size - 1) * tensor.nbytes // self.size)  # by a ring
        try:
            host = _host_like(tensor).copy_(tensor) if nccl is None and self._staged(tensor) else tensor
            work = Work(self, [gloo.allreduce([host])]) if nccl is None else self._watching(nccl.all_reduce(tensor))
        except RuntimeError as error:
            raise self.broken(first_line(error)) from error
        work.wait()
        if host is not tensor:
            tensor.copy_(host)

    def interrupt(self, reason: str = "interrupted") -> None:
        """Make each running and later operation of this rank raise GroupBroken at once. From any thread. Neighbours' connections
        to this rank end."""
        self._stop = self._stop or reason
        for settled in list(self._waits):
            settled.put(None)
        if self._ends is not None:
            self._ends.shut_down()
        with contextlib.suppress(IndexError):
            self._errands.run(self._aborts.pop(), Signal())  # once, as two at a time deadlock; NCCL takes a second for it

    def close(self) -> None:
        """Leave the group and free its sockets and threads. A running operation raises GroupBroken."""
        self.interrupt("closed")
        last = [self._gloo]
        self._gloo = self._nccl = self._ends = self._gathered = None
        if self._summed:  # gloo's object waits for its own sums, and one of some 20 that lost a member ends only at the time-out
            self._errands.run(last.clear, Signal())
        self._errands.close()


def _replaced(text: bytes, old: bytes, new: bytes) -> bytes:
    """``text`` with another address. Raises RuntimeError where it is not there once: gloo has changed how it tells it."""
    if text.count(old) != 1:
        raise RuntimeError(f"the address of gloo stands in its own word {text.count(old)} times: no tunnel can take its place")
    return text.replace(old, new)


def _nothing() -> None:
    """There is nothing to wait for."""


def _host_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available(), device="cpu")


class Forming:
    """A group being formed, in a thread of its own, so that the rank can give it up at any moment: also beside running steps.

    The ranks of ``generation`` meet at ``store`` (``host:port``); ``host`` is the address of this rank's node, where peers connect to it.
    ``operation_s`` bounds each operation of the group once it is formed; ``timeout_s`` when it is None. ``site`` names the host and domains
    that this rank shares with its neighbours (``fleet.protocol.domains.site_of``). ``cores``: how many its process may use. All ranks learn
    both. ``part`` names a group of some of the view's ranks. A thread that was given up ends within ``timeout_s``. It is no daemon, as the
    interpreter cannot end safely while a thread is inside gloo.
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
        operation_s: float | None = None,
        site: str = "",
        cores: float = math.inf,
        part: str = "",
    ) -> None:
        self._store, self._device, self._part = store, device, part
        self._sites = [site] * size
        self._room, self._rooms = RankRoom(host, cores), [RankRoom("", math.inf)] * size
        self._generation, self._rank, self._size, self._timeout_s = generation, rank, size, timeout_s
        self._operation_s, self._error = operation_s or timeout_s, ""
        self._lock, self._settled = threading.Lock(), threading.Event()
        self._group: Group | None = None
        self._ends = ConnectionEnds()
        self._devices: dict[int, str] = {}  # by rank
        self._tunnels: Tunnels | None = None
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
        """The first call decides; a group that comes later is closed."""
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
            self._ends.keep_cached()  # no thread waits for this
        except (RuntimeError, OSError, GroupBroken) as error:
            self._settle(None, f"forming at {self._store}: {first_line(error)}")

    def _meet(self) -> Group:
        client = self._client = StoreClient(self._store, self._generation, self._timeout_s)
        with contextlib.closing(client), contextlib.ExitStack() as formed:
            if tls.held():
                tunnels = Tunnels(self._room.host, self._rank, self._timeout_s, self.interrupt)
                self._tunnels = formed.enter_context(contextlib.closing(tunnels))
            self._go_on()
            group = Group(self._generation, self._rank, self._size, self._device, self._gloo_wires(client), ends=self._ends)
            group.sites, group.rooms = tuple(self._sites), tuple(self._rooms)
            try:  # all ranks end together: one that closed earlier would break those that still connect
                if self._each_has_its_own:
                    self._agree(group, client)
                else:
                    said = torch.zeros(1, dtype=torch.float32, device="cpu")
                    group.all_gather(said.new_empty(self._size, 1), said)
            except GroupBroken:
                group.close()
                raise
        return group

    def _go_on(self) -> None:
        """Raise GroupBroken if an interrupt came before there was a connection to end."""
        if self.done:
            raise GroupBroken(self._error, self._generation)

    def _gloo_wires(self, client: StoreClient) -> Any:
        with _one_device_at_a_time:
            before = listening()
            device = dist.ProcessGroupGloo.create_device(hostname=self._room.host if self._tunnels is None else HOME)
            mine = {each for each in listening() - before if self._tunnels is None or each[0] == HOME}
        self._ends.near |= mine
        port = 0
        if self._tunnels is not None:
            self._tunnels.lead_to(*mine)
            port = self._tunnels.port
        self._go_on()
        said = json.dumps([sorted(mine), port, _nccl.device_name(self._device), self._rank, self._sites[self._rank], *self._room]).encode()
        store = GlooStore(client, f"gloo{self._part}", self._size, said, self._learn)
        return _gloo(store, self._rank, self._size, device, self._operation_s)

    def _learn(self, said: bytes, address: bytes) -> bytes:
        """Keep a rank's addresses, device, site, host and cores. The addresses are needed before the first connection, for an interrupt.

        ``address`` is the word of that rank's gloo. Returns the word for this rank's gloo, which tunnels may change.
        """
        ends, port, name, rank, site, host, cores = json.loads(said)
        self._sites[rank], self._rooms[rank], self._devices[rank] = site, RankRoom(host, cores), name
        self._go_on()
        if (self._tunnels is None) != (port == 0):
            raise GroupBroken(f"of this rank and the one at {host} only one encrypts", self._generation)
        if self._tunnels is not None and host != self._room.host:
            stand_in = self._tunnels.stand_in(rank, (host, port))
            self._ends.far.add(stand_in)
            return _replaced(address, packed(tuple(ends[0])), packed(stand_in))
        self._ends.far |= {(host, port) for host, port in ends} - self._ends.near
        return address

    @property
    def _each_has_its_own(self) -> bool:
        """Whether each rank has a device for NCCL, and no two ranks the same: all ranks decide alike, as all know all devices."""
        names = set(self._devices.values())
        return len(names) == self._size and "" not in names

    def _agree(self, group: Group, client: StoreClient) -> None:
        """Use NCCL for tensors on the devices if each rank has made its communicator, else gloo. All ranks decide alike."""
        making = self._begin_making(client)
        has = dict[int, bool]()
        received = group._errand(functools.partial(self._receive, group, making, has))
        mine, why = None, ""
        try:
            mine = making.wait(self._timeout_s * MAKING_SHARE)
        except (RuntimeError, OSError) as error:
            why = first_line(error)
        self._go_on()
        said = torch.tensor([float(mine is not None)], dtype=torch.float32, device="cpu")
        sent = group.start([(said, peer) for peer in group.peers], [])
        received()
        sent.wait()
        if mine is not None and all(has.values()):
            group.carry_by(mine)
            return
        if mine is not None:
            group._errands.run(mine.abort, Signal())
        log.warning("generation %d exchanges by gloo: NCCL is not there: %s", self._generation, why or "not on all ranks")

    def _receive(self, group: Group, making: _nccl.Making, has: dict[int, bool]) -> None:
        """Receive from each peer whether it has a communicator, in a thread of its own.

        NCCL would wait for a peer that has none, so a rank that still makes its own gives up then. Each rank asks the next rank first, so a
        waiting rank learns it from one that no longer waits.
        """
        said = torch.zeros(1, dtype=torch.float32, device="cpu")
        try:
            for peer in group.peers:
                group._complete([group._gloo.recv([said], peer, Tag.PLAIN)])
                has[peer] = bool(said)
                if not said:
                    making.give_up(RuntimeError(f"rank {peer} has no communicator"))
        except (RuntimeError, GroupBroken) as error:  # gloo refuses to receive at all, or the receive fails
            lost = f"rank {peer} was lost: {first_line(error)}"
            making.give_up(GroupBroken(lost, group.generation))
            raise GroupBroken(lost, group.generation) from error

    def _begin_making(self, client: StoreClient) -> _nccl.Making:
        store, name = TorchStore(client, f"nccl{self._part}"), f"fleet-nccl-{self._generation}{self._part}"
        self._making = making = _nccl.Making(store, self._rank, self._size, self._device, self._operation_s, name)
        if self.done:  # the interrupt came before ``_making`` was set
            making.give_up(GroupBroken(self._error, self._generation))
        return making
