"""Memory of one rank under TP x PP x DP and the ZeRO stages."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.errors import ConfigError
from fleet.laws.law import AtLeastOne, NonNegative, Positive, law, minimum, where

ZERO = "Rajbhandari et al. 2020 (ZeRO), arXiv 1910.02054, sec. 3 and 5"
ACTIVATIONS = "Korthikanti et al. 2022, arXiv 2205.05198, table 2"
CHUNKS = "counted in the ranks of real runs: tests/fault/test_fsdp_memory.py; docs/decisions/0018"
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on one rank. ``gathered``: parameters that the rank does not keep, during the compute that uses them."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float = 0.0

    @property
    def total_bytes(self) -> float:
        """Sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.gathered


@law(ZERO, parameters=7.5e9, tensor=1, pipeline=1, data=64, zero=1)
def model_state(parameters: Positive, tensor: AtLeastOne = 1, pipeline: AtLeastOne = 1, data: AtLeastOne = 1, zero: int = 0) -> RankMemory:
    """Bytes of one rank, Adam in mixed precision: (2 weights + 2 gradients + 12 optimizer) x parameters / (TP x PP).

    ZeRO stage 1 divides the optimizer's 12 by DP, stage 2 the gradients too, stage 3 also the weights.
    """
    if zero not in (0, 1, 2, 3):
        raise ConfigError("zero", zero, "ZeRO has the stages 0, 1, 2 and 3", f"The nearest valid value is {min(max(int(zero), 0), 3)}.")
    share = parameters / (tensor * pipeline)
    return RankMemory(
        weights=2.0 * share / (data if zero >= 3 else 1),
        gradients=2.0 * share / (data if zero >= 2 else 1),
        optimizer=12.0 * share / (data if zero >= 1 else 1),
        activations=0.0,
    )


def _kept(ranks: float, copies: float) -> float:
    """Share of a chunked state that one rank keeps."""
    return (1.0 + minimum(copies, ranks - 1.0)) / ranks


@law(CHUNKS, parameter_bytes=28e9, ranks=8, copies=1, moments=2, spread=True)
def replicated_state(parameter_bytes: Positive, ranks: AtLeastOne, copies: int = 1, moments: int = 2, spread: bool = False) -> RankMemory:
    """Bytes of one rank of Fleet's that has all parameters, at one shard a rank: P weights, 3 P gradients, moments x P.

    3 P is the peak of the gradients, while ranks sum them: the result of the backward, the sum of this rank's shards, and the mean. Where
    gradients travel during the backward (overlap), its result is the sum, but for the first steps: 2 P.
    ``spread``: the optimizer's state is in chunks (zero1), (1 + copies)/N of it on each rank.
    """
    share = _kept(ranks, copies) if spread else 1.0
    return RankMemory(parameter_bytes, 3.0 * parameter_bytes, moments * share * parameter_bytes, 0.0)


@law(CHUNKS, parameter_bytes=28e9, ranks=8, copies=1, moments=2, gathered_bytes=0.9e9, leaving_bytes=0.45e9)
def chunked_state(
    parameter_bytes: Positive,
    ranks: AtLeastOne,
    copies: int = 1,
    moments: int = 2,
    gathered_bytes: NonNegative = 0.0,
    leaving_bytes: NonNegative = 0.0,
) -> RankMemory:
    """Bytes of one rank of Fleet's fsdp, at one shard a rank: (1 + copies)/N of P weights and of moments x P, and units gathered.

    Gradients leave in the backward: (1 + copies)/N of P and one unit. A shard that arrives before the shards it is added to takes 1/N of P
    more, which this law leaves out. ``moments`` is the optimizer's number for a parameter, in the type of the parameters: 2 for AdamW.
    There are at most as many copies as other ranks. In groups there are at least as many copies as other groups.
    """
    kept = _kept(ranks, copies) * parameter_bytes
    return RankMemory(kept, kept + leaving_bytes, moments * kept, 0.0, gathered_bytes)


@law(ACTIVATIONS, sequence=8192, width=8192, heads=64, tensor=8, recompute="selective")
def layer_activation_bytes(
    sequence: Positive,
    width: Positive,
    heads: Positive,
    micro_batch: Positive = 1.0,
    tensor: AtLeastOne = 1,
    recompute: str = "selective",
) -> float:
    """Activations of one layer and micro-batch, sequence parallel: s b h/t times 34 + 5 a s/h; selective 34; full 2.

    For a GPT layer with a four times wider MLP. The 5 a s/h are attention scores, which a fused kernel never keeps.
    """
    if recompute not in RECOMPUTE:
        raise ConfigError("recompute", recompute, "unknown", f"Choose one of {', '.join(RECOMPUTE)}.")
    base = sequence * micro_batch * width / tensor
    if recompute == "none":
        return base * (34.0 + 5.0 * heads * sequence / width)
    return base * (34.0 if recompute == "selective" else 2.0)


@law("1F1B keeps as many micro-batches in flight as there are stages ahead: Narayanan et al. 2021, sec. 2.2", layers=80, stages=4,
     micro_batches=16, layer_bytes=285e6)  # fmt: skip
def pipeline_activation_bytes(layers: Positive, stages: AtLeastOne, micro_batches: AtLeastOne, layer_bytes: NonNegative) -> float:
    """Activations of the first stage under 1F1B: layers/p x min(p, m) x bytes of a layer."""
    return layers / stages * where(stages < micro_batches, stages, micro_batches) * layer_bytes
