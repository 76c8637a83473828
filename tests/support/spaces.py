"""Linux namespaces that one process holds, and processes started in them. ``tests.support.hosts`` makes hosts of them."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from signal import SIGKILL
from typing import Any

import psutil

LIMIT_S = 60.0
READY = "ready\n"
READ_ONLY = "read-only"
"""A step for the holder: whatever is mounted by then cannot be written any more."""

_HOLDER = f"""
import ctypes, json, os, signal, subprocess, sys

def read_only():
    # mount_setattr(2), which has this number on every architecture: MOUNT_ATTR_RDONLY for / and all below it (AT_RECURSIVE).
    attributes = (ctypes.c_uint64 * 4)(1, 0, 0, 0)
    if ctypes.CDLL(None, use_errno=True).syscall(442, -100, b"/", 0x8000, attributes, ctypes.sizeof(attributes)):
        sys.exit("mount_setattr: " + os.strerror(ctypes.get_errno()))

for step in json.loads(sys.argv[1]):
    if step == [{READ_ONLY!r}]:
        read_only()
    elif subprocess.run(step).returncode:
        sys.exit("failed: " + " ".join(step))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans are reaped by the kernel
print({READY.strip()!r}, flush=True)
sys.stdin.buffer.read()
"""
"""The first process of a PID namespace. It ends when its maker does, and the kernel then ends the others and drops what was mounted."""


class Space:
    """Namespaces, and the processes in them. A PID namespace is always among them, so that one signal ends all.

    Made by :meth:`alone` or :meth:`within`.
    """

    def __init__(self, holder: subprocess.Popen[str]) -> None:
        self._holder = holder
        self._started = list[subprocess.Popen[Any]]()
        assert holder.stdout is not None and holder.stderr is not None
        if holder.stdout.readline() != READY:
            raise RuntimeError(f"no namespaces: {holder.communicate(timeout=LIMIT_S)[1]}")
        holder.stderr.close()
        [child] = psutil.Process(holder.pid).children()
        self.pid: int = child.pid
        """The process that holds the namespaces, as this process sees it."""

    @classmethod
    def alone(cls, kinds: Sequence[str], steps: Sequence[Sequence[str]]) -> Space:
        """New namespaces of these kinds, options of unshare(1), prepared by the commands ``steps``. All others are those of this process.

        Raises:
            RuntimeError: a step failed; what it said is quoted.
        """
        return cls(_piped(_unshare(kinds, steps)))

    @classmethod
    def within(cls, outer: Space, kinds: Sequence[str], steps: Sequence[Sequence[str]]) -> Space:
        """As :meth:`alone`, with all other namespaces from ``outer``; it ends with that one."""
        return cls(outer.popen(_unshare(kinds, steps), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))

    @property
    def alive(self) -> bool:
        return self._holder.poll() is None

    def popen(self, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
        """Start a command inside; it is a child of this process all the same, with a PID here."""
        entered = ["nsenter", *(f"--{option}=/proc/{self.pid}/ns/{name}" for option, name in _ENTERED.items()), "--", *command]
        with ThreadPoolExecutor(1) as pool:  # a thread's children begin in another PID namespace; the thread itself does not move
            process = pool.submit(self._start, entered, env=env, **options).result()
        self._started = [each for each in self._started if each.poll() is None] + [process]
        return process

    def do(self, *command: str) -> str:
        """Run a command of the machine in this network; returns what it says. PIDs are those of this process.

        Raises:
            RuntimeError: it failed; what it said is quoted.
        """
        entered = ["nsenter", f"--net=/proc/{self.pid}/ns/net", "--", *command]
        done = subprocess.run(entered, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
        return done.stdout

    def pids(self) -> list[int]:
        """PIDs, as this process sees them, of all that runs in the PID namespace, but for its holder."""
        own = _pid_namespace(self.pid)
        return [pid for pid in psutil.pids() if pid != self.pid and own and _pid_namespace(pid) == own]

    def end(self) -> None:
        """SIGKILL all processes at once, and wait until none is left."""
        if self.alive:
            os.kill(self.pid, SIGKILL)
        for process in self._started:  # the holder goes after those that were started from here, and they once they are waited for
            process.wait(LIMIT_S)
        self._holder.wait(LIMIT_S)
        for pipe in (self._holder.stdin, self._holder.stdout):
            if pipe is not None:
                pipe.close()

    def _start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        with open(f"/proc/{self.pid}/ns/pid", "rb") as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")
        return subprocess.Popen(command, **options)


_ENTERED = {"net": "net", "mount": "mnt", "uts": "uts", "ipc": "ipc"}


def _unshare(kinds: Sequence[str], steps: Sequence[Sequence[str]]) -> list[str]:
    python = Path(sys.executable).resolve()
    return ["unshare", "--pid", "--fork", "--kill-child", *kinds, "--", str(python), "-I", "-S", "-c", _HOLDER, json.dumps(steps)]


def _piped(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _pid_namespace(pid: int) -> str:
    """The namespace's name, empty for a process that is gone or a zombie."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""
