"""A rank's part of durable checkpoints, written beside the steps.

All ranks begin a snapshot at the same step boundary. The loop waits for it, if at all, when the next step is about to change the state.
After that a thread of its own writes the part, and reports when it is durable.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from actors.rank.membership.client import Client
from actors.rank.mesh.parts import InWhole
from actors.rank.state.snapshot import Snapshot, Snapshotter
from actors.rank.state.tracked import Flat, Slice, TrackedState, slices
from actors.rank.telemetry.recorder import Recorder
from fleet.errors import FleetError
from fleet.protocol.events import PartFailed, PartWritten
from fleet.protocol.levels import LEVELS, PEERS, level_of, peers_url
from fleet.protocol.records import CHECKPOINT
from fleet.protocol.types import Part, StateId, View

log = logging.getLogger("fleet.rank")


class Share(Protocol):
    """The part of a state that one rank writes. The snapshot has the tensors of :meth:`flat`; :meth:`items` gives the slices to write.

    Attributes:
        index, count: the number of the part, and how many parts there are.
        state: the whole state.
    """

    index: int
    count: int
    state: TrackedState

    def flat(self) -> Flat: ...

    def items(self, tensors: Sequence[torch.Tensor]) -> list[Slice]: ...


@dataclass(frozen=True, slots=True)
class StatePart:
    """Which part of a state a rank writes.

    Attributes:
        index: the number of the part, of ``count`` parts.
        rank: of this rank within its column. The column's ranks, ``size`` of them, divide its tensors among them.
        first: the column writes what all columns have alike.
    """

    index: int
    count: int
    rank: int
    size: int
    first: bool = True

    def slices(self, tensors: Sequence[torch.Tensor], divided: Mapping[int, InWhole], elsewhere: Collection[int] = ()) -> list[Slice]:
        """This rank's slices of ``tensors``.

        ``divided``: by index, the place of a tensor of which each column has another part. ``elsewhere``: those that this column lacks.
        """
        mine = [number for number in range(len(tensors)) if (self.first or number in divided) and number not in elsewhere]
        found = []
        for number, rows, offsets, shape in slices([tensors[number] for number in mine], self.size)[self.rank]:
            where = divided.get(mine[number])
            begins = offsets if where is None else tuple(map(sum, zip(where.offsets, offsets, strict=True)))
            found.append((mine[number], rows, begins, shape if where is None else where.shape))
        return found


class WholeTensors:
    """The part of a state that all ranks of a column hold: each rank writes some of the tensors."""

    def __init__(self, state: TrackedState, state_part: StatePart) -> None:
        self.state, self.state_part = state, state_part
        self.index, self.count = state_part.index, state_part.count
        self._divided: Mapping[int, InWhole] = {}
        self._elsewhere: Collection[int] = ()

    def flat(self) -> Flat:
        flat = self.state.flat()
        self._divided, self._elsewhere = flat.divided, flat.elsewhere
        return flat

    def items(self, tensors: Sequence[torch.Tensor]) -> list[Slice]:
        return self.state_part.slices(tensors, self._divided, self._elsewhere)


class PartsPort(Protocol):
    """A rank's access to checkpoints; ``storage`` implements it."""

    def write(
        self, state: StateId, generation: int, index: int, count: int, tensors: Sequence[Slice], place: str = ""
    ) -> tuple[str, Part]:  # fmt: skip
        """(id of the checkpoint, the part as written); durable when this returns. ``place``: URL of memories, "" for the store.

        Raises OSError.
        """

    def export(self, target: str, model: Mapping[str, Any]) -> str:
        """Write a model to the path or URL ``target``, whole or not at all; returns its place. Raises OSError."""

    def load(self, checkpoint: str) -> tuple[str, list[torch.Tensor]]:
        """(skeleton, tensors) of a committed checkpoint, verified: of the store by id, of memories by URL. Raises OSError."""


