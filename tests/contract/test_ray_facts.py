"""What Fleet leans on inside Ray Train, which promises none of it: when Ray's version changes, these say what to look at again.

Paths below are those of Ray 2.60, under ``ray/train/v2/_internal/execution``.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import ray
from ray._private.runtime_env.context import RuntimeEnvContext
from ray.exceptions import ActorDiedError, ActorHandleNotFoundError, ActorUnavailableError, RayActorError, RayError
from ray.runtime_env import RuntimeEnv
from ray.train.backend import Backend
from ray.train.collective import barrier, broadcast_from_rank_zero
from ray.train.v2._internal.callbacks import DatasetsCallback, WorkingDirectorySetupCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.exceptions import RayTrainError, WorkerGroupStartupFailedError, WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import default as failure_handling
from ray.train.v2._internal.execution.worker_group import WorkerGroup, WorkerGroupPollStatus
from ray.train.v2._internal.execution.worker_group.execution_group import ReplicaGroup
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker, Worker
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from actors.backend import FleetBackend, FleetBackendConfig
from actors.shield import PatientFailurePolicy, ShieldedController, ShieldedWorkerGroup

NODE_LABEL = "label_selector={ray._raylet.RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()}"
CONTROLLER_CLASS = f"ray.remote(num_cpus=0, {NODE_LABEL}, runtime_env={{'env_vars': env_vars}})"


def calls_of(function: Callable[..., Any]) -> list[str]:
    """The calls in a function's source, in order of their text: ``self._x.y``, without arguments."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [ast.unparse(call.func) for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset))]


def before(calls: list[str], first: str, second: str) -> bool:
    return calls.index(first) < calls.index(second)


def source_of(function: Callable[..., Any]) -> str:
    """A function's source text."""
    return inspect.getsource(function)


def test_the_version_is_the_one_that_was_studied() -> None:
    assert ray.__version__.startswith("2.60.")


def test_barriers_look_up_what_they_call_each_time() -> None:
    """execution/train_fn_utils.py; what ``actors.worker`` replaces there is what a train function gets."""
    for call, method in ((ray.train.report, "report"), (barrier, "barrier"), (broadcast_from_rank_zero, "broadcast_from_rank_zero")):
        assert f"get_train_fn_utils().{method}" in calls_of(inspect.unwrap(call))


def test_a_backend_says_that_single_workers_can_be_replaced() -> None:
    assert Backend.has_replica_groups is False
    assert FleetBackendConfig().backend_cls is FleetBackend and FleetBackend.has_replica_groups
    assert FleetBackend.on_start is Backend.on_start and FleetBackend.on_shutdown is Backend.on_shutdown
    assert calls_of(Backend.on_start) == calls_of(Backend.on_shutdown) == calls_of(Backend.on_training_start) == []
    assert "backend_cls.has_replica_groups" in source_of(TrainController.__init__)
    assert "backend_cls.has_replica_groups" in source_of(WorkerGroup.__init__)


def test_the_controller_makes_the_worker_group_of_its_class_attribute() -> None:
    assert TrainController.worker_group_cls is WorkerGroup
    assert ShieldedController.worker_group_cls is ShieldedWorkerGroup
    assert "self.worker_group_cls.create" in calls_of(TrainController._start_worker_group)


def test_the_controller_decides_on_what_poll_status_returns() -> None:
    assert "self._worker_group.poll_status" in calls_of(TrainController._poll_workers)
    assert before(calls_of(TrainController._step), "self._poll_workers", "self._is_training_succeeded")
    assert "self._worker_group.get_latest_poll_status" in calls_of(TrainController._execute_resize_decision)
    assert "self._latest_poll_status = worker_group_poll_status" in source_of(WorkerGroup.poll_status)


def test_the_controller_replaces_through_the_worker_group() -> None:
    assert "self._worker_group.replace_replica_group" in calls_of(TrainController._replace_bad_workers)
    assert list(inspect.signature(WorkerGroup.replace_replica_group).parameters) == ["self", "replica_group_index"]


def test_statuses_can_be_edited_in_place() -> None:
    statuses = {0: WorkerStatus(running=True), 1: WorkerStatus(running=False, error=ValueError())}
    poll = WorkerGroupPollStatus(statuses, {0: 0, 1: 1})
    assert poll.worker_statuses is statuses
    assert poll.failing_replica_group_indices == {1} and not poll.finished
    statuses[1] = WorkerStatus(running=True)
    assert poll.failing_replica_group_indices == set() and not poll.errors
    statuses.update({rank: WorkerStatus(running=False) for rank in statuses})
    assert poll.finished and not poll.errors


