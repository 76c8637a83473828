"""ssh between hosts of this machine: a server on each, at its own address, with keys that are made for the test.

The server is dropbear: its package has the program alone, and installing it starts no service on the machine.
"""

from __future__ import annotations

import subprocess

from tests.support.host_store import write
from tests.support.hosts import Host
from tests.support.programs import program
from tests.support.waiting import until

HOST_KEY = "/srv/ssh/host_key"
START_S = 30.0


def programs() -> None:
    """Skip the test that asks where one of them is missing."""
    for name in ("ssh", "ssh-keygen", "dropbear", "dropbearkey", "rsync"):
        program(name)


def make_key(host: Host, path: str) -> str:
    """A new key in ``path`` of the user on ``host``; its public half."""
    host.run(["sh", "-c", 'umask 077 && mkdir -p "$(dirname "$1")" && ssh-keygen -q -t ed25519 -N "" -f "$1"', "sh", path])
    return host.run(["cat", f"{path}.pub"]).stdout


def serve_ssh(host: Host, public_key: str) -> subprocess.Popen[str]:
    """A server that lets the owner of a key in, and nobody else; returns when it listens. It ends with the host."""
    write(host, ".ssh/authorized_keys", public_key)
    for step in (
        ["chmod", "700", "."],
        ["mkdir", "-p", HOST_KEY.rpartition("/")[0]],
        ["dropbearkey", "-t", "ed25519", "-f", HOST_KEY],
        ["mount", "-t", "devpts", "-o", "ptmxmode=0666", "terminals", "/dev/pts"],
    ):
        host.run(step)
    command = [program("dropbear"), "-F", "-E", "-s", "-r", HOST_KEY, "-p", f"{host.address}:22", "-P", ""]
    server: subprocess.Popen[str] = host.popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: host.run(["ssh-keyscan", host.address], check=False).stdout, f"ssh answers on {host.hostname}", START_S, tick_s=0.2)
    return server
