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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from actors import ray_internals
from actors.deaths import Condition, DeathWatch, PollVerdict

log = logging.getLogger("ray.train.fleet")

PING_S = 1.0
REPLACE_LIMIT_VARIABLE = "FLEET_REPLACE_LIMIT_S"
"""Set in the controller's environment: a replacement that takes longer hangs; its processes are killed, and the attempt fails."""
START_LIMIT_S = 300.0


class ShieldedWorkerGroup(ray_internals.SeamedWorkerGroup):
    """Ray Train's worker group, which shows a failure only when replacing the worker can succeed, and survives when it does not."""

    _deaths = DeathWatch()
    """Of the whole process: a group that is started anew goes on with the same slots."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reason = ""
        self._replace_limit_s = float(os.environ[REPLACE_LIMIT_VARIABLE])

    def polled(self, statuses: ray_internals.Statuses) -> None:
        conditions = {rank: self.condition(rank, found) for rank, found in statuses.items()}
        verdict = self._deaths.judge(conditions, time.monotonic())
        for rank in verdict.kill:
            log.warning("Rank %d has not answered for too long and is killed.", rank)
            self.kill(rank)
        self.shut(rank for rank, condition in conditions.items() if condition is Condition.DEAD)
        self._edit(statuses, verdict, conditions)

    def replacing(self, rank: int, replace: Callable[[], None]) -> None:
        """Replace one worker, within a time limit. When that fails the controller goes on polling, and will be asked again."""
        try:
            with self._bounded(self._replace_limit_s):
                replace()
        except ray_internals.REPLACEMENT_FAILED:
            log.warning("The replacement of rank %d failed; it will be tried again.", rank, exc_info=True)
            self._deaths.attempt_failed(rank, time.monotonic())
        else:
            self._joined([rank])

    def starting(self, start: Callable[[], None]) -> None:
        with self._bounded(START_LIMIT_S):
            start()
        self._joined(range(len(self)))

    def _joined(self, ranks: Iterable[int]) -> None:
        """New workers fill these slots."""
        for rank in ranks:
            self._deaths.started(rank, time.monotonic())

    def _obstacle(self, candidate: int, conditions: dict[int, Condition]) -> str:
        """Why Ray Train cannot replace ``candidate`` now, or "": it will call every live worker, then wait for a place."""
        if not self.placed():
            return f"rank {candidate} waits for a node with room"
        live = [rank for rank, condition in conditions.items() if rank != candidate and condition is not Condition.DEAD]
        late = sorted(self.unanswered(live, PING_S))
        return f"rank {candidate} waits for ranks {late} to answer or to be lost" if late else ""

    def _report_obstacle(self, reason: str) -> None:
        """Log once why a failed rank is not replaced yet."""
        if reason and reason != self._reason:
            log.warning("Replacement: %s.", reason)
        self._reason = reason

    def _edit(self, statuses: ray_internals.Statuses, verdict: PollVerdict, conditions: dict[int, Condition]) -> None:
        """Hide every failure that the controller must not see now."""
        if verdict.restart:
            return
        shown = verdict.candidate
        obstacle = self._obstacle(shown, conditions) if shown is not None else verdict.reason
        self._report_obstacle(obstacle)
        if obstacle:
            shown = None
        for rank, status in statuses.items():
            if rank in verdict.finish:
                statuses[rank] = ray_internals.alive(running=False)
            elif status.error is not None and rank != shown:
                statuses[rank] = ray_internals.alive(running=True)

    @contextmanager
    def _bounded(self, limit_s: float) -> Iterator[None]:
        """Ray Train waits without a time-out for workers to come up: kill those that hang, and its wait ends with an error."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(limit_s):
                for actor_id in self.kill_all_but_answering(PING_S):
                    log.warning("Worker %s hangs while a worker is being started; it was killed.", actor_id)

        threading.Thread(target=watch, name="fleet-replacement-watch", daemon=True).start()
        try:
            yield
        finally:
            over.set()


class ShieldedController(ray_internals.Controller):
    """Ray Train's controller with the worker group above."""

    worker_group_cls = ShieldedWorkerGroup
