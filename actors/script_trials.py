"""Trials of a training script for ``fleet doctor``, each in a process of its own: the parent's side, and the begin of the child's."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from actors.rank.current import within
from actors.rank.main import user_traceback
from actors.rank.script import Script
from actors.rank.script_loading import train_of
from actors.rank.trial.recording import Book
from actors.rank.trial.trial import TrialPlan, Trying, alone, attempt, play, settle, tried
from fleet.errors import FleetError
from fleet.host.proc import peak_bytes
from fleet.ledger.sameness import HASH, Trial, TrialRequest
from fleet.settings.run import RunSettings

HASHES = "PYTHONHASHSEED"
LEAVE_S = 10.0
NEVER = 10**9


class InProcesses:
    """Runs trials of ``script``, one at a time, each in a new process.

    Args:
        settings: of the run; its seed, shards, threads and options count.
    """

    def __init__(self, script: Script, settings: RunSettings) -> None:
        self._script, self._settings = script, alone(settings, settings.shards)

    def __call__(self, asked: TrialRequest) -> Trial:
        """Make one trial. Raises ConfigError: the script cannot be executed, or refuses a setting; FleetError: the script raises."""
        return tried(self._attempted, asked)

    def _attempted(self, asked: TrialRequest, begins: Path | None, ends: Path | None) -> Trial:
        with _child("2" if HASH in asked.varied else "1", _try, self._script, self._settings, asked, begins, ends) as parent:
            trial: Trial = _received(parent)
        return trial


@contextlib.contextmanager
def _child(hashes: str, target: Callable[..., None], *args: Any) -> Iterator[Connection]:
    """Context of a new process that runs ``target(connection, *args)``; it is killed at the end."""
    context = multiprocessing.get_context("spawn")
    parent, end = context.Pipe()
    process = context.Process(target=_begin, args=(target, end, *args), daemon=True)
    with mock.patch.dict(os.environ, {HASHES: hashes}):
        process.start()
    end.close()
    try:
        yield parent
    finally:
        parent.close()
        process.join(LEAVE_S)
        process.kill()
        process.join()


def _received(parent: Connection) -> Any:
    try:
        found = parent.recv()
    except EOFError as error:
        raise FleetError("the process of a trial ended before it had an answer: see what it printed above") from error
    if isinstance(found, BaseException):
        raise found
    return found


def _begin(target: Callable[..., None], end: Connection, *args: Any) -> None:
    """Run ``target`` in the child, with the script's output dropped."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        target(end, *args)
    except FleetError as error:
        end.send(error)
    except EOFError:
        return  # the parent has gone
    except BaseException as error:  # noqa: BLE001 - the parent gets any error of the script
        end.send(FleetError(f"the script raised {type(error).__name__}: {error}\n\n{user_traceback(error)}"))


def _try(end: Connection, script: Script, settings: RunSettings, asked: TrialRequest, begins: Path | None, ends: Path | None) -> None:
    end.send(attempt(lambda: train_of(script), settings, asked, begins, ends))


# ---- steps on request --------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """One step: its seconds, the samples in the batch of all ranks, the process's peak memory, and its memory before its first step.
    ``looked_s``: the part of the seconds in first passes (``step.gather``).

    On a GPU the memory is that of torch's tensors there.
    """

    seconds: float
    batch_size: int
    peak_bytes: int
    before_bytes: int
    looked_s: float


class Stepping:
    """A process in which one rank of ``world`` takes steps on request, with its part of a batch of ``shards`` shards."""

    def __init__(self, script: Script, settings: RunSettings, world: int, shards: int) -> None:
        self._stack = contextlib.ExitStack()
        self.shards = shards
        self._parent = self._stack.enter_context(_child("1", _step_on_request, script, alone(settings, shards // world), world))

    def step(self) -> Taken:
        """Take one more step. Raises as :class:`InProcesses` does."""
        self._parent.send(True)
        taken: Taken = _received(self._parent)
        return taken

    def close(self) -> None:
        """End the process."""
        self._stack.close()


def _step_on_request(end: Connection, script: Script, settings: RunSettings, world: int) -> None:
    before = [0]

    def wanted(number: int) -> bool:
        before[0] = before[0] or _peak_bytes()
        return bool(end.recv())

    def taken(seconds: float, batch_size: int, looked_s: float) -> None:
        end.send(Taken(seconds, batch_size, _peak_bytes(), before[0], looked_s))

    settle(settings)
    with tempfile.TemporaryDirectory(prefix="fleet-trial-") as folder:
        plan = TrialPlan(TrialRequest(timed=True), steps=NEVER, before=wanted, after=taken, share=world)
        run = Trying(settings, Path(folder), Book(timed=True), plan)
        with within(run):
            play(run, train_of(script))
    end.recv()  # the script has fewer steps than requested
    raise FleetError("the script's loop is over before enough steps were timed: give it more steps, as with --set steps=1000")


def _peak_bytes() -> int:
    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_initialized() else peak_bytes()
