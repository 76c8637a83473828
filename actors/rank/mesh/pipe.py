"""A model that is cut into stages, each on a rank of its own: the units of its shards, and what travels between stages.

A rank computes its turns in the order of :mod:`fleet.protocol.pipelining`, which its neighbours know. So messages carry no number. Before
an activation travels a head with its shapes, as they may differ from shard to shard; its gradient has the same.

Each layer draws its random numbers by step, shard and its own number, so that a model trains alike however it is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from actors.rank.membership.process_group import Group, GroupBroken, Work
from actors.rank.step.weights import NONE
from actors.rank.tags import Tag
from fleet.errors import ConfigError
from fleet.protocol.pipelining import Half, UnitHalf, order

if TYPE_CHECKING:
    from actors.rank.step.step import Step
    from actors.rank.step.units import StepUnits

Tensors = tuple[torch.Tensor, ...]
LossFn = Callable[[Any, Any], Any]
MOST_TENSORS, MOST_DIMENSIONS = 8, 8
"""Of what travels from one stage to the next."""
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


class StageLink:
    """The ranks that compute the stages of the same shards as this one, in the present view.

    Attributes:
        stage, stages: this rank's, and how many there are.
        lost: why what this rank computes since :meth:`meet` is of no use; empty while it is of use.
    """

    def __init__(self, stage: int, stages: int) -> None:
        self.stage, self.stages, self.lost = stage, stages, ""
        self._group: Group | None = None

    def meet(self, group: Group | None) -> None:
        """Compute with ``group``, a rank for each stage, from now on; None: with no rank."""
        self._group, self.lost = group, ""

    @property
    def group(self) -> Group:
        """Raises GroupBroken where there is none."""
        if self._group is None:
            raise GroupBroken("the ranks of the other stages are left", -1)
        return self._group

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1


class Open:
    """A unit between its forward and its backward: what came, what the stage made of it, and the messages that take it on.

    The last stage makes the loss, which has ``weight``.
    """

    def __init__(self, inputs: Tensors, outputs: Tensors, sent: Sequence[Work] = (), weight: float | None = None) -> None:
        self.inputs, self.outputs, self.sent, self.weight = inputs, outputs, sent, weight


class Pipeline:
    """One rank's stage of a model. ``run.pipeline`` makes it.

    Args:
        layers: of the whole model, in order. Each takes what the one before gives: a tensor, or a tuple of tensors. Those of other stages
            lose their memory.
        loss_fn: ``loss_fn(output, batch)`` gives the mean loss of a shard, or that and its weight: see ``Step.backward``.
        inputs: gives the first layer's input from a batch.
        begins: the first layer of each stage. ``run.pipeline`` takes those of all but the first; by default stages differ by one layer at
            most.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        loss_fn: LossFn,
        inputs: Callable[[Any], Any],
        link: StageLink,
        begins: Sequence[int],
    ) -> None:
        self._layers, self._loss_fn, self._inputs, self._link = list(layers), loss_fn, inputs, link
        ends = [*begins[1:], len(layers)]
        self.span = range(begins[link.stage], ends[link.stage])
        for number, layer in enumerate(self._layers):
            if number not in self.span:
                layer.to("meta")
        self._open: dict[int, Open] = {}
        self._sent: list[Work] = []

    # ---- a step --------------------------------------------------------------------------------------------------------------------------

    def step(
        self, step: Step, dataset: Any, batch_size: int, collate_fn: Callable[[list[Any]], Any] | None = None, *, tokens: int = 0
    ) -> None:  # fmt: skip
        """Compute forward and backward of this rank's shards of a step, in the place of a loop over ``step.batches``.

        Arguments, samples and errors are those of ``Step.batches``. The first stage takes its input from a batch, the last one its loss.
        """
        units = step.pipelined(dataset, batch_size, collate_fn, tokens=tokens)
        while pending := step.pending():
            if units.leaves or not self._compute(units, pending):
                step.cut_short()
                return
        units.worked()

    def _compute(self, units: StepUnits, shards: Sequence[int]) -> bool:
        """Whether all units were computed: this rank's stage of ``shards``. Else the rank is called away, or another one is lost."""
        link = self._link
        self._open, self._sent = {}, []
        try:
            for turn in self._turns(units, shards):
                if units.leaves:
                    return False
                self._take(units, turn)
            if self._sent:
                link.group.complete(self._sent)
        except GroupBroken as error:
            link.lost = link.lost or str(error)
            return False
        finally:
            self._open, self._sent = {}, []
        return True

    def _turns(self, units: StepUnits, shards: Sequence[int]) -> Sequence[UnitHalf]:
        if units.rehearsing:
            return order([[shards]]).turns[0][0]
        return order([[shards]] * self._link.stages).turns[self._link.stage][0]

    def _take(self, units: StepUnits, turn: UnitHalf) -> None:
        if turn.half is Half.FORWARD:
            self._open[turn.shard] = self._forward(units, turn.shard)
        else:
            self._backward(units, turn.shard, self._open.pop(turn.shard))

    # ---- forward -------------------------------------------------------------------------------------------------------------------------

    def _forward(self, units: StepUnits, shard: int) -> Open:
        link = self._link
        batch = units.batch(shard) if link.first or link.last or units.rehearsing else None
        if link.first:
            came = _tensors(self._inputs(batch))
        else:
            came = self._practice(batch) if units.rehearsing else self._receive()
            for tensor in came:
                tensor.requires_grad_(tensor.is_floating_point())
        units.begin_forward(shard)
        found: Any = came if len(came) > 1 else came[0]
        for number in self.span:
            units.seed(shard, number)
            found = self._layers[number](*found) if isinstance(found, tuple) else self._layers[number](found)
        if link.last:
            units.seed(shard, len(self._layers))
            with units.inside(shard):
                loss, weight = _with_weight(self._loss_fn(found, batch))
            unit = Open(came, (loss,), weight=weight)
        else:
            made = _tensors(found)
            unit = Open(came, made, [] if units.rehearsing else self._send(made))
        units.end_forward()
        return unit

    def _practice(self, batch: Any) -> Tensors:
        """An input of this stage with the right shapes, and no values: earlier stages have no memory here, but shapes."""
        found: Any = tuple(tensor.to("meta") for tensor in _tensors(self._inputs(batch)))
        found = found if len(found) > 1 else found[0]
        for layer in self._layers[: self.span.start]:
            found = layer(*found) if isinstance(found, tuple) else layer(found)
        return tuple(torch.zeros(one.shape, dtype=one.dtype, device="cpu") for one in _tensors(found))

    # ---- backward ------------------------------------------------------------------------------------------------------------------------

    def _backward(self, units: StepUnits, shard: int, unit: Open) -> None:
        link = self._link
        if link.last:
            units.begin_backward(shard)
            loss = units.step.backward_of(shard, unit.outputs[0], unit.weight)
            weight = unit.weight
        else:
            weight, gradients = (None, [torch.zeros_like(one) for one in unit.outputs]) if units.rehearsing else self._gradients(unit)
            units.begin_backward(shard, weight)
            pairs = [(one, gradient) for one, gradient in zip(unit.outputs, gradients, strict=True) if one.requires_grad]
            if pairs and weight != 0.0:
                torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])
            loss = 0.0
        if not link.first and not units.rehearsing:
            self._send_gradients(unit, weight)
        units.end_backward(shard, loss)

    def _gradients(self, unit: Open) -> tuple[float | None, list[torch.Tensor]]:
        """The weight of the loss, and the gradients of what this stage has sent on. Raises GroupBroken."""
        group, after = self._link.group, self._link.stage + 1
        head = torch.empty(1, dtype=torch.float64, device="cpu")
        gradients = [torch.zeros_like(one, memory_format=torch.contiguous_format) for one in unit.outputs]
        group.recv(head, after, Tag.STAGE_HEAD)
        weight = None if float(head) == NONE else float(head)
        if weight != 0.0:
            group.start([], [(one, after) for one in gradients if one.is_floating_point()], Tag.STAGE).wait()
        group.complete(unit.sent)
        return weight, gradients

    def _send_gradients(self, unit: Open, weight: float | None) -> None:
        group, before = self._link.group, self._link.stage - 1
        head = torch.tensor([NONE if weight is None else weight], dtype=torch.float64, device="cpu")
        found = [torch.zeros_like(one) if one.grad is None else one.grad.contiguous() for one in unit.inputs if one.is_floating_point()]
        self._sent.append(group.start([(head, before)], [], Tag.STAGE_HEAD))
        if weight != 0.0:
            self._sent.append(group.start([(one, before) for one in found], [], Tag.STAGE))

    # ---- between stages ------------------------------------------------------------------------------------------------------------------

    def _send(self, made: Tensors) -> list[Work]:
        """Send the stage's output on."""
        group, after = self._link.group, self._link.stage + 1
        head = torch.tensor(_head_of(made), dtype=torch.int64, device="cpu")
        tensors = [one.detach().contiguous() for one in made]
        return [group.start([(head, after)], [], Tag.STAGE_HEAD), group.start([(one, after) for one in tensors], [], Tag.STAGE)]

    def _receive(self) -> Tensors:
        """The output of the stage before. Raises GroupBroken."""
        group, before = self._link.group, self._link.stage - 1
        head = torch.empty(HEAD, dtype=torch.int64, device="cpu")
        group.recv(head, before, Tag.STAGE_HEAD)
        found = _room_of(head.tolist())
        group.start([], [(one, before) for one in found], Tag.STAGE).wait()
        return found


