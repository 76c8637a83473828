"""Representations of all shards of a step, for a loss that compares the whole batch (``step.gather``).

A shard is computed twice. A first pass without gradients computes its representations, which ranks send to all others. In a second pass the
loss has the representations of all shards. Only the shard's own ones have gradients. The sum over the shards is the gradient of the loss of
the whole batch (Gao et al. 2021, arXiv:2101.06983), and no rank keeps the graph of more than one shard.

A representation depends on the state and the shard alone. So any rank may compute it, and the rank that gets a lost shard computes it
again. In each view and step each shard has one *supplier*, the rank that sends it. That is the first rank that held it when the view began,
else the rank that the shard is assigned to.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from actors.rank.membership.process_group import Group, GroupBroken, Work
from actors.rank.tags import Tag
from fleet.errors import LoopError

CALLS, DIMENSIONS = 8, 6
"""At most so many calls of ``step.gather`` in a shard, for tensors of at most so many dimensions."""
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.uint8)
ROW = 2 + DIMENSIONS
"""Numbers that describe one tensor: its type, how many dimensions it has, and these."""


class _TimesShards(torch.autograd.Function):
    """Multiplies the gradient by ``shards``: a step's gradient is the mean over its shards, and that of a gathered loss is their sum."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, shards: int) -> torch.Tensor:
        ctx.shards = shards
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.shards, None


