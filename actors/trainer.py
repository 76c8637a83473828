"""``fit``: Ray Train's trainer with the shield, which always returns."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train import FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.v2._internal.callbacks import DatasetsCallback, WorkingDirectorySetupCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.execution.scaling_policy.fixed import FixedScalingPolicy
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from actors.backend import FleetBackendConfig
from actors.fork_server import die_with_parent
from actors.rank.environment import RANK_ENVIRONMENT
from actors.shield import REPLACE_LIMIT_VARIABLE, PatientFailurePolicy, ShieldedController, free_placement_group

log = logging.getLogger("fleet.trainer")

CHECK_S = 0.5
UNWIND_S = 10.0
"""How long Ray's own call may take to return once the controller is killed."""

TrainFunction = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class FitOutcome:
    """How ``fit`` ended.

    ``status``: ``finished`` (every worker returned, or the run was done and Ray Train did not notice in time), ``stopped`` (on request), or
    ``failed``. ``error`` is what Ray Train said. ``forced`` tells that the controller had to be killed.
    """

    status: str
    error: str | None
    seconds: float
    forced: bool = False

    @property
    def lost_controller(self) -> bool:
        """Ray Train's controller died, and with it the ranks: nothing of it says that the run itself cannot go on."""
        return self.status == "failed" and (self.error or "").startswith(("ActorDiedError", "ActorUnavailableError"))


def fit(
    train_fn: TrainFunction,
    train_config: dict[str, Any],
    *,
    slots: int,
    resources_per_slot: dict[str, float],
    storage_path: str,
    name: str,
    done: Callable[[], bool],
    stop: Callable[[], bool] = lambda: False,
    backstop_s: float = 30.0,
    poll_s: float = 0.5,
    hang_s: float = 30.0,
    replace_limit_s: float = 60.0,
    runtime_env: dict[str, Any] | None = None,
) -> FitOutcome:
    """Run ``train_fn(train_config)`` in ``slots`` workers, replacing the ones that fail, until all have returned. Always returns.

    The calling process must be connected to a cluster. Each failed worker is replaced in place and without limit; limits are the caller's:
    it ends the run by letting the workers return.

    Args:
        done: the run has ended; when Ray Train is not back ``backstop_s`` later, its controller is killed.
        stop: give up now: the workers are killed.
        poll_s: seconds between Ray Train's health polls, and so to the notice of a death.
        hang_s: a worker that has not answered a poll for so long is killed.
        replace_limit_s: a replacement that takes longer than this is given up and tried again.
        runtime_env: of the workers; with that of ``actors.fork_server`` replacements are up in half a second and not in four.
    """
    trainer = _Trainer(
        functools.partial(_bound_to_node, train_fn),
        train_loop_config=train_config,
        backend_config=FleetBackendConfig(),
        scaling_config=ScalingConfig(num_workers=slots, resources_per_worker=resources_per_slot, placement_strategy="SPREAD"),
        run_config=RunConfig(
            name=name,
            storage_path=storage_path,
            failure_config=FailureConfig(max_failures=-1, controller_failure_limit=-1),
            worker_runtime_env=runtime_env or {"env_vars": RANK_ENVIRONMENT},
        ),
    )
    trainer.controller_environment = _environment(poll_s, hang_s, replace_limit_s)
    return _Fit(trainer, done, stop, backstop_s).run()


