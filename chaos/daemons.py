"""Faults of the processes that keep a run going on its hosts, and are no ranks: coordinator, agents, and Ray's own. And of a host's cores.

A process cannot stop itself and go on, and a killed one cannot answer. So a child strikes a moment later, see ``chaos.signaller``.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from chaos import ballast, brake, confine, signaller
from chaos.processes import opened
from chaos.programs import begin, ready
from fleet.host.linux import allowed_cores
from fleet.host.processes import JOB_VARIABLE, RAYLET_VARIABLE
from fleet.protocol.fault_kinds import KINDS
from fleet.protocol.operations import HEAL, START, Acts, Operation, perform

Finder = Callable[[], psutil.Process]
"""It returns the process, or raises LookupError with a sentence."""
CONTROLLER = "ray::ShieldedController"
"""The name of a controller's process."""
CONFINED_S = 2.0
"""How long the kernel may take to confine a process, and to kill it then."""
FILLED_S = 10.0
"""How long it may take until a filesystem has no room any more."""
SHARED, SHARED_MOST_BYTES = Path("/dev/shm"), 1 << 30
"""Memory of files; chaos takes no more than this."""
MAY_FILL, STORE_MOST_BYTES = ".fleet-may-fill", 1 << 50
"""A file with this name at the root of a filesystem means that only the store is on it. Then chaos may fill it and slow it down."""


class Daemons:
    """Faults that this process, an actor of Ray's in the run, performs on itself and on other processes of its host.

    Args:
        store: URL of the run's store.
        own: only Fleet uses the cluster.
    """

    def __init__(self, store: str = "", own: bool = False) -> None:
        self._store, self._own = store, own
        self._children: dict[str, list[subprocess.Popen[str]]] = {}
        with suppress(OSError):  # a group left by another run is empty, and does no harm
            confine.sweep(confine.memory_group(Path("/proc/self/cgroup").read_text()))
        with suppress(OSError, LookupError):
            brake.sweep(self._disk())

    def operate(self, order: Operation) -> str | None:
        """Carry out the order, by ``ACTS``. Returns the reason of a refusal, or None."""
        return perform(ACTS, self, order)

    def signal_process(self, order: Operation, find: Finder, what: str) -> str | None:
        """Send KILL or STOP (``what``) in a moment; a stop lasts for the duration of the order."""
        try:
            target = find()
            pidfd = os.pidfd_open(target.pid)
        except (LookupError, OSError, psutil.Error) as error:
            return f"{order.kind}: {error}"
        try:
            if not target.is_running():  # by its start time: another process may have the PID since
                return f"{order.kind}: process {target.pid} has ended"
            return self._begin(order, signaller.__file__, pidfd, what, order.duration_s, descriptors=(pidfd,))
        finally:
            os.close(pidfd)

    def end_cluster(self, order: Operation) -> str | None:
        """Kill the control store; Ray ends all other processes a minute later."""
        if not self._own:
            return f"{order.kind}: others may use this cluster, and it would end for them, too; it needs a cluster that Fleet has started"
        return self.signal_process(order, _gcs, "KILL")

    def confine(self, order: Operation) -> str | None:
        """Leave the process of the order no more memory, until it has ended. The program that confines it reports when it has."""
        assert order.process is not None
        try:
            pidfd = opened(order.process)
        except OSError as error:
            return f"{order.kind}: {error}"
        try:
            refused = self._begin(order, confine.__file__, pidfd, order.process.pid, CONFINED_S, descriptors=(pidfd,))
        finally:
            os.close(pidfd)
        return refused or self._not_ready(order, CONFINED_S)

    def fill(self, order: Operation, folder: Path, most_bytes: int) -> str | None:
        """Leave no room on the filesystem of a folder, where at most so much is free."""
        return self._begin(order, ballast.__file__, folder, most_bytes, order.duration_s) or self._not_ready(order, FILLED_S)

    def fill_store(self, order: Operation) -> str | None:
        """The same for the store, where it is a folder with a filesystem of its own."""
        try:
            return self.fill(order, self._disk(), STORE_MOST_BYTES)
        except LookupError as error:
            return f"{order.kind}: {error}"

    def slow_store(self, order: Operation) -> str | None:
        """Limit writes to the device of that filesystem to few bytes a second."""
        try:
            words = brake.__file__, self._disk(), order.bytes_per_s, order.duration_s
        except LookupError as error:
            return f"{order.kind}: {error}"
        return self._begin(order, *words) or self._not_ready(order, FILLED_S)

    def _disk(self) -> Path:
        """The root of the store's own filesystem. Raises LookupError."""
        if not self._store.startswith("file://"):
            raise LookupError("the store is no folder")
        folder = Path(self._store.removeprefix("file://"))
        root = next(each for each in (folder, *folder.parents) if each.is_mount())
        if not (root / MAY_FILL).exists():
            raise LookupError(f"{root} may hold more than the store: chaos strikes only a filesystem with a file {MAY_FILL} at its root")
        return root

    def occupy(self, order: Operation) -> str | None:
        """Keep every core busy."""
        refused = [self._begin(order, signaller.__file__, -1, "SPIN", order.duration_s) for _ in allowed_cores()]
        return next((why for why in refused if why), None)

    def heal(self, order: Operation) -> None:
        """End the programs of the same fault; without effect when it is over."""
        for child in self._children.pop(order.fault, ()):
            child.terminate()
            child.communicate()

    def close(self) -> None:
        """End all programs."""
        for fault in list(self._children):
            self.heal(Operation(fault, "", HEAL))

    def _begin(self, order: Operation, program: str, *words: object, descriptors: Sequence[int] = ()) -> str | None:
        """Start a program for a fault. Returns the reason why it could not start, or None."""
        self._reap()
        try:
            child = begin(program, *words, descriptors=descriptors)
        except OSError as error:
            return f"{order.kind}: {error}"
        self._children.setdefault(order.fault, []).append(child)
        return None

    def _not_ready(self, order: Operation, limit_s: float) -> str | None:
        """The reason why the last program of a fault has not done its work."""
        why = ready(self._children[order.fault][-1], limit_s)
        return f"{order.kind}: {why}" if why else None

    def _reap(self) -> None:
        """Collect programs that have ended by themselves."""
        for fault, children in list(self._children.items()):
            left = [child for child in children if child.poll() is None]
            for child in (child for child in children if child not in left):
                child.communicate()
            self._children[fault] = left


