"""Fleet's uses of Ray Train's internals. No other module of Fleet imports them, and Ray does not promise to keep them.

``tests/contract/test_ray_facts.py`` checks each use by name; ``docs/upgrading.md`` says what to do when one no longer works. Fleet's
decisions are in ``actors.shield``, ``actors.trainer`` and ``actors.worker``: the classes here call methods that those modules implement. A
local cluster's uses of Ray's daemons are in ``fleet.app.cluster.ray_internals``.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import ray
from ray._common.constants import RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR
from ray._private.log import PlainRayHandler
from ray.exceptions import ActorHandleNotFoundError, ActorUnavailableError, RayActorError, RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put
from ray.train.v2._internal.callbacks import DatasetsCallback, WorkingDirectorySetupCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.constants import (
    HEALTH_CHECK_INTERVAL_S_ENV_VAR,
    V2_ENABLED_ENV_VAR,
    WORKER_HEALTH_CHECK_TIMEOUT_S_ENV_VAR,
    get_env_vars_to_propagate,
)
from ray.train.v2._internal.exceptions import RayTrainError, WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.failure_handling.default import DefaultFailurePolicy
from ray.train.v2._internal.execution.scaling_policy.fixed import FixedScalingPolicy
from ray.train.v2._internal.execution.train_fn_utils import get_train_fn_utils
from ray.train.v2._internal.execution.worker_group import WorkerGroup, WorkerGroupPollStatus
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus
from ray.train.v2.api.context import DistributedTrainContext
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from actors.deaths import Condition

REPLACEMENT_FAILED = (RayError, RayTrainError)
"""Errors of a replacement that did not start."""
TURN_S = 0.5
KV_NAMESPACE = b"fleet_placement_groups"
LEFT_OUT = (WorkingDirectorySetupCallback, PlacementGroupCleanerCallback, DatasetsCallback)
"""Ray's callbacks that a run leaves out.

Workers stay in the directory in which they start, so that a script's relative paths are valid. ``Trainer.free`` replaces the cleaner of
placement groups, a process that needs Ray's dashboard. A run has no Ray datasets.
"""

Statuses = dict[int, WorkerStatus]
"""By rank, the status of each worker for the controller."""


class SeamedWorkerGroup(WorkerGroup):
    """Ray Train's worker group with methods before and after the controller's calls. A subclass overrides the first three methods."""

    def polled(self, statuses: Statuses) -> None:
        """Called after each health poll, before the controller decides: it may edit ``statuses``."""

    def replacing(self, rank: int, replace: Callable[[], None]) -> None:
        """Called for the replacement of one worker; an error here ends the run."""
        replace()

    def starting(self, start: Callable[[], None]) -> None:
        """Called for the start of all workers."""
        start()

    def poll_status(self, timeout: float | None = None) -> WorkerGroupPollStatus:
        status = super().poll_status(timeout)
        self.polled(status.worker_statuses)
        return status

    def replace_replica_group(self, replica_group_index: int) -> None:
        self.replacing(replica_group_index, functools.partial(super().replace_replica_group, replica_group_index))

    def _start_impl(self, *args: Any, **kwargs: Any) -> None:
        self.starting(functools.partial(super()._start_impl, *args, **kwargs))

    def _create_placement_group(self, *args: Any, **kwargs: Any) -> Any:
        """Record the placement group in the cluster: if this process is killed, no other process of Ray would free it."""
        handle = super()._create_placement_group(*args, **kwargs)
        note_placement_group(ray.get_runtime_context().get_actor_id(), handle.placement_group)
        return handle

    def condition(self, rank: int, status: WorkerStatus) -> Condition:
        """The condition that a worker's status means."""
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

    def placed(self) -> bool:
        """Whether all workers have a place. Ray Train would wait for ever for a replacement without one."""
        group = self.get_worker_group_state().placement_group_handle.placement_group
        return bool(placement_group_table(group).get("state") == "CREATED")

    def unanswered(self, ranks: Iterable[int], limit_s: float) -> set[int]:
        """The ranks among these that do not answer a call within ``limit_s``."""
        workers = self.get_workers()
        calls = {workers[rank].execute_async(os.getpid): rank for rank in ranks}
        answered, late = ray.wait(list(calls), num_returns=len(calls), timeout=limit_s) if calls else ([], [])
        return {calls[call] for call in late} | {calls[call] for call in answered if _failed(call)}

    def shut(self, ranks: Iterable[int]) -> None:
        """Shut down the groups of dead workers, so that Ray Train does not call them when it replaces another one."""
        groups = self.get_replica_groups() or []
        for rank in ranks:
            if groups[rank].is_active():
                groups[rank].shutdown()

    def kill(self, rank: int) -> None:
        """End the process of a rank."""
        ray.kill(self.get_workers()[rank].actor)

    def kill_all_but_answering(self, limit_s: float) -> list[str]:
        """Kill the workers of this controller that do not answer, also a worker that is still starting and has no record. Returns their
        ids."""
        workers = self.get_workers() if self.has_started() else []
        late = self.unanswered(range(len(workers)), limit_s)
        answering = {worker.actor._actor_id.hex() for rank, worker in enumerate(workers) if rank not in late}
        return [actor_id for actor_id in set(_actors_of(self._worker_cls.__name__)) - answering if _kill_own(actor_id)]


