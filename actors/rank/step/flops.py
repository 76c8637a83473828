"""How many FLOPs the model takes: one shard of one step is counted, once in the life of a process, by PyTorch's own counter."""

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
"""The second step of a process, or the first behind it in which it has a shard: in the first, what is compiled is not compiled yet, and
looks as if it were not."""

SETTLED_STEPS = 10
"""After so many steps of a process nothing in it is done for the first time."""


class FlopCount:
    """Counts while the user's code computes a shard, forward and backward.

    A multiplication and the addition behind it are two. What the loop computes again in its backward pass (activation checkpointing)
    counts again.

    Args:
        declared: FLOPs of a step, of all its shards; 0: they are to be counted.
    """

    def __init__(self, declared: float = 0.0) -> None:
        self._declared, self._of_shard = declared, 0.0
        self._wanted, self._steps = not declared, 0
        self._counter: Any = None
        self._peak = 0.0

    def of_step(self, shards: int) -> float:
        """FLOPs of a step of so many shards; 0 while nobody knows them, and where they cannot be counted."""
        return self._declared or shards * self._of_shard

    def figures(self, shards: int, device: torch.device, last: bool) -> dict[str, float]:
        """What is known of a step, and of the device, whose peak is measured once: in no step that others may wait for, as they do for
        those of a rank that has just come."""
        flops = self.of_step(shards)
        if not flops or not (last or self._steps > SETTLED_STEPS):
            return {}
        self._peak = self._peak or peak_flop_per_s(device)
        return {FLOPS: flops, PEAK: self._peak}

    def step_begins(self) -> None:
        """Another step, or another attempt at one: what the last attempt left in the middle of a shard is counted again."""
        if self._counter is not None:
            self._counter, self._wanted = None, True
        self._steps += 1

    def shard(self) -> AbstractContextManager[Any]:
        """What the user's code runs in, for one shard."""
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
        """Behind what :meth:`shard` has given. Nothing counted means that nobody knows how."""
        if self._counter is not None:
            self._of_shard = float(self._counter.get_total_flops())
            self._counter = None


class _OneModule:
    """In the place of the counter's tracker of modules, of which the total has no need: its hooks forbid the gradient of a gradient."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def peak_flop_per_s(device: torch.device) -> float:
    """What a product of matrices reaches here, the fastest of five: FP32 on a CPU, BF16 on a GPU."""
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
    """Backward is twice forward, as for every product of matrices: what a kernel computes again there is no work of the model. PyTorch's
    own count has that in it, and leaves out what runs on a CPU. A causal mask takes nothing off, as in published counts of models."""
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
    """Operations that have a kernel and a formula, such as the backward of SiLU. PyTorch's counter takes the formula of all that it does
    not count itself, which rounds otherwise; so the bits of a gradient would tell where it was counted."""
    has, found = torch._C._dispatch_has_kernel_for_dispatch_key, {}
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and has(name, "CompositeImplicitAutograd") and (has(name, "CPU") or has(name, "CUDA")):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            found[getattr(getattr(torch.ops.aten, packet), overload or "default")] = _nothing
    return found


def _nothing(*_: Any, **__: Any) -> int:
    return 0


def _why_not() -> str:
    """The counter sees what PyTorch is asked for, one operation at a time."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None and dynamo.counters["frames"]["total"]:
        return "a part of the loop is compiled"
    return ""
