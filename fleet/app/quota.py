"""An equal part of the cores for each process: a group (cgroup) with a quota of CPU time, of version 1 or 2 under one contract.

In each period, all threads of such a process may run for ``cores`` x the period, and then wait for the next one. A period is far shorter
than a step, so that the end of a step does not depend on that of a period.
"""

from __future__ import annotations

from pathlib import Path

from chaos.confine import BoundGroup, sweep
from fleet.errors import ConfigError
from fleet.host.processor_time import V1_PERIOD, V1_QUOTA, V2_LIMIT, own_group

PREFIX = "fleet-cpu-"
LEAST_QUOTA_US, PERIOD_US = 1_000, 5_000
"""The kernel gives a group at least a millisecond in each period."""
MOST_PERIOD_US = 1_000_000


def limit(cores: float) -> tuple[int, int]:
    """(quota, period) in microseconds. Raises ConfigError for a part that the kernel cannot give."""
    period_us = max(PERIOD_US, round(LEAST_QUOTA_US / cores)) if cores > 0 else 0
    if not 0 < period_us <= MOST_PERIOD_US:
        raise ConfigError("--cpu-quota", cores, "the kernel gives a group from 0.001 cores on", "Give each rank 0.05 cores or more.")
    return max(LEAST_QUOTA_US, round(cores * period_us)), period_us


def cpu_part(parent: Path, cores: float) -> BoundGroup:
    """A group with ``cores`` of CPU time, in either version. Raises ConfigError, and OSError where groups have no such limit."""
    quota_us, period_us = limit(cores)
    limits = [{V2_LIMIT: f"{quota_us} {period_us}"}, {V1_PERIOD: str(period_us), V1_QUOTA: str(quota_us)}]
    return BoundGroup(parent, PREFIX, "CPU time", limits)


class Quotas:
    """A group of its own for each process that is handed in. Raises ConfigError at once on a host without such groups.

    Args:
        cores: of each process.
    """

    def __init__(self, cores: float) -> None:
        self._cores, self._groups = cores, list[BoundGroup]()
        limit(cores)
        try:
            self._parent = own_group()
            sweep(self._parent, PREFIX)
            cpu_part(self._parent, cores).close()
        except OSError as error:
            way_out = "Run as root on a host with cgroups, or leave it out and use worlds that have a core for each thread."
            raise ConfigError("--cpu-quota", cores, f"no process can be given a part of a core here: {error}", way_out) from error

    def hold(self, pid: int) -> None:
        """Limit the process to its part from now on. Raises OSError when it has ended."""
        self._groups.append(group := cpu_part(self._parent, self._cores))
        group.take(pid)

    def close(self) -> None:
        """Remove the groups, and with them all limits."""
        while self._groups:
            self._groups.pop().close()
