"""Some of the ranks of a view, as a group of their own: their messages go through the view's group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from actors.rank.membership.errands import Signal
from actors.rank.membership.process_group import Group, GroupBroken, Transfer, Work
from actors.rank.tags import Tag


class Subgroup(Group):
    """The ranks ``members`` of ``whole``, numbered from 0 on in this order. This rank is one of them.

    It has no connections of its own: an interrupt of the whole group interrupts it, and it need not be closed.
    """

    def __init__(self, whole: Group, members: Sequence[int]) -> None:
        self._whole, self._members = whole, tuple(members)
        self.generation, self.device = whole.generation, whole.device
        self.rank, self.size = self._members.index(whole.rank), len(self._members)
        self.sites = tuple(whole.sites[rank] for rank in self._members)
        self.rooms = tuple(whole.rooms[rank] for rank in self._members)
        self._gathered: Work | None = None

    def start(self, sends: Sequence[Transfer], receives: Sequence[Transfer], tag: int = Tag.PLAIN) -> Work:
        outgoing = [(tensor, self._members[peer]) for tensor, peer in sends]
        return self._whole.start(outgoing, [(tensor, self._members[peer]) for tensor, peer in receives], tag)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        raise NotImplementedError("a library adds up over all ranks of its own group")

    # ---- the waits are those of the whole group ------------------------------------------------------------------------------------------

    @property
    def receives_ahead(self) -> bool:
        return self._whole.receives_ahead

    def broken(self, reason: str) -> GroupBroken:
        return self._whole.broken(reason)

    def complete(self, works: Sequence[Work]) -> None:
        self._whole.complete(works)

    def watched(self, operations: Sequence[Any]) -> Callable[[], None]:
        return self._whole.watched(operations)

    def begin_in_background(self, call: Callable[[], None]) -> Callable[[], None]:
        return self._whole.begin_in_background(call)

    def quiet(self) -> None:
        self._whole.quiet()

    def rest(self, until: Signal) -> None:
        self._whole.rest(until)

    def interrupt(self, reason: str = "interrupted") -> None:
        self._whole.interrupt(reason)

    def close(self) -> None:
        """The whole group is closed by itself."""