def _this() -> psutil.Process:
    return psutil.Process()


def _ray_daemon() -> psutil.Process:
    """Ray's daemon on this host. This actor may be a fork, whose parent is another process."""
    daemon = os.environ.get(RAYLET_VARIABLE)
    if daemon is None:
        raise LookupError(f"this process is no actor of Ray's: it has no {RAYLET_VARIABLE}")
    process = psutil.Process(int(daemon))
    if process.name() != "raylet":
        raise LookupError(f"process {daemon} is {process.name()}, and not Ray's daemon")
    return process


def _gcs() -> psutil.Process:
    """The control store of this cluster."""
    session = next((word for word in _ray_daemon().cmdline() if word.startswith("--session-name=")), None)
    if session is None:
        raise LookupError("Ray's daemon here does not name its cluster")
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "gcs_server" and session in (process.info["cmdline"] or ()):
            return process
    raise LookupError("the control store of this cluster does not run on this host")


def _controller() -> psutil.Process:
    """Ray Train's controller of this run; other runs on the cluster, and other clusters on the host, have their own."""
    mine = {RAYLET_VARIABLE: str(_ray_daemon().pid), JOB_VARIABLE: os.environ.get(JOB_VARIABLE, "")}
    for process in psutil.process_iter(["cmdline"]):
        if " ".join(process.info["cmdline"] or ()).startswith(CONTROLLER):
            with suppress(psutil.Error):  # it has ended, or is of another user
                if mine.items() <= process.environ().items():
                    return process
    raise LookupError("Ray Train's controller of this run is not on this host")


def _injection(find: Finder, what: str) -> Callable[[Daemons, Operation], str | None]:
    return lambda daemons, order: daemons.signal_process(order, find, what)


def _heal(daemons: Daemons, order: Operation) -> None:
    daemons.heal(order)


def _healed(starts: Acts) -> Acts:
    """Add the heal of each fault that lasts."""
    return {**starts, **{(kind, HEAL): _heal for kind, _ in starts if KINDS[kind].lasts}}


AGENT_ACTS = _healed({
    ("kill_agent", START): _injection(_this, "KILL"),
    ("stop_agent", START): _injection(_this, "STOP"),
    ("stop_raylet", START): _injection(_ray_daemon, "STOP"),
    ("busy_cores", START): lambda daemons, order: daemons.occupy(order),
    ("shm_full", START): lambda daemons, order: daemons.fill(order, SHARED, SHARED_MOST_BYTES),
})  # fmt: skip
"""The agent of a node performs these."""
CONFINE_ACTS: Acts = {("out_of_memory", START): lambda daemons, order: daemons.confine(order)}
"""The agent performs this before the rank's process takes memory."""
COORDINATOR_ACTS = _healed({
    ("kill_coordinator", START): _injection(_this, "KILL"),
    ("stop_coordinator", START): _injection(_this, "STOP"),
    ("stop_gcs", START): _injection(_gcs, "STOP"),
    ("kill_gcs", START): lambda daemons, order: daemons.end_cluster(order),
    ("kill_controller", START): _injection(_controller, "KILL"),
    ("stop_controller", START): _injection(_controller, "STOP"),
    ("store_full", START): lambda daemons, order: daemons.fill_store(order),
    ("disk_slow", START): lambda daemons, order: daemons.slow_store(order),
})  # fmt: skip
"""The coordinator performs these."""
ACTS: Acts = {**AGENT_ACTS, **CONFINE_ACTS, **COORDINATOR_ACTS}
