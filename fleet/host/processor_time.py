"""The share of the processors that a process may use: the cores that it may run on, and its group's quota (cgroup, version 1 or 2)."""

from __future__ import annotations

from pathlib import Path

from fleet.host.linux import allowed_cores

ROOT = Path("/sys/fs/cgroup")
V1_QUOTA, V1_PERIOD, V2_LIMIT = "cpu.cfs_quota_us", "cpu.cfs_period_us", "cpu.max"


def cpu_group(groups: str, root: Path = ROOT) -> Path:
    """The group that bounds the CPU time of a process, from its ``/proc/PID/cgroup``; of either version. Raises OSError."""
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        named = controllers.split(",")
        if controllers == "" or "cpu" in named:
            base = root if controllers == "" else next((root / each for each in ("cpu", controllers) if (root / each).is_dir()), root)
            for folder in (base / path.strip("/"), base):  # a container may not see its own group by the name that the host knows
                if (folder / "cgroup.procs").exists():
                    return folder
    raise OSError("it is in no group that bounds CPU time")


def own_group() -> Path:
    """The group of this process. Raises OSError."""
    return cpu_group(Path("/proc/self/cgroup").read_text(encoding="utf-8"))


def cores_of_host() -> float:
    """Cores that this process may use: those that it may run on, or its group's share of them where that is less."""
    cores = float(len(allowed_cores(0)))
    try:
        return min(cores, _bound_of(own_group()))
    except OSError:  # no groups here: no quota bounds it
        return cores


def _bound_of(folder: Path) -> float:
    if (folder / V2_LIMIT).exists():
        quota, period = (folder / V2_LIMIT).read_text().split()
    elif (folder / V1_QUOTA).exists():
        quota, period = ((folder / name).read_text().strip() for name in (V1_QUOTA, V1_PERIOD))
    else:
        return float("inf")
    return float("inf") if quota in ("max", "-1") else float(quota) / float(period)
