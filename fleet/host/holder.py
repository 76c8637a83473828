"""This process as the holder of a run, and whether another holder's process lives, where that can be seen from here."""

from __future__ import annotations

import os
import socket
from datetime import UTC, datetime
from pathlib import Path

from fleet.host.clock import unix_time_s
from fleet.host.proc import start_ticks, stat_fields
from fleet.protocol.holding import Holder

BOOT = Path("/proc/sys/kernel/random/boot_id")
ENDED = "ZX"
"""States of a process that has ended, and whose parent has not asked how."""


def this_process(token: str, cluster: str = "") -> Holder:
    """This process, which wants to hold a run from now on. ``token`` is drawn for it. ``cluster``: the address of its cluster."""
    since = datetime.fromtimestamp(unix_time_s(), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    pid = os.getpid()
    return Holder(socket.gethostname(), pid, start_ticks(pid), _boot(), _space(), cluster, since, token)


def lives(holder: Holder) -> bool | None:
    """Whether the holder's process lives; None: it is on another machine, or in another container."""
    if (holder.boot, holder.space) != (_boot(), _space()):
        return None
    try:
        ended = stat_fields(holder.pid)[0] in ENDED
        return not ended and start_ticks(holder.pid) == holder.start_ticks
    except ProcessLookupError:
        return False


def _boot() -> str:
    return BOOT.read_text().strip()


def _space() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino)
