"""``fleet init``: a commented train script to begin with, which runs as it is."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fleet.errors import ConfigError

SPIRALS = """\
class Spirals(torch.utils.data.Dataset):
    def __init__(self, samples, seed):
        draw = torch.Generator().manual_seed(seed)
        self.arm = torch.randint(2, (samples,), generator=draw)
        turn = 4 * torch.rand(samples, generator=draw)
        noise = 0.05 * torch.randn(samples, 2, generator=draw)
        angle = turn + torch.pi * self.arm
        self.points = torch.stack([angle.cos(), angle.sin()], 1) * turn[:, None] / 4 + noise

    def __len__(self):
        return len(self.arm)

    def __getitem__(self, index):
        return self.points[index], self.arm[index]"""

MODEL = """\
    model = nn.Sequential(nn.Linear(2, 256), nn.ReLU(), nn.Dropout(0.05), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)"""

SCRIPT = '''\
"""Trains a small network with Fleet:  fleet run {name} --world 2

It learns which of two spirals a point lies on. Replace the parts 1 to 3 by your own; part 4 can stay as it is.
"""

import os

import fleet
import torch
from torch import nn


# 1. Your data: any dataset with len() and []. What a sample is may depend on its number alone, so that every rank sees the same samples.
{data}


# 2. Your model and your optimizer. Fleet sets the random generators before, so all ranks begin with the same weights.
def build():
{model}


# 3. Your figures. One rank computes them, and all ranks get them.
@torch.no_grad()
def validate(model, held_out):
    scores = model.eval()(held_out.points)
    right = (scores.argmax(1) == held_out.arm).float().mean()
    return {{"val_loss": nn.functional.cross_entropy(scores, held_out.arm).item(), "val_accuracy": right.item()}}


# 4. The loop. Every rank runs this function. It must be called train, and take the run alone.
def train(run: fleet.Run):
    print(f"process {{os.getpid()}}", flush=True)  # what a rank prints is in the terminal, with its number, and in `fleet logs`
    steps = int(run.options.get("steps", "200"))  # fleet run ... --set steps=1000
    data, held_out = Spirals(20_000, seed=1), Spirals(2_000, seed=2)
    model, optimizer = build()

    # What a rank has to hand on when another one takes its place. A scheduler or a GradScaler belongs here too.
    state = run.track(model=model, optimizer=optimizer)

    for step in run.steps(state, total=steps, clip_norm=1.0):
        # The batch of all ranks together is cut into 16 micro-batches (--shards). This rank gets some of them, one after the other.
        for points, arm in step.batches(data, batch_size=256):
            step.backward(nn.functional.cross_entropy(model.train()(points), arm))

        # Sums the gradients of all ranks, and steps the optimizer: do not call optimizer.step() or zero_grad() yourself.
        step.commit()

        # After every 50th step. `figures` is None after the others.
        figures = run.evaluate(lambda: validate(model, held_out), every=50)
        if figures and figures.lowest("val_loss"):
            run.save("best.pt")  # once, although all ranks call it

    # Here are the ranks that hold the final state, and nobody else. Read it with torch.load("model.pt", weights_only=True).
    run.save("model.pt")
'''


PLAIN = '''\
"""The spirals of `fleet init train.py`, as an ordinary job of PyTorch that knows nothing of Fleet.

torchrun --standalone --nproc-per-node 2 {name} --steps 200
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


{data}


def build():
{model}


def save(path, step, model, optimizer):
    # To another name first: a process that is killed while it writes leaves the checkpoint before.
    torch.save({{"step": step, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}}, path + ".tmp")
    os.replace(path + ".tmp", path)


def batches(data, batch_size, step):
    """Endless batches of this rank, from ``step`` on."""
    sampler = DistributedSampler(data, seed=0, drop_last=True)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler, drop_last=True)
    while True:
        epoch, skip = divmod(step, len(loader))
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            if number >= skip:
                yield batch
                step += 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--checkpoint", default="plain.pt")
    given = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model, optimizer = build()
    model, step = DistributedDataParallel(model), 0
    if os.path.exists(given.checkpoint):
        state = torch.load(given.checkpoint, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        print(f"rank {{rank}} goes on from step {{step}}", flush=True)

    stream = batches(Spirals(20_000, seed=1), 256 // world, step)
    while step < given.steps:
        points, arm = next(stream)
        loss = nn.functional.cross_entropy(model(points), arm)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if rank == 0 and step % 100 == 0:
            print(f"step {{step}}: loss {{loss.item():.6f}}", flush=True)
        if rank == 0 and (step % given.save_every == 0 or step == given.steps):
            save(given.checkpoint, step, model, optimizer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

NEXT = (
    "fleet run {script} --world 2",
    'fleet run {script} --world 3 --spares 1 --chaos "mtbf=3s,kinds=kill_rank" --set steps=600 --twin',
)
PLAIN_NEXT = (
    "torchrun --standalone --nproc-per-node 2 {script}",
    'fleet run --plain {script} --world 2 --chaos "mtbf=5s,duration=30s,kinds=kill_rank" -- --steps 2000',
)


def init(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Where to write it; nothing is overwritten.")] = "train.py",
    plain: Annotated[
        bool, typer.Option("--plain", help="The same network as an ordinary torchrun script, for `fleet run --plain`.")
    ] = False,
) -> None:
    """Write a commented train script, which runs as it is."""
    path = Path(file)
    if path.suffix != ".py":
        raise ConfigError("FILE", file, "a train script is a Python file", "Name one, such as train.py.")
    if not path.parent.is_dir():
        raise ConfigError("FILE", file, f"there is no folder {path.parent}", "Create it first.")
    try:
        with path.open("x") as sink:
            sink.write((PLAIN if plain else SCRIPT).format(name=path.name, data=SPIRALS, model=MODEL))
    except FileExistsError as error:
        raise ConfigError("FILE", file, "it is there already, and would be lost", "Name another file.") from error
    print(f"{file} is written. Next:\n")
    for line in PLAIN_NEXT if plain else NEXT:
        print(f"  {line.format(script=shlex.quote(file))}")
