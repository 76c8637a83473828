"""A GAN as PyTorch's example of DCGAN trains one: a step of the discriminator, of two backwards, then one of the generator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.adversarial import Objects, faked, in_turn, networks

criterion = nn.BCEWithLogitsLoss()


def build(options: Mapping[str, str]) -> dict[str, Any]:
    objects = networks(17)
    forged = torch.optim.Adam(objects["generator"].parameters(), lr=5e-3, betas=(0.5, 0.999))
    judged = torch.optim.Adam(objects["discriminator"].parameters(), lr=5e-3, betas=(0.5, 0.999))
    scheduler = torch.optim.lr_scheduler.StepLR(forged, 3, gamma=0.7)
    return {**objects, "generator_optimizer": forged, "discriminator_optimizer": judged, "scheduler": scheduler}


def judge(objects: Objects, real: Tensor) -> Iterator[Tensor]:
    discriminator = objects["discriminator"]
    yield criterion(discriminator(real), torch.ones(len(real), 1, dtype=torch.float64))
    yield criterion(discriminator(faked(objects, real).detach()), torch.zeros(len(real), 1, dtype=torch.float64))


def forge(objects: Objects, real: Tensor) -> Iterator[Tensor]:
    """Its gradients come to the discriminator, too, which does not take this step."""
    yield criterion(objects["discriminator"](faked(objects, real)), torch.ones(len(real), 1, dtype=torch.float64))


LOOP = in_turn(build, 1, judge, forge, clip=0.3)
