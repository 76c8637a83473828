"""The norm of the gradient, block by block: its bits do not depend on which rank holds which part."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from actors.rank.step.reduction import Chunk
from fleet.protocol.chunks import BLOCK


def block_norms(flat: torch.Tensor) -> torch.Tensor:
    """The 2-norm of each block of :data:`fleet.protocol.chunks.BLOCK` elements of a flat tensor, in order, as float64 on the host.

    A norm of all at once, or of a rank's chunk, adds up in an order that depends on where it begins and ends.
    """
    whole = flat.numel() // BLOCK * BLOCK
    norms = [torch.linalg.vector_norm(flat[:whole].view(-1, BLOCK), dim=1)] if whole else []
    if whole < flat.numel():
        norms.append(torch.linalg.vector_norm(flat[whole:]).reshape(1))
    return torch.cat([norm.double().cpu() for norm in norms]) if norms else torch.zeros(0, dtype=torch.float64, device="cpu")


class FlatNorms(NamedTuple):
    """The norms of some blocks of one flat buffer."""

    flat: int
    norms: torch.Tensor


class SplitNorms:
    """The norms of a gradient's blocks: each rank computes those of its own part and sends them to the others.

    Args:
        parts: by rank, its stretches of the flat buffers; each begins with a block, and ends with one or with the gradients.
        extents: by flat buffer, how many of its first elements are gradients.

    Attributes:
        width: how many numbers each rank sends; a rank with fewer norms adds zeros.
    """

    def __init__(self, parts: Sequence[Sequence[Chunk]], extents: Sequence[int]) -> None:
        self._parts = [[Chunk(flat, lo, min(hi, extents[flat])) for flat, lo, hi in part if lo < extents[flat]] for part in parts]
        self._counts = [[-(-(hi - lo) // BLOCK) for _, lo, hi in part] for part in self._parts]
        self.width = max(map(sum, self._counts), default=0)

    def take(self, flats: Sequence[torch.Tensor], rank: int, factor: float = 1.0) -> torch.Tensor:
        """The :attr:`width` numbers that ``rank`` sends. ``factor``: the gradient is multiplied with it first."""
        missing = torch.zeros(self.width - sum(self._counts[rank]), dtype=torch.float64, device="cpu")
        parts = [flats[flat][lo:hi] for flat, lo, hi in self._parts[rank]]
        return torch.cat([*(block_norms(part if factor == 1.0 else part * factor) for part in parts), missing])

    def in_order(self, rows: torch.Tensor) -> list[FlatNorms]:
        """The norms of all blocks, in the order of the flat buffers. ``rows``: the numbers of all ranks, ``[size, width]``."""
        found: dict[Chunk, torch.Tensor] = {}
        for row, part, counts in zip(rows, self._parts, self._counts, strict=True):
            found |= zip(part, row[: sum(counts)].split(counts), strict=True)
        return [FlatNorms(chunk.flat, found[chunk]) for chunk in sorted(found)]


def total_norm(norms: Iterable[FlatNorms], flats: Collection[int]) -> float:
    """The norm of a gradient's part in the buffers ``flats``. ``norms``: of the gradient's blocks, in the order of its flat buffers."""
    counted = [one.norms.numpy() for one in norms if one.flat in flats]
    return math.sqrt(float((np.concatenate(counted) ** 2).sum())) if counted else 0.0


def clip_factor(norms: Iterable[FlatNorms], flats: Collection[int], clip_norm: float) -> float:
    """The factor that clips the part in ``flats`` to ``clip_norm``, as torch's ``clip_grad_norm_`` computes it."""
    return min(1.0, clip_norm / (total_norm(norms, flats) + 1e-6))


def plain_factor(gradients: Sequence[torch.Tensor], clip_norm: float) -> float:
    """The factor of torch's ``clip_grad_norm_``, bit for bit. A run of one shard clips with it."""
    total = torch.nn.utils.get_total_norm(gradients)
    return float(torch.clamp(clip_norm / (total + 1e-6), max=1.0))


def clip(gradients: list[torch.Tensor], factor: float) -> None:
    """Multiply all ``gradients`` by ``factor``, in place."""
    if gradients and factor < 1.0:  # most steps need no pass over the gradient; of a small model a rank may hold no part
        torch._foreach_mul_(gradients, factor)
