"""What keeps a run going on its hosts, and no rank is: the coordinator, agents, and Ray's own processes. And the cores of a host.

A process cannot stop itself and go on, and who is killed gives no answer: a child does it a moment later, see ``chaos.signaller``.
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
from fleet.protocol.fault_kinds import KINDS
from fleet.protocol.operations import HEAL, START, Acts, Operation, perform

Finder = Callable[[], psutil.Process]
"""Raises LookupError, in words."""
CONTROLLER, JOB = "ray::ShieldedController", "RAY_JOB_ID"
"""How a controller calls itself, and where each of Ray's processes has the job that it is of."""
CONFINED_S = 2.0
"""For the kernel to have confined a process, and for the process to have been killed then."""
FILLED_S = 10.0
"""For a filesystem to have no room any more."""
SHARED, SHARED_MOST_BYTES = Path("/dev/shm"), 1 << 30
"""Memory of files, of which chaos takes no more than this."""
MAY_FILL, STORE_MOST_BYTES = ".fleet-may-fill", 1 << 50
"""At the root of a filesystem, this file says that nothing but the store is on it, and that chaos may fill it and slow it down."""


class Daemons:
    """What this process, an actor of Ray's that belongs to the run, may do to itself and to what is beside it on its host.

    Args:
        store: URL of the run's store.
        own: nobody but Fleet has anything on the cluster.
    """

    def __init__(self, store: str = "", own: bool = False) -> None:
        self._store, self._own = store, own
        self._children: dict[str, list[subprocess.Popen[str]]] = {}
        with suppress(OSError):  # what another run has left is empty: it does no harm
            confine.sweep(confine.memory_group(Path("/proc/self/cgroup").read_text()))
        with suppress(OSError, LookupError):
            brake.sweep(self._disk())

    def operate(self, order: Operation) -> str | None:
        """Carry it out, as ``ACTS`` says. Returns why it was refused, or None."""
        return perform(ACTS, self, order)

    def signal_process(self, order: Operation, find: Finder, what: str) -> str | None:
        """``what`` is KILL or STOP, in a moment; a stop lasts for the duration of the order."""
        try:
            target = find()
            pidfd = os.pidfd_open(target.pid)
        except (LookupError, OSError, psutil.Error) as error:
            return f"{order.kind}: {error}"
        try:
            if not target.is_running():  # by its start time: the pid may be another's since
                return f"{order.kind}: process {target.pid} has ended"
            return self._begin(order, signaller.__file__, pidfd, what, order.duration_s, descriptors=(pidfd,))
        finally:
            os.close(pidfd)

    def end_cluster(self, order: Operation) -> str | None:
        """Its control store is killed; Ray ends all else a minute later."""
        if not self._own:
            return f"{order.kind}: others may use this cluster, and it would end for them, too; it takes one that Fleet has started"
        return self.signal_process(order, _gcs, "KILL")

    def confine(self, order: Operation) -> str | None:
        """Leave the process that the order names no more memory, until it has ended. Who confines it says that it is done."""
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
        """Leave no room on the filesystem of a folder, where no more than so much is free."""
        return self._begin(order, ballast.__file__, folder, most_bytes, order.duration_s) or self._not_ready(order, FILLED_S)

    def fill_store(self, order: Operation) -> str | None:
        """The same of the store, where it is a folder, and has a filesystem of its own."""
        try:
            return self.fill(order, self._disk(), STORE_MOST_BYTES)
        except LookupError as error:
            return f"{order.kind}: {error}"

    def slow_store(self, order: Operation) -> str | None:
        """Few bytes a second are written to the device of that filesystem."""
        try:
            words = brake.__file__, self._disk(), order.bytes_per_s, order.duration_s
        except LookupError as error:
            return f"{order.kind}: {error}"
        return self._begin(order, *words) or self._not_ready(order, FILLED_S)

    def _disk(self) -> Path:
        """The root of the filesystem that the store has for itself. Raises LookupError."""
        if not self._store.startswith("file://"):
            raise LookupError("the store is no folder")
        folder = Path(self._store.removeprefix("file://"))
        root = next(each for each in (folder, *folder.parents) if each.is_mount())
        if not (root / MAY_FILL).exists():
            raise LookupError(f"{root} may hold more than the store: chaos strikes a filesystem at whose root a file {MAY_FILL} lies")
        return root

    def occupy(self, order: Operation) -> str | None:
        """Every core has something else to do."""
        refused = [self._begin(order, signaller.__file__, -1, "SPIN", order.duration_s) for _ in allowed_cores()]
        return next((why for why in refused if why), None)

    def heal(self, order: Operation) -> None:
        """End what was begun for the same fault; nothing happens when it is over."""
        for child in self._children.pop(order.fault, ()):
            child.terminate()
            child.communicate()

    def close(self) -> None:
        """End everything that was begun."""
        for fault in list(self._children):
            self.heal(Operation(fault, "", HEAL))

    def _begin(self, order: Operation, program: str, *words: object, descriptors: Sequence[int] = ()) -> str | None:
        """Start a program for a fault. Returns why it could not be."""
        self._reap()
        try:
            child = begin(program, *words, descriptors=descriptors)
        except OSError as error:
            return f"{order.kind}: {error}"
        self._children.setdefault(order.fault, []).append(child)
        return None

    def _not_ready(self, order: Operation, limit_s: float) -> str | None:
        """Why the program that was started last for a fault has not done it."""
        why = ready(self._children[order.fault][-1], limit_s)
        return f"{order.kind}: {why}" if why else None

    def _reap(self) -> None:
        """Those that have ended by themselves."""
        for fault, children in list(self._children.items()):
            left = [child for child in children if child.poll() is None]
            for child in (child for child in children if child not in left):
                child.communicate()
            self._children[fault] = left


