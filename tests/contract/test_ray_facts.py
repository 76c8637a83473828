"""What Fleet relies on inside Ray and Ray Train, which promise none of it. Each test is one fact, to be run by name against another Ray:
``pytest tests/contract/test_ray_facts.py -k callbacks``. ``docs/upgrading.md`` says what each means when it fails, and what to change.

Paths below are those of Ray 2.60, under ``ray/train/v2/_internal/execution``.
"""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import functools
import importlib
import inspect
import json
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import ray.data
import ray.train.torch
from ray._common.constants import HEAD_NODE_RESOURCE_NAME, RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR
from ray._private import log as rays_log
from ray._private import parameter, ray_constants, services, worker, workers
from ray._private.node import Node
from ray._private.runtime_env import packaging
from ray._private.runtime_env.context import RuntimeEnvContext
from ray.dashboard import agent
from ray.dashboard import utils as dashboard_utils
from ray.exceptions import ActorDiedError, ActorHandleNotFoundError, ActorUnavailableError, RayActorError, RayError
from ray.experimental import internal_kv
from ray.runtime_env import RuntimeEnv
from ray.train.backend import Backend
from ray.train.collective import barrier, broadcast_from_rank_zero
from ray.train.v2._internal import constants
from ray.train.v2._internal.callbacks import DatasetsCallback, WorkingDirectorySetupCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.exceptions import (
    RayTrainError,
    WorkerGroupStartupFailedError,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)
from ray.train.v2._internal.execution import train_fn_utils
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import default as failure_handling
from ray.train.v2._internal.execution.scaling_policy.fixed import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroup, WorkerGroupPollStatus
from ray.train.v2._internal.execution.worker_group.execution_group import ReplicaGroup
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker, Worker
from ray.train.v2.api.context import DistributedTrainContext
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError
from ray.train.v2.torch import train_loop_utils
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from actors import hosts, ray_internals
from actors.backend import FleetBackend, FleetBackendConfig
from actors.ray_internals import PatientFailurePolicy
from actors.shield import ShieldedController, ShieldedWorkerGroup
from fleet.app.cluster import lean_agent, local, nodes_asked
from fleet.app.cluster import ray_internals as launch_internals
from fleet.app.cluster.local import LocalCluster
from fleet.errors import ConfigError
from fleet.host import processes
from fleet.host.clock import unix_time_s
from tests.support.waiting import until
from tests.tidy import rules

LIMIT_S = 90.0
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


def test_barriers_look_up_what_they_call_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """execution/train_fn_utils.py; what ``actors.worker`` replaces there is what a train function gets."""
    utilities = SimpleNamespace()
    monkeypatch.setattr(train_fn_utils, "_train_fn_utils", utilities)
    ray_internals.replace_in_train_function("report", len)
    assert train_fn_utils.get_train_fn_utils().report is len
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
    """``actors.ray_internals.KillableTrainer`` repeats this method with its own class: a change here must be followed there."""
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
    assert {"failure_policy", "scaling_policy"} <= set(inspect.signature(TrainController.__init__).parameters)


def test_the_callbacks_that_fleet_leaves_out() -> None:
    source = source_of(DataParallelTrainer._create_default_callbacks)
    left_out = (WorkingDirectorySetupCallback, PlacementGroupCleanerCallback, DatasetsCallback)
    assert all(callback.__name__ in source for callback in left_out)


def test_the_scaling_policy_asks_an_autoscaler_by_two_methods() -> None:
    """``FixedSize`` makes both do nothing; the first is called when the controller starts, the second by each decision."""
    assert {"after_controller_start", "_maybe_send_resource_request"} <= set(dir(FixedScalingPolicy))
    assert list(inspect.signature(FixedScalingPolicy.after_controller_start).parameters) == ["self", "train_run_context"]
    assert calls_of(FixedScalingPolicy.make_decision_for_running_worker_group)[0] == "self._maybe_send_resource_request"


