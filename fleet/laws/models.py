"""Language models, each with the source of its figures, and the figures that follow from their shapes."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.laws.registry import find


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder.

    Attributes:
        parameters: all of them; ``active``: those that one token meets (fewer in a mixture of experts).
        gated: the MLP has three matrices (SwiGLU), not two. ``tied``: input and output share the embedding.
        tokens: of the published run; ``batch_tokens``: of one step, None where it is not published.
    """

    name: str
    parameters: float
    active: float
    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp_width: int
    vocabulary: int
    sequence: int
    gated: bool
    tied: bool
    tokens: float
    batch_tokens: float | None
    source: str

    @property
    def dense(self) -> bool:
        """Whether every token meets every parameter."""
        return self.active == self.parameters

    @property
    def flop_per_token(self) -> float:
        """Forward and backward: 6 x active parameters + 6 x layers x width x sequence, causal attention at half of the full scores."""
        return 6.0 * self.active + 6.0 * self.layers * self.width * self.sequence


_LLAMA3, _LLAMA2 = "The Llama 3 Herd of Models, arXiv 2407.21783", "Llama 2, arXiv 2307.09288"
_GPT3, _MEGATRON = "Brown et al. 2020, arXiv 2005.14165", "Narayanan et al. 2021, arXiv 2104.04473, table 1"

_MODELS = (
    ("gpt3-175b", 175e9, 175e9, 96, 12288, 96, 96, 49152, 50257, 2048, False, True, 300e9, 3.2e6, _GPT3),
    ("opt-175b", 175e9, 175e9, 96, 12288, 96, 96, 49152, 50272, 2048, False, True, 180e9, 2e6, "Zhang et al. 2022, arXiv 2205.01068"),
    ("bloom-176b", 176.2e9, 176.2e9, 70, 14336, 112, 112, 57344, 250880, 2048, False, True, 366e9, 4.194304e6, "arXiv 2211.05100"),
    ("mt-nlg-530b", 530e9, 530e9, 105, 20480, 128, 128, 81920, 51200, 2048, False, True, 270e9, 3.93216e6, "arXiv 2201.11990"),
    ("megatron-1t", 1008e9, 1008e9, 128, 25600, 160, 160, 102400, 51200, 2048, False, True, 450e9, 6.291456e6, _MEGATRON),
    ("llama2-7b", 6.74e9, 6.74e9, 32, 4096, 32, 32, 11008, 32000, 4096, True, False, 2e12, 4e6, _LLAMA2),
    ("llama2-70b", 68.98e9, 68.98e9, 80, 8192, 64, 8, 28672, 32000, 4096, True, False, 2e12, 4e6, _LLAMA2),
    ("llama3-8b", 8.03e9, 8.03e9, 32, 4096, 32, 8, 14336, 128256, 8192, True, False, 15e12, None, _LLAMA3),
    ("llama3-70b", 70.6e9, 70.6e9, 80, 8192, 64, 8, 28672, 128256, 8192, True, False, 15e12, None, _LLAMA3),
    ("llama3-405b", 405.9e9, 405.9e9, 126, 16384, 128, 8, 53248, 128256, 8192, True, False, 15.6e12, 16.777216e6, _LLAMA3),
    ("mixtral-8x7b", 46.7e9, 12.9e9, 32, 4096, 32, 8, 14336, 32000, 32768, True, False, 2e12, None,
     "arXiv 2401.04088; tokens not published, 2e12 assumed"),
    ("deepseek-v3", 671e9, 37e9, 61, 7168, 128, 128, 18432, 129280, 4096, True, False, 14.8e12, 62.91456e6, "arXiv 2412.19437"),
)  # fmt: skip

MODELS = {row[0]: Model(*row) for row in _MODELS}


def model(name: str) -> Model:
    """The model of this name. Raises ConfigError with the nearest name."""
    return find("model", name, MODELS)
