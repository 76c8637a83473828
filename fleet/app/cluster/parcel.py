"""The code of this machine that goes to the nodes of a cluster, and the limit of its size."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator
from pathlib import Path

from fleet.app.cluster.ray_internals import ignored_in
from fleet.errors import ConfigError

PACKAGES = ("fleet", "actors", "policies", "storage", "chaos", "dashboards")
EXCLUDED = (".git", ".venv*", "venv", "__pycache__", "node_modules", "runs", ".mypy_cache", ".pytest_cache", ".ruff_cache")
"""Patterns of names that are never sent."""
MOST_BYTES = 200 * 2**20
"""The code goes to every node by way of the head; Ray refuses more than 500 MB."""


def packages() -> list[str]:
    """The folders of Fleet's own packages."""
    top = Path(__file__).resolve().parents[3]
    return [str(top / name) for name in PACKAGES]


def checked(folder: Path) -> str:
    """``folder``, if its files may travel. Raises ConfigError with the largest files when they are too much."""
    sizes = list(_sizes(folder))
    total = sum(size for _, size in sizes)
    if total > MOST_BYTES:
        largest = ", ".join(f"{path.relative_to(folder)} ({size / 2**20:,.0f} MiB)" for path, size in heapq.nlargest(3, sizes, key=_size))
        reason = f"its files are {total / 2**20:,.0f} MiB, and at most {MOST_BYTES / 2**20:g} travel to the nodes; the largest: {largest}"
        way_out = "Put the script into a folder with its code alone, keep data where every node reads it, or list it in .rayignore."
        raise ConfigError("working directory", str(folder), reason, way_out)
    return str(folder)


def _size(entry: tuple[Path, int]) -> int:
    return entry[1]


def _sizes(folder: Path) -> Iterator[tuple[Path, int]]:
    """Files that would be sent, and their bytes."""
    ignored = ignored_in(folder, EXCLUDED)
    for root, folders, files in os.walk(folder):
        here = Path(root)
        folders[:] = [name for name in folders if not ignored(here / name)]
        for path in (here / name for name in files):
            if not path.is_symlink() and not ignored(path):
                yield path, path.stat().st_size
