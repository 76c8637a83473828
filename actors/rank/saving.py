"""A rank's part of durable checkpoints, written beside the steps.

At the step boundary on which all agreed a snapshot begins; the loop waits for it, if at all, when the next step is about to change the
state. From then on a thread of its own writes the part, and says so when it is durable.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from actors.rank.client import Client
from actors.rank.recorder import Recorder
from actors.rank.snapshot import Snapshot, Snapshotter
from actors.rank.state import TrackedState, partition
from fleet.events import PartWritten
from fleet.records import CHECKPOINT
from fleet.types import Part, StateId, View

log = logging.getLogger("fleet.rank")


class PartsPort(Protocol):
    """Durable checkpoints as a rank sees them; ``storage`` implements it."""

    def write(self, state: StateId, generation: int, index: int, count: int, tensors: list[tuple[int, torch.Tensor]]) -> tuple[str, Part]:
        """(id of the checkpoint, the part as written); durable when this returns."""
        ...

    def load(self, checkpoint: str) -> tuple[str, list[torch.Tensor]]:
        """(skeleton, tensors) of a committed checkpoint, verified."""
        ...


@dataclass(frozen=True)
class Order:
    """One checkpoint as one rank writes it: the part ``index`` of ``count``, asked for as ``request`` in ``generation``."""

    request: int
    state: StateId
    generation: int
    index: int
    count: int


class Saver:
    """``begin`` and ``settle`` belong to the loop's thread.

    What fails is logged and not reported: training goes on, and the coordinator asks again once the request is out of time.
    """

    def __init__(self, client: Client, recorder: Recorder, parts: PartsPort) -> None:
        self._client, self._recorder, self._parts = client, recorder, parts
        self._snapshots = Snapshotter()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fleet-save")
        self._order: Order | None = None
        self._begun_s = 0.0

    def begin(self, request: int, here: StateId, view: View, rank: int, state: TrackedState) -> None:
        """Take the state as it is now, for ``request``. It may change after :meth:`settle`."""
        self.settle()
        with self._blocked():
            before_us = self._recorder.now_us()
            if self._snapshots.begin(here, state):
                self._order = Order(request, here, view.generation, rank, len(view.members))
                self._begun_s = (self._recorder.now_us() - before_us) / 1e6
            else:
                log.warning("the state at step %d was not saved: the two before it are still being written", here.step)

    def settle(self) -> None:
        """Before the state changes: wait until it is copied, then have it written."""
        order, self._order = self._order, None
        if order is None:
            return
        with self._blocked():
            blocked_s = self._begun_s + self._snapshots.settle()
        snapshot = self._snapshots.hold()
        if snapshot is not None and snapshot.state_id == order.state:
            self._thread.submit(self._write, order, snapshot, blocked_s)
        elif snapshot is not None:
            snapshot.release()

    @contextmanager
    def _blocked(self) -> Iterator[None]:
        before = self._recorder.code
        self._recorder.switch(CHECKPOINT)
        try:
            yield
        finally:
            self._recorder.switch(before)

    def _write(self, order: Order, snapshot: Snapshot, blocked_s: float) -> None:
        try:
            with snapshot:
                share = partition(snapshot.tensors, order.count)[order.index]
                mine = [(index, snapshot.tensors[index]) for index in share]
                name, part = self._parts.write(order.state, order.generation, order.index, order.count, mine)
        except OSError as error:
            log.warning("part of a checkpoint at step %d was not written: %s", order.state.step, error)
            return
        meta = snapshot.skeleton if order.index == 0 else ""
        self._client.say(PartWritten(self._client.protocol.member, order.request, name, order.state, part, blocked_s, meta))
