"""NCCL as a view uses it: a communicator that is made while the view forms, and left by abort. Not verified on several GPUs yet.

A communicator is never shrunk, nor mended: the next view has one of its own, on a new prefix of that view's store.
"""

from __future__ import annotations

import logging
import os
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

log = logging.getLogger("fleet.rank")

OFF = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT")
"""Of torch's watchers of NCCL none may end the process, or look into a store that is there for the forming only."""


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
        self._lock, self._told, self._found = threading.Lock(), threading.Event(), list[Any]()
        threading.Thread(target=self._make, name=name, daemon=True).start()

    def wait(self, timeout_s: float) -> Any:
        """The communicator. Raises why it was given up, what went wrong, and TimeoutError."""
        if not self._told.wait(timeout_s):
            self.give_up(TimeoutError(f"NCCL was not there within {timeout_s:g} s"))
        found = self._found[0]
        if isinstance(found, Exception):
            raise found
        return found

    def give_up(self, reason: Exception) -> None:
        """From any thread: the communicator is not wanted any more. One that is there already belongs to who waited for it."""
        self._tell(reason)

    def _make(self) -> None:
        try:
            made = wires(*self._asked)
        except (RuntimeError, OSError) as error:
            self._tell(error)
            return
        if not self._tell(made):
            abort(made)

    def _tell(self, found: Any) -> bool:
        """The first one decides."""
        with self._lock:
            if self._told.is_set():
                return False
            self._found.append(found)
            self._told.set()
            return True


def abort(made: Any) -> None:
    """End what is under way. It takes a second, may fail, and may not come back: nothing of that communicator is used any more."""
    try:
        made.abort()
    except RuntimeError as error:
        log.warning("a communicator of NCCL was not aborted: %s", error)


def device_name(device: torch.device) -> str:
    """Of a GPU, the same in every process that sees it; empty for the host."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