def test_a_controller_is_set_up_by_environment_variables() -> None:
    passed_on = {constants.V2_ENABLED_ENV_VAR, constants.HEALTH_CHECK_INTERVAL_S_ENV_VAR, constants.WORKER_HEALTH_CHECK_TIMEOUT_S_ENV_VAR}
    assert passed_on <= set(constants.ENV_VARS_TO_PROPAGATE)
    assert {*passed_on, RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR} == set(ray_internals.controller_environment(0.5, 10.0))
    assert "HEALTH_CHECK_INTERVAL_S_ENV_VAR" in source_of(TrainController.__init__)
    assert "WORKER_HEALTH_CHECK_TIMEOUT_S_ENV_VAR" in source_of(WorkerGroup.__init__)
    assert isinstance(constants.get_env_vars_to_propagate(), dict)


def test_what_ray_prints_in_a_worker_goes_through_a_handler_of_its_own() -> None:
    assert "PlainRayHandler()" in source_of(rays_log.generate_logging_config)
    assert issubclass(rays_log.PlainRayHandler, logging.StreamHandler)


def test_actors_of_a_job_are_listed_by_class_and_state() -> None:
    assert "job_id" in inspect.signature(ray._private.state.actors).parameters
    assert {'"ActorClassName"', '"State"'} <= set(re.findall(r'"\w+"', inspect.getsource(ray._private.state)))


def test_an_actor_can_be_killed_by_its_id() -> None:
    assert hasattr(ray._raylet.CoreWorker, "kill_actor") and hasattr(ray.actor.ActorHandle, "_actor_id")
    assert ray.ActorID.from_hex("0" * 32).hex() == "0" * 32
    assert "global_worker.core_worker.kill_actor" in source_of(ray.kill) or "worker.core_worker.kill_actor" in source_of(ray.kill)


def test_a_placement_group_can_be_found_again_and_removed() -> None:
    """By its id, which is kept in the cluster's key-value store."""
    for call, names in ((internal_kv._internal_kv_put, {"overwrite", "namespace"}), (internal_kv._internal_kv_get, {"namespace"})):
        assert names <= set(inspect.signature(call).parameters)
    assert "namespace" in inspect.signature(internal_kv._internal_kv_del).parameters
    group = PlacementGroup(ray.PlacementGroupID.from_hex("1" * 36))
    assert group.id.hex() == "1" * 36
    assert list(inspect.signature(remove_placement_group).parameters) == ["placement_group"]
    assert list(inspect.signature(placement_group_table).parameters) == ["placement_group"]


def test_the_head_node_has_a_resource_of_its_own() -> None:
    assert f'"{HEAD_NODE_RESOURCE_NAME}"' in source_of(hosts.start_coordinator)


def test_workers_are_started_by_the_executable_of_their_runtime_environment() -> None:
    """With arguments of its own, and told which raylet it belongs to: what ``actors.fork_client`` stands on."""
    assert RuntimeEnv(py_executable="python -I -S client.py").py_executable() == "python -I -S client.py"
    assert 'executable = ["exec", self.py_executable]' in inspect.getsource(RuntimeEnvContext.exec_worker)
    assert f'"{processes.RAYLET_VARIABLE}"' in inspect.getsource(ray_constants)


def test_a_raylet_starts_workers_by_a_script_that_can_be_replaced() -> None:
    """What ``fleet.app.cluster.setup_worker`` does in its place is compared with Ray's own by ``tests/unit/test_setup_worker.py``."""
    assert "setup_worker_path" in inspect.signature(parameter.RayParams.__init__).parameters
    assert Path(launch_internals.rays_setup_worker()).is_file()
    assert Path(launch_internals.rays_setup_worker()) == Path(workers.__file__).parent / ray_constants.SETUP_WORKER_FILENAME


