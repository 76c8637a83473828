"""A program that holds packets back: packets that the kernel marks for it go into a TUN device, and come out of it later.

``python chaos/relay.py DELAY_S BYTES_PER_S JITTER_S`` writes ``ready``, or the reason why it cannot do that, and runs until its standard
input ends. The device, its route and its settings vanish with this process, however it ends. At the end of its input it removes the rule
that sends marked packets into the device. When it is killed first, the rule stays without a target: packets go as before. The mark has the
PID of this process in it, so that :func:`sweep` can tell such a rule from one in use.

It needs root, and the program ``ip``. It imports nothing but the standard library, as it has to start at once.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import re
import select
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

MARKS = 0x5F000000
"""Marks, and numbers of routing tables, are this number plus the PID of a relay."""
PIDS = 1 << 22
"""The kernel's limit of PIDs."""
SET_INTERFACE, TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
LIMIT_S = 5.0
SLOTS = 20_000
"""Packets that may wait; further ones are lost, as on a link that is too slow."""
SETTINGS = Path("/proc/sys/net/ipv4/conf")
PACKET, AT_ONCE = 65535, 256


def mark_of(pid: int) -> int:
    """The mark of packets for the relay with this PID."""
    return MARKS + pid


class TunDevice:
    """A TUN device of this process, into which the kernel routes packets with the mark. Raises OSError."""

    def __init__(self, mark: int) -> None:
        self.mark, self.name = mark, f"fleet{mark - MARKS}"
        if (SETTINGS / "all/rp_filter").read_text().strip() == "1":
            raise OSError("net.ipv4.conf.all.rp_filter is 1, with which the kernel drops packets that come back from a relay; set it to 2")
        self.fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(self.fd, SET_INTERFACE, struct.pack("16sH", self.name.encode(), TUN_WITHOUT_HEADER))
        for setting, value in (("forwarding", "1"), ("accept_local", "1"), ("rp_filter", "0"), ("send_redirects", "0")):
            (SETTINGS / self.name / setting).write_text(value)
        _ip("link", "set", self.name, "up", "txqueuelen", "10000")
        _ip("route", "add", "default", "dev", self.name, "table", str(mark))
        _ip("rule", "add", "fwmark", hex(mark), "lookup", str(mark))

    def close(self) -> None:
        """Remove the rule; the kernel removes the rest."""
        remove_rule(self.mark)
        os.close(self.fd)


class DelayLine:
    """The time at which each packet leaves: ``delay_s`` after it came, and at most ``bytes_per_s`` in all (0: no limit).

    With ``jitter_s`` each leaves up to so much later, evenly: packets that are close to each other change places.
    """

    def __init__(self, delay_s: float, bytes_per_s: float, jitter_s: float = 0.0, seed: int = 0) -> None:
        self._delay_s, self._s_per_byte, self._jitter_s = delay_s, 1.0 / bytes_per_s if bytes_per_s else 0.0, jitter_s
        self._waiting: list[tuple[float, int, bytes]] = []
        self._free_s, self._numbers, self._draw = 0.0, itertools.count(), random.Random(seed)

    def add(self, packet: bytes, now_s: float) -> None:
        """Add a packet; it is lost where too many wait."""
        if len(self._waiting) < SLOTS:
            self._free_s = max(now_s, self._free_s) + len(packet) * self._s_per_byte
            leaves_s = self._free_s + self._delay_s + self._jitter_s * self._draw.random()
            heapq.heappush(self._waiting, (leaves_s, next(self._numbers), packet))

    def due(self, now_s: float) -> list[bytes]:
        """Packets that leave now, in order; packets of the same time in the order of their arrival."""
        packets = []
        while self._waiting and self._waiting[0][0] <= now_s:
            packets.append(heapq.heappop(self._waiting)[2])
        return packets

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until the next packet leaves; None: no packet waits."""
        return max(0.0, self._waiting[0][0] - now_s) if self._waiting else None


def relay(device: TunDevice, line: DelayLine, until: int) -> None:
    """Relay packets until the descriptor ``until`` has input, or ends."""
    while True:
        readable, _, _ = select.select([device.fd, until], [], [], line.wait_s(time.monotonic()))
        if until in readable:
            return
        if device.fd in readable:
            _take(device.fd, line)
        for packet in line.due(time.monotonic()):
            _put(device.fd, packet)


def sweep() -> None:
    """Remove rules of relays that are gone: their devices are gone, too. Raises OSError."""
    for table in re.findall(r"lookup (\d+)", _ip("rule", "list")):
        pid = int(table) - MARKS
        if 0 < pid < PIDS and not (SETTINGS / f"fleet{pid}").exists():
            remove_rule(int(table))


def remove_rule(mark: int) -> None:
    """Raises OSError."""
    _ip("rule", "del", "fwmark", hex(mark), "lookup", str(mark))


def _take(fd: int, line: DelayLine) -> None:
    """Read packets from the kernel, in batches small enough that others wait only a moment."""
    for _ in range(AT_ONCE):
        try:
            packet = os.read(fd, PACKET)
        except BlockingIOError:
            return
        line.add(packet, time.monotonic())


def _put(fd: int, packet: bytes) -> None:
    with suppress(OSError):  # the kernel does not take it: the packet is lost, as on any link
        os.write(fd, packet)


def _ip(*words: str) -> str:
    """Run ``ip WORDS``. Raises OSError with its output."""
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise OSError(f"ip {' '.join(words)} took longer than {LIMIT_S:g} s") from None
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def main(delay_s: float, bytes_per_s: float, jitter_s: float) -> None:
    """Runs until standard input ends."""
    try:
        device = TunDevice(mark_of(os.getpid()))
    except OSError as error:
        print(error, flush=True)
        raise SystemExit(1) from None
    print("ready", flush=True)
    try:
        relay(device, DelayLine(delay_s, bytes_per_s, jitter_s, os.getpid()), sys.stdin.fileno())
    finally:
        device.close()


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
