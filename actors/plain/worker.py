"""Runs a user's unchanged script as a rank of a job without Fleet, and reports the script's progress to the command.

The launcher starts this file with the script and its arguments. It watches PyTorch's own functions: a hook of optimizers shows the end of a
step, and ``torch.save``, ``torch.load`` and functions that rename files are wrapped. The script imports them as usual.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import shutil
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleet.host.clock import now_us
from fleet.host.linux import die_with_parent

SOCKET, LOGS = "FLEET_PLAIN_SOCKET", "FLEET_PLAIN_LOGS"
"""Variables of the environment: the command's socket, and the folder for the output of ranks."""


class JobLine:
    """The connection to the command that has started the job. A process that was forked off this one sends no reports."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)
        self._pid, self._lock = os.getpid(), threading.Lock()

    @property
    def mine(self) -> bool:
        """Whether this is the rank's process, not one of its children."""
        return os.getpid() == self._pid

    def say(self, what: str, **more: Any) -> None:
        """Send one report, with the present time."""
        if self.mine:
            with self._lock:
                self._socket.sendall(json.dumps({"what": what, "at_us": now_us(), **more}).encode() + b"\n")

    def wait(self) -> None:
        """Wait until the command lets this rank begin. Raises SystemExit when the command has ended."""
        if not self._socket.recv(1):
            raise SystemExit("the command that has started this job is gone")


class ScriptWatch:
    """A rank's reports of its script."""

    def __init__(self, line: JobLine) -> None:
        self._line, self._steps, self._trains = line, 0, False
        self._optimizer: int | None = None

    def begin(self) -> None:
        """Watch the script from now on."""
        import torch
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(self._stepped)
        self._first = register_module_forward_pre_hook(self._computes)
        torch.save = torch.serialization.save = self._saving(torch.save)
        torch.load = torch.serialization.load = self._loading(torch.load)
        os.replace, os.rename = self._naming("moved", os.replace), self._naming("moved", os.rename)
        shutil.copyfile = self._naming("copied", shutil.copyfile)

    def _computes(self, module: Any, inputs: Any) -> None:
        """Report the first forward in training mode."""
        import torch

        if module.training and torch.is_grad_enabled() and self._line.mine:
            self._first.remove()
            self._ready()

    def _ready(self) -> None:
        if not self._trains:
            self._trains = True
            self._line.say("ready")

    def _stepped(self, optimizer: Any, arguments: Any, options: Any) -> None:
        """Count a step. Of several optimizers, only the one that made the first step counts."""
        self._optimizer = id(optimizer) if self._optimizer is None else self._optimizer
        if id(optimizer) == self._optimizer:
            self._ready()
            self._steps += 1
            self._line.say("step", steps=self._steps)

    def _saving(self, save: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(save)
        def reported(obj: Any, f: Any, *arguments: Any, **options: Any) -> Any:
            path, steps, blocking = path_of(f), self._steps, threading.current_thread() is threading.main_thread()
            self._line.say("save", path=path, steps=steps, blocking=blocking)
            try:
                result = save(obj, f, *arguments, **options)
            except BaseException:
                self._line.say("saved", blocking=blocking)
                raise
            self._line.say("saved", path=path, steps=steps, bytes=_size(path), blocking=blocking)
            return result

        return reported

    def _loading(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``load`` with reports. Files loaded after the model has begun to train are data, and are not reported."""

        @functools.wraps(load)
        def reported(f: Any, *arguments: Any, **options: Any) -> Any:
            if self._trains or threading.current_thread() is not threading.main_thread():
                return load(f, *arguments, **options)
            self._line.say("load")
            path = ""
            try:
                result = load(f, *arguments, **options)
                path = path_of(f)
            finally:
                self._line.say("loaded", path=path)
            return result

        return reported

    def _naming(self, what: str, act: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that renames or copies a file with reports. ``os.replace(a, b)`` within ``shutil`` counts once."""

        @functools.wraps(act)
        def reported(source: Any, target: Any, *arguments: Any, **options: Any) -> Any:
            before = path_of(source)
            result = act(source, target, *arguments, **options)
            if before and (after := path_of(target)):
                self._line.say(what, path=before, to=after)
            return result

        return reported


def path_of(f: Any) -> str:
    """The file of a path or an open file, as an absolute path without links; empty where there is none."""
    named = getattr(f, "name", f) if not isinstance(f, str | bytes | os.PathLike) else f
    return os.path.realpath(os.fsdecode(named)) if isinstance(named, str | bytes | os.PathLike) else ""


def _size(path: str) -> int:
    return os.path.getsize(path) if path and os.path.exists(path) else 0


def print_to(path: Path) -> None:
    """Send the output of this process and its children to a file from now on."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def run(line: JobLine, script: str, arguments: list[str]) -> None:
    """Run the script as ``python script arguments`` would."""
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            line.say("raised", text=f"SystemExit: {end.code}")
            raise
    except BaseException as error:
        line.say("raised", text=" ".join(f"{type(error).__name__}: {error}".split())[:1000])
        raise
    line.say("done")


def main() -> None:
    """Run ``worker.py SCRIPT ARGUMENTS``."""
    die_with_parent()
    rank, launch = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print_to(Path(os.environ[LOGS]) / f"rank-{rank}.{launch}.log")
    line = JobLine(os.environ[SOCKET])
    line.say("up", rank=rank, launch=launch, pid=os.getpid())
    line.wait()
    ScriptWatch(line).begin()
    run(line, sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    main()