def test_a_node_is_started_in_the_process_that_hosts_it() -> None:
    assert {"ray_params", "head", "shutdown_at_exit", "spawn_reaper"} <= set(inspect.signature(Node.__init__).parameters)
    assert {"gcs_address", "node_id"} <= set(dir(Node))
    assert "self.all_processes" in source_of(Node.__init__) and ray_constants.PROCESS_TYPE_RAYLET == "raylet"
    assert set(inspect.signature(Node.start_api_server).parameters) == {"self", "include_dashboard", "raise_on_failure"}
    assert "self._webui_url = None" in source_of(Node.start_api_server) + source_of(Node.__init__)


def test_settings_of_a_node_have_these_names() -> None:
    node = LocalCluster(1)
    named = {*node._head_settings(), *node._node_settings(0), "setup_worker_path"}
    assert named <= set(inspect.signature(parameter.RayParams.__init__).parameters)


def test_settings_of_rays_daemons_have_these_names() -> None:
    """Ray ends a process that is given a name which it does not know."""
    assert _initialized(launch_internals.SYSTEM_CONFIG) == 0
    assert _initialized({**launch_internals.SYSTEM_CONFIG, "no_such_setting": 1}) != 0


def _initialized(settings: dict[str, int]) -> int:
    code = "import sys; from ray._raylet import Config; Config.initialize(sys.argv[1])"
    return subprocess.run([sys.executable, "-c", code, json.dumps(settings)], capture_output=True, timeout=60, check=False).returncode


def test_agents_are_started_by_a_command_that_is_looked_up_each_time() -> None:
    source = source_of(services.start_raylet)
    assert "_build_python_executable_command_memory_profileable" in source and "PROCESS_TYPE_DASHBOARD_AGENT" in source
    assert "ray._private.utils.get_dashboard_dependency_error() is not None" in source
    assert callable(ray._private.utils.get_dashboard_dependency_error)
    assert next(iter(inspect.signature(services._build_python_executable_command_memory_profileable).parameters)) == "component"


def test_an_agent_looks_up_its_parts_by_one_function() -> None:
    """``fleet.app.cluster.lean_agent`` has it find none."""
    assert "dashboard_utils.get_all_modules(" in inspect.getsource(agent)
    assert list(inspect.signature(dashboard_utils.get_all_modules).parameters) == ["module_type"]
    assert "get_all_modules" in inspect.getsource(lean_agent)


def test_what_workers_print_passes_one_function() -> None:
    assert inspect.getsource(worker).count("print_to_stdstream") >= 2
    assert list(inspect.signature(worker.print_to_stdstream).parameters) == ["data", "ignore_prefix"]


def test_a_job_can_have_folders_to_import_from() -> None:
    assert launch_internals.job_config(["/a", "/b"])._py_driver_sys_path == ["/a", "/b"]


def test_a_token_is_found_and_read_again() -> None:
    assert {"instance", "has_token", "reset_cache"} <= set(dir(ray._raylet.AuthenticationTokenLoader))
    assert "initialize" in dir(ray._raylet.Config)
    assert isinstance(launch_internals.has_token(), bool)


def test_what_a_train_function_asks_of_ray_train_is_looked_up_each_time() -> None:
    """``actors.train_session`` puts its own in their places; Ray's own context tells where the worker is."""
    calls = ("report", "get_checkpoint", "get_dataset_shard", "get_context", "get_all_reported_checkpoints", "get_preemption_info")
    for name in calls:
        assert "get_train_fn_utils()" in inspect.getsource(getattr(ray.train, name)), name
        assert hasattr(train_fn_utils.TrainFnUtils, name)
    assert {"get_local_rank", "get_local_world_size", "get_node_rank"} <= set(dir(DistributedTrainContext))


def test_utilities_for_torch_are_found_in_their_module() -> None:
    """A train function that was pickled names them by it."""
    for name in ("prepare_model", "prepare_data_loader"):
        assert getattr(ray.train.torch, name) is getattr(train_loop_utils, name)
        assert getattr(train_loop_utils, name).__module__ == train_loop_utils.__name__