def _this() -> psutil.Process:
    return psutil.Process()


def _ray_daemon() -> psutil.Process:
    """Ray's daemon on this host, which has started this process."""
    parent = psutil.Process(os.getppid())
    if parent.name() != "raylet":
        raise LookupError(f"the parent of this process is {parent.name()}, and not Ray's daemon")
    return parent


def _gcs() -> psutil.Process:
    """The control store of this cluster."""
    session = next((word for word in _ray_daemon().cmdline() if word.startswith("--session-name=")), None)
    if session is None:
        raise LookupError("Ray's daemon here does not say of which cluster it is")
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "gcs_server" and session in (process.info["cmdline"] or ()):
            return process
    raise LookupError("the control store of this cluster does not run on this host")


def _controller() -> psutil.Process:
    """Ray Train's controller of this run: other runs on the cluster have others."""
    for process in _ray_daemon().children(recursive=True):
        if " ".join(process.cmdline()).startswith(CONTROLLER) and process.environ().get(JOB) == os.environ.get(JOB):
            return process
    raise LookupError("Ray Train's controller of this run is not on this host")


def _injection(find: Finder, what: str) -> Callable[[Daemons, Operation], str | None]:
    return lambda daemons, order: daemons.signal_process(order, find, what)


def _heal(daemons: Daemons, order: Operation) -> None:
    daemons.heal(order)


def _healed(starts: Acts) -> Acts:
    """With the heal of what lasts."""
    return {**starts, **{(kind, HEAL): _heal for kind, _ in starts if KINDS[kind].lasts}}


AGENT_ACTS = _healed({
    ("kill_agent", START): _injection(_this, "KILL"),
    ("stop_agent", START): _injection(_this, "STOP"),
    ("stop_raylet", START): _injection(_ray_daemon, "STOP"),
    ("busy_cores", START): lambda daemons, order: daemons.occupy(order),
    ("shm_full", START): lambda daemons, order: daemons.fill(order, SHARED, SHARED_MOST_BYTES),
})  # fmt: skip
"""What the agent of a node does."""
CONFINE_ACTS: Acts = {("out_of_memory", START): lambda daemons, order: daemons.confine(order)}
"""What the agent does before the rank's process takes memory."""
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
"""What the coordinator does."""
ACTS: Acts = {**AGENT_ACTS, **CONFINE_ACTS, **COORDINATOR_ACTS}
