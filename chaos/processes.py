"""Real signals to the processes of one node, by pidfd: they never hit another process that got the same PID."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fleet.host.proc import start_ticks
from fleet.protocol.operations import HEAL, START, Acts, Operation, perform
from fleet.protocol.types import Process

CYCLE_S = 0.05
"""Period of the duty cycle that slows a process: about a step, so that every step is slowed and none stops for long."""


def opened(process: Process) -> int:
    """A pidfd that certainly is of ``process``: the start time is read after it was opened, when the PID can no longer be reused.

    Raises ProcessLookupError.
    """
    pidfd = os.pidfd_open(process.pid)
    try:
        ticks = start_ticks(process.pid)
        signal.pidfd_send_signal(pidfd, 0)
        if ticks != process.start_ticks:
            raise ProcessLookupError(f"pid {process.pid} started at tick {ticks}, not {process.start_ticks}: another process has it now")
    except OSError:
        os.close(pidfd)
        raise
    return pidfd


class LocalProcesses:
    """A ``ProcessPort`` for the processes of this node.

    A slowed or stopped process must not stay so when this object goes. :meth:`close` ends every duty cycle and lets every stopped process
    go on, also at interpreter exit. (After a SIGKILL of this very process that is not possible.)
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._cycles: dict[Process, _DutyCycle] = {}
        self._stopped: set[Process] = set()
        atexit.register(self.close)

    def operate(self, order: Operation) -> str | None:
        """Carry out the order, by ``ACTS``."""
        return perform(ACTS, self, order)

    def kill(self, process: Process) -> str | None:
        """SIGKILL, which ends a stopped process too."""
        self._calm(process)
        return self._signal(process, signal.SIGKILL)

    def stop(self, process: Process) -> str | None:
        """SIGSTOP, until :meth:`resume`."""
        self._calm(process)
        refusal = self._signal(process, signal.SIGSTOP)
        if refusal is None:
            self._stopped.add(process)
        return refusal

    def resume(self, process: Process) -> str | None:
        """SIGCONT; also ends a slowdown."""
        self._calm(process)
        return self._signal(process, signal.SIGCONT)

    def slow(self, process: Process, severity: float, duration_s: float) -> str | None:
        """Let it run 1/severity of the time for ``duration_s``; a later slowdown replaces an earlier one."""
        if not severity >= 1:
            return f"severity {severity} is no slowdown: 2 is half speed"
        self._calm(process)
        try:
            pidfd = self._open(process)
        except ProcessLookupError as error:
            return str(error)
        cycle = _DutyCycle(pidfd, severity, duration_s)
        with self._lock:
            self._cycles = {other: running for other, running in self._cycles.items() if running.alive}
            self._cycles[process] = cycle
        return None

    def close(self) -> None:
        """End all slowdowns and let all stopped processes go on. May be called again."""
        for process in {*self._cycles, *self._stopped}:
            self.resume(process)
        atexit.unregister(self.close)

    def _calm(self, process: Process) -> None:
        self._stopped.discard(process)
        with self._lock:
            cycle = self._cycles.pop(process, None)
        if cycle is not None:
            cycle.end()

    def _signal(self, process: Process, number: signal.Signals) -> str | None:
        try:
            with _closing(self._open(process)) as pidfd:
                signal.pidfd_send_signal(pidfd, number)
        except (ProcessLookupError, PermissionError) as error:
            return f"{number.name} to process {process.pid} on {process.node}: {error}"
        return None

    def _open(self, process: Process) -> int:
        """See :func:`opened`; only for processes of this node."""
        if process.node != self._node:
            raise ProcessLookupError(f"it is on node {process.node}, this is {self._node}")
        return opened(process)


ACTS: Acts = {
    ("kill_rank", START): lambda processes, order: processes.kill(order.process),
    ("hang", START): lambda processes, order: processes.stop(order.process),
    ("hang", HEAL): lambda processes, order: processes.resume(order.process),
    ("slow", START): lambda processes, order: processes.slow(order.process, order.severity, order.duration_s),
    ("slow", HEAL): lambda processes, order: processes.resume(order.process),
}
"""The agent of a node performs these."""


class _DutyCycle:
    """Stops and continues a process in turn, in a thread of its own that always ends with SIGCONT. Owns the pidfd."""

    def __init__(self, pidfd: int, severity: float, duration_s: float) -> None:
        run_s = CYCLE_S / severity
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(pidfd, run_s, CYCLE_S - run_s, max(1, round(duration_s / CYCLE_S))), daemon=True, name="slowdown"
        )
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> None:
        """Returns when the process runs at full speed again."""
        self._over.set()
        self._thread.join()

    def _run(self, pidfd: int, run_s: float, stop_s: float, cycles: int) -> None:
        with _closing(pidfd):
            send = _until_gone(pidfd)
            try:
                for _ in range(cycles):
                    if not send(signal.SIGSTOP) or self._over.wait(stop_s) or not send(signal.SIGCONT) or self._over.wait(run_s):
                        return
            finally:
                send(signal.SIGCONT)


def _until_gone(pidfd: int) -> Callable[[signal.Signals], bool]:
    def send(number: signal.Signals) -> bool:
        try:
            signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            return False
        return True

    return send


@contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)
