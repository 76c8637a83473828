"""GPUs of this machine, for the nodes of a local cluster. Linux, NVIDIA."""

from __future__ import annotations

import os
from pathlib import Path

from fleet.errors import ConfigError
from fleet.settings.per_rank import VISIBLE, room
from fleet.settings.run import RunSettings

DRIVER = Path("/proc/driver/nvidia/gpus")


def visible_gpus() -> list[str]:
    """Ids of GPUs: those in ``CUDA_VISIBLE_DEVICES``, or all that the driver knows where it is not set."""
    if (named := os.environ.get(VISIBLE)) is not None:
        return [name.strip() for name in named.split(",") if name.strip() and name.strip() != "-1"]
    return [str(number) for number in range(len(list(DRIVER.glob("*"))))]


def gpus_for(settings: RunSettings) -> list[str]:
    """This machine's GPUs for a local cluster, the same number for each of its nodes; none where ranks take none.

    Raises:
        ConfigError: there are too few for all ranks and spares, or ranks ask for a resource that no local cluster has.
    """
    wanted = settings.per_rank
    if wanted.of_joined:
        reason = "a cluster that Fleet starts has slots and GPUs alone"
        raise ConfigError(f"per_rank.{wanted.of_joined}", getattr(wanted, wanted.of_joined), reason, "Join a cluster with --address.")
    if not wanted.gpus:
        return []
    found = visible_gpus()
    each = len(found) // settings.nodes
    ranks = settings.nodes * room({"GPU": each}, {"GPU": wanted.gpus})
    if ranks < settings.slots:
        reason = (
            f"this machine has {len(found)} GPUs, {each} for each of {settings.nodes} nodes, which is room for {ranks} ranks; "
            f"{settings.world} ranks and {settings.spares} spares were asked for"
        )
        raise ConfigError("per_rank.gpus", wanted.gpus, reason, "Ask for fewer ranks or nodes, or for less of a GPU, such as 0.5.")
    return found[: each * settings.nodes]
