"""The driver of a run that belongs to a cluster: a process of the head node, which :mod:`actors.supervisor` starts.

``python -m fleet.app.in_cluster ADDRESS FOLDER begin|resume``: the folder has the plan and the runtime environment of its ranks. The driver
writes the run's outcome there.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from ray import cloudpickle

from actors.supervisor import ENVIRONMENT, OUTCOME, PLAN
from dashboards.trackers import choice
from fleet.app import chaos_token, policy_choice
from fleet.app.cluster import nodes_asked
from fleet.app.cluster.joined import JoinedCluster, check_room, examine
from fleet.app.holding import HeldElsewhere, check_store
from fleet.app.link_preflight import kept_out
from fleet.app.plans import RunPlan, store_url
from fleet.app.recipes import LiveRun
from fleet.app.stopping import stopped_by_signals
from fleet.errors import ConfigError, FleetError
from fleet.host.whole_files import write_whole
from fleet.settings.run import NODES_S
from storage.backends.urls import redact

log = logging.getLogger("fleet.app.in_cluster")


def main() -> None:
    """Drive the run that the command line names, and leave its outcome in its folder."""
    address, folder, how = sys.argv[1:]
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s")
    home = Path(folder)
    outcome: dict[str, Any]
    try:
        outcome = _drive(address, home, how == "resume")
    except ConfigError as error:
        value = error.value if isinstance(error.value, int | float) else str(error.value)
        outcome = {"refused": [error.field, value, error.reason, error.way_out], "held": isinstance(error, HeldElsewhere)}
    except FleetError as error:
        outcome = {"status": "failed", "reason": str(error), "detail": ""}
    except Exception as error:
        log.exception("the run could not be driven")
        outcome = {"status": "failed", "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", "detail": ""}
    home.mkdir(parents=True, exist_ok=True)  # a run that was refused leaves this file alone
    write_whole(home / OUTCOME, json.dumps(outcome))


def _drive(address: str, folder: Path, resume: bool) -> dict[str, str]:
    """Train to the end. Raises ConfigError when the run cannot be on this cluster; then it leaves nothing."""
    policy_choice.look_in(Path.cwd())
    plan: RunPlan = cloudpickle.loads((folder / PLAN).read_bytes())
    environment = json.loads((folder / ENVIRONMENT).read_text())
    choice.check(plan.settings.track, os.environ)
    if plan.chaos.on:
        chaos_token.check(plan.chaos_token, Path.home())
    takes, metadata = plan.settings.per_rank, _for_ray(plan, address, folder)
    with JoinedCluster(address, takes.takes, takes.selector, code=environment, metadata=metadata) as cluster:
        begun = (folder / "journal.jsonl").exists()
        if not begun and plan.resume:
            _fetch(plan, folder)
        here = dataclasses.replace(plan, folder=folder, resume=(resume and begun) or plan.resume)
        held = _ask_for_nodes(plan, cluster, resume)
        examined = {index: cluster.place(index) for index in cluster.alive()}
        if not resume:  # else the last driver's slots may not be free yet, and the nodes have been examined
            if held is None:
                check_room(plan.settings.slots, cluster.slot, cluster.selector, plan.name, plan.settings.group)
            examine(examined, plan.settings.tls)
            _check_store(here)
        here = dataclasses.replace(here, settings=dataclasses.replace(plan.settings, nodes=max(1, len(examined))))
        policy_choice.check(here.settings)
        live = LiveRun(here, cluster, kept_out(examined, log.info) if here.settings.preflight else None)
        if held is not None:
            held.ask(0)  # agents keep the nodes until ranks are placed
        with stopped_by_signals(lambda signal: live.stop("stopped by its user"), log.info):
            result = live.execute()
            return {"status": result.status, "reason": result.reason, "detail": result.detail}


def _ask_for_nodes(plan: RunPlan, cluster: JoinedCluster, resume: bool) -> nodes_asked.PlaceGroup | None:
    """If the settings ask for it, wait for enough nodes, and hold their room. Raises ConfigError: the cluster has no autoscaler."""
    if not plan.settings.ask_for_nodes:
        return None
    nodes_asked.check(cluster.address)
    if resume:  # the last driver's slots may not be free yet
        return None
    log.info("nodes are asked for: %d places", plan.settings.slots)
    return nodes_asked.await_room(plan.settings.slots, cluster.slot, cluster.selector, NODES_S)


def _check_store(plan: RunPlan) -> None:
    """Raises ConfigError when the store lets two clusters hold one run. One that fails is told by the node's agent that has tried it."""
    try:
        check_store(plan)
    except OSError as error:
        log.warning("whether the store can keep two clusters apart is not known: %s", redact(error))


def _for_ray(plan: RunPlan, address: str, folder: Path) -> dict[str, str]:
    """The run's metadata for Ray's Jobs API. Ray's list of jobs can be filtered by ``job_name``."""
    metadata = {"job_name": plan.name, "fleet_run": plan.name, "fleet_folder": str(folder)}
    metadata["fleet_attach"] = f"fleet attach {plan.name} --address {address}"
    return metadata | ({"fleet_page": plan.page} if plan.page else {})


def _fetch(plan: RunPlan, folder: Path) -> None:
    from storage.mirror import fetch_journal

    fetch_journal(store_url(plan), folder / "journal.jsonl")


if __name__ == "__main__":
    main()
