"""gpt.py for a model that PyTorch's ``fully_shard`` cuts: each rank keeps a part of it, and another rank keeps a copy of that part.

fleet run examples/gpt_fsdp.py --optimizer-sharding fsdp --world 4 --spares 1 --set width=192 --set layers=4
"""

from __future__ import annotations

import torch
from gpt import CONTEXT, GPT, LAYERS, WIDTH, Block, Source, loss_fn, validate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import fleet


def build(mesh: DeviceMesh, width: int = WIDTH, layers: int = LAYERS) -> tuple[GPT, torch.optim.Optimizer]:
    model = GPT(width, layers)
    for part in (*(module for module in model.modules() if isinstance(module, Block)), model):
        fully_shard(part, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)


def train(run: fleet.Run) -> None:
    data, held_out, steps = Source(), Source(held_out=True), int(run.options.get("steps", "200"))
    model, optimizer = build(run.mesh, int(run.options.get("width", WIDTH)), int(run.options.get("layers", LAYERS)))
    state = run.track(model=model, optimizer=optimizer)
    for step in run.steps(state, total=steps, clip_norm=1.0):
        for batch in step.batches(data, batch_size=64, tokens=CONTEXT):
            step.backward(loss_fn(model.train(), batch))
        step.commit()
        run.evaluate(lambda: validate(model, held_out), every=50)
