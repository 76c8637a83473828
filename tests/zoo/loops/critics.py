"""A Wasserstein GAN with a gradient penalty: three steps of the critic, each with the gradient of a gradient, then one of the generator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.zoo.adversarial import Objects, faked, in_turn, networks


def build(options: Mapping[str, str]) -> dict[str, Any]:
    objects = networks(18)
    forged = torch.optim.RMSprop(objects["generator"].parameters(), lr=2e-3)
    judged = torch.optim.AdamW(objects["discriminator"].parameters(), lr=5e-3, betas=(0.0, 0.9))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(forged, 6)
    return {**objects, "generator_optimizer": forged, "discriminator_optimizer": judged, "scheduler": scheduler}


def judge(objects: Objects, real: Tensor) -> Iterator[Tensor]:
    critic, fake = objects["discriminator"], faked(objects, real).detach()
    share = torch.rand(len(real), 1, dtype=torch.float64)
    between = (share * real + (1 - share) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    yield critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


def forge(objects: Objects, real: Tensor) -> Iterator[Tensor]:
    yield -objects["discriminator"](faked(objects, real)).mean()


LOOP = in_turn(build, 3, judge, forge, clip=1.0)
