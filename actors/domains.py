"""Which failure domains the node of this process lies in, from the labels that Ray knows of it."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence

import ray

from fleet.protocol.domains import VARIABLE, locate

log = logging.getLogger("fleet.domains")


def settle(levels: Sequence[str]) -> None:
    """Have ``FLEET_DOMAIN`` in the environment say it, unless it does already: for an agent's hello, and for what a rank claims.

    Args:
        levels: the run's setting ``domains``.
    """
    labels = ray.get_runtime_context().get_node_labels()
    found = locate({str(name): str(value) for name, value in labels.items()}, socket.gethostname(), levels, os.environ.get(VARIABLE, ""))
    if found.missing:
        log.warning("this node has no label %s: its host stands for it", ", ".join(found.missing))
    os.environ[VARIABLE] = found.path
