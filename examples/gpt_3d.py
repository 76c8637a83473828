"""A GPT in stages of tensor groups: two ranks divide each layer, others have the next layers. A lost rank's units go to its siblings.

fleet run examples/gpt_3d.py --mesh stage=2,tensor=2 --world 8 --spares 1 --chaos storm --twin
"""

from __future__ import annotations

from gpt import Source
from gpt_3d_model import build, loss_fn, optimizer_of


def train(run) -> None:
    data = Source()
    model = build(run.mesh["tensor"])
    pipe = run.pipeline(model, loss_fn, inputs=lambda text: text[:, :-1])
    optimizer = optimizer_of(model)
    for step in run.steps(run.track(model=model, optimizer=optimizer), total=int(run.options.get("steps", "200")), clip_norm=1.0):
        pipe.step(step, data, batch_size=64)
        step.commit()
