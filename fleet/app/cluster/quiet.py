"""Ray without its noise: users of Fleet read Fleet's own output. Ray's messages stay in its log files and in a logger."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fleet.app.cluster import ray_internals

log = logging.getLogger("fleet.ray")


def connect(address: str, imports_from: Sequence[str] = (), **arguments: Any) -> None:
    """``ray.init`` with the cluster at ``address``. Deaths that Ray reports go to the logger ``fleet.ray`` as debug messages.

    Python finds modules in the folders ``imports_from`` in all of this job's processes, as it does in the working directory.
    """
    import ray

    ray_internals.take_prints(_to_log)
    job = {"job_config": ray_internals.job_config(imports_from)} if imports_from else {}  # Ray's client takes none
    ray.init(address=address, **{"log_to_driver": False, "logging_level": "ERROR", **job, **arguments})


def _to_log(data: dict[str, Any], ignore_prefix: bool) -> None:
    for line in data["lines"]:
        log.debug("%s%s", "" if ignore_prefix else f"({data['pid']}) ", line)
