"""NCCL as a view uses it: a communicator that is made while the view forms, and left by abort. Not verified on several GPUs yet.

A communicator is never shrunk, nor mended: the next view has one of its own, on a new prefix of that view's store. Whoever waits for it
watches from outside: torch's own watchers are off, as they would end the process.
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
"""Of torch's watchers of NCCL none may end the process, or look into a store that is there for the forming only."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 2e-5, 5e-4
"""Between two looks at an operation: each pause is twice the one before, as what was not there soon takes a while."""


def wires(store: Any, rank: int, size: int, device: torch.device, timeout_s: float) -> Any:
    """A ``ProcessGroupNCCL`` with its communicator: by itself it would make that at its first operation, when ``store`` is gone.

    torch calls the methods of ``store`` as long as its Python object lives: keep it until this returns. Raises RuntimeError, and what the
    store does. It waits for all ranks, however long: an abort from another thread does not end that, with ``blocking = 0`` neither.
    """
    for name in OFF:
        os.environ.setdefault(name, "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    made = dist.ProcessGroupNCCL(store, rank, size, options)
    made.eager_connect_single_device(torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index))
    return made


class Making:
    """A communicator on its way; see :func:`wires`. Nothing calls a thread back from there once a rank does not come: so it is a thread of
    its own that goes, and one that neither who gives up nor the end of the process waits for."""

    def __init__(self, store: Any, rank: int, size: int, device: torch.device, timeout_s: float, name: str) -> None:
        self._asked = (store, rank, size, device, timeout_s)
        self._lock, self._reported, self._found = threading.Lock(), threading.Event(), list[Communicator | Exception]()
        threading.Thread(target=self._make, name=name, daemon=True).start()

    def wait(self, timeout_s: float) -> Communicator:
        """The communicator, once. Raises why it was given up, what went wrong, and TimeoutError."""
        if not self._reported.wait(timeout_s):
            self.give_up(TimeoutError(f"NCCL was not there within {timeout_s:g} s"))
        found = self._found.pop()
        try:
            if isinstance(found, Exception):
                raise found
            return found
        finally:
            del found  # a frame of its own trace that holds the error would keep what other frames hold: sockets

    def give_up(self, reason: Exception) -> None:
        """From any thread: the communicator is not wanted any more. One that is there already belongs to who waited for it."""
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
        """The first one decides."""
        with self._lock:
            if self._reported.is_set():
                return False
            self._found.append(found)
            self._reported.set()
            return True


class Communicator:
    """What a group asks of ``made``, a process group of torch: two kinds of operations, and an abort.

    Operations belong to one thread at a time; :meth:`abort` may come from any other. An operation is bounded by ``limit_s``.
    """

    def __init__(self, made: Any, device: torch.device, limit_s: float) -> None:
        self.made, self._device, self.limit_s = made, device, limit_s
        self.left = False

    def exchange(self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]) -> NcclOperation:
        """Begin to send and to receive ``(tensor, peer)`` pairs, as one: single ones could wait for each other."""
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
        """End what is under way. It takes a second, may fail, and may not come back: nothing of the communicator is used any more."""
        self.left = True
        try:
            self.made.abort()
        except RuntimeError as error:
            log.warning("a communicator of NCCL was not aborted: %s", error)


class NcclOperation:
    """One of a :class:`Communicator`, under way on a stream of its own."""

    def __init__(self, communicator: Communicator, work: Any) -> None:
        self._communicator, self._work = communicator, work

    def follow(self) -> None:
        """From now on the caller's stream waits for it, the caller does not: what is done there to its tensors comes after it, even when
        it is left and its kernels end late."""
        self._work.synchronize()

    def wait(self) -> bool:
        """Block until it is complete; False once the communicator is left. Raises RuntimeError when it fails, or takes too long.

        torch's own wait would abort what has failed, which takes a second and is for the group to do. A look may hang while that goes on,
        so it is for a thread that may be left behind.
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
    """What NCCL found when it was last looked at; empty when nothing."""
    try:
        error = work.exception()
    except TypeError:  # torch before 2.13 has no words for it in Python
        result = work.get_future_result()
        return f"NCCL failed, with torch's result {result.value()}" if result.done() and result.value() else ""
    return "" if error is None else first_line(error)


def first_line(error: object) -> str:
    """What torch says, without where in its code it was; that it says nothing may not become another error."""
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def device_name(device: torch.device) -> str:
    """Of a GPU, the same in every process that sees it; empty for the host."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
