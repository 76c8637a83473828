"""This process as the holder of a run, and whether another holder's process lives, where that can be seen from here."""

from __future__ import annotations

import os
import secrets
import socket
from datetime import UTC, datetime
from pathlib import Path

from fleet.host.clock import unix_time_s
from fleet.host.proc import start_ticks
from fleet.protocol.holding import Holder

BOOT = Path("/proc/sys/kernel/random/boot_id")


def this_process(cluster: str = "") -> Holder:
    """This process, which wants to hold a run from now on. ``cluster``: the address of the cluster that it has joined."""
    since = datetime.fromtimestamp(unix_time_s(), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    pid = os.getpid()
    return Holder(socket.gethostname(), pid, start_ticks(pid), _boot(), _space(), cluster, since, secrets.token_hex(8))


def lives(holder: Holder) -> bool | None:
    """Whether the holder's process lives; None: it is on another machine, or in another container."""
    if (holder.boot, holder.space) != (_boot(), _space()):
        return None
    try:
        return start_ticks(holder.pid) == holder.start_ticks
    except ProcessLookupError:
        return False


def _boot() -> str:
    return BOOT.read_text().strip()


def _space() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino)
