"""Hosts on one machine, for tests of what must hold on several: each with an address, a name, folders and processes of its own.

A host is a set of Linux namespaces (network, mount, PID, UTS, IPC) that one process holds, and hosts are joined by a switch, a bridge in a
network namespace of its own. Nothing of it has a name outside: when the process that made the hosts ends, however it ends, the kernel
removes processes, links and mounts. The machine's own network is not touched. Root is needed, and the programs of :data:`PROGRAMS`.
"""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.programs import namespaces, program
from tests.support.spaces import READ_ONLY, Space

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("ip", "tc", "bridge", "nsenter", "unshare", "mount", "faketime", "pgrep", "nft")
"""Of iproute2, util-linux, mount, faketime, procps and nftables."""
HOME = os.path.expanduser("~")
LINK, SWITCH = "eth0", "switch"
NOBODY = "02:00:00:00:00:fe"
"""A hardware address that no link has: what is sent there is lost in silence."""
LIMIT_S = 60.0
CALENDAR, SLEEPER = "/srv/calendar", "/srv/sleep.so"
SLEEP = """
#define _GNU_SOURCE
#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left)
{ return syscall(SYS_clock_nanosleep, clock, flags, until, left) ? errno : 0; }
"""
OWN = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/srv", HOME)
"""Folders that every host has for itself, empty when it boots."""

_subnets = itertools.count(1)


