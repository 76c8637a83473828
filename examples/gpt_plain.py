"""The loop of gpt.py in plain PyTorch, for one process, before its port to Fleet."""

from __future__ import annotations

import sys

import torch
from gpt import Source, build, loss_fn, validate
from torch.utils.data import DataLoader, RandomSampler


def train(steps: int) -> None:
    data, held_out = Source(), Source(held_out=True)
    model, optimizer, scheduler = build(steps)
    loader = DataLoader(data, batch_size=64, sampler=RandomSampler(data, num_samples=64 * steps))
    for number, batch in enumerate(loader, start=1):
        loss_fn(model.train(), batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if number % 50 == 0:
            print(number, validate(model, held_out), flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    train(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
