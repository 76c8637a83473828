"""Processes that a test has started: told from those that libraries start beside them, and ended with the test."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

ABORT_S = 10.0
_begun: list[subprocess.Popen[Any]] = []


def begin(command: Sequence[str] | str, folder: Path, environment: dict[str, str], **options: Any) -> subprocess.Popen[str]:
    """A process in ``folder``, with its output in one text; it is ended when the test ends before it.

    It heeds signals, also where the tests do not, as beside a shell's ``&`` and ``nohup``.
    """
    command = command if isinstance(command, str) else ["env", "--default-signal=HUP,INT,TERM", *command]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | options
    process = subprocess.Popen(command, cwd=folder, env=environment | {"PYTHONFAULTHANDLER": "1"}, **options)
    _begun.append(process)
    return process


def end_all() -> None:
    """What a test has begun and not waited for would go on beside all tests that follow. Its cluster ends with it.

    Who hangs tells where: SIGABRT has Python print what each thread does.
    """
    while _begun:
        process = _begun.pop()
        if process.poll() is None:
            process.send_signal(signal.SIGABRT)
            try:
                print(process.communicate(timeout=ABORT_S)[0])
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def children_of(program: str) -> list[psutil.Process]:
    """Children of this process that run the file ``program``."""
    return [child for child in psutil.Process().children() if program in child.cmdline()]


def command_of(pid: int) -> bytes:
    """The command line of a process, with zeros between its words; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""
