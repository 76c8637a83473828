"""One loop each, in plain PyTorch and on Fleet."""

from __future__ import annotations

from tests.zoo.feed import Twice
from tests.zoo.loops import (
    bf16,
    checkpointed,
    classifier,
    clip,
    codebook,
    compiled,
    contrastive,
    critics,
    curriculum,
    diffusion,
    distillation,
    ema,
    experts,
    gan,
    groups,
    heads,
    language_model,
    lora,
    padded,
    pair,
    penalty,
    rollouts,
    scaled,
    sparse,
    stopped_early,
    swa,
    tbptt,
    tensor,
    thawed,
    unused,
)
from tests.zoo.usual import Usual

LOOPS: dict[str, Twice | Usual] = {
    each.__name__.rpartition(".")[2]: each.LOOP
    for each in (
        classifier, language_model, padded, thawed, unused, heads, ema, lora, bf16, scaled, checkpointed, compiled,
        groups, codebook, contrastive, clip, tbptt, rollouts, distillation, swa, diffusion, curriculum, sparse, gan,
        critics, pair, penalty, stopped_early,
    )
}  # fmt: skip
TOGETHER: dict[str, Twice | Usual] = {"tensor": tensor.LOOP, "experts": experts.LOOP}
"""Loops of ranks that compute a micro-batch together."""
ALL = LOOPS | TOGETHER
