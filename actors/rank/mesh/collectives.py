"""The collectives within a group of ranks, over the point-to-point messages of :class:`Group`.

Sums are added in the order of the ranks, so the same inputs give the same bits in each attempt. All ranks come to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from actors.rank.membership.process_group import Group
from actors.rank.tags import Tag

Add = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Combines the left tensor with the right one, in place of the left one."""
WHOLE_BYTES = 64 << 10
"""Up to this size each rank gets all parts and adds them up by itself. Of a larger tensor each rank adds up a part."""


def all_gather(group: Group, mine: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks, in order. All have the shape of ``mine``. Raises GroupBroken."""
    mine = mine.contiguous()
    found = [mine if rank == group.rank else torch.empty_like(mine) for rank in range(group.size)]
    _exchange(group, [(mine, peer) for peer in group.peers], [(found[peer], peer) for peer in group.peers])
    return found


def all_to_all(group: Group, parts: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
    """``into[r]`` gets this rank's part of rank r: ``parts[r]`` goes to rank r. Raises GroupBroken.

    Shapes may differ between ranks, also to nothing; all are contiguous.
    """
    into[group.rank].copy_(parts[group.rank])
    _exchange(group, [(parts[peer], peer) for peer in group.peers], [(into[peer], peer) for peer in group.peers])


def reduce_scatter(group: Group, parts: Sequence[torch.Tensor], add: Add) -> torch.Tensor:
    """The sum of all ranks' parts for this rank; ``parts[r]`` is for rank r. All have one shape. Raises GroupBroken."""
    whole = [part.contiguous() for part in parts]
    mine = whole[group.rank]
    found = [mine if rank == group.rank else torch.empty_like(mine) for rank in range(group.size)]
    _exchange(group, [(whole[peer], peer) for peer in group.peers], [(found[peer], peer) for peer in group.peers])
    return _added(found, add)


def all_reduce(group: Group, mine: torch.Tensor, add: Add) -> torch.Tensor:
    """The sum of all ranks' tensors of one shape, in new memory. Raises GroupBroken."""
    if group.size == 2 or mine.nbytes <= WHOLE_BYTES:
        return _added(all_gather(group, mine), add)
    flat = mine.contiguous().view(-1)
    length = -(-flat.numel() // group.size)
    padded = torch.nn.functional.pad(flat, (0, length * group.size - flat.numel()))
    part = reduce_scatter(group, padded.split(length), add)
    return torch.cat(all_gather(group, part))[: flat.numel()].view(mine.shape)


def broadcast(group: Group, tensor: torch.Tensor, source: int) -> None:
    """``tensor``, which is contiguous, gets the values that ``source`` has. Raises GroupBroken."""
    if group.rank == source:
        _exchange(group, [(tensor, peer) for peer in group.peers], [])
    else:
        _exchange(group, [], [(tensor, source)])


def _added(parts: Sequence[torch.Tensor], add: Add) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total = add(total, part)
    return total


def _exchange(group: Group, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]) -> None:
    """Wait for both: a caller may change what was sent."""
    group.start(sends, receives, Tag.TOGETHER).wait()
