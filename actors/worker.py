"""The train function that Ray Train runs in each worker: finds out who and where it is, and becomes a rank."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray._private.log import PlainRayHandler

from actors.node import socket_path
from actors.rank.main import run_rank
from actors.rank.once import Home
from actors.rank.saving import PartsPort
from fleet.config import RunSettings


@dataclass(frozen=True)
class RankSpec:
    """What a worker needs to become a rank. ``folder`` holds the agents' sockets and the rings; ``host`` is None where nodes differ,
    ``logs`` where no folder is the same for all."""

    settings: RunSettings
    folder: Path
    host: str | None
    train: Callable[[Any], None]
    parts: Callable[[], PartsPort]
    home: Home | None = None
    logs: Path | None = None


def rank_main(config: dict[str, Any]) -> None:
    spec: RankSpec = config["spec"]
    slot = ray.train.get_context().get_world_rank()
    node = ray.get_runtime_context().get_node_id()
    host = spec.host or ray.util.get_node_ip_address()
    _hush()
    agent = socket_path(spec.folder, node)
    run_rank(spec.train, spec.settings, slot, node, spec.folder, host, spec.parts(), agent, spec.home, spec.logs)


def _hush() -> None:
    """What Ray has to say goes to its own log files, and not to where the rank prints."""
    for name in ("ray", "ray.train"):
        logger = logging.getLogger(name)
        logger.propagate = False
        logger.handlers[:] = [each for each in logger.handlers if not isinstance(each, PlainRayHandler)]
