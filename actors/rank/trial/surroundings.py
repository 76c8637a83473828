"""A script's questions about its process, the time and its machine: the trial notes them, and gives other answers on request.

Functions are replaced in their Python modules before the script is loaded, and restored afterwards. Questions of libraries are not noted.
"""

from __future__ import annotations

import datetime
import functools
import os
import platform
import random
import socket
import sys
import sysconfig
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from actors.rank.data.sampling import generators_kept
from actors.rank.trial.recording import Book
from fleet.host.packages import PACKAGES
from fleet.ledger.sameness import CLOCK, KERNELS, MACHINE, MEMORY, ONE_THREAD, RANK, SEEDED, Call, TrialRequest

ROOT = Path(__file__).parents[3]
OURS = tuple(f"{ROOT / name}{os.sep}" for name in PACKAGES)
STANDARD = (sysconfig.get_path("stdlib"), "<frozen")
LATER_S, FASTER = 86_400.0 + 3_601.0, 7.0
"""Seconds to another day, hour, minute and second; and the factor by which clocks of durations run faster."""
CORES, HOST = 61, "another-host"
SCRAMBLED = 5_000
"""So many objects of each size are made, and some freed, to shuffle the free places."""
EMPTIES = frozenset({torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided})
DIRECTLY = frozenset({"clock"})
"""Kinds for which only the script gets other answers: libraries use these clocks for waits."""


