"""One Ray node of a local cluster, hosted by one small process. Run by file path; see ``fleet.launch.local``.

It starts the node's daemons, prints one line of JSON, and waits until its standard input closes: so that when the launcher dies,
however it dies, the pipe closes and the node goes with it. Ray lets the daemons die with this process (``PR_SET_PDEATHSIG``).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import ray
from ray._private.node import Node
from ray._private.parameter import RayParams


class _Headless(Node):  # type: ignore[misc]
    """A node without Ray's API server and without the part of the agents that serves it: 70 MB and some seconds less."""

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        self._webui_url = None


def start(settings: dict[str, Any], dashboard: bool) -> Node:
    """Start the node's processes; returns when the node has registered with the cluster."""
    if not dashboard:
        ray._private.utils.get_dashboard_dependency_error = lambda: ImportError("switched off")  # agents start with --minimal
    node_class = Node if dashboard else _Headless
    head = settings.get("gcs_address") is None
    return node_class(RayParams(**settings), head=head, shutdown_at_exit=False, spawn_reaper=True)


def main() -> None:
    """Host the node that the first argument describes, as JSON, until standard input closes."""
    request = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints goes to the log, so that the answer is the only line
    node = start(request["settings"], request["dashboard"])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the raylet at once: unreaped, its workers would live on
    print(json.dumps({"address": node.gcs_address, "node_id": node.node_id}), file=out, flush=True)
    sys.stdin.buffer.read()
    node.kill_all_processes(check_alive=False, allow_graceful=False)


if __name__ == "__main__":
    main()
