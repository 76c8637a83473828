"""State that each shard of a step carries to the next step: hidden states, rollouts, buffers of bounded size.

The state belongs to the shard's number, as the shard's stream of samples does, and not to the rank that computes it. All ranks hold the
state of all shards, so ranks that join get it, and checkpoints contain it. A value that a loop body sets for a shard counts once the step
is committed. Until then each run of the body reads the value of the last committed step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from actors.rank.membership.process_group import Group, Work
from actors.rank.tags import Tag
from fleet.errors import ConfigError, LoopError

FIELD = "fleet.ShardState"


class ShardState:
    """State that a shard carries from step to step. Track the object, and read and set its ``value`` in the loop over batches.

    Args:
        first: ``first(shard)`` gives the first value of shard ``shard``: a tensor, or dicts, lists and tuples of tensors. Shapes and types
            are the same for all shards.

    Raises:
        ConfigError: ``first`` gives a value that is no tensor, or different shapes for different shards.
    """

    def __init__(self, first: Callable[[int], Any]) -> None:
        if not callable(first):
            raise ConfigError(FIELD, type(first).__name__, "it is no function", "Give first(shard), such as lambda shard: torch.zeros(8).")
        self._first = first
        self._values: list[torch.Tensor] = []  # one for each leaf, stacked by shard
        self._form: Any = None
        self._shard = -1
        self._left: dict[int, list[torch.Tensor]] = {}

    def begin(self, shards: int) -> None:
        """Make the first values, for a run of so many shards. Raises ConfigError."""
        if self._values:
            return
        leaves = list[list[torch.Tensor]]()
        for shard in range(shards):
            leaves.append(self._leaves(self._first(shard), shard))
            if _shapes(leaves[-1]) != _shapes(leaves[0]):
                raise ConfigError(FIELD, _shapes(leaves[-1]), f"shard {shard} begins with other shapes than shard 0", "Make them alike.")
        self._values = [torch.stack(each) for each in zip(*leaves, strict=True)]

    def _leaves(self, value: Any, shard: int) -> list[torch.Tensor]:
        leaves, form = _pytree.tree_flatten(_in_order(value))
        other = [type(each).__name__ for each in leaves if not isinstance(each, torch.Tensor)]
        if other or not leaves:
            raise ConfigError(FIELD, other[0] if other else value, f"shard {shard} begins with something that is no tensor", "Make it one.")
        self._form = self._form or form
        if form != self._form:
            raise ConfigError(FIELD, str(form), f"shard {shard} begins with something of another form than shard 0", "Make them alike.")
        return [each.detach().clone() for each in leaves]

    @property
    def _shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [(tuple(each.shape[1:]), each.dtype) for each in self._values]

    # ---- for the loop --------------------------------------------------------------------------------------------------------------------

    @property
    def value(self) -> Any:
        """A copy of the current shard's value after the last committed step. Raises LoopError outside the loop over batches."""
        if self._shard < 0:
            raise LoopError(f"{FIELD}: value belongs inside `for batch in step.batches(...)`, and the object into run.track(...)")
        return _pytree.tree_unflatten([each[self._shard].clone() for each in self._values], self._form)

    @value.setter
    def value(self, value: Any) -> None:
        if self._shard < 0:
            raise LoopError(f"{FIELD}: value belongs inside `for batch in step.batches(...)`, and the object into run.track(...)")
        leaves, form = _pytree.tree_flatten(_in_order(value))
        if form != self._form or not all(isinstance(each, torch.Tensor) for each in leaves) or _shapes(leaves) != self._shapes:
            found = _shapes(leaves) if all(isinstance(each, torch.Tensor) for each in leaves) else value
            reason = f"it began with {self._shapes}; all ranks hold that of all shards, so its shapes stay"
            raise LoopError(
                f"{FIELD}, shard {self._shard}: {found}: {reason}. Keep it in tensors of one size, such as a ring with a count."
            )
        self._left[self._shard] = [each.detach().to(kept.device).clone() for each, kept in zip(leaves, self._values, strict=True)]

    # ---- for the step --------------------------------------------------------------------------------------------------------------------

    def enter(self, shard: int) -> None:
        """The loop body computes ``shard``; -1: none."""
        self._shard = shard
        self._left.pop(shard, None)

    def left(self, shards: Sequence[int]) -> list[torch.Tensor]:
        """The new values of these shards of this rank, by leaf, stacked in order. Where the body has set none, the old value."""
        return [
            torch.stack([self._left[shard][leaf] if shard in self._left else each[shard] for shard in shards])
            for leaf, each in enumerate(self._values)
        ]

    def room(self, count: int) -> list[torch.Tensor]:
        """Memory for the values of so many shards from another rank."""
        return [torch.empty(count, *each.shape[1:], dtype=each.dtype, device="cpu") for each in self._values]

    def receive(self, shards: Sequence[int], values: Sequence[torch.Tensor]) -> None:
        """Keep the new values of another rank's shards."""
        for place, shard in enumerate(shards):
            self._left[shard] = [each[place] for each in values]

    def take(self) -> None:
        """The step is taken."""
        with torch.no_grad():
            for shard, leaves in self._left.items():
                for each, value in zip(self._values, leaves, strict=True):
                    each[shard].copy_(value)
        self.forget()

    def forget(self) -> None:
        """Nothing of the present attempt remains."""
        self._left, self._shard = {}, -1

    # ---- tracked -------------------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """By leaf, of shape (shards, ...): the live tensors."""
        return {str(leaf): each for leaf, each in enumerate(self._values)}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Raises ConfigError when its shapes or its number of shards are others."""
        found = [state[key] for key in sorted(state, key=int)]
        if [(each.shape, each.dtype) for each in found] != [(each.shape, each.dtype) for each in self._values]:
            reason = f"the state to load has {[tuple(each.shape) for each in found]} for it, by shard"
            way_out = "Resume with the same number of shards and the same shapes."
            raise ConfigError(FIELD, [tuple(each.shape) for each in self._values], reason, way_out)
        with torch.no_grad():
            for each, value in zip(self._values, found, strict=True):
                each.copy_(value)


def _in_order(value: Any) -> Any:
    """``value`` with the keys of its dicts sorted: their order has no meaning."""
    if isinstance(value, dict):
        return {key: _in_order(value[key]) for key in sorted(value)}
    if type(value) in (list, tuple):
        return type(value)(map(_in_order, value))
    return value


def _shapes(leaves: Iterable[torch.Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(each.shape), each.dtype) for each in leaves]


class ShardStates:
    """All :class:`ShardState` objects that a loop tracks, on one rank."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._tracked = [one for one in objects.values() if isinstance(one, ShardState)]
        self._work: list[tuple[Work, Any]] = []

    def enter(self, shard: int) -> None:
        """See :class:`ShardState`, here and below."""
        for one in self._tracked:
            one.enter(shard)

    def send(self, group: Group, contributed: Sequence[Sequence[int]]) -> None:
        """Begin to send this rank's new values to all others. ``contributed``: by view rank, the shards that it brings."""
        self._work = []
        mine = contributed[group.rank]
        if not self._tracked or group.size == 1 or not mine:
            return
        messages = [each.cpu() for one in self._tracked for each in one.left(mine)]
        self._work = [(group.start([(each, peer) for peer in group.peers for each in messages], [], Tag.CARRIED), messages)]

    def receive(self, group: Group, contributed: Sequence[Sequence[int]]) -> None:
        """Receive the new values of all other ranks' shards. Raises GroupBroken."""
        if not self._tracked or group.size == 1:
            return
        rooms = [(peer, one, one.room(len(contributed[peer]))) for peer in group.peers if contributed[peer] for one in self._tracked]
        group.start([], [(each, peer) for peer, _, room in rooms for each in room], Tag.CARRIED).wait()
        for peer, one, room in rooms:
            one.receive(contributed[peer], room)
        for work, _ in self._work:
            work.wait()

    def take(self) -> None:
        for one in self._tracked:
            one.take()

    def forget(self) -> None:
        for one in self._tracked:
            one.forget()
