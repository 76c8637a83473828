"""Fleet on hosts: ``fleet.launch`` on the head joins the cluster there. Its driver is a process of the cluster."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from benchmarks.peers.common import Settings
from benchmarks.peers.fleet_run import generous, train
from benchmarks.peers.on_hosts import CODE, ENVIRONMENT, LOGS, HostsRun, Site

SILENCE_S = 3.0
"""Seconds of silence after which a rank or a node is lost. They are equal, so that a cut-off node is not found by its ranks' silence
first."""
CALL = "import sys; from benchmarks.peers import fleet_hosts; fleet_hosts.drive(*sys.argv[1:])"


def start(site: Site, name: str, settings: Settings, output: Path) -> HostsRun:
    """Begin a run that never ends by itself."""
    run = HostsRun(site, settings, f"{LOGS}/{name}", output)
    head = site.head.host
    asked = {"name": name, "address": site.head.address, "storage": site.store.url("bench"), "workdir": run.folder}
    run.start(head, [head.python, "-c", CALL, json.dumps(asked), settings.to_json()], ENVIRONMENT)
    return run


def drive(asked_json: str, settings_json: str) -> None:
    """Process on the head: one run on the cluster that is there; SIGTERM ends it in order."""
    import fleet

    asked, settings = json.loads(asked_json), Settings.from_json(settings_json)
    result = fleet.launch(
        train,
        world=settings.world,
        spares=settings.spares,
        shards=settings.shards,
        seed=settings.seed,
        storage=asked["storage"],
        address=asked["address"],
        name=asked["name"],
        working_dir=CODE,
        options={"workdir": asked["workdir"], "settings": settings_json},
        timeouts={"heartbeat_s": SILENCE_S, "node_s": SILENCE_S},
        budgets=dataclasses.asdict(generous()),
        check=False,
    )
    print(result.status, result.reason, file=sys.stderr, flush=True)
