"""A step where ranks have the layers of a model one after the other: each column has the whole state of its stage.

Parameters of other stages are on ``meta`` here. The optimizers step them, too, with gradients on ``meta``. So the state has the same parts
in all columns, and a checkpoint is that of the whole model. The norm of the gradient is that of all layers, added up in their order: the
same bits wherever the model is cut.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from actors.rank.membership.process_group import GroupBroken
from actors.rank.membership.view_groups import ViewGroups
from actors.rank.mesh import collectives
from actors.rank.mesh.layout import ColumnLayout
from actors.rank.mesh.parts import whole
from actors.rank.mesh.pipe import StageLink
from actors.rank.mesh.torch_group import TensorGroup
from actors.rank.step.layout import LayoutInputs
from actors.rank.tags import Tag
from fleet.errors import ConfigError
from fleet.protocol.pipelining import Ways
from fleet.protocol.types import Coordinate, View

DIGEST_BYTES = hashlib.sha256().digest_size


class StageLayout(ColumnLayout):
    """Each rank has its stage's state whole: the ranks of a column are replicas of each other."""

    def __init__(self, given: LayoutInputs, link: StageLink, divided: TensorGroup | None, coordinate: Coordinate) -> None:
        """``divided``: the ranks with which this one computes each unit, if there are any."""
        self._link, self._divided = link, divided
        super().__init__(given, divided or link, coordinate)
        self._check(given)

    def _check(self, given: LayoutInputs) -> None:
        """Raises ConfigError: a parameter is in no layer, or an optimizer or scaler cannot step those of other stages."""
        if not self.gradients.buffers.constant:
            reason = "a forward may change buffers of a layer, such as BatchNorm's, and several shards are open at a time"
            raise ConfigError("pipeline", "a buffer", reason, "Take a norm without statistics, such as LayerNorm.")
        layers = given.state.numbers
        for root, module in given.state.modules.items():
            for name, one in module.named_parameters():
                if id(one) not in layers:
                    reason = "it is in no layer of run.pipeline, so no stage computes with it"
                    raise ConfigError("pipeline", f"{root}.{name}", reason, "Make it part of a layer.")
        if given.update.scaler is not None:
            raise ConfigError("pipeline", "GradScaler", "it cannot look at gradients of other stages", "Train in bfloat16, without it.")
        for name, optimizer in given.state.optimizers.items():
            probe = torch.nn.Parameter(torch.empty(2, 2, device="meta"))
            probe.grad = torch.empty_like(probe)
            group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
            try:
                make: Any = type(optimizer)
                make([{**group, "params": [probe]}]).step()
            except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
                reason = f"it cannot step parameters of other stages, which have no memory here: {str(error).splitlines()[0]}"
                raise ConfigError("pipeline", f"{name}: {type(optimizer).__name__}", reason, "Take AdamW or SGD, without fused.") from error

    def meet(self, groups: ViewGroups, view: View) -> None:
        super().meet(groups, view)
        self._link.meet(groups.whole)
        self._link.firsts = list(self._at.firsts)

    def part(self) -> None:
        super().part()
        self._link.meet(None)

    @property
    def useless(self) -> str:
        return self._link.lost or super().useless

    def _check_group(self) -> None:
        super()._check_group()
        if self._link.lost:
            raise GroupBroken(self._link.lost, self.group.generation)

    def assigned(self, ways: Ways | None, place: int) -> None:
        assert ways is not None, "a view without stages"
        self._link.give_again(ways, place)

    def reset(self) -> None:
        super().reset()
        self._link.kept.clear()

    # ---- vote ----------------------------------------------------------------------------------------------------------------------------

    def squares(self, blocks: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The squares of the norms of this column's part of each layer, first of divided parameters, then of others.

        They are zero for layers of other stages. Of ranks that have the same parameters one says them.
        """
        layout, state = self.gradients.layout, self.given.state
        found = torch.zeros(2, len(state.stages.layers), dtype=torch.float64, device="cpu")
        for flat, norms in sorted(blocks.items()):
            if flat in layout.divided or state.stages.leads:
                found[int(flat not in layout.divided), layout.units[flat] - 1] += float((norms**2).sum())
        return found.flatten()

    def square_of(self, norms: torch.Tensor) -> float:
        total, rows, layers = 0.0, norms[self._at.firsts].tolist(), len(self.given.state.stages.layers)
        for layer in range(layers):  # one stage has it, and each of its columns another part
            for number in (layer + layers, layer):
                for row in rows:
                    total += row[number]
        return total

    # ---- apply ---------------------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stepping(self, *, turns: bool) -> Iterator[list[torch.Tensor]]:
        elsewhere = self.gradients.mean.elsewhere
        for one in elsewhere:
            one.grad = torch.empty_like(one)
        with super().stepping(turns=turns) as gradients:
            yield gradients
        for one in elsewhere:
            one.grad = None
        self._link.kept.clear()

    # ---- the whole state -----------------------------------------------------------------------------------------------------------------

    def digest(self, step: int) -> str:
        state = self.given.state
        found = {name: whole(tracked.state_dict()) for name, tracked in state.objects.items()}
        self._check_group()
        tensors = state.in_order(found)
        mine = torch.zeros(len(tensors), 1 + DIGEST_BYTES, dtype=torch.uint8, device="cpu")
        for row, tensor in zip(mine, tensors, strict=True):
            if not tensor.is_meta:
                row[0] = 1
                row[1:] = torch.frombuffer(bytearray(state.fingerprint(tensor)), dtype=torch.uint8)
        rows = [row.tolist() for row in self._of_stages(mine)]
        known = [next((bytes(one[1:]) for one in of_one if one[0]), b"") for of_one in zip(*rows, strict=True)]
        return state.digest(step, found, known=known)

    def _of_stages(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """The tensors that the first rank of each stage has. All ranks get them. Raises GroupBroken."""
        group, firsts = self._link.group, self._link.firsts
        found = {first: mine if first == group.rank else torch.empty_like(mine) for first in firsts}
        sends = [(mine, peer) for peer in group.peers] if group.rank in firsts else []
        group.start(sends, [(found[first], first) for first in firsts if first != group.rank], Tag.TOGETHER).wait()
        return list(found.values())


def of_all_stages(link: StageLink, state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` with the tensors of all stages: all ranks call it together. Where one is lost, ``link`` says so."""
    found: dict[str, Any] = {key: of_all_stages(link, value) if isinstance(value, Mapping) else value for key, value in state.items()}
    names = [key for key, value in found.items() if isinstance(value, torch.Tensor)]
    try:
        group = link.group
        here = torch.tensor([not found[name].is_meta for name in names], dtype=torch.uint8, device="cpu")
        rows = torch.empty(group.size, len(names), dtype=torch.uint8, device="cpu")
        group.all_gather(rows, here, Tag.TOGETHER)
        for name, stage in zip(names, rows[link.firsts].long().argmax(0).tolist(), strict=True):
            tensor = found[name].detach()
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") if tensor.is_meta else tensor.contiguous()
            collectives.broadcast(group, tensor, link.firsts[stage])
            found[name] = tensor
    except GroupBroken as error:
        link.lost = link.lost or str(error)
    return found
