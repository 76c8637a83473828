"""Loops of ranks that compute shards together, by PyTorch's own tensor parallelism, and the moments at which a test kills one of them."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from actors.rank.membership.process_group import Group
from actors.rank.membership.subgroup import Subgroup
from actors.rank.rank_injector import RankInjector
from actors.rank.tags import Tag
from fleet.protocol.operations import START, Operation
from fleet.protocol.types import Process
from tests.support import moments, trains
from tests.support.moments import Moment

WIDTH, VOCABULARY, LENGTH, HEADS = 16, 24, 4, 4


class Text(torch.utils.data.Dataset[torch.Tensor]):
    """Each item is a sequence with a step of its own from number to number."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        return (torch.arange(LENGTH + 1) * (1 + index % 5) + index) % VOCABULARY


class Block(nn.Module):
    """Attention of heads, and an MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        q, k, v = (part(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.after(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.norm(self.blocks(self.token(tokens))))


def divided(model: Model, mesh: Any, how: str) -> Model:
    """``layers``: the two layers of attention and MLP. ``sequence``: norms take parts of the sequence, and embedding and head are divided,
    too, with the loss. ``units``: as ``sequence``, and ``fully_shard`` cuts the model."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    columns, rows = ("q", "k", "v", "up"), ("out", "down")
    if how == "layers":
        plan: dict[str, Any] = {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel() for name in rows}}
        for block in model.blocks:
            parallelize_module(block, mesh, plan)
        return model
    along = Shard(1)
    plan = {
        **{name: ColwiseParallel() for name in columns},
        **{name: RowwiseParallel(output_layouts=along) for name in rows},
        **{name: SequenceParallel() for name in ("before", "after")},
    }
    for block in model.blocks:
        for name in ("q", "k", "v", "up"):
            plan[name] = ColwiseParallel(input_layouts=along)
        parallelize_module(block, mesh, plan)
    parallelize_module(
        model, mesh,
        {
            "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=along),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=along, output_layouts=Shard(-1), use_local_output=False),
        },
    )  # fmt: skip
    return model