class _Fit:
    """One call of ``fit``: Ray Train in a thread of its own, watched from this one."""

    def __init__(self, trainer: _Trainer, done: Callable[[], bool], stop: Callable[[], bool], backstop_s: float) -> None:
        self._trainer, self._done, self._stop, self._backstop_s = trainer, done, stop, backstop_s
        self._back = threading.Event()
        self._error: str | None = "Ray Train ended without a word"

    def run(self) -> FitOutcome:
        start_s = time.monotonic()
        threading.Thread(target=self._train, name="fleet-ray-train", daemon=True).start()
        try:
            ending = self._wait()
        finally:
            forced = not self._back.is_set()
            if forced:
                self._trainer.kill_controller()
                self._back.wait(UNWIND_S)
            self._trainer.free()
        seconds = time.monotonic() - start_s
        if ending == "back" and self._error is not None and not self._done():
            return FitOutcome("failed", self._error, seconds)
        return FitOutcome("stopped" if ending == "stop" else "finished", self._error, seconds, forced)

    def _train(self) -> None:
        try:
            self._trainer.fit()
            self._error = None
        except Exception as error:  # noqa: BLE001 - whatever Ray Train raises is the outcome of the run
            self._error = f"{type(error).__name__}: {error}"
        finally:
            self._back.set()

    def _wait(self) -> str:
        """Why the wait is over: Ray Train came ``back``, the caller said ``stop``, or the ``backstop`` was reached."""
        done_s: float | None = None
        while not self._back.wait(CHECK_S):
            if self._stop():
                return "stop"
            if done_s is None and self._done():
                done_s = time.monotonic()
            if done_s is not None and time.monotonic() - done_s > self._backstop_s:
                return "backstop"
        return "back"


class _FixedSize(FixedScalingPolicy):
    """Ray's own, but that it tells no autoscaler what it needs.

    The placement group tells that as well; what Ray's would tell it to is one more actor, of 120 MB and with a loop that wakes 100 times a
    second, to share a cluster between training and data pipelines.
    """

    def after_controller_start(self, train_run_context: Any) -> None:
        """There is nobody to register with."""

    def _maybe_send_resource_request(self) -> None:
        """There is nobody to ask."""


class _Trainer(DataParallelTrainer):
    """Ray Train's trainer, whose controller is the shielded one and can be killed."""

    controller_environment: dict[str, str]
    _controller: Any = None

    def _create_default_callbacks(self) -> list[Any]:
        """Without three of Ray's: workers stay in the directory they start in, so that a script's relative paths hold; ``free`` does what
        the cleaner of placement groups does, a process that needs Ray's dashboard; and there are no Ray datasets to hand out."""
        unwanted = (WorkingDirectorySetupCallback, PlacementGroupCleanerCallback, DatasetsCallback)
        return [callback for callback in super()._create_default_callbacks() if not isinstance(callback, unwanted)]

    def _initialize_and_run_controller(self, **arguments: Any) -> Result:
        """As Ray's own, but that the class is ours and the handle is kept."""
        arguments["failure_policy"] = PatientFailurePolicy(self.run_config.failure_config)
        arguments["scaling_policy"] = _FixedSize(self.scaling_config)
        options: dict[str, Any] = {
            "num_cpus": 0,
            "label_selector": {ray._raylet.RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()},
            "runtime_env": {"env_vars": {**get_env_vars_to_propagate(), **self.controller_environment}},
        }
        self._controller = ray.remote(**options)(ShieldedController).remote(**arguments)
        ray.get(self._controller.run.remote())
        return ray.get(self._controller.get_result.remote())

    def kill_controller(self) -> None:
        """Its workers are ended with it. May be called before it exists."""
        if self._controller is not None and ray.is_initialized():
            ray.kill(self._controller)

    def free(self) -> None:
        """Free what a killed controller holds. Nothing is left of it when this process has left the cluster."""
        if self._controller is not None and ray.is_initialized():
            try:
                free_placement_group(self._controller._actor_id.hex())
            except RayError as error:
                log.warning("The run's placement group could not be freed: %s", error)


def _environment(poll_s: float, hang_s: float, replace_limit_s: float) -> dict[str, str]:
    return {
        "RAY_TRAIN_V2_ENABLED": "1",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(poll_s),
        "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": str(hang_s),
        REPLACE_LIMIT_VARIABLE: str(replace_limit_s),
        "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",
    }


def _bound_to_node(train_fn: TrainFunction, config: dict[str, Any]) -> Any:
    """The train function, in a process that dies with its raylet: SIGKILL reaches even a stopped process."""
    if not die_with_parent():
        log.warning("This worker could not be bound to its node's life.")
    return train_fn(config)
