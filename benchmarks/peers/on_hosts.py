"""Hosts on which systems run beside each other, and a run whose ranks write event logs on hosts of their own.

Hosts are namespaces of this machine (`tests.support.hosts`), so that all have one monotonic clock. This process reads a host's files as
they grow, and finds and signals its processes by the PIDs that they have here.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

from benchmarks.peers.common import REPOSITORY, Commit, Kill, Line, Settings, Timeline, alive
from tests.support.host_store import HostStore
from tests.support.hosts import HOME, Host, Hosts
from tests.support.ray_hosts import Head, ray_head, ray_worker

CODE, LIBRARY = f"{HOME}/code", f"{HOME}/library"
"""Folders of a host: the code of the benchmarks' ranks, which Fleet brings from the head, and this repository's parts for other systems."""
LOGS = f"{HOME}/bench"
"""Folder of a host below which each run writes."""
RANKS = ("benchmarks/__init__.py", "benchmarks/peers")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
"""Environment of processes on the head, which sees the repository."""
END_S = 30.0
TRIES = 3
T = TypeVar("T")
INCARNATION = 10_000_000
"""PIDs of two hosts may be equal, so those of each boot of a host begin at a multiple of this number."""

_TIMES = """
import json
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated.gcs_service_pb2 import GetAllNodeInfoRequest
from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub
nodes = NodeInfoGcsServiceStub(init_grpc_channel({address!r})).GetAllNodeInfo(GetAllNodeInfoRequest(), timeout=30).node_info_list
print(json.dumps([[node.start_time_ms, node.end_time_ms] for node in nodes if node.node_manager_address == {of!r}]))
"""


class Site:
    """Context manager: a head without ranks, and workers with slots, with Ray on all, and an object store on the head.

    Args:
        cpus: slots of each worker.
    """

    def __init__(self, cpus: Sequence[int]) -> None:
        self.cpus = tuple(cpus)
        self._stack = ExitStack()

    def __enter__(self) -> Site:
        with ExitStack() as stack:
            self.hosts = stack.enter_context(Hosts(1 + len(self.cpus)))
            self.workers: Sequence[Host] = list(self.hosts)[1:]
            self.boots = dict.fromkeys(self.workers, 0)
            self.store, self.head = _tried(self.hosts[0], self._begin_head)
            for worker in self.workers:
                self.join(worker)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def join(self, worker: Host) -> None:
        """Give a newly booted worker the code of ranks, and let it join Ray; returns when it has registered."""
        _tried(worker, lambda: self._try_to_join(worker))

    def _begin_head(self) -> tuple[HostStore, Head]:
        store = HostStore(self.hosts[0])
        _furnish(self.hosts[0], CODE, RANKS)
        return store, ray_head(self.hosts[0])

    def _try_to_join(self, worker: Host) -> None:
        self.boots[worker] = max(self.boots.values()) + 1
        self.store.admit(worker)
        _furnish(worker, LIBRARY, (*RANKS, "fleet"))
        ray_worker(worker, self.head, num_cpus=self.cpus[self.workers.index(worker)])

    def replace(self, worker: Host) -> None:
        """Put another machine in the place of a worker. A worker that is up is lost with all that it has. The new link is whole."""
        worker.kill_all()
        worker.mend()
        worker.boot()
        self.join(worker)

    def node_times(self, worker: Host) -> list[tuple[float, float]]:
        """(start, end) of each node that Ray has known at this address, oldest first, by this machine's monotonic clock. The end of a live
        node is infinite."""
        found = json.loads(self.head.script(_TIMES.format(address=self.head.address, of=worker.address)).splitlines()[-1])
        ahead_s = time.time() - time.monotonic()
        return sorted((begin / 1000 - ahead_s, end / 1000 - ahead_s if end else float("inf")) for begin, end in found)


@dataclass
class _Logs:
    """Event logs of one run on one incarnation of a host."""

    host: Host
    incarnation: int
    timeline: Timeline

    def local(self, pid: int) -> int:
        return pid - self.incarnation * INCARNATION


@dataclass
class HostsRun:
    """A run on a site. Its ranks log to ``folder`` of their host, and its keepers are ``processes`` of hosts.

    Implements `peers.common.Run`. PIDs are unique over hosts, and hold only within this run. Faults are ``kill``, ``host`` (all processes
    of the rank's host) and ``cut`` (its link).
    """

    site: Site
    settings: Settings
    folder: str
    output: Path
    processes: dict[Host, Any] = field(default_factory=dict)
    replaced: Callable[[HostsRun, Host], None] = lambda run, worker: None
    """Called when a worker is another machine than before."""

    def __post_init__(self) -> None:
        self._logs: list[_Logs] = []
        self._output: IO[bytes] = self.output.open("ab")
        for worker in self.site.workers:
            self.watch(worker)

    def start(self, host: Host, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start a keeper on a host."""
        self.processes[host] = host.popen(command, env=env, stdout=self._output, stderr=self._output)

    def replace(self, worker: Host) -> None:
        """Put another machine in the place of a worker."""
        self.processes.pop(worker, None)
        self.site.replace(worker)
        self.watch(worker)
        self.replaced(self, worker)

    def watch(self, worker: Host) -> None:
        """Read a host's logs from now on."""
        self._logs.append(_Logs(worker, self.site.boots[worker], Timeline(worker.root / f"{self.folder}/events".lstrip("/"))))

    def commits(self) -> list[Commit]:
        return merged((logs.incarnation * INCARNATION, logs.timeline.commits()) for logs in self._logs)

    def lost_lines(self) -> list[Line]:
        return sorted(line for logs in self._logs for line in logs.timeline.lost_lines)

    def ranks(self) -> dict[int, int]:
        """Members of the newest membership's last two commits whose processes live."""
        recent = self.commits()[-2:]
        members = {slot: pid for commit in recent if commit.epoch == recent[-1].epoch for slot, pid in commit.members.items()}
        return {slot: pid for slot, pid in sorted(members.items()) if self._here(pid) is not None}

    def host_of(self, pid: int) -> Host:
        """The host of a member, now or before."""
        return self._logs_of(pid).host

    @staticmethod
    def boot_of(pid: int) -> int:
        """The number of the boot of a member's host, out of all boots of the site's workers."""
        return pid // INCARNATION

    def boot_after(self, pid: int) -> int:
        """The boot of the machine that took the place of a member's host; -1 before there is one."""
        host = self.host_of(pid)
        return next((logs.incarnation for logs in self._logs if logs.host is host and logs.incarnation > self.boot_of(pid)), -1)

    def world_full(self) -> bool:
        return len(self.ranks()) >= self.settings.world

    def failed(self) -> str | None:
        ended = {host: process.poll() for host, process in self.processes.items() if host.alive}
        over = [f"{host.hostname}: exit status {code}, see {self.output}" for host, code in ended.items() if code is not None]
        return over[0] if over else None

    def inject(self, kind: str, slot: int) -> Kill:
        pid = self.ranks()[slot]
        here, host = self._here(pid), self.host_of(pid)
        before_s = time.monotonic()
        if kind == "kill":
            assert here is not None
            os.kill(here, signal.SIGKILL)
        elif kind == "host":
            host.kill_all()
        else:
            host.cut()
        # A host ends at one signal, and the call then waits for it, which takes a while. A process or a link ends before the call returns.
        return Kill(before_s if kind == "host" else time.monotonic(), slot, pid, kind)

    def stop(self) -> None:
        """SIGTERM to the keepers, some time for them to end in order, and SIGKILL."""
        processes = [process for host, process in self.processes.items() if host.alive]
        for process in processes:
            process.terminate()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=END_S)
            process.kill()
            process.wait()
        self._output.close()

    def _logs_of(self, pid: int) -> _Logs:
        return next(logs for logs in self._logs if logs.incarnation == self.boot_of(pid))

    def _here(self, pid: int) -> int | None:
        """A member's PID as this process knows it; None when it lives no more."""
        logs = self._logs_of(pid)
        if not logs.host.alive or self.site.boots[logs.host] != logs.incarnation:
            return None
        return next((each for each in logs.host.pids() if _inside(each) == logs.local(pid) and alive(each)), None)


