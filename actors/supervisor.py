"""Keeps a detached run going on a cluster: starts the run's driver, and starts it again when it is killed.

The driver is a process of the head node, and a Ray job of its own. Its output is in files of the run's folder. A client on another machine
gets them piece by piece (:mod:`fleet.host.mirroring`).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from actors.asking import ask
from actors.messages import SettingAnswer, Wanted
from fleet.host import mirroring
from fleet.host.linux import die_with_parent
from fleet.host.mirroring import FilePiece, Known
from fleet.protocol.provider import NAMESPACE

DRIVER = "fleet.app.in_cluster"
PLAN, ENVIRONMENT, OUTCOME, LOG = "plan.pickle", "environment.json", "outcome.json", "driver.log"
STOPPED = {"status": "stopped", "reason": "it was stopped before it began", "detail": ""}
MOST_RESTARTS = 5
KEPT_S = 3600.0
"""After its run has ended, the actor answers for so long."""
PREFIX = "run-"


@dataclass(frozen=True, slots=True)
class DriverStanding:
    """The state of a run's driver. ``outcome``: its result, once it has ended; ``code``: its exit status, None while it lives."""

    folder: str
    pid: int
    restarts: int
    code: int | None
    outcome: dict[str, Any] | None


class RunSupervisor:
    """The actor, on the head node. It lives longer than the job that made it, and ends some time after its run."""

    async def __init__(self, root: str, inside: str) -> None:  # type: ignore[misc]  # Ray awaits it
        self.folder = Path(root).expanduser().absolute() / inside
        self._process: asyncio.subprocess.Process | None = None
        self._restarts, self._stopping = 0, False
        self._watching: asyncio.Task[None] | None = None
        again = ray.get_runtime_context().was_current_actor_reconstructed
        self._ended_before = again and (self.folder / OUTCOME).exists()
        if again and (self.folder / PLAN).exists() and not self._ended_before:
            self._watching = asyncio.create_task(self._keep_going(resume=True))

    async def where(self) -> str:
        """The run's folder on the head."""
        return str(self.folder)

    async def begin(self, plan: bytes) -> str:
        """Start the driver of ``plan``, which :mod:`fleet.app.in_cluster` reads. Returns "", or why not: the folder has a run already."""
        if self._has_journal and self._watching is None and not ray.cloudpickle.loads(plan).resume:
            return f"{self.folder} is there already on the head"
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (OUTCOME, LOG):
            (self.folder / name).unlink(missing_ok=True)
        self._keep(PLAN, plan)
        self._watching = asyncio.create_task(self._keep_going(resume=False))
        return ""

    def _keep(self, name: str, data: bytes) -> None:
        """Write a file for this user alone, whole or not at all: environments may have secrets."""
        draft = self.folder / f"{name}.draft"
        draft.touch(mode=0o600)
        draft.write_bytes(data)
        draft.replace(self.folder / name)

    @property
    def _has_journal(self) -> bool:
        return (self.folder / "journal.jsonl").exists()

    async def _keep_going(self, resume: bool) -> None:
        """Start the driver, and a new one after each kill. A killed driver ends the run's processes; the new one resumes from the newest
        durable
        checkpoint."""
        while True:
            await self._start(resume)
            assert self._process is not None
            if not self._goes_on(await self._process.wait()):
                break
            self._restarts, resume = self._restarts + 1, True
        await asyncio.sleep(KEPT_S)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    async def _start(self, resume: bool) -> None:
        context = ray.get_runtime_context()
        environment = {name: value for name, value in os.environ.items() if name not in ("RAY_JOB_ID", "RAY_JOB_CONFIG_JSON_ENV_VAR")}
        self._keep(ENVIRONMENT, json.dumps(dict(context.runtime_env)).encode())
        command = [sys.executable, "-m", DRIVER, str(context.gcs_address), str(self.folder), "resume" if resume else "begin"]
        with (self.folder / LOG).open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=environment, preexec_fn=die_with_parent
            )

    async def standing(self) -> DriverStanding:
        outcome, process = self.folder / OUTCOME, self._process
        result = json.loads(outcome.read_text()) if outcome.exists() else None
        code = process.returncode if process is not None else 0 if self._ended_before else None
        if code is not None and self._goes_on(code):
            code = None
        if code is not None and result is None and self._stopping and not self._has_journal:
            result = STOPPED  # the signal ended the driver before it could handle it
        return DriverStanding(str(self.folder), process.pid if process is not None else 0, self._restarts, code, result)

    def _goes_on(self, code: int) -> bool:
        """Whether a new driver follows one with this exit status."""
        killed = code < 0 and not (self.folder / OUTCOME).exists() and not self._stopping
        return killed and self._restarts < MOST_RESTARTS

    async def pieces(self, known: Known) -> list[FilePiece]:
        """The parts of the run's files after the ``known`` parts."""
        return await asyncio.to_thread(mirroring.pieces, self.folder, mirroring.RUN, known)

    async def stop(self, number: int = signal.SIGTERM) -> None:
        """The first signal ends the run in order, a second one at once."""
        self._stopping = True
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def ask(self, wanted: Wanted) -> SettingAnswer:
        """Send a request to the run's coordinator. The answer says why it was refused, if it was. Raises FleetError: no coordinator
        answers."""
        return await asyncio.to_thread(ask, self.folder, wanted)

    async def leave(self, forget: bool = False) -> None:
        """The client asks no more: if the run has ended, end this actor, too. ``forget``: the run was refused, so remove its folder."""
        if self._process is None or self._process.returncode is not None:
            if forget:
                await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)
            ray.actor.exit_actor()


def start(name: str, root: str, inside: str, environment: Mapping[str, Any]) -> Any:
    """Create the supervisor of run ``name`` on the head node. Its driver and all ranks have the same runtime ``environment``.

    Raises ValueError when the cluster has a run of this name.
    """
    options: dict[str, Any] = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}, "max_restarts": -1, "max_task_retries": -1}
    options |= {"name": f"{PREFIX}{name}", "namespace": NAMESPACE, "lifetime": "detached", "runtime_env": dict(environment)}
    return ray.remote(RunSupervisor).options(**options).remote(root, inside)


def find(name: str) -> Any:
    """The supervisor of run ``name``. Raises ValueError when there is none."""
    return ray.get_actor(f"{PREFIX}{name}", namespace=NAMESPACE)