def test_a_dataset_of_parquet_files_knows_where_they_lie(cluster: LocalCluster, tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "0.parquet")
    dataset = ray.data.read_parquet(str(tmp_path))
    assert launch_internals.parquet_paths(dataset) == [str(tmp_path)]
    others = (dataset.limit(1), dataset.map(dict), dataset.select_columns(["x"]), ray.data.range(3))
    assert [launch_internals.parquet_paths(other) for other in others] == [None] * 4


def test_what_ray_leaves_behind_is_known_before_it_is_sent(tmp_path: Path) -> None:
    """``get_excludes_from_ignore_files`` and ``_get_excludes`` say what the archive has that Ray makes."""
    folder, archive = tmp_path / "work", tmp_path / "work.zip"
    (folder / "cache").mkdir(parents=True)
    for name in ("train.py", "corpus.bin", "noise.log", "cache/old.py"):
        (folder / name).write_text(name)
    (folder / ".rayignore").write_text("*.bin\n")
    (folder / ".gitignore").write_text("*.log\n")
    packaging.create_package(str(folder), archive, include_gitignore=True, excludes=["cache"])
    ignored = launch_internals.ignored_in(folder, ["cache"])
    sent = {name for name in zipfile.ZipFile(archive).namelist() if not name.endswith("/")}
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    left = {name for name in files if ignored(folder / name) or ignored((folder / name).parent)}
    assert files - left == sent and "train.py" in sent and {"corpus.bin", "noise.log", "cache/old.py"} <= left


class Reader:
    """Imports what came by its environment, and holds a slot if told to."""

    def read(self) -> tuple[int, str]:
        parcel = importlib.import_module("sent_along")
        return parcel.ANSWER, Path("note.txt").read_text()


def test_folders_of_an_actors_environment_are_uploaded_by_two_calls(cluster: LocalCluster, tmp_path: Path) -> None:
    """``upload_py_modules_if_needed`` and ``upload_working_dir_if_needed``. Ray itself refuses folders of a single actor."""
    package, folder = tmp_path / "sent_along", tmp_path / "work"
    package.mkdir()
    folder.mkdir()
    (package / "__init__.py").write_text("ANSWER = 42\n")
    (folder / "note.txt").write_text("here")
    environment = {"py_modules": [str(package)], "working_dir": str(folder)}
    ready = launch_internals.uploaded(environment)
    assert [each.partition("://")[0] for each in (*ready["py_modules"], ready["working_dir"])] == ["gcs", "gcs"]
    remote = ray.remote(num_cpus=0)(Reader)
    reader = remote.options(runtime_env=ready).remote()
    assert ray.get(reader.read.remote(), timeout=LIMIT_S) == (42, "here")
    ray.kill(reader)
    with pytest.raises(ValueError, match="is not a valid URI"):
        remote.options(runtime_env=environment).remote()


def test_what_is_free_and_where_a_jobs_actors_are_is_told_by_node(cluster: LocalCluster) -> None:
    """``available_resources_per_node``, and ``actors`` with an ``Address`` that has a ``NodeID``."""
    node = cluster.place(cluster.alive()[0]).id
    free = launch_internals.free_by_node()[node][local.RANK_RESOURCE]
    holder = ray.remote(num_cpus=0, resources={local.RANK_RESOURCE: 1}, label_selector={ray._raylet.RAY_NODE_ID_KEY: node})(Reader).remote()
    until(lambda: node in launch_internals.nodes_of_job(), "the actor lives there")
    until(lambda: launch_internals.free_by_node()[node].get(local.RANK_RESOURCE, 0) == free - 1, "its slot is held")
    ray.kill(holder)
    until(lambda: launch_internals.free_by_node()[node].get(local.RANK_RESOURCE, 0) == free, "its slot is free again")
    assert node not in launch_internals.nodes_of_job()


