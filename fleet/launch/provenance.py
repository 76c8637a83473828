"""What a run is made of: code, versions, machine. Written into the journal's first record, so that runs can be compared and repeated."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("fleet-train", "ray", "torch", "numpy")
GIT_S = 10.0


def provenance(script: str) -> dict[str, Any]:
    """Digest of the script, the commit that it lies in and a digest of what differs from it, versions, processor, and the command."""
    return {
        "script_sha256": _digest(Path(script).read_bytes()) if script and Path(script).is_file() else "",
        **_commit(Path(script).resolve().parent if script else Path.cwd()),
        "versions": {"python": platform.python_version()} | {name: found for name in PACKAGES if (found := _version(name))},
        "machine": platform.machine(),
        "cores": os.cpu_count() or 0,
        "command": sys.argv[:200],
    }


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit(folder: Path) -> dict[str, str]:
    """Empty outside a repository, and where git is not installed. ``diff_sha256`` is empty when nothing differs."""
    commit = _git(folder, "rev-parse", "HEAD")
    diff = _git(folder, "diff", "HEAD") if commit else b""
    return {"commit": commit.decode().strip(), "diff_sha256": _digest(diff) if diff else ""}


def _git(folder: Path, *arguments: str) -> bytes:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, timeout=GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode == 0 else b""
