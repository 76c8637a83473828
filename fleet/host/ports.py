"""Ports for servers of this machine whose address is given out before they listen."""

from __future__ import annotations

import random
import socket
from pathlib import Path

RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST = 20_000
"""Ray gives its workers the ports below."""

TRIES = 100


def free_port(host: str = "127.0.0.1") -> int:
    """A port without a listener, outside the kernel's range for outgoing connections: it stays free until its server starts, also again."""
    kept_back = range(FIRST, _first_outgoing())
    for port in random.sample(kept_back, min(TRIES, len(kept_back))):
        if _is_free(host, port):
            return port
    with socket.create_server((host, 0)) as server:  # the system has no ports outside its range for outgoing connections
        return int(server.getsockname()[1])


def _first_outgoing() -> int:
    try:
        return int(RANGE_FILE.read_text().split()[0])
    except OSError:
        return 32_768


def _is_free(host: str, port: int) -> bool:
    try:
        socket.create_server((host, port)).close()
    except OSError:
        return False
    return True