def alive(*, running: bool) -> WorkerStatus:
    """The status of a worker without an error, which runs or has returned."""
    return WorkerStatus(running=running)


class Controller(TrainController):
    """Ray Train's controller; a subclass names its worker group."""

    worker_group_cls = SeamedWorkerGroup


class PatientFailurePolicy(DefaultFailurePolicy):
    """Retries also when a worker died during a call of the controller."""

    def _is_retryable_error(self, training_failed_error: TrainingFailedError) -> bool:
        error = training_failed_error
        met_the_dead = isinstance(error, ControllerError) and isinstance(error.controller_failure, RayError)
        return bool(met_the_dead or super()._is_retryable_error(error))


class FixedSize(FixedScalingPolicy):
    """Ray's own policy, without requests to an autoscaler.

    The placement group makes the same request. Ray's policy would start one more actor, which shares a cluster between training and data
    pipelines. That actor takes 120 MB, and its loop wakes 100 times a second.
    """

    def after_controller_start(self, train_run_context: Any) -> None:
        """Does not register with an autoscaler."""

    def _maybe_send_resource_request(self) -> None:
        """Sends no request to an autoscaler."""


class ControllerLeft(Exception):
    """The caller has stopped waiting for the controller."""


class KillableTrainer(DataParallelTrainer):
    """Ray Train's trainer with a controller of a class of Fleet, which can be killed."""

    controller_class: type[Controller]
    controller_environment: dict[str, str]
    controller_runtime: Mapping[str, Any] = MappingProxyType({})
    _controller: Any = None
    _left = False

    def _create_default_callbacks(self) -> list[Any]:
        return [callback for callback in super()._create_default_callbacks() if not isinstance(callback, LEFT_OUT)]

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        """As Ray's own method, with a class of Fleet and a kept handle."""
        arguments["failure_policy"] = PatientFailurePolicy(self.run_config.failure_config)
        arguments["scaling_policy"] = FixedSize(self.scaling_config)
        options: dict[str, Any] = {
            "num_cpus": 0,
            "label_selector": {ray._raylet.RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()},
            "runtime_env": {**self.controller_runtime, "env_vars": self._controller_variables()},
        }
        self._controller = ray.remote(**options)(self.controller_class).remote(**arguments)
        self._answer(self._controller.run.remote())
        return self._answer(self._controller.get_result.remote())

    def _controller_variables(self) -> dict[str, str]:
        return {**get_env_vars_to_propagate(), **self.controller_runtime.get("env_vars", {}), **self.controller_environment}

    def _answer(self, call: Any) -> Any:
        """Wait for ``call``, in turns: Ray's own wait would end only when the process leaves the cluster. Raises ControllerLeft."""
        while not ray.wait([call], timeout=TURN_S)[0]:
            if self._left:
                raise ControllerLeft
        return ray.get(call)

    def leave(self) -> None:
        """Let the thread that waits for the controller stop waiting soon, without changing the controller."""
        self._left = True

    def kill_controller(self) -> None:
        """Kill the controller, which ends its workers. It may be called before the controller exists."""
        if self._controller is not None and ray.is_initialized():
            ray.kill(self._controller)

    def free(self) -> None:
        """Free the placement group of a killed controller; raises RayError where that fails. When this process leaves the cluster, it is
        freed, too."""
        if self._controller is not None and ray.is_initialized():
            free_placement_group(self._controller._actor_id.hex())


