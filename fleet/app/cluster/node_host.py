"""One Ray node of a local cluster, hosted by one small process; see ``fleet.app.cluster.local``.

It starts the node's daemons, prints one line of JSON, and waits until its standard input closes or the raylet ends. Then it kills the rest
of the node. So the node ends with the launcher, however the launcher dies. Without this, Ray's agents would live on for a minute, in which
they try to tell the head. Workers would live on without limit, as no process would reap their raylet.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import sys

from fleet.app.cluster.ray_internals import HostedNode
from fleet.host import processes


def main() -> None:
    """Host the node that the first argument describes, as JSON, until standard input closes."""
    settings = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray's prints go to the log, so that the answer is the only line
    node = HostedNode(settings)
    print(json.dumps({"address": node.address, "node_id": node.id, "raylet": node.raylet.pid}), file=out, flush=True)
    ended = select.select([sys.stdin, os.pidfd_open(node.raylet.pid)], [], [])[0]
    node.raylet.poll()  # reaps it
    processes.kill_all(os.environ[processes.CLUSTER_VARIABLE], os.environ[processes.NODE_VARIABLE])
    if sys.stdin in ended and node.is_head:
        shutil.rmtree(settings["temp_dir"], ignore_errors=True)
