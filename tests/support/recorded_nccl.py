"""NCCL that is not there: a communicator of host memory that exchanges between threads, and fails as NCCL was seen to fail.

:data:`RECORDINGS` says what each does and where that is known from. :class:`Stage` is the communicators of one view; on it a test says when
the failure strikes, and when what comes late comes.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

LIMIT_S = 60.0
COMM_ERROR = 2
"""Of torch's ``WorkResult``."""
PAUSE_S, LATE_LOOKS = 0.001, 3
"""So often one looks at an operation before it has failed."""
H200 = "benchmarks.device on one H200, torch 2.11, NCCL 2.28.9: "


@dataclass(frozen=True)
class Recording:
    """What NCCL does when it makes a communicator, in an operation once the failure has struck, and when it is to abort."""

    name: str
    source: str
    making: Literal["made", "refused", "refused on one", "never back"] = "made"
    operation: Literal["hangs", "hangs in a look", "fails"] = "hangs"
    abort: Literal["back", "late", "fails"] = "back"
    says: str = ""
    words: bool = True
    """Whether torch can say it in Python."""


RECORDINGS = (
    Recording("works, and hangs without a peer", H200 + "a rank whose peer never came was not back 6 s after its abort; made in 23 ms"),
    Recording("aborts slowly", H200 + "an abort took 0.98 to 1.0 s, idle or busy, and no new one waited for it", abort="late"),
    Recording(
        "hangs in a look",
        "torch's code: whoever looks at an operation takes a lock that an abort holds until it is back",
        operation="hangs in a look",
        abort="late",
    ),
    Recording(
        "refuses to abort",
        "torch's abort raises what NCCL answers to it, an error of CUDA on that device, too",
        abort="fails",
        says="NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    ),
    Recording(
        "fails late",
        "NCCL's manual, of ncclCommGetAsyncError: that a peer has ended may show as ncclRemoteError, and later",
        operation="fails",
        says="NCCL error: remote process exited or there was a network error\nncclRemoteError: A call failed",
    ),
    Recording(
        "fails late and says nothing", "not seen of NCCL; torch passes on what an error says, and may say nothing", operation="fails"
    ),
    Recording(
        "fails late, as a number",
        "torch 2.11: Work.exception() raises TypeError, found or not; its result is 0, or 2 for an error of the communicator",
        operation="fails",
        words=False,
    ),
    Recording(
        "fails late, then aborts slowly",
        H200 + "an abort takes a second whatever goes before it",
        operation="fails",
        abort="late",
        says="NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
    ),
    Recording(
        "is refused",
        "NCCL with two ranks on one GPU; tests.contract.communicators has it refuse again where there is a GPU",
        making="refused",
        says="NCCL error: invalid usage\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA device 1b000",
    ),
    Recording(
        "is refused on one rank",
        H200 + "who makes one with a rank that never comes is not back; here that rank was refused",
        making="refused on one",
        says="NCCL error: internal error - please report this issue to the NCCL developers",
    ),
    Recording("cannot be made", H200 + "neither an abort nor blocking = 0 ended a making within 6 s", making="never back"),
)


class _Fabric:
    """What the ranks of one communicator exchange by: messages in order for each pair, and sums in order."""

    def __init__(self, size: int) -> None:
        self.size, self.lock = size, threading.Lock()
        self.mail = defaultdict[tuple[int, int], deque[torch.Tensor]](deque)
        self.summands = defaultdict[int, dict[int, torch.Tensor]](dict)


_fabrics: dict[str, _Fabric] = {}
_numbers = itertools.count()


class Stage:
    """The communicators of one view, and when they do what is recorded."""

    def __init__(self, recording: Recording) -> None:
        self.recording, self.made = recording, list[RecordedNccl]()
        self.injected, self.released = threading.Event(), threading.Event()

    def wires(self, store: Any, rank: int, size: int, *_: Any) -> RecordedNccl:
        """In place of ``nccl.wires``: ranks meet at ``store``."""
        making = self.recording.making
        if making == "refused" or (making == "refused on one" and rank == size - 1):
            raise RuntimeError(self.recording.says)
        if making != "made":
            self.released.wait(LIMIT_S)
            return self._made(RecordedNccl(self, rank, _Fabric(size)))
        if rank == 0:
            number = str(next(_numbers))
            _fabrics[number] = _Fabric(size)
            store.set("fabric", number)
        store.set(f"there/{rank}", "yes")
        store.wait([f"there/{each}" for each in range(size)])
        return self._made(RecordedNccl(self, rank, _fabrics[store.get("fabric").decode()]))

    def free(self) -> None:
        """What comes late comes now: makings, aborts, and the kernels of what was left."""
        self.released.set()
        for nccl in self.made:
            for work in nccl.works if nccl.aborts else ():
                work.ends_late()

    def _made(self, made: RecordedNccl) -> RecordedNccl:
        self.made.append(made)
        return made


class RecordedNccl:
    """What is used of torch's ``ProcessGroupNCCL``, of one rank."""

    def __init__(self, stage: Stage, rank: int, fabric: _Fabric) -> None:
        self.stage, self.rank, self.fabric = stage, rank, fabric
        self.aborts, self.looks_after_abort, self.left = 0, 0, False
        self.works = list[RecordedWork]()
        self._sums = itertools.count()
        self._coalesced: list[tuple[torch.Tensor, int]] | None = None

    def _start_coalescing(self) -> None:
        assert self._coalesced is None
        self._coalesced = []

    def recv(self, tensors: list[torch.Tensor], source: int, _: int) -> None:
        assert self._coalesced is not None, "single ones could wait for each other"
        self._coalesced.append((tensors[0], source))

    def send(self, tensors: list[torch.Tensor], to: int, _: int) -> None:
        assert self._coalesced is not None, "single ones could wait for each other"
        with self.fabric.lock:
            self.fabric.mail[self.rank, to].append(tensors[0].clone())

    def _end_coalescing(self) -> RecordedWork:
        assert self._coalesced is not None
        pending, self._coalesced = self._coalesced, None

        def arrives() -> bool:
            while pending and (mail := self.fabric.mail[pending[0][1], self.rank]):
                pending.pop(0)[0].copy_(mail.popleft())
            return not pending

        return RecordedWork(self, arrives, [tensor for tensor, _ in pending])

    def allreduce(self, tensors: list[torch.Tensor]) -> RecordedWork:
        summands = self.fabric.summands[next(self._sums)]
        with self.fabric.lock:
            summands[self.rank] = tensors[0].clone()

        def is_there() -> bool:
            if len(summands) == self.fabric.size:
                tensors[0].copy_(torch.stack([summands[rank] for rank in range(self.fabric.size)]).sum(0))
            return len(summands) == self.fabric.size

        return RecordedWork(self, is_there, tensors)

    def abort(self) -> None:
        self.aborts += 1
        if self.stage.recording.abort == "fails":
            raise RuntimeError(self.stage.recording.says)
        if self.stage.recording.abort == "late":
            self.stage.released.wait(LIMIT_S)
        self.left = True


class RecordedWork:
    """What is used of torch's ``Work``."""

    def __init__(self, nccl: RecordedNccl, moves: Callable[[], bool], into: list[torch.Tensor]) -> None:
        self._nccl, self._moves, self._into, self._looks = nccl, moves, into, 0
        self._done, self._failed = False, False
        nccl.works.append(self)

    def synchronize(self) -> None:
        """The caller's stream waits: here there is none."""

    def get_future_result(self) -> torch.futures.Future[int]:
        result = torch.futures.Future[int]()
        if self._done:
            result.set_result(COMM_ERROR if self._failed else 0)
        return result

    def exception(self) -> RuntimeError | None:
        if not self._nccl.stage.recording.words:
            raise TypeError("Unable to convert function return value to a Python type!")
        return RuntimeError(self._nccl.stage.recording.says) if self._failed else None

    def is_completed(self) -> bool:
        stage, nccl = self._nccl.stage, self._nccl
        nccl.looks_after_abort += bool(nccl.aborts)
        if self._done:
            return True
        if not stage.injected.is_set():
            self._done = self._moved()
            while stage.recording.operation == "hangs in a look" and not (self._done or stage.released.wait(PAUSE_S)):
                self._done = self._moved()
        elif stage.recording.operation == "fails":
            self._looks += 1
            self._done = self._failed = self._looks > LATE_LOOKS
        return self._done

    def _moved(self) -> bool:
        with self._nccl.fabric.lock:
            return self._moves()

    def ends_late(self) -> None:
        """Its kernels end, long after it was left, and what they write is wrong."""
        for tensor in () if self._done else self._into:
            tensor.fill_(float("nan"))
