"""In the place of Slurm's commands, for batch scripts that are carried out on hosts of this machine. Nothing of Slurm's is in it.

It stands in for the scheduler alone: who runs what where, with which variables, who is signalled, and what is left at the end of a step.
``scontrol show hostnames`` and ``srun`` are typed by the script; ``slurmd`` waits on each host and runs what it is asked for. The standard
library is enough for it: it is typed on hosts as ``python slurm_stand_in.py COMMAND``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PORT = 6818
REAP_S = 0.2
KILL_WAIT_S = 30.0
"""Slurm's own: from SIGTERM to SIGKILL."""
REQUEUED = "requeued"
"""In the folder of the script: the job that is to be queued again."""
PR_SET_CHILD_SUBREAPER = 36
UNTAKEN = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0")
"""What the script may tell ``srun``: that other tasks go on when one has ended, however it has."""


def hostnames(listed: str) -> list[str]:
    """``host[1-3,5],other`` as names."""
    found = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\])?", listed):
        stem, _, numbers = part.rstrip("]").partition("[")
        for span in numbers.split(",") if numbers else [""]:
            first, _, last = span.partition("-")
            found += [f"{stem}{number}" for number in range(int(first), int(last or first) + 1)] if span else [stem]
    return found


# ---- on each host ------------------------------------------------------------------------------------------------------------------------


def slurmd() -> None:
    """Run one task for each connection, until this process is ended."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    with socket.create_server(("", PORT)) as server:
        threading.Thread(target=_reap_forever, daemon=True).start()
        print("ready", flush=True)
        while True:
            threading.Thread(target=_serve, args=(server.accept()[0],), daemon=True).start()


def _serve(connection: socket.socket) -> None:
    """A line asks for a task, whose output goes back; or for a signal to the tasks that are here."""
    with connection, connection.makefile("rb") as lines:
        asked = json.loads(lines.readline())
        if "signal" in asked:
            _notice(asked["signal"])
        else:
            code = _task(asked, connection)
            connection.sendall(f"\0{code}".encode())


_tasks = dict[int, subprocess.Popen[bytes]]()
_starting = threading.Lock()


def _reap_forever() -> None:
    """Take leave of orphans that have ended, as Slurm's steps do: who waits for their end, such as ``ray stop``, would wait in vain."""
    while True:
        time.sleep(REAP_S)
        with _starting:
            for pid, (parent, state) in _processes().items():
                if parent == os.getpid() and state == "Z" and pid not in _tasks:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(pid, os.WNOHANG)


def _task(asked: dict[str, Any], connection: socket.socket) -> int:
    """Run it to its end, then end what is left of its step on this host; its code."""
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with _starting:
        task = subprocess.Popen(asked["command"], env=asked["env"], cwd=asked["cwd"], start_new_session=True, **pipes)
        _tasks[task.pid] = task
    pump = threading.Thread(target=_pump, args=(task, connection), daemon=True)
    pump.start()
    code = task.wait()
    del _tasks[task.pid]
    _end_step()
    pump.join()
    return code


def _pump(task: subprocess.Popen[bytes], connection: socket.socket) -> None:
    assert task.stdout is not None
    while text := os.read(task.stdout.fileno(), 65536):
        connection.sendall(text.replace(b"\0", b""))


def _notice(number: int) -> None:
    """To the process group of each task; and after a while SIGKILL to all that is left of the step, which its cgroup knows."""
    waiting = list(_tasks.values())
    for task in waiting:
        os.killpg(task.pid, number)
    for task in waiting:
        try:
            task.wait(KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            _end_step()


def _end_step() -> None:
    """SIGKILL for all that a step has started on this host, until nothing is left. Here it is the only one."""
    while found := _started():
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if pid not in _tasks:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        time.sleep(0.05)


def _processes() -> dict[int, tuple[int, str]]:
    """PID of each process of this host -> (that of its parent, its state)."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            pid, _, rest = path.read_text().partition(" (")
            state, parent = rest.rpartition(") ")[2].split()[:2]
            found[int(pid)] = int(parent), state
    return found


def _started() -> list[int]:
    """PIDs of all that this process has started, and of all that those have: orphans come back to this one."""
    parents = {pid: parent for pid, (parent, _) in _processes().items()}
    found, fresh = set[int](), {os.getpid()}
    while fresh:
        fresh = {pid for pid, parent in parents.items() if parent in fresh} - found
        found |= fresh
    return sorted(found)


# ---- typed by the script -----------------------------------------------------------------------------------------------------------------


def srun(words: list[str]) -> int:
    """One task on each host of the allocation; its highest code. All output is shown as it comes."""
    while words and words[0] in UNTAKEN:
        words = words[1:]
    hosts = hostnames(os.environ["SLURM_JOB_NODELIST"])
    found = selectors.DefaultSelector()
    for number, host in enumerate(hosts):
        line = socket.create_connection((host, PORT))
        env = {**os.environ, **_of_task(number, len(hosts), host)}
        line.sendall(json.dumps({"command": words, "env": env, "cwd": os.getcwd()}).encode() + b"\n")
        found.register(line, selectors.EVENT_READ)
    return max(_results(found), default=1)


def _of_task(number: int, count: int, host: str) -> dict[str, str]:
    """The variables that Slurm gives a task, where each host has one."""
    return {
        "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_PROCID": str(number), "SLURM_NODEID": str(number), "SLURM_LOCALID": "0",
        "SLURM_NTASKS": str(count), "SLURM_STEP_NUM_TASKS": str(count), "SLURM_STEP_NUM_NODES": str(count), "SLURMD_NODENAME": host,
        "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"], "SLURM_TASKS_PER_NODE": f"1(x{count})",
    }  # fmt: skip


def _results(lines: selectors.BaseSelector) -> Iterator[int]:
    """The code of each task, as they end; 1 for one whose host is lost."""
    while lines.get_map():
        for key, _ in lines.select():
            line: socket.socket = key.fileobj
            text, mark, code = line.recv(65536).partition(b"\0")
            sys.stdout.buffer.write(text)
            sys.stdout.buffer.flush()
            if mark or not text:
                lines.unregister(line)
                line.close()
                yield int(code or 1) % 256


def scancel(hosts: list[str]) -> None:
    """SIGTERM for all tasks on these hosts, and SIGKILL for what is left after a while. Returns when they have ended."""
    lines = [socket.create_connection((host, PORT)) for host in hosts]
    for line in lines:
        line.sendall(json.dumps({"signal": int(signal.SIGTERM)}).encode() + b"\n")
    for line in lines:
        line.recv(1)
        line.close()


def main(command: str, *words: str) -> int:
    match command:
        case "slurmd":
            slurmd()
        case "srun":
            return srun(list(words))
        case "scancel":
            scancel(list(words))
        case "scontrol" if words[:2] == ("show", "hostnames"):
            print("\n".join(hostnames(words[2])))
        case "scontrol" if words[:1] == ("requeue",):
            Path(REQUEUED).write_text(words[1])
        case _:
            raise SystemExit(f"{command} {' '.join(words)}: this is not stood in for")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
