"""Between Ray Train's health poll and its decisions: which deaths the controller may see, and when.

Without it, Ray Train 2.60 hangs or ends the run in common cases. Examples are two ranks lost in one poll, no room for a replacement, and a
stopped rank while another dies. In each it calls a process that cannot answer, without a time-out and in its only thread. So failures are
hidden from it until its next calls can succeed. Then it sees one failure. The rules are in ``actors.deaths``; the calls to Ray are here.

It is a subclass of the worker group, in the controller's process, because that class sees both the poll and the replacement. A callback
sees only the poll. It cannot hide an error of a replacement from the controller, and cannot prevent the full restart that follows.
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
"""Set in the controller's environment: a replacement that takes longer counts as hung. Its processes are killed, and the attempt fails."""
START_LIMIT_S = 300.0


class ShieldedWorkerGroup(ray_internals.SeamedWorkerGroup):
    """Ray Train's worker group, which shows a failure only when a replacement can succeed, and survives a failed replacement."""

    _deaths = DeathWatch()
    """One for the process: a group that is started again continues with the same slots."""

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
        """Replace one worker, within a time limit. When that fails, the controller goes on polling, and a later poll asks again."""
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
        """Hide all failures that the controller must not see now."""
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
        """Context with a limit of Ray Train's wait for starting workers: it kills those that hang, and the wait ends with an error."""
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
