"""torchft on hosts: the lighthouse on the head, and on each worker a supervisor as in `torchft_alone`, which restarts its dead ranks.

Ranks are dealt to the workers in turn. There is no spare: a host's ranks come back when another machine takes its place.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.peers.common import Settings
from benchmarks.peers.on_hosts import ENVIRONMENT, LIBRARY, LOGS, HostsRun, Site
from benchmarks.peers.torchft_alone import CALL
from tests.support.hosts import Host


def start(site: Site, name: str, settings: Settings, output: Path) -> HostsRun:
    """Begin a run that never ends by itself."""
    run = HostsRun(site, settings, f"{LOGS}/{name}", output, replaced=supervise)
    head = site.head.host
    run.start(head, [head.python, "-c", CALL.format("light_the_head"), head.address], ENVIRONMENT)
    for worker in site.workers:
        supervise(run, worker)
    return run


def supervise(run: HostsRun, worker: Host) -> None:
    """Start the ranks of a worker: at first, or when it is another machine than before."""
    workers = run.site.workers
    slots = list(range(workers.index(worker), run.settings.world, len(workers)))
    arguments = [run.folder, run.settings.to_json(), run.site.head.host.address, worker.address, json.dumps(slots)]
    command = [worker.python, "-c", CALL.format("supervise_host"), *arguments]
    run.start(worker, command, {**ENVIRONMENT, "PYTHONPATH": LIBRARY})
