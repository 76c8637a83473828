"""A model that is cut into stages, each on a rank of its own: the units of its shards, and what travels between stages.

A rank computes its turns in the order of :mod:`fleet.protocol.pipelining`. Each shard has tags of its own. Before an activation travels a
head with its shapes, as they may differ from shard to shard; its gradient has the same. All messages are kept until the commit. When a rank
is lost, its units are computed by others of its stage, in the same step. They get again what the lost rank had got.

Each layer draws its random numbers by step, shard and its own number, so that a model trains alike however it is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from actors.rank.membership.process_group import Group, GroupBroken, Work
from actors.rank.mesh.parts import waited
from actors.rank.step.step import Step, units_of
from actors.rank.step.weights import NONE
from actors.rank.tags import stage_body, stage_head
from fleet.errors import ConfigError
from fleet.protocol.pipelining import Half, UnitHalf

if TYPE_CHECKING:
    from actors.rank.step.units import StepUnits
    from fleet.protocol.pipelining import Ways

Tensors = tuple[torch.Tensor, ...]
LossFn = Callable[[Any, Any], Any]
MOST_TENSORS, MOST_DIMENSIONS = 8, 8
"""Of what travels from one stage to the next."""
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


class StageLink:
    """The ranks of the present view, which compute units of all stages.

    Attributes:
        stage, stages: this rank's, and how many there are.
        lost: why what this rank computes since :meth:`meet` is of no use; empty while it is of use.
        firsts: of the view's ranks, the first one of each column, in the order of coordinates.
        kept: by shard, the messages of this rank's units of the present step. ``sent``: those that are under way.
    """

    def __init__(self, stage: int, stages: int) -> None:
        self.stage, self.stages, self.lost = stage, stages, ""
        self.firsts: list[int] = []
        self.kept: dict[int, Boundaries] = {}
        self.sent: list[Work] = []
        self._group: Group | None = None

    def meet(self, inside: Group | None) -> None:
        """Compute with the ranks of ``inside``, a whole view, from now on; None: with no rank."""
        self._group, self.lost, self.sent = inside, "", []

    @property
    def group(self) -> Group:
        """Raises GroupBroken where there is none."""
        if self._group is None:
            raise GroupBroken("the other ranks are left", -1)
        return self._group

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    # ---- between stages ------------------------------------------------------------------------------------------------------------------

    def send(self, shard: int, tensors: Tensors, after: int) -> None:
        """Send a stage's output on to rank ``after``."""
        head = torch.tensor(_head_of(tensors), dtype=torch.int64, device="cpu")
        self.sent.append(self.group.start([(head, after)], [], stage_head(shard)))
        self.sent.append(self.group.start([(one, after) for one in tensors], [], stage_body(shard)))

    def receive(self, shard: int, before: int) -> Tensors:
        """The output of the stage before, from rank ``before``. Raises GroupBroken."""
        head = torch.empty(HEAD, dtype=torch.int64, device="cpu")
        self.group.recv(head, before, stage_head(shard))
        found = _room_of(head.tolist())
        self.group.start([], [(one, before) for one in found], stage_body(shard)).wait()
        return found

    def send_gradients(self, shard: int, kept: Boundaries, before: int) -> None:
        """Send the gradients of a stage's inputs back to rank ``before``, with the weight of the shard's loss; of weight 0 it alone."""
        head = torch.tensor([NONE if kept.weight is None else kept.weight], dtype=torch.float64, device="cpu")
        self.sent.append(self.group.start([(head, before)], [], stage_head(shard)))
        if kept.weight != 0.0 and kept.gradients:
            self.sent.append(self.group.start([(one, before) for one in kept.gradients], [], stage_body(shard)))

    def gradients_of(self, shard: int, kept: Boundaries, after: int) -> Tensors:
        """The gradients of this stage's outputs, from rank ``after``; and the weight of the shard's loss. Raises GroupBroken."""
        head = torch.empty(1, dtype=torch.float64, device="cpu")
        gradients = tuple(torch.zeros_like(one) for one in kept.outputs)
        self.group.recv(head, after, stage_head(shard))
        kept.weight = None if float(head) == NONE else float(head)
        if kept.weight != 0.0:
            self.group.start([], [(one, after) for one in _floating(gradients)], stage_body(shard)).wait()
        return gradients

    def give_again(self, ways: Ways, place: int) -> None:
        """A view begins within a step: send what this rank's units have given to units beside them that are computed anew.

        Their rank was lost. ``place``: of this rank in its column. Raises GroupBroken.
        """
        for shard in sorted(ways.stages[self.stage].done[place]):
            kept = self.kept[shard]
            if not self.last and (after := ways.computing[self.stage + 1].get(shard)) is not None:
                self.send(shard, kept.outputs, after)
            if not self.first and (before := ways.computing[self.stage - 1].get(shard)) is not None:
                self.send_gradients(shard, kept, before)

    def arrived(self) -> None:
        """Wait until other ranks have all that this one has sent. Raises GroupBroken."""
        sent, self.sent = self.sent, []
        if sent:
            self.group.complete(sent)


