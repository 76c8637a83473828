"""Folders in a node's memory whose processes ended before they could tidy up. The next run on the node removes them.

An owner's name has its PID, its start tick, and the PID namespace of both. The sweep leaves a folder alone when it cannot see an owner's
process from here.
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
    """This process uses ``folder`` from now on, perhaps with others."""
    pid = os.getpid()
    (folder / f"{OWNER}{pid}").write_text(f"{start_ticks(pid)} {_namespace()}")


def sweep(root: Path, prefix: str) -> list[Path]:
    """Remove the folders in ``root`` whose names begin with ``prefix`` and whose owners have all ended. Returns the removed folders."""
    gone = [folder for folder in root.glob(f"{prefix}*") if folder.is_dir() and _abandoned(folder)]
    for folder in gone:
        shutil.rmtree(folder, ignore_errors=True)
    return gone


def _abandoned(folder: Path) -> bool:
    """Whether the folder had owners, all visible from here, and none lives. A folder that a process is just making has none yet."""
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