HEAD = 1 + MOST_TENSORS * (2 + MOST_DIMENSIONS)


def _tensors(value: Any) -> Tensors:
    """The activations that one stage gives to the next. Raises ConfigError."""
    found = tuple(value) if isinstance(value, tuple | list) else (value,)
    other = [type(one).__name__ for one in found if not isinstance(one, torch.Tensor)]
    if other or not 0 < len(found) <= MOST_TENSORS:
        reason = f"a layer gives {other[0] if other else f'{len(found)} values'}, and tensors travel between stages, at most {MOST_TENSORS}"
        raise ConfigError("pipeline", type(value).__name__, reason, "Let each layer take and give a tensor, or a tuple of tensors.")
    return found


def _head_of(tensors: Tensors) -> list[int]:
    numbers = [len(tensors)]
    for one in tensors:
        numbers += [DTYPES.index(one.dtype), one.dim(), *one.shape, *[0] * (MOST_DIMENSIONS - one.dim())]
    return numbers + [0] * (HEAD - len(numbers))


def _room_of(head: Sequence[int]) -> Tensors:
    """Memory for the tensors of a head."""
    found = []
    for number in range(head[0]):
        dtype, dimensions, *shape = head[1 + number * (2 + MOST_DIMENSIONS) :][: 2 + MOST_DIMENSIONS]
        found.append(torch.empty(shape[:dimensions], dtype=DTYPES[dtype], device="cpu"))
    return tuple(found)


def _with_weight(found: Any) -> tuple[torch.Tensor, float | None]:
    loss, weight = found if isinstance(found, tuple) else (found, None)
    return loss, None if weight is None else float(weight)


def begins_of(layers: int, stages: int) -> list[int]:
    """The first layer of each stage: stages differ by one layer at most."""
    return [layers * stage // stages for stage in range(stages)]
