"""Folders in a node's memory whose processes were ended before they could tidy up: the next run that comes to the node removes them.

An owner is named by its PID, the tick at which it started, and the PID namespace in which that holds: what belongs to a process that cannot
be seen from here is left alone.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from fleet.host.proc import start_ticks

OWNER = "owner-"


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def own(folder: Path) -> None:
    """This process uses ``folder`` from now on, perhaps beside others."""
    pid = os.getpid()
    (folder / f"{OWNER}{pid}").write_text(f"{start_ticks(pid)} {_namespace()}")


def sweep(root: Path, prefix: str) -> list[Path]:
    """Remove the folders in ``root`` whose names begin with ``prefix`` and whose owners have all ended; which those were."""
    gone = [folder for folder in root.glob(f"{prefix}*") if folder.is_dir() and _abandoned(folder)]
    for folder in gone:
        shutil.rmtree(folder, ignore_errors=True)
    return gone


def _abandoned(folder: Path) -> bool:
    """Whether it had owners, all of which could be seen from here, and none lives. A folder that is just being made has none yet."""
    owners = list(folder.glob(f"{OWNER}*"))
    return bool(owners) and not any(_may_live(owner) for owner in owners)


def _may_live(owner: Path) -> bool:
    try:
        ticks, namespace = owner.read_text().split()
    except (OSError, ValueError):
        return True
    if int(namespace) != _namespace():
        return True
    try:
        return start_ticks(int(owner.name.removeprefix(OWNER))) == int(ticks)
    except (OSError, ValueError):
        return False
