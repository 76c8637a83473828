"""Train functions with a step or an evaluation that takes long, once: the second time it is short."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from tests.support.trains import Numbers, _loop, build

LONG_S = 120.0
AT = 6
"""After so many steps."""


def nap(run: Any, what: str) -> None:
    """It sleeps, unless it has slept in an earlier run. A file says that it has begun."""
    flags = Path(run.options["flags"])
    if not (flags / "rested").exists():
        (flags / f"{what}-{run.slot}").touch()
        time.sleep(float(run.options.get("long_s", LONG_S)))


def trains_long(run: Any) -> None:
    """``where``: in which part of the loop of step ``AT`` it is long; ``first``: in the first backward."""
    where = run.options["where"]
    model, optimizer, scheduler = build(norm=run.options.get("norm", "batch"))
    state = run.track(model=model, optimizer=optimizer, scheduler=scheduler)

    def judge() -> dict[str, float]:
        if where == "swaps":
            kept = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict({name: torch.zeros_like(value) for name, value in kept.items()})
            nap(run, where)
            model.load_state_dict(kept)
        elif where == "evaluation":
            nap(run, where)
        return {"val_loss": 1.0}

    for step in run.steps(state, total=int(run.options["steps"]), clip_norm=1.0):
        for x, y in step.batches(Numbers(), batch_size=64):
            error = ((model(x) - y) ** 2).mean()
            if (where == "first" and step.number == 0) or (where == "backward" and step.number == AT):
                nap(run, where)
            step.backward(error)
        time.sleep(float(run.options.get("pause_s", "0.01")))
        step.commit()
        run.evaluate(judge, every=AT)


def prints_much(run: Any) -> None:
    """The plain loop, which prints a mebibyte in each step: more than a small disk has."""

    def talk(run: Any, step: Any) -> None:
        if step.number >= 2:
            for _ in range(1024):
                print("x" * 1023)

    _loop(run, talk)
