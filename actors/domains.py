"""The failure domains of this process's node, from the node's labels in Ray."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence

import ray

from fleet.protocol.domains import VARIABLE, locate

log = logging.getLogger("fleet.domains")


def settle(levels: Sequence[str]) -> None:
    """Set ``FLEET_DOMAIN`` in the environment, unless it is set: for an agent's hello, and for a rank's claim.

    Args:
        levels: the run's setting ``domains``.
    """
    labels = ray.get_runtime_context().get_node_labels()
    found = locate({str(name): str(value) for name, value in labels.items()}, socket.gethostname(), levels, os.environ.get(VARIABLE, ""))
    if found.missing:
        log.warning("this node has no label %s: its host is used instead", ", ".join(found.missing))
    os.environ[VARIABLE] = found.path
