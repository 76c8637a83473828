"""Ports for servers of this machine that others are told of before they listen."""

from __future__ import annotations

import random
import socket
from pathlib import Path

RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST = 20_000
"""Ray gives its workers the ports below."""

TRIES = 100


def free_port(host: str = "127.0.0.1") -> int:
    """A port on which nobody listens, and that no outgoing connection is given: it is free when its server starts, and starts again."""
    kept_back = range(FIRST, _first_outgoing())
    for port in random.sample(kept_back, min(TRIES, len(kept_back))):
        if _is_free(host, port):
            return port
    with socket.create_server((host, 0)) as server:  # of a system that keeps none back
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
