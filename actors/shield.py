"""Between Ray Train's health poll and its decisions: what the controller may see of the deaths in a fleet, and when.

Left alone, Ray Train 2.60 hangs or ends the run on what fleets meet daily: two ranks lost in one poll, no room for a replacement,
one rank stopped while another dies. Each time it calls, without a time-out and in its only thread, a process that cannot answer. So
failures are hidden from it until the calls that it will make can succeed; then it is shown one. The rules are in ``actors.deaths``;
what Ray is asked is here.

It lives in the controller's process as a subclass of the worker group, because that class sees both the poll and the replacement:
a callback sees the poll only, and cannot keep an error of a replacement from the controller, nor a full restart from following it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import ActorHandleNotFoundError, ActorUnavailableError, RayActorError, RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put
from ray.train.v2._internal.exceptions import RayTrainError, WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.failure_handling.default import DefaultFailurePolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroup, WorkerGroupPollStatus
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus
from ray.train.v2._internal.execution.worker_group.worker import Worker
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from actors.deaths import Condition, DeathWatch, Verdict

log = logging.getLogger("ray.train.fleet")

PING_S = 1.0
REPLACE_LIMIT_VARIABLE = "FLEET_REPLACE_LIMIT_S"
"""Set in the controller's environment: a replacement that takes longer hangs; its processes are killed, and the attempt fails."""
START_LIMIT_S = 300.0
KV_NAMESPACE = "fleet_placement_groups"


