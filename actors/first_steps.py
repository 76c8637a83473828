"""Two steps of a script before a run, in a process forked off this one, which has already executed the script's top level.

Where this process cannot be forked, or its copy could not use a GPU, it starts a new one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from actors.fork_server import why_not
from actors.rank.script import FUNCTION, Script
from actors.rank.script_loading import train_of
from actors.rank.trial.held_back import NOTE, Untried
from fleet.errors import ConfigError
from fleet.host.linux import die_with_parent
from fleet.settings.run import RunSettings

PRINTED = "printed"
MOST_PRINTED_BYTES = 20_000
"""So much of the end of a failing script's output is shown."""
FIRST_TO_GO = "1000"
"""When memory runs out, the kernel kills the trial first."""
LEAVE_S = 5.0


class FirstSteps:
    """A trial that has begun. Use it as a context manager: at its end no process or file of the trial is left.

    Args:
        script: this process has executed it, see :func:`actors.rank.script_loading.load_train`.
        settings: of the run.
        joins: the run will be on a cluster of other machines.

    Attributes:
        why_unknown: why the trial has no result; empty: the script could take two steps, or the trial is not over.
    """

    def __init__(self, script: Script, settings: RunSettings, joins: bool) -> None:
        self.why_unknown = ""
        self._folder = tempfile.TemporaryDirectory(prefix="fleet-trial-", ignore_cleanup_errors=True)
        forks = not settings.per_rank.gpus and script.name in sys.modules and not why_not()
        context: Any = multiprocessing.get_context("fork" if forks else "spawn")
        self._answer, end = context.Pipe(duplex=False)
        arguments = (end, script, settings, Path(self._folder.name), joins, forks)
        self._process = context.Process(target=_take_steps, args=arguments)
        with warnings.catch_warnings():  # newer Pythons warn of threads, but those of BLAS allow a fork
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        end.close()

    def __enter__(self) -> FirstSteps:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def wait(self, limit_s: float) -> bool:
        """Wait at most ``limit_s`` for the end of the trial. True: it is over. Raises ConfigError with the script's own lines: it fails."""
        if self._answer.closed:
            return True
        if not self._answer.poll(max(0.0, limit_s)):
            return False
        try:
            found: ConfigError | str | None = self._answer.recv()
        except EOFError:
            self._process.join(LEAVE_S)
            found = f"its process has ended with {self._process.exitcode}"
        held, printed = self._read(NOTE), self._read(PRINTED)
        self.close()
        if isinstance(found, ConfigError) and not held:
            if printed:
                found = ConfigError(found.field, found.value, found.reason, f"{found.way_out}\n\nIt has printed:\n{printed}")
            raise found
        self.why_unknown = held.partition("\n")[0] or (found if isinstance(found, str) else "")
        return True

    def close(self) -> None:
        """End the trial, and all processes that it has started."""
        if self._answer.closed:
            return
        self._answer.close()
        self._process.kill()
        with contextlib.suppress(ProcessLookupError):  # it has no process group of its own yet
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()
        self._folder.cleanup()

    def _read(self, name: str) -> str:
        path = Path(self._folder.name, name)
        return path.read_bytes()[-MOST_PRINTED_BYTES:].decode(errors="replace").rstrip() if path.exists() else ""


def _take_steps(end: Connection, script: Script, settings: RunSettings, folder: Path, joins: bool, forked: bool) -> None:
    """Run the trial in the new process. It imports the modules of ranks, which this process does not need."""
    os.setsid()
    die_with_parent()
    from actors.rank.trial.first_steps import take_first_steps

    Path("/proc/self/oom_score_adj").write_text(FIRST_TO_GO)
    _print_to(folder / PRINTED)
    sys.argv = [script.file, *script.arguments]
    try:
        end.send(take_first_steps(_loading(script, forked), script.file, settings, folder, joins))
    except Untried as why:
        end.send(str(why))
    sys.stdout.flush()


def _loading(script: Script, forked: bool) -> Callable[[], Callable[[Any], None]]:
    """Gives the train function. A forked process has loaded it: a script may, for example, register names that cannot be registered
    twice."""
    if forked:
        return lambda: getattr(sys.modules[script.name], FUNCTION)
    return lambda: train_of(script)


def _print_to(path: Path) -> None:
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(number, stream)
    os.close(number)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", 1, closefd=False) for stream in (1, 2))
