"""Parameters that the shape of a model comes to."""

from __future__ import annotations

from fleet.laws.models import Model


def shape_parameters(model: Model) -> float:
    """Of a dense model: attention, MLP, norms and embeddings; biases left out."""
    attention = 2 * model.width**2 + 2 * model.width**2 * model.kv_heads / model.heads
    mlp = (3 if model.gated else 2) * model.width * model.mlp_width
    embeddings = model.vocabulary * model.width * (1 if model.tied else 2)
    return model.layers * (attention + mlp + 2 * model.width) + embeddings + model.width
