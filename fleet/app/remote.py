"""Runs that belong to a cluster, as a process sees them that is connected to it: begin one, find one, follow it, stop it.

What such a run writes lies on the head node. Here it is copied, piece by piece, into a folder like that of a local run, so that all that
reads a run's folder works on it.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle

from actors import supervisor
from actors.messages import SettingAnswer, Wanted
from actors.rank.script import Script
from actors.rank.shipped import Shipped
from actors.supervisor import DriverStanding
from dashboards.trackers import choice
from fleet.app import chaos_token, plans
from fleet.app.cluster import ray_internals, reach
from fleet.app.cluster.joined import SLOT, environment, nodes, run_names, top_of
from fleet.app.cluster.ray_internals import free_by_node
from fleet.app.plans import RunPlan, RunResult
from fleet.app.shipping import ship
from fleet.errors import ConfigError, RunFailed
from fleet.host.mirroring import MirroredFiles
from fleet.host.provenance import code_of, provenance
from fleet.settings.per_rank import room

ROOT = "~/.fleet/runs"
"""On the head, unless ``--storage`` names a folder from its root on."""
CALL_S = 30.0
PULL_S = 0.5
LAST_PULLS = 1_000


@contextmanager
def connected(address: str) -> Iterator[None]:
    """This process connected to the cluster at ``address``; a process that is connected to it already stays so. Raises ConfigError."""
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address not in (reach.AUTO, here):
            way_out = "Give that address or auto, or call ray.shutdown() first."
            raise ConfigError("address", address, f"this process is connected to the cluster at {here}", way_out)
        yield
    else:
        with reach.reached(address):
            yield


class RemoteRun:
    """One run of a cluster, and its copy in ``folder``."""

    def __init__(self, name: str, folder: Path, handle: Any) -> None:
        self.name, self.folder, self._handle = name, folder, handle
        self._copies = MirroredFiles(folder)
        self._over = threading.Event()

    @property
    def journal(self) -> Path:
        return self.folder / "journal.jsonl"

    def standing(self) -> DriverStanding:
        """Raises RunFailed when the cluster does not answer."""
        standing: DriverStanding = self._ask(self._handle.standing.remote())
        return standing

    def pull(self) -> bool:
        """Copy what is new; whether there was something. Raises RunFailed."""
        return self._copies.take(self._ask(self._handle.pieces.remote(self._copies.known))) > 0

    def stop(self, reason: str = "") -> None:
        """End the run in order; called again, at once. ``reason`` is this process's: the run notes that its user has stopped it."""
        self._ask(self._handle.stop.remote())

    def ask(self, wanted: Wanted) -> SettingAnswer:
        """Have the run's coordinator do what is wanted; it answers why not, if not. Raises RunFailed: nobody answers."""
        answer: SettingAnswer = self._ask(self._handle.ask.remote(wanted))
        return answer

    def pause(self) -> None:
        """Before the cluster is asked again."""
        self._over.wait(PULL_S)

    def follow(self) -> DriverStanding:
        """Copy until the run has ended. Raises RunFailed when the cluster is gone."""
        while True:
            standing = self.standing()
            news = self.pull()
            if standing.code is not None:
                for _ in range(LAST_PULLS):
                    if not self.pull():
                        break
                return standing
            if not news:
                self.pause()

    def leave(self, forget: bool = False) -> None:
        """Nobody has to ask about this run any more. ``forget``: it was refused, and nothing of it is to be left on the head."""
        ray.wait([self._handle.leave.remote(forget)], timeout=CALL_S)  # this process may end next, and the call with it

    def _ask(self, call: Any) -> Any:
        try:
            return ray.get(call, timeout=CALL_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            words = " ".join(str(error).split())[:200]
            raise RunFailed(f"run {self.name}: the cluster does not answer: {type(error).__name__}: {words}") from error


class Attached:
    """A run of a cluster as one that is executed here: what ``fleet.app.recipes.LiveRun`` is for a local one."""

    controls = None
    """Chaos takes orders where its injector is; the page here cannot give any."""

    def __init__(self, plan: RunPlan, run: RemoteRun) -> None:
        self.plan, self.run = plan, run

    def execute(self) -> RunResult:
        """Follow it to its end.

        Raises ConfigError when the cluster could not have it: nothing is left of it then. Raises RunFailed when it has no journal.
        """
        standing = self.run.follow()
        forget = "refused" in (standing.outcome or {}) and not self.plan.resume
        self.run.leave(forget)
        if forget:
            shutil.rmtree(self.plan.folder, ignore_errors=True)
        result = result_of(self.plan, standing)
        if not self.plan.journal.exists():
            raise RunFailed(f"run {self.plan.name} has not begun: {result.reason}", result.detail or _said(self.plan.folder))
        return result

    def stop(self, reason: str) -> None:
        self.run.stop(reason)


class Launched(Attached):
    """A plan that is carried out on a cluster, from its beginning. Its folder is somewhere below ``root``."""

    def __init__(self, plan: RunPlan, root: Path, code: Path | None) -> None:
        super().__init__(plan, begin(plan, root, code))


def begin(plan: RunPlan, root: Path, code: Path | None) -> RemoteRun:
    """Begin ``plan``, whose folder is somewhere below ``root``; what lies in the folder ``code`` is there for all its ranks.

    Raises ConfigError when the cluster has a run of this name, or the code is too much.
    """
    storage = plan.settings.storage
    there = storage if "://" not in storage and Path(storage).is_absolute() else ROOT
    handle = _supervisor(plan.name, there, str(plan.folder.relative_to(root)), ray_internals.uploaded(environment(code)))
    plan.folder.mkdir(parents=True, exist_ok=True)
    kept = code_of(plan.script)
    kept.keep(plan.folder)
    train = plan.train.carried(top_of(code)) if isinstance(plan.train, Script) else plan.train
    train = train if isinstance(train, Script | Shipped) else ship(train, "script")
    made_of, token = provenance(plan.script, kept), chaos_token.shown()
    settings = dataclasses.replace(plan.settings, track=choice.located(plan.settings.track, os.environ))
    sent = dataclasses.replace(plan, settings=settings, train=train, chaos=plan.chaos.carried(), made_of=made_of, chaos_token=token)
    refused = ray.get(handle.begin.remote(bytes(cloudpickle.dumps(sent))), timeout=CALL_S)
    if refused:
        handle.leave.remote()
        shutil.rmtree(plan.folder, ignore_errors=True)
        raise ConfigError("--name", plan.name, refused, "Choose another, or use fleet run --resume.")
    return RemoteRun(plan.name, plan.folder, handle)


def _supervisor(name: str, root: str, inside: str, runtime_env: dict[str, Any]) -> Any:
    try:
        handle = supervisor.start(name, root, inside, runtime_env)
        ray.get(handle.where.remote(), timeout=CALL_S)
    except ValueError as error:
        raise ConfigError(
            "--name", name, "the cluster has a run of this name", f"Choose another, or see it with fleet attach {name}."
        ) from error
    except (ray.exceptions.RayError, TimeoutError) as error:
        words = " ".join(str(error).split())[-400:]
        raise ConfigError(
            "--address", ray.get_runtime_context().gcs_address, f"no process could be started on the head node: {words}"
        ) from error
    return handle


def result_of(plan: RunPlan, standing: DriverStanding) -> RunResult:
    """Raises ConfigError, as the driver has."""
    outcome = standing.outcome or {}
    if "refused" in outcome:
        raise ConfigError(*outcome["refused"])
    if not outcome:
        reason = f"the process that drives the run ended with {standing.code}, {standing.restarts} restarts included"
        return RunResult(plan=plan, status="failed", reason=reason, detail=_said(plan.folder))
    return RunResult(plan=plan, status=outcome["status"], reason=outcome["reason"], detail=outcome["detail"])


def find(name: str, root: Path) -> RemoteRun:
    """A run of the cluster, to be copied to ``root``. Raises ConfigError when there is none of this name."""
    try:
        handle = supervisor.find(name)
    except ValueError as error:
        there = ", ".join(sorted(each.removeprefix(supervisor.PREFIX) for each in run_names())) or "none"
        raise ConfigError("RUN", name, f"the cluster has no such run; it has: {there}", "See fleet status --address.") from error
    return RemoteRun(name, root / name, handle)


def all_runs(root: Path) -> list[RemoteRun]:
    """The runs that the cluster knows of: those that go on, and those that ended within the last hour and that nobody has attached to."""
    return [find(each.removeprefix(supervisor.PREFIX), root) for each in sorted(run_names())]


def seen() -> str:
    """The cluster that this process is connected to, in a clause: how many nodes it has, and how much room."""
    alive, free = nodes(), free_by_node()
    slots = sum(room(free.get(str(node["NodeID"]), {}), SLOT) for node in alive)
    return f"{len(alive)} nodes, room for {slots} ranks"


def in_words(run: RemoteRun) -> str:
    """How far a run is, in a line."""
    standing = run.standing()
    restarts = f", its driver was started again {standing.restarts} time(s)" if standing.restarts else ""
    if standing.code is None:
        return f"goes on, driven by process {standing.pid} of the head{restarts}"
    outcome = standing.outcome or {}
    return f"{outcome.get('status', 'ended')}: {outcome.get('reason', f'its driver ended with {standing.code}')}{restarts}"


def plan_of(run: RemoteRun) -> RunPlan | None:
    """A plan of a run that was begun elsewhere, for what shows it: its folder and its settings; None when it was stopped before it began.

    Raises RunFailed: it has no journal.
    """
    for _ in range(round(CALL_S / PULL_S)):
        standing = run.standing()
        run.pull()
        if run.journal.exists():
            return plans.seen_plan(run.folder)
        if standing.outcome == supervisor.STOPPED:
            return None
        if standing.code is not None:
            break
        run.pause()
    raise RunFailed(f"run {run.name} has no journal yet", _said(run.folder))


def _said(folder: Path) -> str:
    """The end of what the driver has printed."""
    log = folder / "driver.log"
    return log.read_text(errors="replace")[-3000:] if log.exists() else ""
