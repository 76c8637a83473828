"""Fleet, through its public API, on a local cluster of its own.

Ray Train replaces killed ranks. A spare joins at a step boundary soon after a kill. A lost node comes back at once as a new one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.common import EventLog, Kill, LoggedRun, Settings, not_installed, rank_environment

CALL = "import sys; from benchmarks.peers import fleet_run; fleet_run.drive(*sys.argv[1:])"
HEARTBEAT_S = 3.0
ANSWER_S = 30.0
LOSE_POLL_S = 0.05
ENDLESS = 1_000_000_000


class FleetRun(LoggedRun):
    """The driver, which started the nodes, loses one: it is asked by a file, and answers by another."""

    def inject(self, kind: str, slot: int) -> Kill:
        if kind != "node":
            return super().inject(kind, slot)
        pid = self.ranks()[slot]
        answer = self.workdir / f"lost-{pid}"
        (self.workdir / "lose").write_text(str(pid))
        deadline_s = time.monotonic() + ANSWER_S
        while not answer.exists() and time.monotonic() < deadline_s:
            time.sleep(0.005)
        return Kill(json.loads(answer.read_text()), slot, pid, kind)


class Fleet:
    name = "fleet"
    extra_faults: tuple[str, ...] = ("node", "hang")
    hang_timeout_s = HEARTBEAT_S

    def missing(self) -> str | None:
        return not_installed("torch", "ray")

    def start(self, workdir: Path, settings: Settings) -> FleetRun:
        return FleetRun(workdir, settings, [sys.executable, "-c", CALL, str(workdir), settings.to_json()], rank_environment())


SYSTEM = Fleet()


def drive(workdir: str, settings_json: str) -> None:
    """Process of the driver: a cluster, one run that never ends by itself, and SIGTERM to end both."""
    from fleet.app.plans import RunPlan
    from fleet.app.recipes import LiveRun, local_cluster
    from fleet.settings.run import RunSettings, Timeouts

    folder, settings = Path(workdir), Settings.from_json(settings_json)
    chosen = RunSettings(
        world=settings.world,
        spares=settings.spares,
        nodes=settings.nodes,
        shards=settings.shards,
        seed=settings.seed,
        options={"workdir": workdir, "settings": settings_json},
        timeouts=Timeouts(heartbeat_s=HEARTBEAT_S),
        budgets=generous(),
    )
    with local_cluster(chosen) as cluster:
        live = LiveRun(RunPlan(name="bench", folder=folder / "run", settings=chosen, train=train), cluster)
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=live.stop, args=("SIGTERM",)).start())
        threading.Thread(target=_lose_nodes, args=(live, folder), daemon=True).start()
        print(live.execute(), flush=True)


def generous() -> Any:
    """The kills come from outside and are unknown to the run, so the budgets must leave room for them."""
    from fleet.settings.run import Budgets

    return Budgets(slot=100_000, total=10_000)


def _node_of(live: Any, pid: int) -> int:
    """Index of the node on which rank process ``pid`` lives. Raises KeyError."""
    import ray

    _, ranks, _ = ray.get(live.coordinator.census.remote(), timeout=30)
    names = {process.pid: process.node for _, process, _ in ranks}
    return next(index for index, place in live.places.items() if place.id == names[pid])


def _lose_nodes(live: Any, folder: Path) -> None:
    """Lose the node of the process that ``lose`` names, and start another."""
    wanted = folder / "lose"
    while True:
        time.sleep(LOSE_POLL_S)
        if not wanted.exists() or not (pid := wanted.read_text()):
            continue
        wanted.unlink()
        index = _node_of(live, int(pid))
        at_s = time.monotonic()
        live.nodes.lose(index)
        answer = folder / f"lost-{pid}"
        answer.with_suffix(".new").write_text(json.dumps(at_s))
        os.replace(answer.with_suffix(".new"), answer)
        live.nodes.add()


def train(run: Any) -> None:
    """The common step, as a user of Fleet would write it."""
    from benchmarks.peers.workload import build, shard_loss

    settings = Settings.from_json(run.options["settings"])
    model, optimizer = build(settings)
    state = run.track(model=model, optimizer=optimizer)
    log = EventLog(Path(run.options["workdir"]) / "events", run.slot)
    numbers = list(range(settings.shards))
    for step in run.steps(state, total=ENDLESS):
        for _ in step.batches(numbers, batch_size=settings.shards):
            loss = shard_loss(model, settings, step.number, step.shard)
            if step.shard == step.shards[-1]:
                time.sleep(settings.wait_s)
            step.backward(loss)
        if step.commit():
            log.write(step.number + 1, settings.global_samples, "commit", run.generation)
