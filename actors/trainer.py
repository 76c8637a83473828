"""``fit``: Ray Train's trainer with the shield, which always returns."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ray.exceptions import RayError
from ray.train import FailureConfig, RunConfig, ScalingConfig

from actors import ray_internals
from actors.backend import FleetBackendConfig
from actors.rank.environment import RANK_ENVIRONMENT
from actors.shield import REPLACE_LIMIT_VARIABLE, ShieldedController
from fleet.host.linux import die_with_parent

log = logging.getLogger("fleet.trainer")

CHECK_S = 0.5
BACKSTOP_S = 30.0
"""Limit for the end of workers whose train function has ended."""
UNWIND_S = 10.0
"""Limit for the return of Ray's own call after the controller is killed."""
LEAVE_S = 5.0
"""Limit for Ray's thread to end when the caller leaves the cluster."""

TrainFunction = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class FitOutcome:
    """How ``fit`` ended.

    ``status``: ``finished`` (all workers returned, or the run was done and Ray Train did not notice in time), ``stopped`` (on request), or
    ``failed``. ``error`` is Ray Train's error. ``forced``: the controller had to be killed.
    """

    status: str
    error: str | None
    seconds: float
    forced: bool = False

    @property
    def lost_controller(self) -> bool:
        """Whether Ray Train's controller died, and with it the ranks. The run itself may be able to go on."""
        return self.status == "failed" and (self.error or "").startswith(("ActorDiedError", "ActorUnavailableError"))


def fit(
    train_fn: TrainFunction,
    train_config: dict[str, Any],
    *,
    slots: int,
    resources_per_slot: dict[str, float],
    selector: Mapping[str, str],
    storage_path: str,
    name: str,
    done: Callable[[], bool],
    stop: Callable[[], bool] = lambda: False,
    forsaken: Callable[[], bool] = lambda: False,
    backstop_s: Callable[[], float] = lambda: BACKSTOP_S,
    poll_s: float = 0.5,
    hang_s: float = 30.0,
    replace_limit_s: float = 60.0,
    runtime_env: dict[str, Any] | None = None,
    controller_runtime: Mapping[str, Any] = MappingProxyType({}),
) -> FitOutcome:
    """Run ``train_fn(train_config)`` in ``slots`` workers, replacing those that fail, until all have returned. It always returns.

    The calling process must be connected to a cluster. Each failed worker is replaced in place, without a limit. The caller sets limits: it
    ends the run by letting the workers return.

    Args:
        resources_per_slot: the Ray resources of each worker.
        selector: conditions on the labels of nodes for workers; see ``fleet.settings.per_rank``.
        done: whether the run has ended. If Ray Train has not returned ``backstop_s()`` later, its controller is killed, with its workers.
        stop: whether to give up now: the workers are killed.
        forsaken: whether to leave at once without cleaning up: the cluster is about to end, and would not answer calls.
        poll_s: seconds between Ray Train's health polls, and so until it notices a death.
        hang_s: a worker that has not answered a poll for so long is killed.
        replace_limit_s: a replacement that takes longer is given up and tried again.
        runtime_env: of the workers; with that of ``actors.fork_server`` a replacement starts in half a second, not in four.
        controller_runtime: the runtime environment of Ray Train's controller, and of its processes other than workers.
    """
    trainer = _Trainer(
        functools.partial(_bound_to_node, train_fn),
        train_loop_config=train_config,
        backend_config=FleetBackendConfig(),
        scaling_config=ScalingConfig(
            num_workers=slots,
            resources_per_worker=resources_per_slot,
            use_gpu=bool(resources_per_slot.get("GPU")),
            label_selector=dict(selector) or None,
            placement_strategy="SPREAD",
        ),
        run_config=RunConfig(
            name=name,
            storage_path=storage_path,
            failure_config=FailureConfig(max_failures=-1, controller_failure_limit=-1),
            worker_runtime_env=runtime_env or {"env_vars": RANK_ENVIRONMENT},
        ),
    )
    trainer.controller_runtime = controller_runtime
    trainer.controller_environment = {
        **ray_internals.controller_environment(poll_s, hang_s),
        REPLACE_LIMIT_VARIABLE: str(replace_limit_s),
    }
    return _Fit(trainer, done, stop, forsaken, backstop_s).run()


class _Fit:
    """One call of ``fit``: Ray Train in a thread of its own, watched from this one."""

    def __init__(
        self,
        trainer: _Trainer,
        done: Callable[[], bool],
        stop: Callable[[], bool],
        forsaken: Callable[[], bool],
        backstop_s: Callable[[], float],
    ) -> None:
        self._trainer, self._done, self._stop, self._forsaken, self._backstop_s = trainer, done, stop, forsaken, backstop_s
        self._back = threading.Event()
        self._error: str | None = "Ray Train ended without a result"

    def run(self) -> FitOutcome:
        start_s = time.monotonic()
        thread = threading.Thread(target=self._train, name="fleet-ray-train", daemon=True)
        thread.start()
        forced = False
        try:
            ending = self._wait()
        finally:
            if not self._forsaken():
                forced = self._unwind()
            else:  # Ray ends a process with code 1 if it leaves a cluster while a thread still frees objects there
                self._trainer.leave()
                thread.join(LEAVE_S)
        seconds = time.monotonic() - start_s
        if ending == "back" and self._error is not None and not self._done():
            return FitOutcome("failed", self._error, seconds)
        return FitOutcome("stopped" if ending == "stop" else "finished", self._error, seconds, forced)

    def _unwind(self) -> bool:
        """Remove all of it from the cluster. Returns whether its controller had to be killed."""
        forced = not self._back.is_set()
        if forced:
            self._trainer.kill_controller()
            self._back.wait(UNWIND_S)
        self._trainer.free()
        return forced

    def _train(self) -> None:
        try:
            self._trainer.fit()
            self._error = None
        except Exception as error:  # noqa: BLE001 - any error of Ray Train is the outcome of the run
            self._error = f"{type(error).__name__}: {error}"
        finally:
            self._back.set()

    def _wait(self) -> str:
        """Wait, and return why the wait is over: Ray Train came ``back``, the caller said ``stop``, or the ``backstop`` was reached."""
        done_s: float | None = None
        while not self._back.wait(CHECK_S):
            if self._stop() or self._forsaken():
                return "stop"
            if done_s is None and self._done():
                done_s = time.monotonic()
            if done_s is not None and time.monotonic() - done_s > self._backstop_s():
                return "backstop"
        return "back"


class _Trainer(ray_internals.KillableTrainer):
    """Ray Train's trainer with the shielded controller."""

    controller_class = ShieldedController

    def free(self) -> None:
        try:
            super().free()
        except RayError as error:
            log.warning("The run's placement group could not be freed: %s", error)


def _bound_to_node(train_fn: TrainFunction, config: dict[str, Any]) -> Any:
    """Run the train function in a process that dies with its raylet, by SIGKILL, which also ends a stopped process."""
    if not die_with_parent():
        log.warning("This worker could not be bound to its node's life.")
    return train_fn(config)
