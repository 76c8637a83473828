"""Runs that belong to a cluster, seen from a process that is connected to it: begin one, find one, follow it, stop it.

The files of such a run lie on the head node. This module copies them, piece by piece, into a folder like that of a local run. So all
readers of a run's folder work on it.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import threading
from collections.abc import Callable, Iterator
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
from fleet.errors import ConfigError, FleetError, OutOfSight, RunFailed
from fleet.host.follow import last_words
from fleet.host.mirroring import MirroredFiles
from fleet.host.provenance import code_of, provenance
from fleet.settings.per_rank import room

ROOT = "~/.fleet/runs"
"""Folder of runs on the head, unless ``--storage`` is an absolute path."""
CALL_S = 30.0
PULL_S = 0.5
LAST_PULLS = 1_000


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect this process to the cluster at ``address`` meanwhile. A process that is connected already stays so. Raises ConfigError."""
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address not in (reach.AUTO, here):
            way_out = "Give that address or auto, or call ray.shutdown() first."
            raise ConfigError("address", address, f"this process is connected to the cluster at {here}", way_out)
        yield
    else:
        with reach.reached(address):
            yield


def answered(run: str, call: Any) -> Any:
    """The answer of the supervisor of ``run``. A FleetError that the supervisor raises is raised here, too.

    Raises RunFailed: the supervisor failed. Raises OutOfSight: it does not answer.
    """
    try:
        return ray.get(call, timeout=CALL_S)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, FleetError):
            raise cause from None
        words = f"{type(cause).__name__}: {cause}" if cause is not None else str(error)
        raise RunFailed(f"run {run}: its supervisor on the head has failed: {words}", str(error)) from error
    except ray.exceptions.GetTimeoutError as error:
        raise OutOfSight(f"run {run}: its supervisor on the head has not answered for {CALL_S:g} s; the run may go on") from error
    except ray.exceptions.ActorDiedError as error:
        reason = "its supervisor is gone: the run has ended and was attached to, or its head is lost"
        raise OutOfSight(f"run {run}: {reason} ({_in_one_line(error)})") from error
    except ray.exceptions.RayError as error:
        raise OutOfSight(f"run {run}: its cluster does not answer; the run may go on ({_in_one_line(error)})") from error


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


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
        """Raises OutOfSight when the cluster does not answer."""
        standing: DriverStanding = self._ask(self._handle.standing.remote())
        return standing

    def pull(self) -> bool:
        """Copy new data, and return whether there was any. Raises OutOfSight."""
        return self._copies.take(self._ask(self._handle.pieces.remote(self._copies.known))) > 0

    def stop(self, reason: str = "") -> None:
        """End the run in order; called again, at once. The run does not note ``reason``: its record says that its user has stopped it."""
        self._ask(self._handle.stop.remote())

    def ask(self, wanted: Wanted) -> SettingAnswer:
        """Send ``wanted`` to the run's coordinator, whose answer may be a refusal. Raises FleetError: it does not answer."""
        answer: SettingAnswer = self._ask(self._handle.ask.remote(wanted))
        return answer

    def pause(self) -> None:
        """Wait before the next question to the cluster."""
        self._over.wait(PULL_S)

    def follow(self) -> DriverStanding:
        """Copy until the run has ended. Raises OutOfSight when the cluster is gone."""
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
        """End the supervisor: no user needs it any more. ``forget``: the run was refused, and leaves nothing on the head."""
        ray.wait([self._handle.leave.remote(forget)], timeout=CALL_S)  # this process may end next, and the call with it

    def _ask(self, call: Any) -> Any:
        return answered(self.name, call)


class Attached:
    """A run of a cluster, to look at. It stands in for ``fleet.app.recipes.LiveRun``, but cannot stop the run."""

    controls = None
    """Chaos takes orders beside its injector; the page here cannot give any."""

    def __init__(self, plan: RunPlan, run: RemoteRun) -> None:
        self.plan, self.run = plan, run

    def execute(self) -> RunResult:
        """Follow the run to its end.

        Raises ConfigError when the run could not be on this cluster; then it leaves nothing. Raises RunFailed when it has no journal.
        """
        standing = self.run.follow()
        outcome = standing.outcome or {}
        forget = "refused" in outcome and not outcome.get("held") and not self.plan.resume
        self.run.leave(forget)
        if forget:
            shutil.rmtree(self.plan.folder, ignore_errors=True)
        result = result_of(self.plan, standing)
        if not self.plan.journal.exists():
            raise RunFailed(f"run {self.plan.name} has not begun: {result.reason}", result.detail or _said(self.plan.folder))
        return result


class Launched(Attached):
    """A plan that is carried out on a cluster, from its beginning. Its folder is somewhere below ``root``."""

    def __init__(self, plan: RunPlan, root: Path, code: Path | None) -> None:
        super().__init__(plan, begin(plan, root, code))

    def stop(self, reason: str) -> None:
        """End the run in order; called again, at once."""
        self.run.stop(reason)


