"""How many FLOPs the model takes: PyTorch's counter counts one shard of one step, once in the life of a process."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from fleet.protocol.records import FLOPS, PEAK

log = logging.getLogger("fleet.rank.flops")
UNCOUNTED: AbstractContextManager[None] = nullcontext()
COUNTED_STEP = 1
"""Steps of a process before the count: in the first step a model that will be compiled is not compiled yet.

The process counts in its second step, or in the first later step in which it has a shard.
"""

SETTLED_STEPS = 10
"""After so many steps of a process no work is done for the first time."""


class FlopCount:
    """Counts while the user's code computes a shard, forward and backward.

    A multiplication and the addition after it are two FLOPs. Operations that activation checkpointing computes again in the backward count
    again.

    Args:
        declared: FLOPs of a step, of all its shards; 0: they are to be counted.
    """

    def __init__(self, declared: float = 0.0) -> None:
        self._declared, self._of_shard = declared, 0.0
        self._wanted, self._steps = not declared, 0
        self._counter: Any = None
        self._peak = 0.0

    def of_step(self, shards: int) -> float:
        """FLOPs of a step of so many shards; 0 before the count, and where the counter cannot count them."""
        return self._declared or shards * self._of_shard

    def figures(self, shards: int, device: torch.device, last: bool) -> dict[str, float]:
        """FLOPs of a step and the device's peak; empty while they are unknown.

        The peak is measured once, not in the first steps of a process: other ranks may wait for those.
        """
        flops = self.of_step(shards)
        if not flops or not (last or self._steps > SETTLED_STEPS):
            return {}
        self._peak = self._peak or peak_flop_per_s(device)
        return {FLOPS: flops, PEAK: self._peak}

    def step_begins(self) -> None:
        """A step, or another attempt at one, begins. A count that the last attempt left in the middle of a shard begins again."""
        if self._counter is not None:
            self._counter, self._wanted = None, True
        self._steps += 1

    def shard(self) -> AbstractContextManager[Any]:
        """The context in which the user's code computes one shard."""
        if not self._wanted or self._steps <= COUNTED_STEP:
            return UNCOUNTED
        self._wanted = False
        if why := _why_not():
            log.warning("the model's FLOPs are not counted, and the report has no MFU: %s; run.steps(flops=) takes them", why)
            return UNCOUNTED
        from torch.utils.flop_counter import FlopCounterMode  # a process that counts nothing goes without it

        self._counter = FlopCounterMode(display=False, custom_mapping=_attention() | _left_as_they_are())
        self._counter.mod_tracker = _OneModule()
        return self._counter  # type: ignore[no-any-return]  # torch gives it no type

    def shard_ends(self) -> None:
        """Call it after the context of :meth:`shard`. A count of 0 means that the FLOPs stay unknown."""
        if self._counter is not None:
            self._of_shard = float(self._counter.get_total_flops())
            self._counter = None


class _OneModule:
    """Replaces the counter's tracker of modules, whose hooks forbid the gradient of a gradient. The total does not need the tracker."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def peak_flop_per_s(device: torch.device) -> float:
    """FLOP/s of a product of matrices on this device, the fastest of five: FP32 on a CPU, BF16 on a GPU."""
    size, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    fastest_s = math.inf
    for _ in range(5):
        begin_s = time.monotonic()
        product = left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        fastest_s = min(fastest_s, time.monotonic() - begin_s)
        del product
    return 2 * size**3 / fastest_s


def _attention() -> dict[Any, Callable[..., int]]:
    """Formulas for the attention kernels. The backward counts twice the forward, as for each product of matrices.

    Operations that a kernel computes again in the backward do not count, as they are no work of the model. PyTorch's own count includes
    them, and leaves out kernels of the CPU. A causal mask reduces no count, as in published counts of models.
    """
    from torch.utils.flop_counter import sdpa_flop_count

    def forward(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    def backward(grad: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return 2 * int(sdpa_flop_count(query, key, value))

    ends = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    kinds = [f"_scaled_dot_product_{end}" for end in ends]
    found = {kind: getattr(torch.ops.aten, kind, None) for kind in kinds}
    there = {kind: packet for kind, packet in found.items() if packet is not None}
    return dict.fromkeys(there.values(), forward) | {getattr(torch.ops.aten, f"{kind}_backward"): backward for kind in there}


def _left_as_they_are() -> dict[Any, Callable[..., int]]:
    """Operations that have a kernel and a decomposition, such as the backward of SiLU: the counter leaves them as they are.

    Without this PyTorch's counter would run the decomposition, which rounds differently. A counted shard's gradient would have other bits.
    """
    has, found = torch._C._dispatch_has_kernel_for_dispatch_key, {}
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and has(name, "CompositeImplicitAutograd") and (has(name, "CPU") or has(name, "CUDA")):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            found[getattr(getattr(torch.ops.aten, packet), overload or "default")] = _nothing
    return found


def _nothing(*_: Any, **__: Any) -> int:
    return 0


def _why_not() -> str:
    """Why the FLOPs cannot be counted; empty where they can. The counter sees single operations, and a compiled part has none."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None and dynamo.counters["frames"]["total"]:
        return "a part of the loop is compiled"
    return ""
