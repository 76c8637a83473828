"""The parts of a run: code, versions, machine. The journal's first record holds them, so that users can compare and repeat runs."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGES = ("fleet-train", "ray", "torch", "numpy")
GIT_S = 10.0
PATCH = "code.patch"
PATCH_BYTES = 2**20
UNTRACKED_BYTES = 2**20
UNTRACKED_FILES = 1_000
"""The most files in the patch, and the most names in the record."""
NOT_CODE = {".fleet", "__pycache__", "nodes.jsonl"}
"""Names that Fleet and Python leave in folders of code; they change with every run."""
DIFF = ("diff", "HEAD", "--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/")


@dataclass(frozen=True, slots=True)
class Code:
    """The code of a run: the ``commit`` that is checked out, and the difference of its files from it, as a patch that ``git apply`` takes.

    The patch has the ``untracked`` files that git does not ignore. Large files, and files beyond a thousand, are ``left_out``: the record
    has only their names and sizes. All is empty outside a repository, and where git is not installed.
    """

    commit: str = ""
    patch: bytes = b""
    untracked: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """Facts for a run's record. ``diff_sha256`` is empty without a difference; ``patch`` names the file, or why there is none."""
        differs = self.patch + "\n".join(self.left_out).encode()
        size = len(self.patch)
        kept = PATCH if 0 < size <= PATCH_BYTES else f"not kept: {size} bytes, at most {PATCH_BYTES}" if size else ""
        facts: dict[str, Any] = {"commit": self.commit, "diff_sha256": _digest(differs) if differs else "", "patch": kept}
        facts |= {"untracked": list(self.untracked)} if len(self.untracked) <= UNTRACKED_FILES else {}
        return facts | ({"untracked_left_out": ", ".join(self.left_out)[:1_000]} if self.left_out else {})

    def keep(self, folder: Path) -> None:
        """Write the patch into a run's folder, if there is a difference of at most ``PATCH_BYTES``."""
        if 0 < len(self.patch) <= PATCH_BYTES:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / PATCH).write_bytes(self.patch)


def provenance(script: str, code: Code | None = None) -> dict[str, Any]:
    """Digest of the script, its commit and a digest of the difference from that, versions, processor, command and folder."""
    return {
        "script_sha256": digest_of_script(script),
        **(code or code_of(script)).record(),
        "versions": {"python": platform.python_version()} | {name: found for name in PACKAGES if (found := _version(name))},
        "machine": platform.machine(),
        "cores": os.cpu_count() or 0,
        "command": sys.argv[:200],
        "directory": str(Path.cwd()),
    }


def digest_of_script(script: str) -> str:
    """SHA-256 of the script's file; empty where there is none."""
    return _digest(Path(script).read_bytes()) if script and Path(script).is_file() else ""


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def code_of(script: str, only: Collection[str] | None = None) -> Code:
    """The code of the repository that holds ``script``, or this process's folder without a script.

    ``only``: the untracked files that count, if given. A resumed run gives those of its begin, so that later files make no difference.
    """
    folder = Path(script).resolve().parent if script else Path.cwd()
    commit = _git(folder, "rev-parse", "HEAD").decode().strip()
    if not commit:
        return Code()
    top = Path(os.fsdecode(_git(folder, "rev-parse", "--show-toplevel").rstrip(b"\n")))
    names = [name for name in _untracked(top) if only is None or name in only]
    sizes = {name: (top / name).lstat().st_size for name in names if os.path.lexists(top / name)}
    taken = [name for name, size in sizes.items() if size <= UNTRACKED_BYTES][:UNTRACKED_FILES]
    left_out = [f"{name} ({sizes[name]} bytes)" for name in sorted(sizes.keys() - set(taken))]
    return Code(commit, _patch(top, taken), tuple(sizes), tuple(left_out))


def _untracked(top: Path) -> list[str]:
    """Untracked files that may be code, in order. Files left by runs, Fleet and Python do not count: they change with every run."""
    listed = _git(top, "ls-files", "--others", "--exclude-standard", "-z").split(b"\0")
    names = [Path(os.fsdecode(name)) for name in listed if name and not name.endswith(b"/")]  # with a slash: another repository
    folders = {folder for name in names for folder in list(name.parents)[:-1]}
    of_runs = {folder for folder in folders if (top / folder / "journal.jsonl").exists()}
    return sorted(str(name) for name in names if NOT_CODE.isdisjoint(name.parts) and of_runs.isdisjoint(name.parents))


def _patch(top: Path, untracked: list[str]) -> bytes:
    """The working tree's difference from its commit. Untracked files get into it through a copy of git's index, which stays the same."""
    if not untracked:
        return _git(top, *DIFF)
    with tempfile.TemporaryDirectory(prefix="fleet-index-") as scratch:
        index = top / os.fsdecode(_git(top, "rev-parse", "--git-path", "index").rstrip(b"\n"))
        copy = {"GIT_INDEX_FILE": str(Path(scratch, "index"))}
        if index.is_file():
            shutil.copy(index, copy["GIT_INDEX_FILE"])
        names = b"\0".join(map(os.fsencode, untracked))
        _git(top, "--literal-pathspecs", "add", "-N", "--pathspec-from-file=-", "--pathspec-file-nul", given=names, environment=copy)
        return _git(top, *DIFF, environment=copy)


def _git(folder: Path, *arguments: str, given: bytes = b"", environment: Mapping[str, str] | None = None) -> bytes:
    """The output of git; empty when git fails, takes too long, or is not there."""
    variables = {**os.environ, **(environment or {})}
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, input=given, env=variables, capture_output=True, timeout=GIT_S, check=False
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode == 0 else b""