def begin(plan: RunPlan, root: Path, code: Path | None) -> RemoteRun:
    """Begin ``plan``, whose folder is somewhere below ``root``. The files of the folder ``code`` travel to all ranks.

    Raises ConfigError when the cluster has a run of this name, or the code is too large.
    """
    storage = plan.settings.storage
    there = storage if "://" not in storage and Path(storage).is_absolute() else ROOT
    handle = _supervisor(plan, there, str(plan.folder.relative_to(root)), ray_internals.uploaded(environment(code)))
    plan.folder.mkdir(parents=True, exist_ok=True)
    kept = code_of(plan.script)
    kept.keep(plan.folder)
    train = plan.train.carried(top_of(code)) if isinstance(plan.train, Script) else plan.train
    train = train if isinstance(train, Script | Shipped) else ship(train, "script")
    made_of, token = provenance(plan.script, kept), chaos_token.shown()
    settings = dataclasses.replace(plan.settings, track=choice.located(plan.settings.track, os.environ))
    sent = dataclasses.replace(plan, settings=settings, train=train, chaos=plan.chaos.carried(), made_of=made_of, chaos_token=token)
    refused = answered(plan.name, handle.begin.remote(bytes(cloudpickle.dumps(sent))))
    if refused:
        handle.leave.remote()
        shutil.rmtree(plan.folder, ignore_errors=True)
        raise ConfigError("--name", plan.name, refused, "Choose another, or use fleet run --resume.")
    return RemoteRun(plan.name, plan.folder, handle)


def _supervisor(plan: RunPlan, root: str, inside: str, runtime_env: dict[str, Any]) -> Any:
    try:
        handle = supervisor.start(plan.name, root, inside, runtime_env)
        ray.get(handle.where.remote(), timeout=CALL_S)
    except ValueError as error:
        raise _taken(plan) from error
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise ConfigError(
            "--address", ray.get_runtime_context().gcs_address, f"no process could be started on the head node: {_in_one_line(error)}"
        ) from error
    return handle


def _taken(plan: RunPlan) -> ConfigError:
    """The error when the cluster has a run of this name, with advice by that run's state."""
    name, field = plan.name, "--resume" if plan.resume else "--name"
    over = find(name, plan.folder.parent).standing().code is not None
    if not over:
        otherwise = "" if plan.resume else "choose another name, or "
        way_out = f"{otherwise}see it with fleet attach {name}; fleet stop {name} ends it."
        return ConfigError(field, name, "the cluster has a run of this name, which goes on", way_out[0].upper() + way_out[1:])
    then = "resume it then" if plan.resume else "choose another name"
    reason = "the cluster has a run of this name, which has ended, and no user has seen its end"
    return ConfigError(field, name, reason, f"See its end with fleet attach {name}, and {then}.")


def result_of(plan: RunPlan, standing: DriverStanding) -> RunResult:
    """The result that the driver left. Raises ConfigError when the driver did."""
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
        place = ray.get_runtime_context().gcs_address
        reason = f"the cluster at {place} has no such run; it has: {there}"
        way_out = "Name another cluster by --address HOST:PORT, as ray start printed it. A run without --address is known in its folder."
        raise ConfigError("RUN", name, reason, way_out) from error
    return RemoteRun(name, root / name, handle)


def all_runs(root: Path) -> list[RemoteRun]:
    """The runs of the cluster: those that go on, and those that ended within the last hour and to which no user has attached."""
    return [find(each.removeprefix(supervisor.PREFIX), root) for each in sorted(run_names())]


def seen() -> str:
    """A clause on the cluster that this process is connected to: its nodes, and its room."""
    alive, free = nodes(), free_by_node()
    slots = sum(room(free.get(str(node["NodeID"]), {}), SLOT) for node in alive)
    return f"{len(alive)} nodes, room for {slots} ranks"


def in_words(run: RemoteRun) -> str:
    """The state of a run, in a line."""
    standing = run.standing()
    restarts = f", its driver was started again {standing.restarts} time(s)" if standing.restarts else ""
    if standing.code is None:
        return f"goes on, driven by process {standing.pid} of the head{restarts}"
    outcome = standing.outcome or {}
    return f"{outcome.get('status', 'ended')}: {outcome.get('reason', f'its driver ended with {standing.code}')}{restarts}"


def plan_of(run: RemoteRun, say: Callable[[str], None]) -> RunPlan | None:
    """The plan of a run that was begun elsewhere, to show it: its folder and its settings. None when it was stopped before it began.

    While the run starts, this waits, and ``say`` takes the process that starts it. Raises RunFailed: it has ended without a journal.
    Raises ConfigError: the run could not be on this cluster.
    """
    known = ""
    while True:
        standing = run.standing()
        run.pull()
        if last_words(run.journal)[0] is not None:
            return plans.seen_plan(run.folder)
        if standing.code is not None:
            break
        by = f"process {standing.pid} of the head starts it" if standing.pid else "its supervisor on the head starts its driver"
        if by != known:
            known = by
            say(f"{run.name} has not begun yet: {by}")
        run.pause()
    run.leave()  # this user has seen its end
    if standing.outcome == supervisor.STOPPED:
        return None
    outcome = standing.outcome or {}
    if "refused" in outcome:
        raise ConfigError(*outcome["refused"])
    reason = outcome.get("reason", f"its driver ended with {standing.code}")
    raise RunFailed(f"run {run.name} has ended before it began: {reason}", _said(run.folder))


def _said(folder: Path) -> str:
    """The end of the driver's output."""
    log = folder / "driver.log"
    return log.read_text(errors="replace")[-3000:] if log.exists() else ""
