"""The collectives within a group of ranks, over the point-to-point messages of :class:`Group`.

Sums are added in the order of the ranks, so the same inputs give the same bits in each attempt. All ranks come to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from actors.rank.membership.process_group import Group
from actors.rank.tags import Tag

Add = Callable[[torch.Tensor, torch.Tensor], Any]
"""Combines the left tensor with the right one, in place of the left one."""
PLAIN_SUMS = (torch.float32, torch.float64)
"""The library adds up two tensors of these types itself: its messages take half of the time that single ones take."""
WHOLE_BYTES = 64 << 10
"""Up to this size each rank gets all parts and adds them up by itself. Of a larger tensor each rank adds up a part."""


class Scratch:
    """Memory for what comes from other ranks. It is kept: to take it anew for each collective would cost more than to add it up."""

    def __init__(self) -> None:
        self._held: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def like(self, tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
        """So many tensors of this shape, until the next call."""
        key, length = (tensor.dtype, tensor.device), tensor.numel() * count
        found = self._held.get(key)
        if found is None or found.numel() < length:
            found = self._held[key] = torch.empty(length, dtype=tensor.dtype, device=tensor.device)
        return [part.view(tensor.shape) for part in found[:length].split(max(1, tensor.numel()))] if length else [tensor] * count


def all_gather(group: Group, mine: torch.Tensor, places: Sequence[torch.Tensor]) -> None:
    """``places[r]``, which is contiguous, gets rank r's tensor. All have the shape of ``mine``. Raises GroupBroken."""
    mine = mine.contiguous()
    places[group.rank].copy_(mine)
    _exchange(group, [(mine, peer) for peer in group.peers], [(places[peer], peer) for peer in group.peers])


def all_to_all(group: Group, parts: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
    """``into[r]`` gets this rank's part of rank r: ``parts[r]`` goes to rank r. Raises GroupBroken.

    Shapes may differ between ranks, also to nothing; all are contiguous.
    """
    into[group.rank].copy_(parts[group.rank])
    _exchange(group, [(parts[peer], peer) for peer in group.peers], [(into[peer], peer) for peer in group.peers])


def reduce_scatter(group: Group, parts: Sequence[torch.Tensor], into: torch.Tensor, add: Add, scratch: Scratch) -> None:
    """``into`` gets the sum of all ranks' parts for this rank; ``parts[r]`` is for rank r. All have one shape. Raises GroupBroken."""
    whole = [part.contiguous() for part in parts]
    others = scratch.like(into, group.size - 1)
    _exchange(group, [(whole[peer], peer) for peer in group.peers], list(zip(others, group.peers, strict=True)))
    own = whole[group.rank]
    found = {**dict(zip(group.peers, others, strict=True)), group.rank: own.clone() if own.data_ptr() == into.data_ptr() else own}
    _add_up(into, [found[rank] for rank in range(group.size)], add)


def all_reduce(group: Group, tensor: torch.Tensor, add: Add, scratch: Scratch) -> None:
    """``tensor`` becomes the sum of all ranks' tensors, which have one shape. Raises GroupBroken: then its values are of no use."""
    if group.size == 2 and add is torch.Tensor.add_ and tensor.dtype in PLAIN_SUMS and tensor.is_contiguous():
        group.all_reduce(tensor)  # of two numbers the sum has the same bits in either order
    elif group.size == 2:
        mine, (other,) = tensor.contiguous(), scratch.like(tensor, 1)
        _exchange(group, [(mine, group.peers[0])], [(other, group.peers[0])])
        add(tensor, other)
    elif tensor.nbytes <= WHOLE_BYTES:
        mine, others = tensor.contiguous(), scratch.like(tensor, group.size - 1)
        _exchange(group, [(mine, peer) for peer in group.peers], list(zip(others, group.peers, strict=True)))
        found = {**dict(zip(group.peers, others, strict=True)), group.rank: mine.clone()}
        _add_up(tensor, [found[rank] for rank in range(group.size)], add)
    else:
        flat = tensor.contiguous().view(-1)
        length = -(-flat.numel() // group.size)
        padded = torch.nn.functional.pad(flat, (0, length * group.size - flat.numel()))
        part = torch.empty_like(padded[:length])
        reduce_scatter(group, padded.split(length), part, add, scratch)
        whole = torch.empty_like(padded)
        all_gather(group, part, whole.split(length))
        tensor.copy_(whole[: flat.numel()].view(tensor.shape))


def broadcast(group: Group, tensor: torch.Tensor, source: int) -> None:
    """``tensor``, which is contiguous, gets the values that ``source`` has. Raises GroupBroken."""
    if group.rank == source:
        _exchange(group, [(tensor, peer) for peer in group.peers], [])
    else:
        _exchange(group, [], [(tensor, source)])


def _add_up(into: torch.Tensor, parts: Sequence[torch.Tensor], add: Add) -> None:
    """``into`` gets the sum, added up in order; none of the parts is its memory."""
    into.copy_(parts[0])
    for part in parts[1:]:
        add(into, part)


def _exchange(group: Group, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]) -> None:
    """Wait for both: a caller may change what was sent."""
    group.start(sends, receives, Tag.TOGETHER).wait()