HOLDS = """
import ray, sys
from ray.job_config import JobConfig
ray.init(address=sys.argv[1], job_config=JobConfig(metadata={"fleet_run": "mine"}), log_to_driver=False, logging_level="ERROR")
group = ray.util.placement_group([{sys.argv[2]: 1}])
ray.get(group.ready())
print("there", flush=True)
sys.stdin.readline()
"""


def test_what_each_run_holds_is_told_by_its_job(cluster: LocalCluster) -> None:
    """``get_all_job_info`` of ``global_worker.gcs_client`` has ``config.metadata``; a group's id ends with its job's, and its table has
    ``bundles``, ``bundles_to_node_id`` and ``state``.
    """
    command = [sys.executable, "-c", HOLDS, cluster.address, local.RANK_RESOURCE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdin is not None and job.stdout is not None
        assert job.stdout.readline() == "there\n"
        [(node, held)] = launch_internals.held_by_run()["mine"].items()
        assert held == {local.RANK_RESOURCE: 1.0}
        assert node in {each["NodeID"] for each in ray.nodes()}
        job.communicate("\n", timeout=LIMIT_S)
    until(lambda: "mine" not in launch_internals.held_by_run(), "it goes with its job")


def test_a_node_is_taken_out_by_one_call_to_the_control_plane(cluster: LocalCluster) -> None:
    """``UnregisterNodeRequest`` with a ``NodeDeathInfo``, by ``NodeInfoGcsServiceStub`` on the channel of ``init_grpc_channel``."""
    index = cluster.add()
    node = cluster.place(index).id
    launch_internals.remove_node(cluster.address, node)
    until(lambda: not any(each["NodeID"] == node and each["Alive"] for each in ray.nodes()), "Ray holds it for dead")
    cluster.lose(index)
    with pytest.raises(OSError, match="did not take node"):
        launch_internals.remove_node("127.0.0.1:9", node, limit_s=2.0)


def test_nodes_that_drain_are_told_with_their_time(cluster: LocalCluster) -> None:
    """``get_all_node_info`` of ``global_worker.gcs_client`` has a ``NodeSnapshot`` of each, and ``get_draining_nodes`` their deadlines in
    milliseconds of Unix time. A node without work goes at once.
    """
    index = cluster.add()
    node, until_ms = cluster.place(index).id, int((unix_time_s() + 60.0) * 1000)
    holder = ray.remote(num_cpus=0, resources={local.RANK_RESOURCE: 1}, label_selector={ray._raylet.RAY_NODE_ID_KEY: node})(Reader).remote()
    until(lambda: node in launch_internals.nodes_of_job(), "an actor lives there")
    assert node not in launch_internals.draining()
    accepted, _ = ray._raylet.GcsClient(address=cluster.address).drain_node(node, 2, "a test", until_ms)  # 2: preemption
    assert accepted
    until(lambda: launch_internals.draining().get(node) == pytest.approx(until_ms / 1000.0), "it is told")
    ray.kill(holder)
    cluster.lose(index)


def test_a_worker_ends_at_sigterm_by_a_function_that_is_looked_up_each_time(cluster: LocalCluster) -> None:
    """``raise_sys_exit_with_custom_error_message``, with these arguments. An actor with a loop of its own hears of it, too."""
    handler = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(worker.Worker.main_loop))))
    assert "raise_sys_exit_with_custom_error_message('The process receives a SIGTERM.', exit_code=1)" in handler
    listener = ray.remote(num_cpus=0)(Listener).remote()
    pid = ray.get(listener.listen.remote(), timeout=60)
    os.kill(pid, signal.SIGTERM)
    assert ray.get(listener.received.remote(), timeout=60) == pid
    ray.kill(listener)


