"""The processes of one local node, found by a mark in their environment. Linux only: it reads ``/proc``."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from fleet.host.proc import stat_fields

CLUSTER_VARIABLE = "FLEET_CLUSTER"
"""Names the local cluster that a process belongs to; every descendant of its nodes inherits it."""
NODE_VARIABLE = "FLEET_NODE_INDEX"
"""Index of the node that a process runs on; ``head`` on the head node."""
ZYGOTE_VARIABLE = "FLEET_ZYGOTE"
"""Path of the socket of the process that forks for the nodes of a local cluster; see ``actors.fork_server``."""
JOB_VARIABLE, RAYLET_VARIABLE = "RAY_JOB_ID", "RAY_RAYLET_PID"
"""The job of an actor, and the PID of the daemon that has started it. Ray reads both once, when a worker imports it."""
NOT_YET: Mapping[str, str] = dict.fromkeys((NODE_VARIABLE, JOB_VARIABLE, RAYLET_VARIABLE), "not-known-yet")
"""Marks of a process that forks the nodes' processes. They are as long as any value: the fork writes its own ones in their place."""
ENVIRONMENT_BEGINS, ENVIRONMENT_ENDS = 47, 48
"""Of :func:`stat_fields`: env_start and env_end, see proc_pid_stat(5)."""


def calling(module: str, function: str, *arguments: str) -> list[str]:
    """Command line of a process that calls a function of Fleet, with these arguments in ``sys.argv``; it needs no installation."""
    ours = str(Path(__file__).parents[2])
    program = f"import sys; sys.path.insert(0, {ours!r}); from {module} import {function}; sys.argv[0] = 'fleet'; {function}()"
    return [sys.executable, "-c", program, *arguments]


def bear_marks(environment: Mapping[str, str]) -> None:
    """Mark this process by its ``environment``. It was forked from a process with the marks ``NOT_YET``.

    ``/proc`` shows the environment in the memory that a process began with, which a fork copies. It does not show later changes.
    """
    begins, ends = (int(stat_fields(os.getpid())[number]) for number in (ENVIRONMENT_BEGINS, ENVIRONMENT_ENDS))
    for name, not_yet in NOT_YET.items():
        mark = f"{name}={not_yet}".encode()
        place = ctypes.string_at(begins, ends - begins).find(mark)
        if place >= 0 and name in environment:
            own = f"{name}={environment[name]}\0".encode()
            ctypes.memmove(begins + place, own.ljust(len(mark), b"="), len(mark))  # two zeros would end the environment


def find(cluster: str, node: str | None = None) -> list[int]:
    """PIDs of the live processes of a cluster (or of one of its nodes) and of all their descendants, parents first."""
    marks = [f"{CLUSTER_VARIABLE}={cluster}".encode()] + ([f"{NODE_VARIABLE}={node}".encode()] if node is not None else [])
    parents: dict[int, int] = {}
    found: set[int] = set()
    for pid, parent, environment in _processes():
        parents[pid] = parent
        if all(mark in environment for mark in marks):
            found.add(pid)
    grown = True
    while grown:  # a child that cleaned its environment still has its parent
        children = {pid for pid, parent in parents.items() if parent in found} - found
        found |= children
        grown = bool(children)
    return sorted(found)


def kill_all(cluster: str, node: str | None = None, limit_s: float = 10.0) -> list[int]:
    """SIGKILL every process of the cluster (node) but this one until none is left, for at most ``limit_s``. Returns the PIDs still alive.

    It looks again after each round, so that a process forked between the look and the signal does not escape.
    """
    end_s = time.monotonic() + limit_s
    while pids := [pid for pid in find(cluster, node) if pid != os.getpid()]:
        for pid in pids:
            _kill(pid)
        if time.monotonic() > end_s:
            return pids
        time.sleep(0.01)
    return []


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it has ended since the look, as it should


def _processes() -> Iterator[tuple[int, int, list[bytes]]]:
    """(pid, parent, environment) of each live process that this process may read; zombies are left out."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            state, parent = stat_fields(int(name))[:2]
            with open(f"/proc/{name}/environ", "rb") as file:
                environment = file.read().split(b"\0")
        except OSError:
            continue  # ended meanwhile, or another user's
        if state != "Z":
            yield int(name), int(parent), environment
