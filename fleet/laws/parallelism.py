"""Mapping a model to ranks: tensor (TP), pipeline (PP) and data parallelism (DP). N = TP x PP x DP."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.errors import ConfigError
from fleet.laws.law import AtLeastOne, Count, Positive, floor, law

MEGATRON = "Narayanan et al. 2021, arXiv 2104.04473"


@law("Huang et al. 2019 (GPipe), arXiv 1811.06965", stages=16, micro_batches=32)
def pipeline_bubble(stages: AtLeastOne, micro_batches: AtLeastOne) -> float:
    """Share of a step in which a stage waits: (p - 1) / (m + p - 1)."""
    return (stages - 1.0) / (micro_batches + stages - 1.0)


@law(f"{MEGATRON}, sec. 2.2", stages=16, micro_batches=32, chunks=4)
def interleaved_bubble(stages: AtLeastOne, micro_batches: AtLeastOne, chunks: AtLeastOne) -> float:
    """The same with v chunks of layers on every stage: (p - 1) / (v m + p - 1)."""
    return (stages - 1.0) / (chunks * micro_batches + stages - 1.0)


@law(MEGATRON, gpus=100_000, tensor=8, pipeline=16)
def data_parallel_ranks(gpus: AtLeastOne, tensor: AtLeastOne, pipeline: AtLeastOne) -> float:
    """Whole replicas that fit: floor(N / (TP x PP))."""
    return floor(gpus / (tensor * pipeline))


@dataclass(frozen=True, slots=True)
class Mapping3d:
    """TP x PP x DP, and the GPUs they use."""

    tensor: int
    pipeline: int
    data: int

    @property
    def gpus(self) -> int:
        """TP x PP x DP."""
        return self.tensor * self.pipeline * self.data


@law(MEGATRON, alone=True, gpus=100_000, tensor=8, pipeline=16)
def largest_mapping(gpus: Count, tensor: Count, pipeline: Count) -> Mapping3d:
    """The mapping with as many whole replicas as fit: TP, PP, floor(N / (TP x PP)); the other GPUs are left over."""
    replicas = int(data_parallel_ranks(gpus, tensor, pipeline))
    if replicas < 1:
        reason = f"one replica needs TP x PP = {tensor * pipeline} GPUs"
        raise ConfigError("gpus", gpus, reason, f"The nearest valid value is {tensor * pipeline}.")
    return Mapping3d(tensor, pipeline, replicas)


def check_mapping(gpus: int, tensor: int, pipeline: int, data: int) -> Mapping3d:
    """The mapping, when TP x PP x DP is N. Raises ConfigError with the nearest valid DP and N."""
    for name, value in {"gpus": gpus, "tensor": tensor, "pipeline": pipeline, "data": data}.items():
        if value < 1:
            raise ConfigError(name, value, "must be at least 1", "The nearest valid value is 1.")
    product = tensor * pipeline * data
    if product != gpus:
        nearest = max(1, round(gpus / (tensor * pipeline)))
        reason = f"TP x PP x DP = {tensor} x {pipeline} x {data} = {product}, and there are {gpus} GPUs"
        raise ConfigError("data", data, reason, f"The nearest valid values are data = {nearest} with gpus = {tensor * pipeline * nearest}.")
    return Mapping3d(tensor, pipeline, data)


@law(f"{MEGATRON}, sec. 3.2: one point-to-point message a micro-batch and stage boundary", sequence=8192, width=8192)
def boundary_bytes(sequence: Positive, width: Positive, micro_batch: Positive = 1.0, bytes_per_value: Positive = 2.0) -> float:
    """Activations that cross one pipeline boundary, a micro-batch, forward: sequence x micro-batch x width x 2 B."""
    return sequence * micro_batch * width * bytes_per_value


@law("Shoeybi et al. 2019, arXiv 1909.08053: two all-reduces forward and two backward a layer", sequence=8192, width=8192)
def tensor_layer_bytes(sequence: Positive, width: Positive, micro_batch: Positive = 1.0, bytes_per_value: Positive = 2.0) -> float:
    """Buffers that TP all-reduces, a layer and micro-batch, forward and backward: 4 x sequence x micro-batch x width x 2 B."""
    return 4.0 * boundary_bytes(sequence, width, micro_batch, bytes_per_value)
