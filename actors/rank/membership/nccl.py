"""NCCL for a view: ranks make a communicator while the view forms, and leave it by abort. Not verified on several GPUs yet.

A communicator is never shrunk or repaired: the next view has its own, on a new prefix of that view's store. The waiting thread has its own
time-outs. torch's watchers are off, as they would end the process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from actors.rank.tags import Tag

log = logging.getLogger("fleet.rank")

OFF = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT")
"""torch's watchers of NCCL. They may not end the process, or read the store, which exists only while the group forms."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 2e-5, 5e-4
"""Pauses between two checks of an operation: each is twice the one before, as an operation that does not end soon takes longer."""


def wires(store: Any, rank: int, size: int, device: torch.device, timeout_s: float) -> Any:
    """A ``ProcessGroupNCCL`` with its communicator. By itself it would make that at its first operation, after the end of ``store``.

    torch calls the methods of ``store`` as long as its Python object lives: keep it until this returns. Raises RuntimeError, and errors of
    the store. It waits for all ranks without limit. An abort from another thread does not end the wait, also with ``blocking = 0``.
    """
    for name in OFF:
        os.environ.setdefault(name, "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    made = dist.ProcessGroupNCCL(store, rank, size, options)
    made.eager_connect_single_device(torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index))
    return made


class Making:
    """A communicator that is being made; see :func:`wires`. If a rank does not come, the thread inside NCCL never returns.

    So it is a daemon thread of its own: neither the caller of :meth:`give_up` nor the end of the process waits for it.
    """

    def __init__(self, store: Any, rank: int, size: int, device: torch.device, timeout_s: float, name: str) -> None:
        self._asked = (store, rank, size, device, timeout_s)
        self._lock, self._reported, self._found = threading.Lock(), threading.Event(), list[Communicator | Exception]()
        threading.Thread(target=self._make, name=name, daemon=True).start()

    def wait(self, timeout_s: float) -> Communicator:
        """The communicator; call it once. Raises the reason of :meth:`give_up`, NCCL's or the store's error, or TimeoutError."""
        if not self._reported.wait(timeout_s):
            self.give_up(TimeoutError(f"NCCL was not there within {timeout_s:g} s"))
        found = self._found.pop()
        try:
            if isinstance(found, Exception):
                raise found
            return found
        finally:
            del found  # this frame, kept by the error's traceback, would keep the error, and so the sockets of other frames

    def give_up(self, reason: Exception) -> None:
        """The group no longer needs the communicator. If it is made already, the thread in :meth:`wait` owns it. From any thread."""
        self._report(reason)

    def _make(self) -> None:
        _, _, _, device, limit_s = self._asked
        try:
            made = Communicator(wires(*self._asked), device, limit_s)
        except (RuntimeError, OSError) as error:
            self._report(error)
            return
        if not self._report(made):
            made.abort()

    def _report(self, found: Communicator | Exception) -> bool:
        """Set the result. False: there is one already, as the first decides."""
        with self._lock:
            if self._reported.is_set():
                return False
            self._found.append(found)
            self._reported.set()
            return True


class Communicator:
    """The operations that a group needs of ``made``, a process group of torch: two kinds of exchange, and an abort.

    Operations belong to one thread at a time; :meth:`abort` may come from any other. An operation is bounded by ``limit_s``.
    """

    def __init__(self, made: Any, device: torch.device, limit_s: float) -> None:
        self.made, self._device, self.limit_s = made, device, limit_s
        self.left = False

    def exchange(self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]) -> NcclOperation:
        """Begin to send and to receive ``(tensor, peer)`` pairs as one operation: single ones could wait for each other."""
        self.made._start_coalescing()
        for tensor, peer in receives:
            self.made.recv([tensor], peer, Tag.PLAIN)
        for tensor, peer in sends:
            self.made.send([tensor], peer, Tag.PLAIN)
        return NcclOperation(self, self.made._end_coalescing())

    def all_reduce(self, tensor: torch.Tensor) -> NcclOperation:
        """Begin to sum ``tensor`` over ranks, in place."""
        return NcclOperation(self, self.made.allreduce([tensor]))

    def abort(self) -> None:
        """End all operations. It takes a second, may fail, and may never return. No operation of the communicator may follow."""
        self.left = True
        try:
            self.made.abort()
        except RuntimeError as error:
            log.warning("a communicator of NCCL was not aborted: %s", error)


class NcclOperation:
    """A running operation of a :class:`Communicator`, on a stream of its own."""

    def __init__(self, communicator: Communicator, work: Any) -> None:
        self._communicator, self._work = communicator, work

    def follow(self) -> None:
        """Let the caller's stream wait for the operation, without the caller.

        Later work of that stream on the tensors comes after the operation, even if it is left and its kernels end late.
        """
        self._work.synchronize()

    def wait(self) -> bool:
        """Block until the operation is complete; False once the communicator is left. Raises RuntimeError when it fails or takes too long.

        torch's own wait would abort a failed operation, which takes a second, and which the group does itself. A check may hang during an
        abort, so only a thread that may be left behind calls this.
        """
        limit_s = self._communicator.limit_s
        until_s, pause_s = time.monotonic() + limit_s, SHORTEST_PAUSE_S
        while not self._communicator.left and not self._work.is_completed():
            if time.monotonic() > until_s:
                raise RuntimeError(f"an operation of NCCL was not complete within {limit_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        if failure := failure_of(self._work):
            raise RuntimeError(failure)
        return not self._communicator.left


def failure_of(work: Any) -> str:
    """The error that NCCL reported at the last check; empty without one."""
    try:
        error = work.exception()
    except TypeError:  # torch before 2.13 has no text of it in Python
        result = work.get_future_result()
        return f"NCCL failed, with torch's result {result.value()}" if result.done() and result.value() else ""
    return "" if error is None else first_line(error)


def first_line(error: object) -> str:
    """The first line of torch's message, without the place in its code; for an empty message, the error's class."""
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def device_name(device: torch.device) -> str:
    """The UUID of a GPU, the same in each process that sees it; empty for the host."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