class ShieldedWorkerGroup(WorkerGroup):
    """Ray Train's worker group, which shows a failure only when replacing the worker can succeed, and survives when it does not."""

    _deaths = DeathWatch()
    """Of the whole process: a group that is started anew goes on with the same slots."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reason = ""
        self._replace_limit_s = float(os.environ[REPLACE_LIMIT_VARIABLE])

    def poll_status(self, timeout: float | None = None) -> WorkerGroupPollStatus:
        status = super().poll_status(timeout)
        conditions = {rank: self._condition(rank, found) for rank, found in status.worker_statuses.items()}
        verdict = self._deaths.judge(conditions, time.monotonic())
        self._kill(verdict.kill)
        dead = [rank for rank, condition in conditions.items() if condition is Condition.DEAD]
        self._shut(dead)
        self._edit(status.worker_statuses, verdict, conditions)
        return status

    def replace_replica_group(self, replica_group_index: int) -> None:
        """Replace one worker, within a time limit. When that fails the controller goes on polling, and will be asked again."""
        try:
            with self._bounded(self._replace_limit_s):
                super().replace_replica_group(replica_group_index)
        except (RayError, RayTrainError):
            log.warning("The replacement of rank %d failed; it will be tried again.", replica_group_index, exc_info=True)
            self._deaths.attempt_failed(replica_group_index, time.monotonic())
        else:
            self._joined([replica_group_index])

    def _start_impl(self, *args: Any, **kwargs: Any) -> None:
        with self._bounded(START_LIMIT_S):
            super()._start_impl(*args, **kwargs)
        self._joined(range(len(self)))

    def _joined(self, ranks: Iterable[int]) -> None:
        """New workers fill these slots."""
        for rank in ranks:
            self._deaths.started(rank, time.monotonic())

    def _create_placement_group(self, *args: Any, **kwargs: Any) -> Any:
        """Leave word of the placement group: when this process is killed, nobody else would free it."""
        handle = super()._create_placement_group(*args, **kwargs)
        note_placement_group(ray.get_runtime_context().get_actor_id(), handle.placement_group)
        return handle

    # ---- what was seen -----------------------------------------------------------------------------------------------------------------

    def _condition(self, rank: int, status: WorkerStatus) -> Condition:
        error = status.error
        if error is None:
            if rank in self._world_rank_to_ongoing_poll:
                return Condition.PENDING
            return Condition.RUNNING if status.running else Condition.DONE
        if isinstance(error, WorkerHealthCheckTimeoutError):
            return Condition.HUNG
        cause = error.health_check_failure if isinstance(error, WorkerHealthCheckFailedError) else error
        if isinstance(cause, ActorUnavailableError):
            return Condition.UNSURE
        return Condition.DEAD if isinstance(cause, RayActorError) else Condition.RAISED

    def _placed(self) -> bool:
        group = self.get_worker_group_state().placement_group_handle.placement_group
        return bool(placement_group_table(group).get("state") == "CREATED")

    def _unanswered(self, ranks: Iterable[int]) -> set[int]:
        """Those of ``ranks`` that do not answer a call right now."""
        workers = self.get_workers()
        calls = {workers[rank].execute_async(os.getpid): rank for rank in ranks}
        answered, late = ray.wait(list(calls), num_returns=len(calls), timeout=PING_S) if calls else ([], [])
        return {calls[call] for call in late} | {calls[call] for call in answered if _failed(call)}

    def _obstacle(self, candidate: int, conditions: dict[int, Condition]) -> str:
        """Why Ray Train cannot replace ``candidate`` now, or "": it will call every live worker, then wait for a place."""
        if not self._placed():
            return f"rank {candidate} waits for a node with room"
        live = [rank for rank, condition in conditions.items() if rank != candidate and condition is not Condition.DEAD]
        late = sorted(self._unanswered(live))
        return f"rank {candidate} waits for ranks {late} to answer or to be lost" if late else ""

    def _tell(self, reason: str) -> None:
        """Log once why a failed rank is not replaced yet."""
        if reason and reason != self._reason:
            log.warning("Replacement: %s.", reason)
        self._reason = reason

    # ---- what is done ------------------------------------------------------------------------------------------------------------------

    def _edit(self, statuses: dict[int, WorkerStatus], verdict: Verdict, conditions: dict[int, Condition]) -> None:
        """Hide every failure that the controller must not see now."""
        if verdict.restart:
            return
        shown = verdict.candidate
        obstacle = self._obstacle(shown, conditions) if shown is not None else verdict.reason
        self._tell(obstacle)
        if obstacle:
            shown = None
        for rank, status in statuses.items():
            if rank in verdict.finish:
                statuses[rank] = WorkerStatus(running=False)
            elif status.error is not None and rank != shown:
                statuses[rank] = WorkerStatus(running=True)

    def _shut(self, ranks: Iterable[int]) -> None:
        """Shut the groups of the dead, so that Ray Train does not call them when it replaces another."""
        groups = self.get_replica_groups() or []
        for rank in ranks:
            if groups[rank].is_active():
                groups[rank].shutdown()

    def _kill(self, ranks: Iterable[int]) -> None:
        workers = self.get_workers()
        for rank in ranks:
            log.warning("Rank %d has not answered for too long and is killed.", rank)
            ray.kill(workers[rank].actor)

    @contextmanager
    def _bounded(self, limit_s: float) -> Iterator[None]:
        """Ray Train waits without a time-out for workers to come up: kill those that hang, and its wait ends with an error."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(limit_s):
                self._kill_hanging()

        threading.Thread(target=watch, name="fleet-replacement-watch", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _kill_hanging(self) -> None:
        """Kill all workers of this controller that do not answer; also one that it has no record of, because it waits for it."""
        workers: list[Worker] = self.get_workers() if self.has_started() else []
        late = self._unanswered(range(len(workers)))
        answering = {worker.actor._actor_id.hex() for rank, worker in enumerate(workers) if rank not in late}
        for actor_id in set(_workers(self._worker_cls.__name__)) - answering:
            if _kill_own(actor_id):
                log.warning("Worker %s hangs while a worker is being started; it was killed.", actor_id)


class ShieldedController(TrainController):
    """Ray Train's controller with the worker group above."""

    worker_group_cls = ShieldedWorkerGroup


class PatientFailurePolicy(DefaultFailurePolicy):
    """Retries also when the controller met a worker that died under its hands."""

    def _is_retryable_error(self, training_failed_error: TrainingFailedError) -> bool:
        error = training_failed_error
        met_the_dead = isinstance(error, ControllerError) and isinstance(error.controller_failure, RayError)
        return bool(met_the_dead or super()._is_retryable_error(error))


def note_placement_group(controller_id: str, group: PlacementGroup) -> None:
    """Record in the cluster which placement group a controller holds."""
    _internal_kv_put(controller_id.encode(), group.id.hex().encode(), overwrite=True, namespace=KV_NAMESPACE.encode())


def free_placement_group(controller_id: str) -> None:
    """Remove the placement group of a controller that is gone; without one, do nothing."""
    key, namespace = controller_id.encode(), KV_NAMESPACE.encode()
    found = _internal_kv_get(key, namespace=namespace)
    if found is not None:
        remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(found.decode())))
        _internal_kv_del(key, namespace=namespace)


def _failed(call: ray.ObjectRef[int]) -> bool:
    try:
        ray.get(call)
    except RayError:
        return True
    return False


def _workers(class_name: str) -> list[str]:
    """Ids of this job's actors of that class which are alive or still to come up."""
    actors = ray._private.state.actors(job_id=ray.JobID.from_hex(ray.get_runtime_context().get_job_id()))
    return [actor_id for actor_id, facts in actors.items() if facts["State"] != "DEAD" and facts["ActorClassName"] == class_name]


def _kill_own(actor_id: str) -> bool:
    """Kill an actor of which no handle is at hand. False when it is not this process's: another run of the job has its own."""
    try:
        ray._private.worker.global_worker.core_worker.kill_actor(ray.ActorID.from_hex(actor_id), True)
    except ActorHandleNotFoundError:
        return False
    return True
