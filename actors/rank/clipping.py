"""The norm of the gradient, block by block: the same bits whoever holds which part of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from fleet.chunks import BLOCK


def block_norms(flat: torch.Tensor) -> torch.Tensor:
    """The 2-norm of each block of :data:`fleet.chunks.BLOCK` elements of a flat tensor, in order, as float64 on the host.

    A norm of all at once, or of a rank's chunk, adds up in an order that depends on where it begins and ends.
    """
    whole = flat.numel() // BLOCK * BLOCK
    norms = [torch.linalg.vector_norm(flat[:whole].view(-1, BLOCK), dim=1)] if whole else []
    if whole < flat.numel():
        norms.append(torch.linalg.vector_norm(flat[whole:]).reshape(1))
    return torch.cat([norm.double().cpu() for norm in norms]) if norms else torch.zeros(0, dtype=torch.float64)


def total_norm(norms: Iterable[torch.Tensor]) -> float:
    """Of a gradient whose blocks, in the order of its flat buffers, have these norms."""
    return math.sqrt(float((np.concatenate([norm.numpy() for norm in norms]) ** 2).sum()))


def clip_factor(norms: Iterable[torch.Tensor], clip_norm: float) -> float:
    """By what to multiply such a gradient; as ``clip_grad_norm_`` of torch."""
    return min(1.0, clip_norm / (total_norm(norms) + 1e-6))


def clip(flats: Sequence[torch.Tensor], clip_norm: float, norms: Sequence[torch.Tensor] | None = None) -> None:
    """Scale the gradient that lies in ``flats`` to the norm ``clip_norm`` if its own is greater, in place. ``norms``: of its blocks."""
    factor = clip_factor([block_norms(flat) for flat in flats] if norms is None else norms, clip_norm)
    if factor < 1.0:  # most steps need no pass over the gradient
        for flat in flats:
            flat.mul_(factor)