@dataclass(slots=True)
class Boundaries:
    """The messages of one unit. They are kept until the commit, as the rank that they were sent to may be lost.

    Attributes:
        outputs: for the next stage; none of the last one. ``weight``: of the shard's loss.
        gradients: of the inputs, for the stage before; None: that is still to come.
    """

    outputs: Tensors
    weight: float | None = None
    gradients: Tensors | None = None


class Open(NamedTuple):
    """A unit between its forward and its backward: what came, and what the stage made of it. The last stage makes the loss."""

    inputs: Tensors
    outputs: Tensors


class Pipeline:
    """One rank's stage of a model. ``run.pipeline`` makes it.

    Args:
        layers: of the whole model, in order. Each takes what the one before gives: a tensor, or a tuple of tensors. Those of other stages
            lose their memory.
        loss_fn: ``loss_fn(output, batch)`` gives the mean loss of a shard, or that and its weight: see ``Step.backward``.
        inputs: gives the first layer's input from a batch.
        begins: the first layer of each stage. ``run.pipeline`` takes those of all but the first; by default stages differ by one layer at
            most.

    Attributes:
        span: the numbers of this stage's layers.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        loss_fn: LossFn,
        inputs: Callable[[Any], Any],
        link: StageLink,
        begins: Sequence[int],
    ) -> None:
        self.layers, self._loss_fn, self._inputs, self._link = list(layers), loss_fn, inputs, link
        ends = [*begins[1:], len(layers)]
        self.span = range(begins[link.stage], ends[link.stage])
        _check_tied(layers, [range(*span) for span in zip(begins, ends, strict=True)])
        for number, layer in enumerate(self.layers):
            if number not in self.span:
                layer.to("meta")
        self._open: dict[int, Open] = {}

    # ---- a step --------------------------------------------------------------------------------------------------------------------------

    def step(
        self, step: Step, dataset: Any, batch_size: int, collate_fn: Callable[[list[Any]], Any] | None = None, *, tokens: int = 0
    ) -> None:  # fmt: skip
        """Compute forward and backward of this rank's shards of a step, in the place of a loop over ``step.batches``.

        Arguments, samples and errors are those of ``Step.batches``. The first stage takes its input from a batch, the last one its loss.
        """
        units = units_of(step, dataset, batch_size, collate_fn, tokens=tokens)
        while units.pending():
            if units.leaves or not self._compute(units):
                units.cut_short()
                return
        units.worked()

    def _compute(self, units: StepUnits) -> bool:
        """Whether all units were computed. Else the rank is called away, or another one is lost."""
        self._open = {}
        try:
            for turn in self._turns(units):
                if units.leaves:
                    return False
                self._take(units, turn)
            self._link.arrived()
        except GroupBroken as error:
            self._link.lost = self._link.lost or str(error)
            return False
        finally:
            self._open = {}
        return True

    def _turns(self, units: StepUnits) -> Sequence[UnitHalf]:
        return [UnitHalf(half, 0) for half in Half] if units.rehearsing else units.turns(self._link.stage)

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
            came = self._practice(batch) if units.rehearsing else self._came(units, shard)
            for tensor in came:
                tensor.requires_grad_(tensor.is_floating_point())
        units.begin_forward(shard)
        found = _as_given(came)
        for number in self.span:
            units.seed(shard, number)
            found = _called(self.layers[number], found)
        if link.last:
            units.seed(shard, len(self.layers))
            with units.inside(shard):
                loss, weight = _with_weight(self._loss_fn(found, batch))
            link.kept[shard] = Boundaries((), weight)
            units.end_forward()
            return Open(came, (loss,))
        made = _tensors(found)
        kept = link.kept[shard] = Boundaries(tuple(waited(one.detach()).contiguous() for one in made))
        if not units.rehearsing and (after := units.computing(shard, link.stage + 1)) is not None:
            link.send(shard, kept.outputs, after)
        units.end_forward()
        return Open(came, made)

    def _came(self, units: StepUnits, shard: int) -> Tensors:
        """The output of the stage before. Raises GroupBroken."""
        with units.waiting():
            return self._link.receive(shard, units.source(shard, self._link.stage - 1))

    def _practice(self, batch: Any) -> Tensors:
        """An input of this stage with the right shapes, and no values: earlier stages have no memory here, but shapes."""
        found = _as_given(tuple(tensor.to("meta") for tensor in _tensors(self._inputs(batch))))
        for layer in self.layers[: self.span.start]:
            found = _called(layer, found)
        return tuple(torch.zeros(one.shape, dtype=one.dtype, device="cpu") for one in _tensors(found))

    # ---- backward ------------------------------------------------------------------------------------------------------------------------

    def _came_back(self, units: StepUnits, shard: int, kept: Boundaries) -> Tensors:
        """The gradients of this stage's output. Raises GroupBroken."""
        with units.waiting():
            return self._link.gradients_of(shard, kept, units.source(shard, self._link.stage + 1))

    def _backward(self, units: StepUnits, shard: int, unit: Open) -> None:
        link, kept = self._link, self._link.kept[shard]
        if link.last:
            units.begin_backward(shard)
            loss = units.backward_of(shard, unit.outputs[0], kept.weight)
        else:
            gradients = kept.outputs if units.rehearsing else self._came_back(units, shard, kept)
            units.begin_backward(shard, kept.weight)
            pairs = [(one, gradient) for one, gradient in zip(unit.outputs, gradients, strict=True) if one.requires_grad]
            if pairs and kept.weight != 0.0:
                torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])
            loss = 0.0
        kept.gradients = tuple(torch.zeros_like(one) if one.grad is None else one.grad.contiguous() for one in _floating(unit.inputs))
        if not link.first and not units.rehearsing and (before := units.computing(shard, link.stage - 1)) is not None:
            link.send_gradients(shard, kept, before)
        units.end_backward(shard, loss)


