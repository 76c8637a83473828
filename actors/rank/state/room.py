"""How much memory a process can still take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

GIB = 1 << 30
NO_LIMIT = "max"


def free_bytes(device: torch.device, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process can still take on ``device``: of the GPU, or of the host within its control groups (cgroup v2)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    host = int(meminfo["MemAvailable"].split()[0]) * 1024
    return min([host, *_left_in(proc, groups)])


def _left_in(proc: Path, groups: Path) -> Iterator[int]:
    """Bytes left in each control group of this process, up to the outermost. Memory that the kernel can drop counts as free."""
    path = next((line[3:] for line in (proc / "self/cgroup").read_text().splitlines() if line.startswith("0::")), "")
    inner = groups / path.strip("/")
    for group in (inner, *inner.parents):
        limit, used = group / "memory.max", group / "memory.current"
        if limit.is_file() and (most := limit.read_text().strip()) != NO_LIMIT:
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            yield int(most) - int(used.read_text()) + int(stat.get("inactive_file", 0))
        if group == groups:
            return
