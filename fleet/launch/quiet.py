"""Ray without its noise: users of Fleet read Fleet's own output; what Ray has to say stays in its log files and in a logger."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("fleet.ray")


def connect(address: str, **arguments: Any) -> None:
    """``ray.init`` with the cluster at ``address``. Deaths that Ray reports go to the logger ``fleet.ray`` as debug messages."""
    import ray

    ray._private.worker.print_to_stdstream = _to_log
    ray.init(address=address, **{"log_to_driver": False, "logging_level": "ERROR", **arguments})


def _to_log(data: dict[str, Any], ignore_prefix: bool) -> None:
    for line in data["lines"]:
        log.debug("%s%s", "" if ignore_prefix else f"({data['pid']}) ", line)
