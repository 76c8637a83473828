"""Loops of ranks that have the layers of a model one after the other, and the moments at which a test kills one of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from actors.rank.mesh.pipe import Pipeline
from tests.support import moments
from tests.support.moments import Moment
from tests.support.tensors import VOCABULARY, WIDTH, Block, Text
from tests.support.waiting import until


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.token(tokens)


class Dropped(Block):
    """A block that draws random numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.1, self.training)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Embedding(), Dropped(), Dropped(), Head())


def divide(model: Model, mesh: Any) -> None:
    """The ranks of a tensor group divide the blocks."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {
        **{name: ColwiseParallel() for name in ("q", "k", "v", "up")},
        "out": RowwiseParallel(),
        "down": RowwiseParallel(),
    }
    for block in model.layers:
        if isinstance(block, Block):
            parallelize_module(block, mesh, plan)


def loss_of(logits: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def train(run: Any) -> None:
    """Options: ``steps``, ``pause_s``; ``weighted``: by tokens; ``saves``: a file at the end; ``weights``: a file of them, and the model is
    built on ``meta``."""
    torch.manual_seed(1)
    weighted, weights = "weighted" in run.options, run.options.get("weights")
    with torch.device("meta" if weights else "cpu"):
        model = Model()

    def loss_fn(logits: torch.Tensor, text: torch.Tensor) -> Any:
        return (loss_of(logits, text), int(text[:, 0].sum()) % 7 + 1) if weighted else loss_of(logits, text)

    if "tensor" in run.config.mesh:
        divide(model, run.mesh["tensor"])
    pipe = run.pipeline(model.layers, loss_fn, inputs=lambda text: text[:, :-1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = run.track(model=model, optimizer=optimizer, weights=weights)
    pause_s = float(run.options.get("pause_s", "0.01"))
    for step in run.steps(state, total=int(run.options.get("steps", "14")), clip_norm=0.5):
        pipe.step(step, Text(), batch_size=16)
        time.sleep(pause_s)
        step.commit()
    if "saves" in run.options:
        run.save(run.options["saves"])


PIPELINE, LINK, STEP = "actors.rank.mesh.pipe:Pipeline", "actors.rank.mesh.pipe:StageLink", "actors.rank.step.train_step:TrainStep"
LAYOUT, MEETING = "actors.rank.mesh.stages:StageLayout", "actors.rank.mesh.meeting:ColumnMeeting"
MOMENTS = {
    "before-a-forward": Moment("a unit is about to begin", f"{STEP}.begin_forward"),
    "behind-a-forward": Moment("its activations are on their way", f"{PIPELINE}._forward", behind=True),
    "between-its-halves": Moment("it waits for the gradients of its activations, or has its loss", f"{PIPELINE}._backward"),
    "in-a-backward": Moment("it has what it needs for a unit's backward", f"{STEP}.begin_shard"),
    "behind-a-backward": Moment("all gradients of a unit are there, and the stage before may have them", f"{STEP}.end_shard"),
    "a-unit-is-done": Moment("a unit counts", f"{STEP}.end_shard", behind=True),
    "before-the-sum": Moment("all its units are done", f"{STEP}.reduce", when=moments.for_loop),
    "behind-the-sum": Moment("it has the sums of its column", f"{STEP}.reduce", True, moments.for_loop),
    "behind-ready": Moment("all know that all have their sums", f"{moments.GROUP}.all_gather", True, moments.tagged(moments.Tag.READY)),
    "before-apply": Moment("the step is decided and not taken", f"{STEP}.apply"),
    "behind-apply": Moment("the step is taken, and the coordinator does not know", f"{STEP}.apply", behind=True),
    "at-the-end": Moment("the digest of the whole is taken", f"{LAYOUT}.digest"),
    "claims": Moment("the view behind a loss begins", f"{MEETING}.exchange", second=True),
    "has-met": Moment("the view behind a loss has begun", f"{MEETING}.exchange", True, second=True),
    "gives-again": Moment("other ranks need what its units have given", f"{LINK}.give_again", second=True),
    "computes-anothers-units": Moment("it computes units of the lost rank, maybe", f"{PIPELINE}._forward", True, second=True),
}  # fmt: skip


def dies_at(run: Any) -> None:
    """The rank in the slot ``victim`` dies at the ``moment``, once. Of some moments another has died before, in the same step."""
    moment, victim = MOMENTS[run.options["moment"]], int(run.options["victim"])
    if moment.second:
        first = Path(run.options["flags"]) / "first"
        moments._inject(run, "first", (victim + 2) % 6, MOMENTS["in-a-backward"], lambda: True)
        moments._inject(run, "second", victim, moment, first.exists)
    else:
        moments._inject(run, "second", victim, moment, lambda: True)
    train(run)


def counted(run: Any) -> None:
    """The rank in the slot ``victim`` dies once all units of its step are computed. Each rank writes to ``flags`` which ones it begins."""
    flags, shards, stages = Path(run.options["flags"]), run.shards, run.config.mesh["stage"]

    def noted(method: str, name: str, behind: bool) -> None:
        right = getattr(Pipeline, method)

        def wrong(self: Pipeline, units: Any, shard: int, *rest: Any) -> Any:
            found = right(self, units, shard, *rest) if behind else None
            if not units.rehearsing:
                with (flags / f"{name}-{run.slot}").open("a") as file:
                    file.write(f"{units._step.number} {self._link.stage} {shard}\n")
            return found if behind else right(self, units, shard, *rest)

        setattr(Pipeline, method, wrong)

    def all_are_done(train: Any, move: Any) -> bool:
        step = f"{train.duties.at.step} "
        until(lambda: sum(line.startswith(step) for line in written(flags, "done")) == shards * stages, "all units")
        return True

    noted("_forward", "begun", behind=False)
    noted("_backward", "done", behind=True)
    moment = Moment("all units of all ranks are done", f"{STEP}.reduce", when=all_are_done)
    moments._inject(run, "second", int(run.options["victim"]), moment, lambda: not (flags / "second").exists())
    train(run)


def written(flags: Path, name: str) -> list[str]:
    """The lines that ranks have written."""
    return [line for path in flags.glob(f"{name}-*") for line in path.read_text().splitlines()]


def several_die(run: Any) -> None:
    """The ranks in the slots ``victims`` die in the same step, each before a backward."""
    for number, slot in enumerate(run.options["victims"].split(",")):
        moments._inject(run, f"death-{number}", int(slot), MOMENTS["in-a-backward"], lambda: True)
    train(run)