def test_an_autoscaler_is_known_by_what_it_reports(cluster: LocalCluster) -> None:
    """``get_cluster_status`` of ``global_worker.gcs_client`` with ``timeout_s`` gives a ``GetClusterStatusReply``, whose
    ``autoscaling_state`` has an ``autoscaler_state_version``: 0 where none reports. One that does is in ``tests/fault/test_autoscaled.py``.
    """
    assert not launch_internals.has_autoscaler()
    with pytest.raises(ConfigError, match="no autoscaler reports to the cluster at here"):
        nodes_asked.check("here")


def test_places_that_are_asked_for_are_told_apart_by_the_name_of_their_group(cluster: LocalCluster) -> None:
    """``placement_group_table`` has ``name``, ``state`` and ``bundles_to_node_id`` of each."""
    group = nodes_asked.PlaceGroup({local.RANK_RESOURCE: 1.0}, {})
    before = launch_internals.places_of_job()
    group.ask(1)
    assert group.wait(60)
    kept = launch_internals.places_of_job(asked=True)
    assert sum(kept.values()) == 1 and set(kept) <= {str(node["NodeID"]) for node in ray.nodes()}
    there = next(iter(kept))
    group.ask(1, [there])
    assert group.wait(60) and there not in launch_internals.places_of_job(asked=True)
    assert launch_internals.places_of_job() == before
    group.ask(0)
    until(lambda: not launch_internals.places_of_job(asked=True), "nothing is asked for")


def test_errors_of_polls_tell_a_time_out_from_a_death() -> None:
    """``SeamedWorkerGroup.condition`` reads them."""
    assert issubclass(WorkerHealthCheckTimeoutError, RayTrainError) and issubclass(WorkerHealthCheckFailedError, RayTrainError)
    assert not issubclass(WorkerHealthCheckTimeoutError, WorkerHealthCheckFailedError)
    source = source_of(WorkerGroup._poll_workers_and_collect_errors)
    assert "WorkerHealthCheckTimeoutError" in source and "WorkerHealthCheckFailedError" in source


def test_an_error_of_the_controller_carries_its_cause() -> None:
    cause = ActorDiedError()
    assert ControllerError(cause).controller_failure is cause and issubclass(ControllerError, TrainingFailedError)


WALL = (ray_internals, launch_internals, lean_agent)


def _used(source: str) -> Iterator[str]:
    """The last part of each internal name of Ray's that a source uses."""
    for _, name in rules.rays_internals(ast.parse(source)):
        yield name.rpartition(".")[2]


class Listener:
    """An actor that hears SIGTERM and goes on."""

    def __init__(self) -> None:
        self._reported = asyncio.Event()

    async def listen(self) -> int:
        launch_internals.take_sigterm(functools.partial(asyncio.get_running_loop().call_soon_threadsafe, self._reported.set))
        return os.getpid()

    async def received(self) -> int:
        await self._reported.wait()
        return os.getpid()


@pytest.mark.parametrize("module", WALL, ids=lambda module: str(module.__name__))
def test_nothing_is_used_that_no_fact_names(module: Any) -> None:
    facts = Path(__file__).read_text()
    assert sorted(name for name in _used(inspect.getsource(module)) if not re.search(rf"\b{name}\b", facts)) == []


def test_the_document_says_of_each_fact_what_to_do() -> None:
    own = [node.name for node in ast.parse(Path(__file__).read_text()).body if isinstance(node, ast.FunctionDef)]
    facts = [name.removeprefix("test_") for name in own if name.startswith("test_")][:-1]
    text = (Path(__file__).parents[2] / "docs" / "upgrading.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", text, re.M)
    assert sorted(name for name, *_ in rows) == sorted(facts)
    named = [name for *_, change in rows for name in re.findall(r"`(\w+)(?:\.(\w+))?`", change)]
    known = "".join(inspect.getsource(module) for module in (*WALL, hosts, local))
    assert [name for cls, member in named for name in (cls, member) if name and not re.search(rf"\b{name}\b", known)] == []
