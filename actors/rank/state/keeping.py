"""A run stops while the loop of this rank computes or evaluates: what it has committed is written beside that.

The rank has left its view, so nobody changes the state. A forward may change buffers of modules, of which the step keeps what they were; an
evaluation may have put other weights in place, which is looked for before and after the state is copied.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from actors.rank.membership.client import Client
from actors.rank.state.saving import PartsPort, Share, WholeTensors
from actors.rank.state.tracked import Flat, Slice
from actors.rank.step.train_step import TrainStep
from fleet.protocol.events import PartFailed, PartWritten
from fleet.protocol.instructions import Keep
from fleet.protocol.types import Part

log = logging.getLogger("fleet.rank")


class ChangedMeanwhile(RuntimeError):
    """The tensors in place are not those that were committed."""


def keep(order: Keep, train: TrainStep, parts: PartsPort, client: Client) -> None:
    """Write this rank's part, and say so, or why it cannot. In a thread of its own."""
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
    """(id of the checkpoint, the part, what the first rank says of all)."""
    share: Share = train.layout.share() if sharded else WholeTensors(train.state, index, len(order.members))
    _check(train)
    flat, copies = _copied(train, share)
    _check(train)
    name, part = parts.write(order.state, order.generation, share.index, share.count, copies)
    return name, part, flat.skeleton if share.index == 0 else ""


def _check(train: TrainStep) -> None:
    if changed := train.body.changed():
        raise ChangedMeanwhile(f"the train function has changed {changed}, and may put it back")


def _copied(train: TrainStep, share: Share) -> tuple[Flat, list[Slice]]:
    """This rank's part, in host memory. A forward that begins meanwhile has kept what buffers were: then they are read again."""
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
        raise ChangedMeanwhile("a forward is under way that changes a buffer, of which only a part is written here")
    return [(index, tensor.detach().to("cpu", copy=True), *rest) for index, tensor, *rest in share.items(held)]  # type: ignore[misc]