class Representations:
    """The representations that one rank has of the current step.

    Attributes:
        used: the loop gathers. A process knows it once it has run the loop body, which it does before it joins a view.
        looking: the current shard is in its first pass: only its representations count.
        times: a trial of one rank alone has a part of the batch, which stands for so many parts.
        looked_us: how long its first passes have taken.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self.used = self.looking = False
        self.times, self.looked_us = 1, 0
        self._held: dict[int, list[torch.Tensor]] = {}
        self._shard, self._given, self._alone = -1, list[torch.Tensor](), False
        self._masks: Sequence[Collection[int]] = ()  # by view rank, the shards that it held when the view began in the middle of this step
        self._silent: Collection[int] = ()
        self._work: list[tuple[Work, Any]] = []
        self._over, self._broken = False, ""

    @property
    def _several(self) -> bool:
        """There is more than one shard, so a loss needs representations of other shards."""
        return self._shards * self.times > 1

    # ---- in a view -----------------------------------------------------------------------------------------------------------------------

    @property
    def held(self) -> tuple[int, ...]:
        """Shards whose representations are here."""
        return tuple(self._held)

    def join(self, masks: Sequence[Collection[int]], silent: Collection[int]) -> None:
        """A view begins. ``masks``: by rank, the shards that it held. ``silent`` ranks compute no shard of its first step, and ask for
        none."""
        self._masks, self._silent, self._work, self._over, self._broken = masks, silent, [], False, ""

    def begin_step(self) -> None:
        """The next step, or the same one from its beginning, in the same view."""
        self._held = {}
        self.join((), ())

    def rehearse(self) -> None:
        """There is one shard; its representations stand for all."""
        self._alone = True

    def forget(self) -> None:
        """The rehearsal is over."""
        self._alone = False
        self.begin_step()

    # ---- a shard -------------------------------------------------------------------------------------------------------------------------

    def begin(self, shard: int, *, looking: bool) -> None:
        """The loop body begins with ``shard``."""
        self._shard, self.looking, self._given = shard, looking, []

    def end(self) -> bool:
        """The loop body is done with the shard. True: it was the first pass."""
        if not self.looking:
            if self.used and self._several and len(self._given) != len(self._held[self._shard]):
                raise self._refused(f"{len(self._given)} calls", f"there were {len(self._held[self._shard])} in the shard's first pass")
            return False
        self._held[self._shard], self.looking = self._given, False
        return True

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """See ``Step.gather``."""
        if not self._several:
            return tensor
        self._check(tensor)
        if not self.used:
            self.used = self.looking = True
        number = len(self._given)
        self._given.append(tensor.detach().clone() if self.looking else tensor.detach())  # the loop body may change it in place
        if self.looking:
            return tensor.detach().repeat(self._shards * self.times, *[1] * (tensor.dim() - 1))
        if number >= len(self._held[self._shard]):
            raise self._refused(f"{number + 1} calls", f"there were {number} in the shard's first pass")
        if _other(tensor.detach(), self._held[self._shard][number]):
            reason = "it is not that of the first pass: it may follow neither from what step.gather gives nor from what the body keeps"
            raise self._refused(f"the tensor of call {number + 1}", reason)
        own = _TimesShards.apply(tensor, self._shards)  # type: ignore[no-untyped-call]
        parts = [own if shard == self._shard else self._held[shard][number] for shard in range(self._shards)]
        others = [self._held[shard][number] for shard in range(self._shards)] * (self.times - 1)
        return torch.cat([part.to(tensor.device) for part in (*parts, *others)])

    def _check(self, tensor: torch.Tensor) -> None:
        if tensor.dim() == 0 or tensor.dim() > DIMENSIONS or tensor.dtype not in DTYPES:
            reason = f"it has {tensor.dim()} dimensions and is {tensor.dtype}; it has 1 to {DIMENSIONS}, the first of which counts samples"
            raise self._refused(f"a tensor of shape {tuple(tensor.shape)}", reason)
        if len(self._given) == CALLS:
            raise self._refused(f"{CALLS + 1} calls", f"there are at most {CALLS} in a shard: concatenate what belongs together")

    def _refused(self, value: str, reason: str) -> LoopError:
        return LoopError(f"step.gather, shard {self._shard}: {value}: {reason}. All shards of a step call it alike.")

    # ---- among the ranks -----------------------------------------------------------------------------------------------------------------

    def lacking(self, shards: Sequence[int]) -> tuple[int, ...]:
        """The shards among these that need a first pass on this rank."""
        return () if not self.used or not self._several else tuple(shard for shard in shards if shard not in self._held)

    @property
    def complete(self) -> bool:
        """This rank has the representations of all shards."""
        return not self.used or not self._several or len(self._held) == self._shards

    def exchange(self, group: Group, contributed: Sequence[Collection[int]]) -> None:
        """Exchange representations, so that this rank has those of all shards. It has computed those that it supplies.

        Raises GroupBroken, LoopError.

        Args:
            contributed: by view rank, the shards that it brings to the step at hand.
        """
        if self._alone:
            self._held = dict.fromkeys(range(self._shards), next(iter(self._held.values())))
            return
        if not self.used or not self._several or group.rank in self._silent or self._over:
            return
        if self._broken:
            raise GroupBroken(self._broken, group.generation)
        try:
            self._exchange(group, self._suppliers(contributed, group.size))
        except GroupBroken as error:
            self._broken = str(error)
            raise
        self._over = True

    def _suppliers(self, contributed: Sequence[Collection[int]], size: int) -> list[int]:
        masks = self._masks or [()] * size
        return [
            next((rank for rank in range(size) if shard in masks[rank]), next(r for r in range(size) if shard in contributed[r]))
            for shard in range(self._shards)
        ]

    def _exchange(self, group: Group, suppliers: Sequence[int]) -> None:
        masks = self._masks or [()] * group.size
        peers = [peer for peer in group.peers if peer not in self._silent]

        def owed(source: int, rank: int) -> list[int]:
            return [shard for shard, supplier in enumerate(suppliers) if supplier == source and shard not in masks[rank]]

        sends: list[tuple[torch.Tensor, int]] = []
        for peer in peers:
            if shards := owed(group.rank, peer):
                if self.lacking(shards):  # this rank was called away from its first pass
                    raise GroupBroken("this rank has not computed what it supplies", group.generation)
                sends += [(message, peer) for message in self._packed(shards)]
        self._work.append((group.start(sends, [], Tag.GATHERED), sends))
        sources = {peer: shards for peer in peers if (shards := owed(peer, group.rank))}
        heads = {peer: torch.zeros(1 + CALLS * ROW, dtype=torch.int64, device="cpu") for peer in sources}
        group.start([], [(head, peer) for peer, head in heads.items()], Tag.GATHERED).arrived()
        like = {peer: _like(head) for peer, head in heads.items()}
        self._compare(like, sources)
        room = {
            peer: [torch.empty(len(shards), *each.shape, dtype=each.dtype, device="cpu") for each in like[peer]]
            for peer, shards in sources.items()
        }
        receives = [(tensor, peer) for peer, tensors in room.items() for tensor in tensors]
        group.start([], receives, Tag.GATHERED).arrived()
        for peer, shards in sources.items():
            for place, shard in enumerate(shards):
                self._held.setdefault(shard, [tensor[place] for tensor in room[peer]])

    def _packed(self, shards: Sequence[int]) -> list[torch.Tensor]:
        first = self._held[shards[0]]
        for shard in shards[1:]:
            self._same(shard, self._held[shard], shards[0], first)
        numbers = [len(first)]
        for each in first:
            numbers += [DTYPES.index(each.dtype), each.dim(), *each.shape, *[0] * (DIMENSIONS - each.dim())]
        head = torch.zeros(1 + CALLS * ROW, dtype=torch.int64, device="cpu")
        head[: len(numbers)] = torch.tensor(numbers, device="cpu")
        return [head, *(torch.stack([self._held[shard][call].cpu() for shard in shards]) for call in range(len(first)))]

    def _compare(self, like: dict[int, list[torch.Tensor]], sources: dict[int, list[int]]) -> None:
        own = next(iter(self._held.items()), None)
        for peer, found in like.items():
            own = own or (sources[peer][0], found)
            self._same(sources[peer][0], found, *own)

    def _same(self, shard: int, found: Sequence[torch.Tensor], other: int, right: Sequence[torch.Tensor]) -> None:
        shapes = [[(tuple(each.shape), each.dtype) for each in tensors] for tensors in (found, right)]
        if shapes[0] != shapes[1]:
            self._shard = shard
            raise self._refused(f"{shapes[0]}", f"shard {other} has given {shapes[1]}")

    def finish(self, group: Group, contributed: Sequence[Collection[int]]) -> None:
        """Before the sum: send other ranks the representations that they need, and complete all messages of the tag. Raises GroupBroken."""
        self.exchange(group, contributed)
        for work, _ in self._work:
            work.wait()
        self._work = []


def _other(tensor: torch.Tensor, first: torch.Tensor) -> bool:
    """Whether the tensors differ by more than the rounding between a forward with gradients and one without."""
    if tensor.shape != first.shape or tensor.dtype != first.dtype:
        return True
    first = first.to(tensor.device)
    if not tensor.is_floating_point():
        return not torch.equal(tensor, first)
    allowed = torch.finfo(tensor.dtype).eps ** 0.5 * first.double().norm()
    return bool((tensor.double() - first.double()).norm() > allowed)


def _like(head: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a message's head describes, without memory."""
    count, *numbers = head.tolist()
    rows = [numbers[call * ROW : (call + 1) * ROW] for call in range(count)]
    return [torch.empty(row[2 : 2 + row[1]], dtype=DTYPES[row[0]], device="meta") for row in rows]