def test_groups_that_are_shut_are_not_called_during_a_replacement() -> None:
    source = source_of(WorkerGroup._replace_replica_group_impl)
    assert "if i != replica_group_index and rg.is_active()" in source
    assert before(calls_of(WorkerGroup._replace_replica_group_impl), "w.actor.clear_result_queue.remote", "self._create_workers")
    assert "self._active = False" in source_of(ReplicaGroup.shutdown)  # the call itself would connect to a cluster
    assert ReplicaGroup([], {}).is_active()


def test_a_worker_answers_calls_while_it_trains() -> None:
    assert "training_thread_runner.run" in " ".join(calls_of(RayTrainWorker.run_train_fn))
    assert {"execute", "poll_status", "clear_result_queue"} <= set(dir(RayTrainWorker))
    assert WorkerGroup._worker_cls is RayTrainWorker
    assert {"actor", "placement_group_bundle_index"} <= {field.name for field in dataclasses.fields(Worker)}


def test_attributes_of_the_worker_group() -> None:
    source = source_of(WorkerGroup.__init__)
    assert "self._world_rank_to_ongoing_poll: Dict[int, PollTask] = {}" in source
    assert "self._create_placement_group" in calls_of(WorkerGroup._start_impl)
    state = source_of(WorkerGroup._replace_replica_group_impl)
    assert "self._worker_group_state.placement_group_handle.placement_group" in state


def test_errors_of_the_dead_and_of_those_out_of_reach() -> None:
    assert issubclass(ActorDiedError, RayActorError) and issubclass(ActorUnavailableError, RayActorError)
    assert not issubclass(ActorUnavailableError, ActorDiedError)
    assert issubclass(RayActorError, RayError) and issubclass(ActorHandleNotFoundError, RayError)
    assert issubclass(WorkerGroupStartupFailedError, RayTrainError)
    assert WorkerHealthCheckFailedError("", failure=ActorDiedError()).health_check_failure is not None


def test_ray_does_not_retry_when_its_controller_meets_the_dead() -> None:
    """The reason for ``PatientFailurePolicy``; when it fails, that class may go."""
    assert RayActorError not in failure_handling.RETRYABLE_CONTROLLER_ERRORS
    error = ray.train.ControllerError(ActorDiedError())
    config = ray.train.FailureConfig(max_failures=-1, controller_failure_limit=-1)
    assert failure_handling.DefaultFailurePolicy(config)._is_retryable_error(error) is False
    assert PatientFailurePolicy(config)._is_retryable_error(error) is True


def test_the_trainer_creates_its_controller_where_fleet_does_it_instead() -> None:
    """``actors.trainer`` repeats this method with its own class: a change here must be followed there."""
    assert calls_of(DataParallelTrainer._initialize_and_run_controller) == [
        "get_env_vars_to_propagate",
        "env_vars.setdefault",
        CONTROLLER_CLASS,
        "ray.remote",
        "ray.get_runtime_context().get_node_id",
        "ray.get_runtime_context",
        "controller_actor_cls.remote",
        "threading.current_thread",
        "threading.main_thread",
        "self._register_sigint_handler",
        "ray.get",
        "controller.run.remote",
        "ray.get",
        "controller.get_result.remote",
    ]
    assert "failure_policy" in inspect.signature(TrainController.__init__).parameters


def test_the_callbacks_that_fleet_leaves_out() -> None:
    source = source_of(DataParallelTrainer._create_default_callbacks)
    left_out = (WorkingDirectorySetupCallback, PlacementGroupCleanerCallback, DatasetsCallback)
    assert all(callback.__name__ in source for callback in left_out)


def test_workers_are_started_by_the_executable_of_their_runtime_environment() -> None:
    """With arguments of its own, and told which raylet it belongs to: what ``actors.fork_client`` stands on."""
    assert RuntimeEnv(py_executable="python -I -S client.py").py_executable() == "python -I -S client.py"
    assert 'executable = ["exec", self.py_executable]' in inspect.getsource(RuntimeEnvContext.exec_worker)
