"""Whether the kernel killed a process for memory: it only reports a count for each memory group (cgroup)."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
COUNTERS = (("memory.events", "oom_kill"), ("memory.oom_control", "oom_kill"))
"""File and line of the counter, in cgroup version 2 and 1."""


def memory_groups(groups: str, root: Path = ROOT) -> list[Path]:
    """Folders of the memory group of a process, innermost first, from its ``/proc/PID/cgroup``; of both versions of cgroup."""
    found: list[Path] = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            base = root / "memory" if controllers else root
            inside = [base / path.strip("/"), base]  # in a container the group may have another name than on the host
            found += [folder for folder in inside if folder.is_dir()]
    return found


def kills(folders: list[Path]) -> int | None:
    """How many processes of the first group with a counter were killed for memory so far; None: no group has one."""
    for folder in folders:
        for name, key in COUNTERS:
            try:
                lines = (folder / name).read_text().splitlines()
            except OSError:
                continue
            counts = [int(line.split()[1]) for line in lines if line.split()[:1] == [key]]
            if counts:
                return counts[0]
    return None


class MemoryKills:
    """The counts of the memory groups of this node's processes, as last read."""

    def __init__(self, root: Path = ROOT, proc: Path = Path("/proc")) -> None:
        self._root, self._proc = root, proc
        self._folders: dict[int, list[Path]] = {}
        self._seen: dict[tuple[Path, ...], int] = {}

    def watch(self, pid: int) -> None:
        """Watch a process from now on, while it lives."""
        try:
            groups = (self._proc / str(pid) / "cgroup").read_text()
        except OSError:
            return  # it has ended already, so its group is unknown
        folders = memory_groups(groups, self._root)
        count = kills(folders)
        if count is not None:
            self._folders[pid] = folders
            self._seen.setdefault(tuple(folders), count)

    def killed(self, pid: int) -> bool:
        """Whether the kernel killed a process for memory: its group's count has grown since the last death that was checked."""
        folders = self._folders.pop(pid, [])
        count, before = kills(folders), self._seen.get(tuple(folders))
        if count is None or before is None or count <= before:
            return False
        self._seen[tuple(folders)] = before + 1
        return True

    def forget(self, pid: int) -> None:
        """Stop watching a process that ended in another way."""
        self._folders.pop(pid, None)
