"""Faults inside a rank's process, on its agent's order. The loop has no extra code before: a fault wraps methods when it comes."""

from __future__ import annotations

import ctypes
import logging
import os
import random
import resource
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from actors.rank.mesh.parts import local, waited
from actors.rank.step.train_step import TrainStep
from fleet.protocol.operations import HEAL, START, Acts, Operation, perform

log = logging.getLogger("fleet.chaos")
BLOCK_BYTES, BLOCKS = 1 << 20, 64
"""So many blocks exceed the memory limit of a process."""
ELEMENT_BITS = 20
"""Only the lowest bits of an element flip. A loss or a norm would show a higher bit at once, and the fault has to be silent."""
SINGLE_SHARE, MOST_BITS = 0.38, 4
"""In under 40% of real events one bit flips (arXiv 2605.04213). The number in other events is not published: two to four here."""


class RankInjector:
    """Carries out orders on the training state of ``train``. The listening thread calls :meth:`operate`."""

    def __init__(self, train: TrainStep) -> None:
        self._train_step = train
        self._healed = threading.Event()

    def operate(self, order: Operation) -> str | None:
        """Carry out the order now, or when the loop next comes to a suitable place. Returns why it was refused, or None."""
        log.warning("chaos: %s of %s in this process", order.phase, order.kind)
        refused = perform(ACTS, self, order)
        if refused:
            log.error("%s", refused)
        return refused

    def flip_weight(self, order: Operation) -> None:
        """Flip bits of a weight."""
        _flip(self._train_step.layout.elements, random.Random(order.seed))

    def flip_optimizer(self, order: Operation) -> None:
        """Flip bits of an element of the optimizer's state, which this rank steps and gives to others."""
        kept = self._train_step.layout.kept
        _flip(self._train_step.update.moments if kept is None else kept.chunks.moments, random.Random(order.seed))

    def flip_gradient(self, order: Operation) -> None:
        """Flip bits of the next shard's gradients."""
        self._train_step.before_sum(lambda gradients: _flip(gradients, random.Random(order.seed)))

    def spoil_gradient(self, order: Operation) -> None:
        """Make a value of the next shard's gradients NaN."""
        self._train_step.before_sum(lambda gradients: gradients[0].reshape(-1)[:1].fill_(float("nan")))

    def open_no_more(self, order: Operation) -> None:
        """Let the process open no further file or connection, until the fault is healed or its time is over."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        descriptor = os.dup(0)  # the lowest that is free
        os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor, hard))
        self._healed.clear()
        threading.Thread(target=self._open_again, args=(order.duration_s, (soft, hard)), daemon=True, name="chaos-descriptors").start()

    def _open_again(self, after_s: float, limits: tuple[int, int]) -> None:
        self._healed.wait(after_s)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    def take_memory(self, order: Operation) -> str | None:
        """Take more memory than the process's memory group allows. The agent made the group for this fault; without it, refuse."""
        if "/fleet-" not in Path("/proc/self/cgroup").read_text():
            return f"{order.kind}: this process is in no group of its own: it would take the host's memory"
        taken = [bytes([1]) * BLOCK_BYTES for _ in range(BLOCKS)]
        return f"{order.kind}: {len(taken)} blocks were taken, and the kernel has not killed this process"

    def heal(self, order: Operation) -> None:
        """End a hang of the loop, and let the process open files again."""
        self._healed.set()

    def flip_activation(self, order: Operation) -> None:
        """Flip bits of the output of the first layer that has weights, once."""
        modules = (inner for module in self._train_step.state.modules.values() for inner in module.modules())
        layer = next(module for module in modules if any(True for _ in module.parameters(recurse=False)))

        def hook(module: Any, inputs: Any, output: Any) -> None:
            handle.remove()
            _flip([output], random.Random(order.seed))

        handle = layer.register_forward_hook(hook)

    def hang(self, order: Operation) -> None:
        """Stop the loop before its next shard, until the fault is healed. The process still sends beats."""
        train, right = self._train_step, self._train_step.begin_shard
        self._healed.clear()

        def wrong(shard: int) -> None:
            train.begin_shard = right  # type: ignore[method-assign]
            self._healed.wait(order.duration_s)
            right(shard)

        train.begin_shard = wrong  # type: ignore[method-assign]


def _flip(tensors: Sequence[torch.Tensor], draw: random.Random) -> None:
    """Flip one or several bits of one element. It writes to ``data``: autograd counts other writes, and a running backward would raise."""
    mine = [waited(local(tensor)) for tensor in tensors]
    tensor = draw.choice([tensor for tensor in mine if tensor.numel() and tensor.is_floating_point()]).data
    element = tensor.reshape(-1) if tensor.is_contiguous() else tensor
    place = draw.randrange(element.numel()) if element.dim() == 1 else tuple(draw.randrange(size) for size in element.shape)
    one = element[place].reshape(1).clone().view(torch.uint8)
    count = 1 if draw.random() < SINGLE_SHARE else draw.randint(2, MOST_BITS)
    for bit in draw.sample(range(min(ELEMENT_BITS, 4 * one.numel())), count):
        one[bit // 8] ^= 1 << bit % 8
    element[place] = one.view(element.dtype)[0]


def _hold_interpreter(injector: RankInjector, order: Operation) -> None:
    """Sleep with the interpreter's lock held, as a faulty C extension may: no thread of this process runs."""
    ctypes.PyDLL(None).usleep(ctypes.c_uint(min(int(order.duration_s * 1e6), 2**32 - 1)))


ACTS: Acts = {
    ("flip_weight", START): RankInjector.flip_weight,
    ("flip_optimizer", START): RankInjector.flip_optimizer,
    ("flip_gradient", START): RankInjector.flip_gradient,
    ("flip_activation", START): RankInjector.flip_activation,
    ("nan", START): RankInjector.spoil_gradient,
    ("hang_loop", START): RankInjector.hang,
    ("hang_loop", HEAL): RankInjector.heal,
    ("no_descriptors", START): RankInjector.open_no_more,
    ("no_descriptors", HEAL): RankInjector.heal,
    ("out_of_memory", START): RankInjector.take_memory,
    ("hold_gil", START): _hold_interpreter,
    ("hold_gil", HEAL): RankInjector.heal,
}
"""The faults that a rank's process carries out on itself."""
