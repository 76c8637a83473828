"""Truncated back-propagation: a recurrent network reads a stream for each micro-batch, and goes on where the last step has ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import fleet
from fleet.data import Streams
from tests.zoo.feed import Done, Feed, Twice

STEPS, BATCH, LENGTH, WIDTH = 24, 16, 6, 12


def stream(shard: int, shards: int, epoch: int) -> Iterator[Tensor]:
    """Pieces of a wave that is the shard's own, one after the other."""
    for piece in range(400):
        at = torch.arange(piece * LENGTH, (piece + 1) * LENGTH + 1, dtype=torch.float64)
        yield torch.sin(0.3 * at + shard) + 0.3 * torch.sin(0.071 * at * (1 + shard % 3))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.GRU(1, WIDTH, batch_first=True), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        out, hidden = self.cells(x.unsqueeze(2), hidden)
        return self.head(out).squeeze(2), hidden


def build(options: Mapping[str, str]) -> dict[str, Any]:
    torch.manual_seed(51)
    model = Recurrent().double()
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=3e-3), "hidden": fleet.ShardState(first)}


def first(shard: int) -> dict[str, Tensor]:
    return {"hidden": torch.zeros(1, 1, WIDTH, dtype=torch.float64), "read": torch.zeros((), dtype=torch.int64)}


def read(model: nn.Module, batch: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, the state behind it): the pieces of a batch follow on each other."""
    wave = torch.cat([batch[:, :-1].reshape(1, -1), batch[-1:, -1:]], dim=1)
    predicted, hidden = model(wave[:, :-1], state["hidden"])
    return (predicted - wave[:, 1:]).square().mean(), {"hidden": hidden.detach(), "read": state["read"] + len(batch)}


def plain(feed: Feed) -> Done:
    done = Done(build(feed.options))
    model, optimizer, hidden = done.objects["model"], done.objects["optimizer"], done.objects["hidden"]
    data, states = Streams(stream), [first(shard) for shard in range(feed.shards)]
    data.begin(BATCH, feed.shards)
    for step in feed.steps(STEPS):
        optimizer.zero_grad()
        losses = []
        for shard, batch in enumerate(feed.batches(step, data, BATCH)):
            loss, states[shard] = read(model, batch, states[shard])
            (loss / feed.shards).backward()
            losses.append(loss.item())
        optimizer.step()
        done.report(losses)
    hidden.begin(feed.shards)
    hidden.load_state_dict({"0": torch.stack([one["hidden"] for one in states]), "1": torch.stack([one["read"] for one in states])})
    return done


def train(run: Any) -> None:
    objects = build(run.options)
    model, hidden = objects["model"], objects["hidden"]
    state = run.track(**objects)
    data = Streams(stream)
    for step in run.steps(state, total=STEPS):
        for batch in step.batches(data, batch_size=BATCH):
            loss, hidden.value = read(model, batch, hidden.value)
            step.backward(loss)
        step.commit()


LOOP = Twice(build, plain, train)
