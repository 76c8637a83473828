"""A GPT whose layers are divided over the ranks of a tensor group. A lost rank breaks its group alone: other groups compute its shards.

fleet run examples/gpt_tensor.py --mesh tensor=2 --world 4 --spares 1 --chaos storm --twin
"""

from __future__ import annotations

from gpt import Source, loss_fn
from gpt_tensor_model import build


def train(run) -> None:
    data = Source()
    model, optimizer = build(run.mesh["tensor"])
    for step in run.steps(run.track(model=model, optimizer=optimizer), total=int(run.options.get("steps", "200")), clip_norm=1.0):
        for batch in step.batches(data, batch_size=64):
            step.backward(loss_fn(model.train(), batch))
        step.commit()