class Surroundings:
    """Replaces the functions that answer such questions, in one trial.

    Args:
        calls: the list for the script's calls.
    """

    def __init__(self, asked: TrialRequest, book: Book, calls: list[Call]) -> None:
        self._asked, self._book, self._calls = asked, book, calls
        self.set_threads = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Context in which all replacements are in place."""
        with ExitStack() as stack:
            stack.enter_context(generators_kept())
            for owner, name, kind, answer in self._replaced():
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, self._noting(owner, name, kind, answer)))
            stack.enter_context(self._threads())
            stack.enter_context(self._environment())
            self._classes(stack)
            if not self._asked.timed:
                stack.enter_context(Filled(float("nan") if MEMORY in self._asked.varied else 0.0))
            if MEMORY in self._asked.varied:
                scramble()
            if self._asked.form == KERNELS:
                stack.enter_context(_deterministic())
            yield

    def adopt(self, names: dict[str, Any]) -> None:
        """Replace ``datetime`` in ``names`` of the script's module, once it is loaded, so that it gives another time, too.

        Libraries keep the original: those in C check its size.
        """
        note, shift = self._note, datetime.timedelta(seconds=LATER_S if CLOCK in self._asked.varied else 0)

        class DateTime(datetime.datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Any:
                note("datetime.now()", "clock")
                return super().now(tz) + shift

        for name, value in list(names.items()):
            if value is datetime.datetime:
                names[name] = DateTime
            elif value is datetime:
                names[name] = SimpleNamespace(**{**vars(datetime), "datetime": DateTime})

    def _note(self, what: str, kind: str) -> bool:
        """Note the call ``what`` if the script makes it. True: the script made it directly, not through a library."""
        frame, direct = sys._getframe(2), True
        while frame is not None and frame.f_code.co_filename.startswith(STANDARD) and not _installed(frame.f_code.co_filename):
            frame, direct = frame.f_back, False  # type: ignore[assignment]
        if frame is None or _installed(frame.f_code.co_filename) or frame.f_code.co_filename.startswith((*OURS, "<")):
            return False
        call = Call(what, kind, f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}", self._book.within)
        if len(self._calls) < 1_000 and call not in self._calls[-20:]:
            self._calls.append(call)
        return direct

    def _noting(self, owner: Any, name: str, kind: str, answer: Callable[..., Any] | None) -> Any:
        right = getattr(owner, name)
        what = f"{owner.__name__}.{name}()"

        @functools.wraps(right)
        def asked(*args: Any, **kwargs: Any) -> Any:
            direct = self._note(what, kind)
            if answer is None or (kind in DIRECTLY and not direct):
                return right(*args, **kwargs)
            return answer(right, *args, **kwargs)

        return asked

    def _replaced(self) -> list[tuple[Any, str, str, Callable[..., Any] | None]]:
        """(owner, name, kind, replacement) of each function. The replacement gets the original and its arguments; None: the answer
        stays."""
        varied, seeded, one = self._asked.varied, self._asked.form == SEEDED, self._asked.form == ONE_THREAD
        clock, machine = CLOCK in varied, MACHINE in varied
        later, faster = (lambda right: right() + LATER_S), (lambda right: FASTER * right())
        found: list[tuple[Any, str, str, Callable[..., Any] | None]] = [
            (time, "time", "clock", later if clock else None),
            (time, "time_ns", "clock", (lambda right: right() + int(LATER_S * 1e9)) if clock else None),
            *((time, name, "clock", faster if clock else None) for name in ("perf_counter", "monotonic", "process_time")),
            *(
                (time, f"{name}_ns", "clock", (lambda right: int(FASTER) * right()) if clock else None)
                for name in ("perf_counter", "monotonic")
            ),
            (os, "urandom", "chance", (lambda right, size: random.randbytes(size)) if seeded else None),
            (uuid, "uuid4", "chance", (lambda right: uuid.UUID(int=random.getrandbits(128), version=4)) if seeded else None),
            (np.random, "default_rng", "chance", _seeded_rng if seeded else None),
            (torch, "seed", "chance", (lambda right: torch.manual_seed(random.getrandbits(32)).initial_seed()) if seeded else None),
            (os, "getpid", "process", None),
            (os, "listdir", "machine", (lambda right, *a: right(*a)[::-1]) if machine else None),
            (os, "scandir", "machine", (lambda right, *a: Backwards(right(*a))) if machine else None),
            (socket, "gethostname", "machine", (lambda right: HOST) if machine else None),
            (platform, "node", "machine", (lambda right: HOST) if machine else None),
        ]
        cores = 1 if one else CORES if machine else 0
        found += [(os, name, "machine", (lambda right: cores) if cores else None) for name in ("cpu_count", "process_cpu_count")]
        affinity = lambda right, pid: set(range(cores))  # noqa: E731
        return [*found, (os, "sched_getaffinity", "machine", affinity if cores else None)]

    @contextmanager
    def _threads(self) -> Iterator[None]:
        right = torch.set_num_threads

        def set_num_threads(count: int) -> None:
            if self._note("torch.set_num_threads()", "threads"):
                self.set_threads = True
            if self._asked.form != ONE_THREAD:
                right(min(count, 8))  # the machine may have fewer cores than the trial pretends

        before = torch.get_num_threads()
        with mock.patch.object(torch, "set_num_threads", set_num_threads):
            try:
                yield
            finally:
                right(before)

    @contextmanager
    def _environment(self) -> Iterator[None]:
        rank = "1" if RANK in self._asked.varied else "0"
        with mock.patch.dict(os.environ, {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2" if rank == "1" else "1"}):
            yield

    def _classes(self, stack: ExitStack) -> None:
        """Replace classes whose objects depend on chance or time when they are made without a seed."""
        note, seeded = self._note, self._asked.form == SEEDED

        class Random(random.Random):
            def __init__(self, x: Any = None) -> None:
                if x is None:
                    note("random.Random()", "chance")
                    x = random.getrandbits(64) if seeded else None
                super().__init__(x)

        class Generator(torch.Generator):
            def seed(self) -> int:
                note("torch.Generator.seed()", "chance")
                if not seeded:
                    return super().seed()
                return self.manual_seed(random.getrandbits(32)).initial_seed()

        class SystemRandom(random.SystemRandom):
            def random(self) -> float:
                note("random.SystemRandom()", "chance")
                return random.random() if seeded else super().random()

        for owner, name, kind in ((random, "Random", Random), (random, "SystemRandom", SystemRandom), (torch, "Generator", Generator)):
            stack.enter_context(mock.patch.object(owner, name, kind))


@functools.lru_cache(maxsize=4096)
def _installed(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file


def _seeded_rng(right: Callable[..., Any], seed: Any = None) -> Any:
    return right(int(np.random.randint(1 << 31)) if seed is None else seed)


class Backwards(Iterator[Any], AbstractContextManager[Any]):
    """``os.scandir``'s entries, the last one first."""

    def __init__(self, entries: Any) -> None:
        with entries:
            self._entries = iter(list(entries)[::-1])

    def __next__(self) -> Any:
        return next(self._entries)

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """All entries are read."""
        self._entries = iter(())


class Filled(TorchFunctionMode):
    """Context in which unwritten memory of torch holds ``value``. So code that reads it is found, and does not differ by chance."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See ``TorchFunctionMode``."""
        found = func(*args, **(kwargs or {}))
        if func in EMPTIES and isinstance(found, torch.Tensor) and found.device.type != "meta":
            with torch.no_grad():
                odd = self._value != self._value
                found.fill_(self._value if found.is_floating_point() or found.is_complex() else int(odd))
        return found


def scramble() -> None:
    """Shuffle free places of all small sizes, so that objects lie in another order in memory than in another process."""
    shuffled = random.Random(5)
    kept: list[list[Any]] = []
    for size in range(0, 480, 16):
        objects: list[Any] = [bytes(size) for _ in range(SCRAMBLED // 5)] if size else [object() for _ in range(SCRAMBLED)]
        shuffled.shuffle(objects)
        kept.append(objects[::2])
        del objects
    _KEPT[:] = kept


_KEPT: list[list[Any]] = []
"""The objects between the free places."""


@contextmanager
def _deterministic() -> Iterator[None]:
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic")
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
