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


def try_to_listen(host: str, port: int) -> None:
    """Raises OSError where no server can listen there now: the host is unknown or another machine, or the port is taken."""
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
        with socket.socket(family, kind, protocol) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:  # else it would take the port of IPv4, too
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(address)


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