class Host:
    """One host. Made by :class:`Hosts`; its address, name and link stay the same when it is killed and booted again."""

    def __init__(self, rack: Space, index: int, subnet: int, names: str, sees_tree: bool, own: Sequence[str] = ()) -> None:
        self.hostname = f"host{index}"
        self.address = f"10.77.{subnet}.{index}"
        self.sees_tree = sees_tree
        self.environment_folder = f"/srv/{self.hostname}-python"
        """Where Python and its packages lie on this host; on another host they lie elsewhere."""
        self.clock_ahead_s = 0
        """How far clocks are ahead, the monotonic one too, for what is started from now on."""
        self.has_calendar = False
        """From its next boot on the host has a calendar of its own, which :meth:`set_calendar` sets; other clocks are the kernel's."""
        self._rack, self._names, self._port, self._own = rack, names, f"port{index}", (*OWN, *own)
        self._network = Space.within(rack, ("--net",), [])
        self._space: Space | None = None
        self._plug(index)

    @property
    def python(self) -> str:
        """The path of Python on this host."""
        return f"{self.environment_folder}/bin/python"

    @property
    def alive(self) -> bool:
        return self._space is not None and self._space.alive

    @property
    def root(self) -> Path:
        """Where the host's files lie for this process, while it is up."""
        return Path("/proc", str(self._up().pid), "root")

    def boot(self) -> None:
        """Bring the host up with empty folders. Its link is as it was before.

        Raises:
            RuntimeError: the host is up, or a step failed, which is quoted.
        """
        if self.alive:
            raise RuntimeError(f"{self.hostname} is up: kill it before it boots")
        steps = [["hostname", self.hostname], *_folders(self.environment_folder, self.sees_tree, self._own), [*_NAMES, self._names]]
        self._space = Space.within(self._network, ("--mount", "--uts", "--ipc"), steps)
        if self.has_calendar:
            (self.root / SLEEPER[1:]).write_bytes(_sleeper())
            self.set_calendar(0)

    def kill_all(self) -> None:
        """SIGKILL all processes at once. Peers see their connections closed; after :meth:`cut`, as when power fails, nothing."""
        if self._space is not None:
            self._space.end()
            self._space = None

    def remove(self) -> None:
        """End of the host, with its link."""
        self.kill_all()
        self._network.end()

    def popen(self, command: Sequence[str], env: Mapping[str, str] | None = None, cwd: str | None = None, **options: Any) -> Any:
        """Start ``command`` on the host; ``options`` are those of :class:`subprocess.Popen`, which is returned.

        It is a child of this process and has a PID here, so that it is waited for and signalled as any other. Of the environment here it
        gets nothing but ``env`` and what a login sets.
        """
        return self._up().popen(["env", "-C", cwd or HOME, *command], env=self._login() | dict(env or {}), **options)

    def run(
        self, command: Sequence[str], timeout_s: float = LIMIT_S, check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run ``command`` on the host to its end; output is captured, as text.

        Raises:
            RuntimeError: it failed, and ``check`` is set; its output is quoted.
            TimeoutExpired: it took too long, and was killed.
        """
        process = self.popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        if check and process.returncode:
            raise RuntimeError(f"{self.hostname}: {' '.join(command)} ended with {process.returncode}:\n{out}{err}")
        return subprocess.CompletedProcess(list(command), process.returncode, out, err)

    def set_calendar(self, ahead_s: int) -> None:
        """The wall clock of what was started with ``has_calendar`` is ahead by so much, a second from now at the latest."""
        self.run(["sh", "-c", f"echo '{ahead_s:+d}s' >{CALENDAR}.new && mv {CALENDAR}.new {CALENDAR}"])

    def pids(self) -> list[int]:
        """PIDs, as this process sees them, of all that runs on the host, but for the one that holds it."""
        return self._space.pids() if self._space is not None else []

    def cut(self) -> None:
        """Lose in silence all that goes between this host and the others. Processes live on, and no connection is closed."""
        self._rack.do("bridge", "link", "set", "dev", self._port, "state", "disabled")

    def mend(self) -> None:
        """The end of :meth:`cut`."""
        self._rack.do("bridge", "link", "set", "dev", self._port, "state", "forwarding")

    def shape(self, rate_bits_per_s: int, burst_bytes: int = 32 * 1024, queue_ms: int = 200) -> None:
        """Let no more than a rate pass between this host and the switch, in each direction.

        Args:
            rate_bits_per_s: the rate on the wire.
            burst_bytes: how much may pass at once after a pause.
            queue_ms: how long a packet may wait for its turn before it is dropped.
        """
        bucket = ("tbf", "rate", f"{rate_bits_per_s}bit", "burst", f"{burst_bytes}b", "latency", f"{queue_ms}ms")
        self._network.do("tc", "qdisc", "replace", "dev", LINK, "root", *bucket)
        self._rack.do("tc", "qdisc", "replace", "dev", self._port, "root", *bucket)

    def unshape(self) -> None:
        """The end of :meth:`shape`; nothing happens without one."""
        for space, link in ((self._network, LINK), (self._rack, self._port)):
            if " tbf " in space.do("tc", "qdisc", "show", "dev", link):
                space.do("tc", "qdisc", "del", "dev", link, "root")

    def lose_sight_of(self, other: Host) -> None:
        """Lose in silence what this host sends to another; what comes from there still arrives."""
        self._network.do("ip", "neigh", "replace", other.address, "lladdr", NOBODY, "dev", LINK, "nud", "permanent")

    def see_again(self, other: Host) -> None:
        """The end of :meth:`lose_sight_of`; nothing happens without one."""
        if NOBODY in self._network.do("ip", "neigh", "show", other.address, "dev", LINK):
            self._network.do("ip", "neigh", "del", other.address, "dev", LINK)

    def _plug(self, index: int) -> None:
        """A cable from the host's network to the switch."""
        self._rack.do("ip", "link", "add", self._port, "type", "veth", "peer", "name", LINK, "netns", str(self._network.pid))
        self._rack.do("ip", "link", "set", self._port, "master", SWITCH, "up")
        for command in (
            f"link set {LINK} address 02:00:00:00:01:{index:02x}",
            f"addr add {self.address}/24 dev {LINK}",
            f"link set {LINK} up",
        ):
            self._network.do("ip", *command.split())
        self._network.do("ip", "link", "set", "lo", "up")

    def _login(self) -> dict[str, str]:
        path = f"{self.environment_folder}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        clock = _clock(self.clock_ahead_s) if self.clock_ahead_s else _calendar() if self.has_calendar else {}
        return {"PATH": path, "HOME": HOME, "USER": "root", "LANG": "C.UTF-8", **clock}

    def _up(self) -> Space:
        if self._space is None:
            raise RuntimeError(f"{self.hostname} is down: boot it first")
        return self._space


class Hosts:
    """Context manager: ``count`` hosts on one switch, up when the block begins and gone when it ends. Several may be open at once.

    Args:
        count: how many hosts, at most 200.
        with_tree: indices of the hosts that see the source tree (read-only); the others see an empty folder there, so that nothing of this
            project can be imported unless it travels.
        own: more folders of the machine that each host has for itself, empty when it boots.
    """

    def __init__(self, count: int, with_tree: Iterable[int] = (0,), own: Sequence[str] = ()) -> None:
        if not 1 <= count <= 200:
            raise ValueError(f"{count} hosts: from 1 to 200 have addresses")
        needed()
        self._count, self._with_tree, self._own, self._stack = count, set(with_tree), own, ExitStack()
        self._all: list[Host] = []

    def __enter__(self) -> Hosts:
        with ExitStack() as stack:
            subnet = next(_subnets) % 250
            rack = Space.alone(("--net", "--mount", "--uts", "--ipc", "--mount-proc"), _switch())
            self.holder_pid = rack.pid
            """The one process that holds everything."""
            stack.callback(rack.end)
            names = _names(subnet, self._count)
            self._all = [Host(rack, 1 + index, subnet, names, index in self._with_tree, self._own) for index in range(self._count)]
            for host in self._all:
                stack.callback(host.remove)
                host.boot()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def __getitem__(self, index: int) -> Host:
        return self._all[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def cut_between(self, one: Host, other: Host) -> None:
        """Lose in silence all that goes between two hosts; others reach both."""
        one.lose_sight_of(other)
        other.lose_sight_of(one)

    def mend_between(self, one: Host, other: Host) -> None:
        """The end of :meth:`cut_between`; nothing happens without one."""
        one.see_again(other)
        other.see_again(one)

    def mend(self) -> None:
        """End every cut and every limit of a rate, set clocks right for what is started from now on, and boot what is down."""
        for host in self._all:
            host.mend()
            host.unshape()
            host.clock_ahead_s = 0
            host.has_calendar = False
            for other in self._all:
                host.see_again(other)
            if not host.alive:
                host.boot()


def needed() -> None:
    """Skip the test that asks, and say why, where hosts cannot be made."""
    namespaces()
    for name in PROGRAMS:
        program(name)


def _clock(ahead_s: int) -> dict[str, str]:
    """Variables that put a program's clocks off. No namespace can do that to the calendar: a library stands before the kernel."""
    said = subprocess.run(["faketime", "-f", "+0s", "printenv", "LD_PRELOAD"], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    library = said.stdout.strip().replace("libfaketime.so", "libfaketimeMT.so")  # the one for threads
    return {"LD_PRELOAD": library, "FAKETIME": f"{ahead_s:+d}s"}


def _calendar() -> dict[str, str]:
    """As :func:`_clock`, by a file that is read once a second."""
    settings = {"FAKETIME_TIMESTAMP_FILE": CALENDAR, "FAKETIME_CACHE_DURATION": "1", "DONT_FAKE_MONOTONIC": "1"}
    return {"LD_PRELOAD": f"{SLEEPER} {_clock(0)['LD_PRELOAD']}", **settings}


@functools.cache
def _sleeper() -> bytes:
    """A library with the kernel's own sleep: that of faketime 0.9.10 fails until a monotonic time where only the calendar is off."""
    with tempfile.NamedTemporaryFile(suffix=".so") as made:
        command = ["cc", "-xc", "-", "-shared", "-fPIC", "-o", made.name]
        subprocess.run(command, input=SLEEP, text=True, capture_output=True, timeout=LIMIT_S, check=True)
        return Path(made.name).read_bytes()


def _names(subnet: int, count: int) -> str:
    """``/etc/hosts`` of all."""
    hosts = (f"10.77.{subnet}.{1 + index} host{1 + index}" for index in range(count))
    return "\n".join(["127.0.0.1 localhost", *hosts, ""])


def _switch() -> list[list[str]]:
    """Without a spanning tree and its delay. Ports do not learn late: nobody moves."""
    return [["ip", "link", "add", SWITCH, "type", "bridge", "forward_delay", "0"], ["ip", "link", "set", SWITCH, "up"]]


_NAMES = ("sh", "-c", 'printf %s "$1" >/run/hosts && mount --bind /run/hosts /etc/hosts', "sh")


def _folders(environment: str, sees_tree: bool, own: Sequence[str]) -> list[list[str]]:
    """The commands that give a host folders of its own, when all that it was born with is read-only.

    What it shall see of what they hide is put aside first: the environment may lie inside the source tree, and both at home or in ``/tmp``.
    """
    seen = [sys.base_prefix, *[str(ROOT)] * sees_tree]
    kept = {environment: sys.prefix, "/sys/fs/cgroup": "/sys/fs/cgroup"} | {path: path for path in seen if _hidden(path, own)}
    detached = {target: f"/mnt/{number}" for number, target in enumerate(kept)}
    steps = [["mount", "-t", "tmpfs", "aside", "/mnt"]]
    for target, source in kept.items():
        steps += [["mkdir", detached[target]], ["mount", "--rbind", source, detached[target]]]
    steps += [[READ_ONLY], *_bare(sees_tree, own)]
    for target in kept:
        steps += [["mkdir", "-p", target], ["mount", "--rbind", detached[target], target]]
    return [*steps, ["umount", "-l", "/mnt"], ["chmod", "1777", "/tmp", "/var/tmp", "/dev/shm"]]


def _bare(sees_tree: bool, folders: Sequence[str]) -> list[list[str]]:
    """Empty folders, and the kernel's as this host's namespaces have them."""
    hidden = [["mount", "-t", "tmpfs", "-o", "ro,size=4k", "hidden", str(ROOT)]] if not sees_tree else []
    own = [["mount", "-t", "tmpfs", "own", folder] for folder in folders]
    return [*hidden, *own, ["mount", "-t", "proc", "proc", "/proc"], ["mount", "-t", "sysfs", "-o", "ro", "sysfs", "/sys"]]


def _hidden(path: str, own: Sequence[str]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in own)