def controller_environment(poll_s: float, hang_s: float) -> dict[str, str]:
    """Variables of a controller that polls each ``poll_s``, and gives up a worker that has not answered for ``hang_s``."""
    return {
        V2_ENABLED_ENV_VAR: "1",
        HEALTH_CHECK_INTERVAL_S_ENV_VAR: str(poll_s),
        WORKER_HEALTH_CHECK_TIMEOUT_S_ENV_VAR: str(hang_s),
        RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR: "0",
    }


def note_placement_group(controller_id: str, group: PlacementGroup) -> None:
    """Record a controller's placement group in the cluster."""
    _internal_kv_put(controller_id.encode(), group.id.hex().encode(), overwrite=True, namespace=KV_NAMESPACE)


def free_placement_group(controller_id: str) -> None:
    """Remove the placement group of a controller that is gone; without one, do nothing."""
    key = controller_id.encode()
    found = _internal_kv_get(key, namespace=KV_NAMESPACE)
    if found is not None:
        remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(found.decode())))
        _internal_kv_del(key, namespace=KV_NAMESPACE)


def replace_in_train_function(method: str, function: Callable[..., Any]) -> None:
    """Replace Ray Train's utility ``method`` by ``function`` in this worker, also for modules that have imported its callers already."""
    setattr(get_train_fn_utils(), method, function)


def hush() -> None:
    """Let Ray's messages go to its own log files, and not to the rank's output."""
    for name in ("ray", "ray.train"):
        logger = logging.getLogger(name)
        logger.propagate = False
        logger.handlers[:] = [each for each in logger.handlers if not isinstance(each, PlainRayHandler)]


def _failed(call: ray.ObjectRef[int]) -> bool:
    try:
        ray.get(call)
    except RayError:
        return True
    return False


def _actors_of(class_name: str) -> list[str]:
    """Ids of this job's actors of that class that are alive or still starting."""
    actors = ray._private.state.actors(job_id=ray.JobID.from_hex(ray.get_runtime_context().get_job_id()))
    return [actor_id for actor_id, facts in actors.items() if facts["State"] != "DEAD" and facts["ActorClassName"] == class_name]


def _kill_own(actor_id: str) -> bool:
    """Kill an actor without a handle. False when this process does not own it: another run of the job has its own actors."""
    try:
        ray._private.worker.global_worker.core_worker.kill_actor(ray.ActorID.from_hex(actor_id), True)
    except ActorHandleNotFoundError:
        return False
    return True


def own_context() -> Any:
    """Ray Train's own ``ray.train.TrainContext`` of this worker, also after it was replaced."""
    return DistributedTrainContext()


def replace_in_torch(name: str, function: Callable[..., Any]) -> None:
    """Replace ``ray.train.torch.NAME`` by ``function`` in this worker, for later imports and unpickling."""
    import ray.train.torch  # loads torch, which a driver does without
    from ray.train.v2.torch import train_loop_utils

    setattr(train_loop_utils, name, function)
    setattr(ray.train.torch, name, function)
