"""A student learns from a teacher that does not train: soft labels at a temperature, beside the true ones."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.usual import Usual, rows

CLASSES, HEAT = 5, 2.0


@functools.cache
def teacher() -> nn.Module:
    """Each process builds the same one. It is not tracked."""
    with torch.random.fork_rng():
        torch.manual_seed(61)
        return nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, CLASSES)).double().requires_grad_(False).eval()


def build(options: Mapping[str, str]) -> dict[str, Any]:
    torch.manual_seed(62)
    student = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, CLASSES)).double()
    optimizer = torch.optim.NAdam(student.parameters(), lr=5e-3)
    return {"model": student, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5)}


def loss_of(student: nn.Module, x: Tensor, step: int) -> Tensor:
    found, right = student(x), teacher()(x)
    soft = nn.functional.kl_div((found / HEAT).log_softmax(1), (right / HEAT).softmax(1), reduction="batchmean")
    return HEAT**2 * soft + 0.5 * nn.functional.cross_entropy(found, right.argmax(1))


LOOP = Usual(build, loss_of, rows(6, 61))
