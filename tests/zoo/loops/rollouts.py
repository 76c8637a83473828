"""Policy gradient: each micro-batch has an environment that goes on from step to step, and a ring of its last returns as a baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import fleet
from tests.zoo.feed import Done, Feed, Twice
from tests.zoo.usual import rows

STEPS, BATCH, MOVES, RING = 24, 16, 5, 4
DATA = rows(3, 53)
"""Winds, of which each micro-batch has those of its episodes."""


def build(options: Mapping[str, str]) -> dict[str, Any]:
    torch.manual_seed(53)
    policy = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    return {"model": policy, "optimizer": torch.optim.RMSprop(policy.parameters(), lr=3e-3), "world": fleet.ShardState(first)}


def first(shard: int) -> tuple[Tensor, Tensor, Tensor]:
    """(where it stands, its last returns, how many there were)."""
    at = torch.tensor([0.1 * shard, 1.0, -0.5], dtype=torch.float64)
    return at, torch.zeros(RING, dtype=torch.float64), torch.zeros((), dtype=torch.int64)


def episode(policy: nn.Module, winds: Tensor, world: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """(loss, the world behind it)."""
    at, returns, count = world
    baseline = returns.sum() / count.clamp(1, RING)
    chances, rewards = [], []
    for wind in winds.repeat(MOVES, 1)[:MOVES]:
        choice = torch.distributions.Categorical(logits=policy(at))
        action = choice.sample()
        push = torch.nn.functional.one_hot(action, 3).double() - 1 / 3
        at = 0.9 * at + 0.2 * push + 0.05 * wind
        chances.append(choice.log_prob(action))
        rewards.append(-at.square().sum())
    total = torch.stack(rewards).sum()
    returns = returns.clone()
    returns[count % RING] = total
    return -(total - baseline) * torch.stack(chances).sum(), (at, returns, count + 1)


def plain(feed: Feed) -> Done:
    done = Done(build(feed.options))
    policy, optimizer, world = done.objects["model"], done.objects["optimizer"], done.objects["world"]
    worlds = [first(shard) for shard in range(feed.shards)]
    for step in feed.steps(STEPS):
        optimizer.zero_grad()
        losses = []
        for shard, winds in enumerate(feed.batches(step, DATA, BATCH)):
            loss, worlds[shard] = episode(policy, winds, worlds[shard])
            (loss / feed.shards).backward()
            losses.append(loss.item())
        optimizer.step()
        done.report(losses)
    world.begin(feed.shards)
    world.load_state_dict({str(leaf): torch.stack(each) for leaf, each in enumerate(zip(*worlds, strict=True))})
    return done


def train(run: Any) -> None:
    objects = build(run.options)
    policy, world = objects["model"], objects["world"]
    state = run.track(**objects)
    for step in run.steps(state, total=STEPS):
        for winds in step.batches(DATA, batch_size=BATCH):
            loss, world.value = episode(policy, winds, world.value)
            step.backward(loss)
        step.commit()


LOOP = Twice(build, plain, train)