HEAD = 1 + MOST_TENSORS * (2 + MOST_DIMENSIONS)


def _tensors(value: Any) -> Tensors:
    """The activations that one stage gives to the next. Raises ConfigError."""
    found = tuple(value) if isinstance(value, tuple | list) else (value,)
    other = [type(one).__name__ for one in found if not isinstance(one, torch.Tensor)]
    if other or not 0 < len(found) <= MOST_TENSORS:
        reason = f"a layer gives {other[0] if other else f'{len(found)} values'}, and tensors travel between stages, at most {MOST_TENSORS}"
        raise ConfigError("pipeline", type(value).__name__, reason, "Let each layer take and give a tensor, or a tuple of tensors.")
    return found


def _as_given(tensors: Tensors) -> Any:
    """As a layer gives them."""
    return tensors if len(tensors) > 1 else tensors[0]


def _called(layer: nn.Module, value: Any) -> Any:
    """The result of ``layer`` from that of the layer before."""
    return layer(*value) if isinstance(value, tuple) else layer(value)


def _floating(tensors: Tensors) -> Tensors:
    """Those that have gradients."""
    return tuple(one for one in tensors if one.is_floating_point())


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


def _check_tied(layers: Sequence[nn.Module], spans: Sequence[range]) -> None:
    """Raises ConfigError: layers of two stages have one parameter."""
    stages, names = dict[int, int](), dict[int, str]()
    for stage, span in enumerate(spans):
        for number in span:
            for name, one in layers[number].named_parameters():
                if stages.setdefault(id(one), stage) != stage:
                    reason = f"it is {names[id(one)]}, which another stage has: each stage would train its own"
                    way_out = "Give both layers to one stage (begins=), or a parameter each."
                    raise ConfigError("pipeline", f"layer {number}: {name}", reason, way_out)
                names.setdefault(id(one), f"layer {number}: {name}")


def begins_of(layers: int, stages: int) -> list[int]:
    """The first layer of each stage: stages differ by one layer at most."""
    return [layers * stage // stages for stage in range(stages)]