def merged(timelines: Iterable[tuple[int, Sequence[Commit]]]) -> list[Commit]:
    """The commits of one job, from the logs of ranks on several hosts. Each host's PIDs begin at the number beside them."""
    found: dict[tuple[int, int], Commit] = {}
    for base, commits in timelines:
        for commit in commits:
            one = found.setdefault((commit.epoch, commit.step), Commit(commit.t_s, commit.step, commit.samples, commit.epoch))
            one.t_s, one.samples = min(one.t_s, commit.t_s), max(one.samples, commit.samples)
            one.members.update({slot: base + pid for slot, pid in commit.members.items()})
    return sorted(found.values(), key=lambda commit: commit.t_s)


def _inside(pid: int) -> int:
    """The PID that a process of this machine has in its own namespace, 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next(int(line.split()[-1]) for line in lines if line.startswith("NSpid:"))


def _tried(host: Host, step: Callable[[], T]) -> T:
    """The result of ``step``, which starts Ray on a host. Ray's limit of half a minute is short on a busy machine: after a failure, the
    host boots, and the step is done again."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
            return step()
        host.kill_all()
        host.boot()
    return step()


def _furnish(host: Host, folder: str, parts: Sequence[str]) -> None:
    """Put parts of this repository into a folder of a host."""
    packed = subprocess.run(["tar", "c", "--exclude=__pycache__", *parts], cwd=REPOSITORY, capture_output=True, check=True, timeout=END_S)
    unpack = host.popen(["sh", "-c", 'mkdir -p "$1" && tar x -C "$1"', "sh", folder], stdin=subprocess.PIPE)
    unpack.communicate(packed.stdout, timeout=END_S)
    if unpack.returncode:
        raise RuntimeError(f"{host.hostname}: the code could not be put there")