def train(run: Any) -> None:
    """Options: ``how`` the model is divided, ``steps``, ``pause_s``; ``evaluates``: after each fifth step; ``saves``: a file at the end;
    ``weights``: a file of them, and the model is built on ``meta``; ``flips``: a fault of slot 1 in step 6; ``scaled``: with a scaler that
    grows until the loss overflows."""
    from torch.distributed.tensor.parallel import loss_parallel

    torch.manual_seed(1)
    how, weights = run.options.get("how", "layers"), run.options.get("weights")
    with torch.device("meta" if weights else "cpu"):
        model = Model()
    if run.config.mesh:
        model = divided(model, run.mesh["tensor"], how)
    if how == "units":
        for module in (*model.blocks, model):
            fully_shard(module, mesh=run.mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=1) if "scaled" in run.options else None
    more = {} if scaler is None else {"scaler": scaler}
    state = run.track(model=model, optimizer=optimizer, weights=weights, **more)
    pause_s = float(run.options.get("pause_s", "0.01"))
    for step in run.steps(state, total=int(run.options.get("steps", "14")), clip_norm=0.5):
        for text in step.batches(Text(), batch_size=16):
            with loss_parallel():
                logits = model(text[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
                step.backward(loss if scaler is None else 8.0 * loss)
            if step.number == 6 and run.slot == 1 and "flips" in run.options and trains.once(run, "flip"):
                order = Operation("f", run.options["flips"], START, Process("", 0, 0), seed=1)
                assert RankInjector(run._train_step).operate(order) is None
        time.sleep(pause_s)
        step.commit()
        if scaler is not None:
            Path(run.options["flags"], f"scale-{step.number}-{run.slot}").write_text(str(scaler.get_scale()))
        if "evaluates" in run.options:
            figures = run.evaluate(lambda: {"first": float(_whole(model(Text()[0][None, :-1])).abs().sum())}, every=5)
            if figures is not None:
                Path(run.options["flags"], f"figure-{step.number}-{run.slot}").write_text(str(figures["first"]))
    if "saves" in run.options:
        run.save(run.options["saves"])


@torch.no_grad()
def _whole(value: Any) -> torch.Tensor:
    found: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found.detach()


def _ready(of: type[Group], group: Group, out: torch.Tensor, inp: torch.Tensor, tag: int = Tag.PLAIN) -> bool:
    return tag == Tag.READY and type(group) is of


GROUP, STEP = "actors.rank.mesh.torch_group:TensorGroup", "actors.rank.step.train_step:TrainStep"
LAYOUT, MEETING = "actors.rank.mesh.layout:ColumnLayout", "actors.rank.mesh.meeting:ColumnMeeting"
WHOLE, ZERO1 = "actors.rank.membership.process_group:Group", "actors.rank.zero1"
MOMENTS = {
    "before-a-forward": Moment("a shard is about to begin", f"{STEP}.begin_shard"),
    "in-a-forward": Moment("it has a sum of its group", f"{GROUP}.all_gather_single_coalesced", behind=True),
    "un-waited": Moment("a collective has been called, and its result is not waited for", "actors.rank.mesh.torch_group:Done.wait"),
    "in-a-sum": Moment("its group adds up, and it has not sent its part", f"{GROUP}._reduce"),
    "behind-a-sum": Moment("its group has added up, and the others may not know", f"{GROUP}._reduce", behind=True),
    "before-a-backward": Moment("the loss is there", f"{STEP}.scaled"),
    "behind-a-backward": Moment("all gradients of a shard are there", f"{STEP}.end_shard"),
    "a-shard-is-done": Moment("a shard counts", f"{STEP}.end_shard", behind=True),
    "before-the-sum": Moment("all its shards are done", f"{STEP}.reduce", when=moments.for_loop),
    "behind-the-sum": Moment("it has the sums of its column", f"{STEP}.reduce", True, moments.for_loop),
    "behind-ready": Moment("all know that all have their sums", f"{WHOLE}.all_gather", True, moments.tagged(moments.Tag.READY)),
    "before-apply": Moment("the step is decided and not taken", f"{STEP}.apply"),
    "behind-apply": Moment("the step is taken, and the coordinator does not know", f"{STEP}.apply", behind=True),
    "at-the-end": Moment("the digest of the whole is taken", f"{LAYOUT}.digest"),
    "claims": Moment("the view behind a loss begins", f"{MEETING}.exchange", second=True),
    "has-met": Moment("the view behind a loss has begun", f"{MEETING}.exchange", True, second=True),
}  # fmt: skip
SPREAD = {
    "in-a-sum": MOMENTS["in-a-sum"],
    "before-the-sum": MOMENTS["before-the-sum"],
    "behind-the-sum": MOMENTS["behind-the-sum"],
    "behind-its-columns-sums": Moment("its column has compared all", f"{WHOLE}.all_gather", True, functools.partial(_ready, Subgroup)),
    "behind-ready": Moment("all know that all have their sums", f"{WHOLE}.all_gather", True, functools.partial(_ready, Group)),
    "before-apply": MOMENTS["before-apply"],
    "parameters-travel": Moment("its chunk is stepped, and no other rank has that", f"{ZERO1}.layout:Zero1Layout.publish"),
    "behind-publish": Moment("all of its column have the step's parameters", f"{ZERO1}.layout:Zero1Layout.publish", behind=True),
    "slices-leave": Moment("slices of chunks are about to leave it, beside a step", f"{ZERO1}.moving:MovingChunks._carry", second=True),
    "at-the-end": Moment("the digest of the whole is taken", "actors.rank.mesh.layout:SpreadInColumns.digest"),
    "claims": Moment("the view behind a loss begins", f"{ZERO1}.resharding:Resharding.exchange", second=True),
    "has-met": Moment("the view behind a loss has begun", f"{ZERO1}.resharding:Resharding.exchange", True, second=True),
}  # fmt: skip
"""Where the optimizer's state of a column is spread over its ranks."""
FOUND = {"none": MOMENTS, "zero1": SPREAD, "fsdp": moments.MOMENTS | {"at-the-end": SPREAD["at-the-end"]}}
"""By ``optimizer_sharding``."""


def dies_at(run: Any) -> None:
    """The rank in the slot ``victim`` dies at the ``moment``, once. Of some moments another has died before, in the same step."""
    moment, victim = FOUND[run.config.optimizer_sharding][run.options["moment"]], int(run.options["victim"])
    if moment.second:
        first = Path(run.options["flags"]) / "first"
        moments._inject(run, "first", (victim + 2) % 4, MOMENTS["in-a-sum"], lambda: True)
        moments._inject(run, "second", victim, moment, first.exists)
    else:
        moments._inject(run, "second", victim, moment, lambda: True)
    train(run)


def two_die(run: Any) -> None:
    """The ranks in two slots die in the same step, each in a forward."""
    for name, slot in (("first", 1), ("second", int(run.options["victim"]))):
        moments._inject(run, name, slot, MOMENTS["in-a-sum"], lambda: True)
    trains.once(run, "begun")
    train(run)
