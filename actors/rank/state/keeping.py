"""A run stops while this rank's loop computes or evaluates: a thread beside it writes the committed state.

The rank has left its view, so no step changes the state. A forward may change buffers of modules, whose committed values the step keeps. An
evaluation may have put other weights in place, so the thread checks for that before and after the copy.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from actors.rank.membership.client import Client
from actors.rank.state.saving import PartsPort, Share, StatePart, WholeTensors
from actors.rank.state.tracked import Flat, Slice
from actors.rank.step.train_step import TrainStep
from fleet.protocol.events import PartFailed, PartWritten
from fleet.protocol.instructions import Keep
from fleet.protocol.types import Part

log = logging.getLogger("fleet.rank")


class ChangedMeanwhile(RuntimeError):
    """The tensors in place are not the committed ones."""


def keep(order: Keep, train: TrainStep, parts: PartsPort, client: Client) -> None:
    """Write this rank's part, and report it or the error. In a thread of its own."""
    protocol = client.protocol
    try:
        name, part, meta = _write(order, train, parts, protocol.sharded, order.members.index(protocol.member))
    except (OSError, RuntimeError) as error:  # a GPU's errors are of the second kind
        log.warning("the state at step %d was not kept: %s", order.state.step, error)
        client.say(PartFailed(protocol.member, order.request, f"{type(error).__name__}: {error}"))
        return
    with client.lock:
        protocol.written(PartWritten(protocol.member, order.request, name, order.state, part, 0.0, meta))
    client.say()


def _write(order: Keep, train: TrainStep, parts: PartsPort, sharded: bool, index: int) -> tuple[str, Part, str]:
    """(id of the checkpoint, the part, the skeleton if this is the first part)."""
    count = len(order.members)
    share: Share = train.layout.share() if sharded else WholeTensors(train.state, StatePart(index, count, index, count))
    _check(train)
    flat, copies = _copied(train, share)
    _check(train)
    name, part = parts.write(order.state, order.generation, share.index, share.count, copies)
    return name, part, flat.skeleton if share.index == 0 else ""


def _check(train: TrainStep) -> None:
    if changed := train.body.changed():
        raise ChangedMeanwhile(f"the train function has changed {changed}, and may put it back")


def _copied(train: TrainStep, share: Share) -> tuple[Flat, list[Slice]]:
    """This rank's part, in host memory. If a forward begins meanwhile, the buffers are read again from the values that the step keeps."""
    before = train.gradients.buffers.as_committed()
    flat = share.flat()
    copies = _part(share, flat, before)
    if not before and (begun := train.gradients.buffers.as_committed()):
        copies = _part(share, flat, begun)
    return flat, copies


def _part(share: Share, flat: Flat, committed: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Slice]:
    was = {(live.data_ptr(), live.shape): value for live, value in committed if live.numel()}
    held = [was.get((tensor.data_ptr(), tensor.shape), tensor) for tensor in flat.tensors]
    lies_in = {live.untyped_storage().data_ptr() for live, _ in committed if live.numel()}
    if any(each.numel() and each.untyped_storage().data_ptr() in lies_in for each in held):
        raise ChangedMeanwhile("a running forward changes a buffer, and this rank writes only a part of that buffer")
    return [(index, tensor.detach().to("cpu", copy=True), *rest) for index, tensor, *rest in share.items(held)]  # type: ignore[misc]
