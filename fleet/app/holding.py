"""One run, one record: this process takes a run, says every few seconds that it lives, and hears when another process has taken it."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fleet.app.plans import RunPlan, place_of, store_url
from fleet.app.resuming import check_idle
from fleet.errors import ConfigError
from fleet.host import secret
from fleet.host.folds import is_written
from fleet.host.holder import lives, this_process
from fleet.protocol.holding import LOOK_S, RENEW_S, STALE_S, Holder, RunHeld, SeenClaim, Stamp, TakenOver, Tenure
from storage.backends.causes import cause_of
from storage.backends.trial import detail_of, refusal
from storage.backends.urls import redact
from storage.lock import RunLock

log = logging.getLogger("fleet.app.holding")
CLOSE_S = 20.0
"""A stamp that is being written when the run ends may take so long."""


class HeldElsewhere(ConfigError):
    """The run goes on elsewhere: what lies in its folder is not that of a run that was refused."""


def refused(plan: RunPlan, held: RunHeld) -> HeldElsewhere:
    """That the run of ``plan`` goes on elsewhere, and what can be typed."""
    holder, name = held.holder, plan.name
    there = f" --address {holder.cluster}" if holder.cluster else ""
    look = f"fleet attach {name}{there}" if there else f"fleet runs watch {name} on {holder.host}"
    stop = f"fleet stop {name}{there}" if there else f"fleet stop {name} there"
    way_out = f"See it with {look}, end it with {stop}, or take it away from there: add --take-over."
    return HeldElsewhere("--resume" if plan.resume else "--name", name, f"it goes on: {holder} holds it", way_out)


def looked_at(plan: RunPlan, named: bool, address: str, take: bool, say: Callable[[str], object]) -> RunPlan:
    """The plan, with what was seen of other holders of its run, before anything is started.

    ``named``: others may have a run of this name. ``take``: take it from whatever holds it. ``say`` takes what is waited for.

    Raises ConfigError: the run goes on elsewhere.
    """
    place = place_of(plan, address)
    if take and not named:
        raise ConfigError("--take-over", "given", "it is about a run that goes on elsewhere", "Use it with --resume RUN.")
    if take and not place:
        reason = "the run's store is a folder of the cluster's head, so no other cluster holds it"
        raise ConfigError("--take-over", "given", reason, f"End it there: fleet stop {plan.name} --address {address}.")
    if plan.resume and not take:
        check_idle(plan.folder)
    if not named or not place or plan.plain is not None:
        return plan
    try:
        return dataclasses.replace(plan, seen=_look(plan, place, take, say))
    except OSError as error:
        raise refusal(place, "this machine could not read the holder of the run there", cause_of(error), detail_of(error)) from error


def _look(plan: RunPlan, place: str, take: bool, say: Callable[[str], object]) -> SeenClaim:
    said: list[str] = []
    waiting = threading.Event()

    def wait(holder: Holder, wait_s: float) -> None:
        if not said:
            said.append(f"{plan.name} was held by {holder}: does it still live? That takes up to {STALE_S:g} s")
            say(said[0])
        waiting.wait(wait_s)

    try:
        return RunLock(place, lives, wait).watch(take)
    except RunHeld as held:
        raise refused(plan, held) from held


def check_store(plan: RunPlan) -> None:
    """Raises ConfigError when the store cannot keep two clusters from holding one run. Raises OSError."""
    if not RunLock(store_url(plan)).creates_once():
        reason = "it takes a second write of a name that must be written once: two clusters could both go on with one run there"
        way_out = "Use a store with conditional writes (If-None-Match), such as S3, or a file system with hard links."
        raise ConfigError("--storage", redact(plan.settings.storage), reason, way_out)


class RunHold:
    """This process holds the run of ``plan``, from here to :meth:`close`. ``cluster``: the address of the cluster that it has joined.

    Attributes:
        url: of the run's store.
        tenure: its right to save; None: the store fails, and ``refusal`` says how.

    Raises ConfigError when another process holds it.
    """

    def __init__(self, plan: RunPlan, cluster: str = "") -> None:
        self.url = store_url(plan)
        self._stop, self._count, self.lost = threading.Event(), 0, ""
        self._thread: threading.Thread | None = None
        self.tenure: Tenure | None = None
        self.refusal: ConfigError | None = None
        try:
            self._lock = RunLock(self.url, lives, lambda holder, wait_s: self._stop.wait(wait_s))
            self.tenure = self._lock.claim(this_process(secret.nonce().hex(), cluster), plan.seen)
            self._await_journal(plan)
        except RunHeld as held:
            raise refused(plan, held) from held
        except OSError as error:
            self.refusal = refusal(self.url, "this machine could not hold the run there", cause_of(error), detail_of(error))

    def _await_journal(self, plan: RunPlan) -> None:
        """A holder that this one has followed has the journal until it knows: of a folder that both have, one process writes it."""
        for _ in range(round(STALE_S / LOOK_S)):
            if not plan.journal.exists() or not is_written(plan.journal):
                return
            self._stop.wait(LOOK_S)

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Where the run cannot be started, it is another's to take."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    @contextmanager
    def kept(self, lost: Callable[[str], object]) -> Iterator[None]:
        """Renew the stamp meanwhile, beside all else. ``lost`` is told once, in words, when another process has taken the run."""
        if self.tenure is not None:
            self._thread = threading.Thread(target=self._renew, args=(self.tenure, lost), name="fleet-hold", daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            self.close()

    def _renew(self, tenure: Tenure, lost: Callable[[str], object]) -> None:
        failing = False
        while not self._stop.wait(RENEW_S):
            try:
                self._stamp(tenure)
                failing = False
            except TakenOver as error:
                self.lost = str(error)
                lost(self.lost)
                return
            except OSError as error:
                level, failing = logging.DEBUG if failing else logging.WARNING, True
                log.log(level, "the run's store was not told that this process lives; that is tried every %g s: %s", RENEW_S, redact(error))

    def _stamp(self, tenure: Tenure, over: bool = False) -> None:
        self._count += 1
        self._lock.renew(tenure, Stamp(self._count, over))

    def forget(self) -> None:
        """Of a run that has not begun nothing is left."""
        self._end()
        if self.tenure is None:
            return
        try:
            self._lock.forget()
        except OSError as error:
            log.info("a mark of this run stays in its store: %s", redact(error))

    def _end(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def close(self) -> None:
        """Another process may take the run at once."""
        if self._stop.is_set():
            return
        self._end()
        if self.tenure is None or self.lost:
            return
        try:
            self._stamp(self.tenure, over=True)
        except TakenOver as error:
            log.warning("%s", error)
        except OSError as error:
            log.warning("the run's store was not told that the run is over; to take it takes %g s: %s", STALE_S, redact(error))
