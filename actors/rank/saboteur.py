"""What chaos does inside a rank's process, when its agent says so. Nothing of it is in the loop's way before: methods are wrapped then."""

from __future__ import annotations

import ctypes
import logging
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from actors.rank.engine import Engine
from fleet.protocol.fault_kinds import HEAL, START, Acts, Operation, perform

log = logging.getLogger("fleet.chaos")
ELEMENT_BITS = 20
"""Bits flip among the lowest ones of an element: what a loss or a norm shows at once is not silent."""


class Saboteur:
    """Carries out orders on the training state of ``engine``. ``strike`` is called from the listening thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._healed = threading.Event()

    def operate(self, order: Operation) -> str | None:
        """Do it now, or when the loop next comes to where it can be done. Returns why it was refused, or None."""
        log.warning("chaos: %s of %s in this process", order.phase, order.kind)
        refused = perform(ACTS, self, order)
        if refused:
            log.error("%s", refused)
        return refused

    def flip_weight(self, order: Operation) -> None:
        """A bit of the weights."""
        _flip(self._engine.parameters, random.Random(order.seed))

    def flip_optimizer(self, order: Operation) -> None:
        """A bit of the optimizer's state."""
        _flip(self._engine.moments, random.Random(order.seed))

    def flip_gradient(self, order: Operation) -> None:
        """A bit of the next shard's gradients."""
        self._after_backward(lambda gradients: _flip(gradients, random.Random(order.seed)))

    def spoil_gradient(self, order: Operation) -> None:
        """A value of the next shard's gradients becomes no number."""
        self._after_backward(lambda gradients: gradients[0].reshape(-1)[:1].fill_(float("nan")))

    def heal(self, order: Operation) -> None:
        """A loop that stands still goes on."""
        self._healed.set()

    def _after_backward(self, spoil: Callable[[Sequence[torch.Tensor]], object]) -> None:
        """Once, between a shard's backward and its sum."""
        engine, right = self._engine, self._engine.end_shard

        def wrong(shard: int, loss: float) -> None:
            engine.end_shard = right  # type: ignore[method-assign]
            spoil([parameter.grad for parameter in engine.parameters if parameter.grad is not None])
            right(shard, loss)

        engine.end_shard = wrong  # type: ignore[method-assign]

    def flip_activation(self, order: Operation) -> None:
        """Once, in what the first layer that has weights gives to the next."""
        layer = next(module for module in self._engine.modules if any(True for _ in module.parameters(recurse=False)))

        def hook(module: Any, inputs: Any, output: Any) -> None:
            handle.remove()
            _flip([output], random.Random(order.seed))

        handle = layer.register_forward_hook(hook)

    def hang(self, order: Operation) -> None:
        """The loop stands still before its next shard, until it is healed; the process beats meanwhile."""
        engine, right = self._engine, self._engine.begin_shard
        self._healed.clear()

        def wrong() -> None:
            engine.begin_shard = right  # type: ignore[method-assign]
            self._healed.wait(order.duration_s)
            right()

        engine.begin_shard = wrong  # type: ignore[method-assign]


def _flip(tensors: Sequence[torch.Tensor], draw: random.Random) -> None:
    """One bit of one element. By ``data``, as autograd counts other writes, and a backward that is under way would raise."""
    tensor = draw.choice([tensor for tensor in tensors if tensor.numel() and tensor.is_floating_point()]).data
    element = tensor.reshape(-1) if tensor.is_contiguous() else tensor
    place = draw.randrange(element.numel()) if element.dim() == 1 else tuple(draw.randrange(size) for size in element.shape)
    one = element[place].reshape(1).clone().view(torch.uint8)
    bit = draw.randrange(min(ELEMENT_BITS, 4 * one.numel()))
    one[bit // 8] ^= 1 << bit % 8
    element[place] = one.view(element.dtype)[0]


def _hold_interpreter(saboteur: Saboteur, order: Operation) -> None:
    """Sleep with the interpreter's lock held, as a C extension may that forgets to give it up: no thread of this process runs."""
    ctypes.PyDLL(None).usleep(ctypes.c_uint(min(int(order.duration_s * 1e6), 2**32 - 1)))


ACTS: Acts = {
    ("flip_weight", START): Saboteur.flip_weight,
    ("flip_optimizer", START): Saboteur.flip_optimizer,
    ("flip_gradient", START): Saboteur.flip_gradient,
    ("flip_activation", START): Saboteur.flip_activation,
    ("nan", START): Saboteur.spoil_gradient,
    ("hang_loop", START): Saboteur.hang,
    ("hang_loop", HEAL): Saboteur.heal,
    ("hold_gil", START): _hold_interpreter,
    ("hold_gil", HEAL): Saboteur.heal,
}
"""What a rank's process does to itself."""
