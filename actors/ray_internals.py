"""All that Fleet uses of Ray Train's internals. No other module of Fleet imports them, and Ray promises none of them.

Each thing here is a fact that ``tests/contract/test_ray_facts.py`` checks by name; ``docs/upgrading.md`` tells what to do when one does
not hold any more. What Fleet decides is elsewhere (``actors.shield``, ``actors.trainer``, ``actors.worker``): these classes call methods
with names of Fleet's own, which those modules fill in. What a local cluster uses of Ray's daemons is in
``fleet.app.cluster.ray_internals``.
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
"""What a replacement raises that did not come up."""
TURN_S = 0.5
KV_NAMESPACE = b"fleet_placement_groups"
LEFT_OUT = (WorkingDirectorySetupCallback, PlacementGroupCleanerCallback, DatasetsCallback)
"""Ray's callbacks that a run does without: workers stay in the directory they start in, so that a script's relative paths hold;
``Trainer.free`` does what the cleaner of placement groups does, a process that needs Ray's dashboard; and there are no Ray datasets."""

Statuses = dict[int, WorkerStatus]
"""By rank: what the controller is told of each worker."""


class SeamedWorkerGroup(WorkerGroup):
    """Ray Train's worker group with a seam before and after what the controller has it do. A subclass overrides the first three methods."""

    def polled(self, statuses: Statuses) -> None:
        """After each health poll, before the controller decides: ``statuses`` may be edited."""

    def replacing(self, rank: int, replace: Callable[[], None]) -> None:
        """Around the replacement of one worker; an error from here ends the run."""
        replace()

    def starting(self, start: Callable[[], None]) -> None:
        """Around the start of all workers."""
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
        """Leave word of the placement group: when this process is killed, nobody else would free it."""
        handle = super()._create_placement_group(*args, **kwargs)
        note_placement_group(ray.get_runtime_context().get_actor_id(), handle.placement_group)
        return handle

    def condition(self, rank: int, status: WorkerStatus) -> Condition:
        """What a worker's status means."""
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
        """Whether all workers have a place. A replacement without one would be waited for without end."""
        group = self.get_worker_group_state().placement_group_handle.placement_group
        return bool(placement_group_table(group).get("state") == "CREATED")

    def unanswered(self, ranks: Iterable[int], limit_s: float) -> set[int]:
        """Those of ``ranks`` that do not answer a call within ``limit_s``."""
        workers = self.get_workers()
        calls = {workers[rank].execute_async(os.getpid): rank for rank in ranks}
        answered, late = ray.wait(list(calls), num_returns=len(calls), timeout=limit_s) if calls else ([], [])
        return {calls[call] for call in late} | {calls[call] for call in answered if _failed(call)}

    def shut(self, ranks: Iterable[int]) -> None:
        """Shut the groups of the dead, so that Ray Train does not call them when it replaces another."""
        groups = self.get_replica_groups() or []
        for rank in ranks:
            if groups[rank].is_active():
                groups[rank].shutdown()

    def kill(self, rank: int) -> None:
        """End the process of a rank."""
        ray.kill(self.get_workers()[rank].actor)

    def kill_all_but_answering(self, limit_s: float) -> list[str]:
        """Kill the workers of this controller that do not answer; also one that it has no record of, because it waits for it. Their ids."""
        workers = self.get_workers() if self.has_started() else []
        late = self.unanswered(range(len(workers)), limit_s)
        answering = {worker.actor._actor_id.hex() for rank, worker in enumerate(workers) if rank not in late}
        return [actor_id for actor_id in set(_actors_of(self._worker_cls.__name__)) - answering if _kill_own(actor_id)]


def alive(*, running: bool) -> WorkerStatus:
    """The status of a worker without error, which runs or has returned."""
    return WorkerStatus(running=running)


class Controller(TrainController):
    """Ray Train's controller; a subclass names its worker group."""

    worker_group_cls = SeamedWorkerGroup


class PatientFailurePolicy(DefaultFailurePolicy):
    """Retries also when the controller met a worker that died under its hands."""

    def _is_retryable_error(self, training_failed_error: TrainingFailedError) -> bool:
        error = training_failed_error
        met_the_dead = isinstance(error, ControllerError) and isinstance(error.controller_failure, RayError)
        return bool(met_the_dead or super()._is_retryable_error(error))


class FixedSize(FixedScalingPolicy):
    """Ray's own, but that it tells no autoscaler what it needs.

    The placement group tells that as well; what Ray's would tell it to is one more actor, of 120 MB and with a loop that wakes 100 times a
    second, to share a cluster between training and data pipelines.
    """

    def after_controller_start(self, train_run_context: Any) -> None:
        """There is nobody to register with."""

    def _maybe_send_resource_request(self) -> None:
        """There is nobody to ask."""


class ControllerLeft(Exception):
    """Nobody waits for the controller any more."""


class KillableTrainer(DataParallelTrainer):
    """Ray Train's trainer, whose controller is of a class of ours and can be killed."""

    controller_class: type[Controller]
    controller_environment: dict[str, str]
    controller_runtime: Mapping[str, Any] = MappingProxyType({})
    _controller: Any = None
    _left = False

    def _create_default_callbacks(self) -> list[Any]:
        return [callback for callback in super()._create_default_callbacks() if not isinstance(callback, LEFT_OUT)]

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        """As Ray's own, but that the class is ours and the handle is kept."""
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
        """Wait for it, in turns: Ray's own wait would only end with the process's leave of the cluster. Raises Left."""
        while not ray.wait([call], timeout=TURN_S)[0]:
            if self._left:
                raise ControllerLeft
        return ray.get(call)

    def leave(self) -> None:
        """Whoever waits for the controller soon waits no more, and leaves it as it is."""
        self._left = True

    def kill_controller(self) -> None:
        """Its workers are ended with it. May be called before it exists."""
        if self._controller is not None and ray.is_initialized():
            ray.kill(self._controller)

    def free(self) -> None:
        """Free what a killed controller holds; RayError where that fails. Nothing is left of it when this process has left the cluster."""
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
    """Record in the cluster which placement group a controller holds."""
    _internal_kv_put(controller_id.encode(), group.id.hex().encode(), overwrite=True, namespace=KV_NAMESPACE)


def free_placement_group(controller_id: str) -> None:
    """Remove the placement group of a controller that is gone; without one, do nothing."""
    key = controller_id.encode()
    found = _internal_kv_get(key, namespace=KV_NAMESPACE)
    if found is not None:
        remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(found.decode())))
        _internal_kv_del(key, namespace=KV_NAMESPACE)


def replace_in_train_function(method: str, function: Callable[..., Any]) -> None:
    """In this worker, Ray Train's utility ``method`` is ``function`` from now on, whoever has imported what calls it."""
    setattr(get_train_fn_utils(), method, function)


def hush() -> None:
    """What Ray has to say goes to its own log files, and not to where the rank prints."""
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


def own_context() -> Any:
    """What Ray Train itself says of this worker, whatever stands in its place: a ``ray.train.TrainContext``."""
    return DistributedTrainContext()


def replace_in_torch(name: str, function: Callable[..., Any]) -> None:
    """In this worker ``ray.train.torch.NAME`` is ``function`` for whoever imports or unpickles it from now on."""
    import ray.train.torch  # loads torch, which a driver does without
    from ray.train.v2.torch import train_loop_utils

    setattr(train_loop_utils, name, function)
    setattr(ray.train.torch, name, function)
