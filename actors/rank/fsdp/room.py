"""Whether a rank has room for gathered units: a unit that it cannot hold is refused before the first step, by name."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from actors.rank.fsdp.taken import Unit
from fleet.errors import ConfigError
from fleet.protocol.chunks import AT_ONCE, LEAST_AT_ONCE

log = logging.getLogger("fleet.rank")
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


def check(units: Sequence[Unit], free: int) -> bool:
    """Check the units before the first step, while this rank still holds the whole model. Raises ConfigError: a unit is too large.

    Returns whether the next unit has room, too, while one computes.

    Args:
        free: bytes that are free beside the whole model; a model on ``meta`` takes none.
    """
    sizes = [sum(parameter.nbytes for parameter in unit.parameters) for unit in units]
    held = sum(parameter.nbytes for unit in units for parameter in unit.parameters if not parameter.is_meta)
    room, needed = free + held, sum(sorted(sizes)[-LEAST_AT_ONCE:])
    if needed > room:
        largest = max(range(len(units)), key=sizes.__getitem__)
        reason = (
            f"its parameters are {sizes[largest] / GIB:.3g} GiB, {LEAST_AT_ONCE} are gathered at once, {needed / GIB:.3g} GiB in all, "
            f"and this rank has room for {room / GIB:.3g} GiB"
        )
        way_out = "Call fully_shard on parts of it, so that less is gathered at once; or give each rank more memory."
        raise ConfigError("fully_shard", units[largest].name, reason, way_out)
    if (ahead := sum(sorted(sizes)[-AT_ONCE:])) > room:
        log.warning("no unit is gathered ahead: %.3g GiB for %d units, and this rank has room for %.3g", ahead / GIB, AT_ONCE, room / GIB)
    return ahead <= room
