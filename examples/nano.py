"""nano_plain.py, ported: `fleet run examples/nano.py --world 2 --shards 8`. docs/nano.md explains each changed line."""

from __future__ import annotations

from nano_plain import BATCH, CONTEXT, EVERY, MICRO_BATCHES, build, load, mean_losses, rate
from torch import Tensor
from torch.utils.data import Dataset

import fleet


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Item ``i``: inputs and targets from place ``i`` on, ``CONTEXT`` tokens each."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens) - CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self.tokens[index : index + CONTEXT + 1].long()
        return row[:-1], row[1:]


def train(run: fleet.Run) -> None:
    steps = int(run.options.get("steps", "60"))
    splits = {"train_loss": load(held_out=False), "val_loss": load(held_out=True)}
    model, optimizer = build()
    state, data = run.track(model=model, optimizer=optimizer), Windows(splits["train_loss"])
    for step in run.steps(state, total=steps, clip_norm=1.0):
        for group in optimizer.param_groups:
            group["lr"] = rate(step.number, steps)
        for x, y in step.batches(data, batch_size=BATCH * MICRO_BATCHES):
            loss = model(x, y)
            step.backward(loss)
        step.commit()
        losses = run.evaluate(lambda: mean_losses(model, splits), every=EVERY)
        if losses and run.is_main:
            print(step.number + 1, dict(losses), flush=True)
        if losses and losses.lowest("val_loss"):
            run.save("best.pt")