@dataclass(frozen=True)
class SaveOrder:
    """One rank's part of a checkpoint to write to ``place``. The coordinator asked for it as ``request`` in ``generation``."""

    request: int
    state: StateId
    generation: int
    share: Share
    place: str = ""


class Saver:
    """``begin`` and ``settle`` belong to the loop's thread. ``places``: see :func:`fleet.protocol.levels.places`.

    A failure is logged and reported: training goes on, and the coordinator asks again later.
    """

    def __init__(self, client: Client, recorder: Recorder, parts: PartsPort, places: Mapping[str, str]) -> None:
        self._client, self._recorder, self._parts, self._places = client, recorder, parts, places
        self._snapshots = Snapshotter()
        # Copies for peers are made every few seconds, and must not wait behind a store that takes minutes.
        self._threads = {level.name: ThreadPoolExecutor(1, thread_name_prefix=f"fleet-save-{level.name}") for level in LEVELS}
        self._order: SaveOrder | None = None
        self._begun_s = 0.0

    def begin(self, request: int, here: StateId, view: View, share: Share) -> None:
        """Take the state as it is now, for ``request``. It may change after :meth:`settle`."""
        self.settle()
        with self._recorder.during(CHECKPOINT):
            before_us = self._recorder.now_us()
            if self._snapshots.begin(here, share.state, share.flat):
                level = level_of(request)
                place = peers_url(view.copies[share.index]) if level == PEERS else self._places.get(level, "")
                self._order = SaveOrder(request, here, view.generation, share, place)
                self._begun_s = (self._recorder.now_us() - before_us) / 1e6
            else:
                self._give_up(request, here, "the two snapshots before it are still being written")

    def settle(self) -> None:
        """Before the state changes: wait until it is copied, then write it in another thread."""
        order, self._order = self._order, None
        if order is None:
            return
        with self._recorder.during(CHECKPOINT):
            blocked_s = self._begun_s + self._snapshots.settle()
        snapshot = self._snapshots.hold_settled()
        if snapshot is not None and snapshot.state_id == order.state:
            self._threads[level_of(order.request)].submit(self._write, order, snapshot, blocked_s)
        elif snapshot is not None:
            snapshot.release()

    def _give_up(self, request: int, here: StateId, reason: str) -> None:
        log.warning("the state at step %d was not saved for the %s: %s", here.step, level_of(request), reason)
        self._client.say(PartFailed(self._client.protocol.member, request, reason))

    def _write(self, order: SaveOrder, snapshot: Snapshot, blocked_s: float) -> None:
        try:
            with snapshot:
                snapshot.arrive()
                share = order.share
                mine = share.items(snapshot.tensors)
                name, part = self._parts.write(order.state, order.generation, share.index, share.count, mine, order.place)
        except (OSError, RuntimeError) as error:  # a GPU's errors are of the second kind
            self._give_up(order.request, order.state, f"{type(error).__name__}: {error}")
            return
        meta = snapshot.skeleton if order.share.index == 0 else ""
        with self._client.lock:
            protocol = self._client.protocol
            protocol.written(PartWritten(protocol.member, order.request, name, order.state, part, blocked_s, meta))
        self._client.say()


def model_state(tracked: TrackedState | None, model: Any) -> Mapping[str, Any]:
    """Names to tensors for ``run.save``: of ``model``, or of the tracked module; of several tracked ones a mapping for each.

    Raises FleetError when there is no model to write.
    """
    if model is None:
        modules = tracked.modules if tracked is not None else {}
        if len(modules) > 1:
            return {name: module.state_dict() for name, module in modules.items()}
        if not modules:
            raise FleetError("run.save: no module is tracked yet. Name what to write: run.save(path, model)")
        model = next(iter(modules.values()))
    found = model.state_dict() if hasattr(model, "state_dict") else model
    if not isinstance(found, Mapping):
        raise FleetError(f"run.save: a {type(model).__name__} is no module and no mapping of names to tensors")
    return found
