"""One training step: its mapping, its memory, and its time by term."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from fleet.errors import ConfigError
from fleet.laws.collectives import hierarchical_all_reduce_s, message_s, ring_all_reduce_s
from fleet.laws.memory import RankMemory, layer_activation_bytes, model_state, pipeline_activation_bytes
from fleet.laws.parallelism import Mapping3d, boundary_bytes, check_mapping, tensor_layer_bytes
from fleet.planning.inputs import FSDP, PlanInput
from fleet.planning.kept import LINK_LATENCY_S, exchange_of, state_of

PIPELINES = (1, 2, 4, 8, 12, 16, 24, 32, 64)


@dataclass(frozen=True, slots=True)
class MappedStep:
    """A step of one mapping; times are those of the slowest rank, and add up to ``step_s``.

    Attributes:
        compute_s: arithmetic. ``bubble_s``: wait in the pipeline. ``straggler_s``: wait for a slow rank.
        tensor_s, pipeline_s, data_s: communication that is not hidden; ``hidden_s``: the part that overlap hides. ``gather_s``: gathers of
            parameters that other ranks keep.
    """

    mapping: Mapping3d
    recompute: str
    micro_batches: int
    memory: RankMemory
    usable_bytes: float
    compute_s: float
    bubble_s: float
    tensor_s: float
    pipeline_s: float
    data_s: float
    straggler_s: float
    hidden_s: float
    tokens: float
    mfu: float
    gather_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Time of the step."""
        return self.compute_s + self.bubble_s + self.tensor_s + self.pipeline_s + self.data_s + self.gather_s + self.straggler_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second without faults."""
        return self.tokens / self.step_s

    @property
    def fits(self) -> bool:
        """Whether the state and the activations find room on one GPU."""
        return self.memory.total_bytes <= self.usable_bytes

    @property
    def shares(self) -> dict[str, float]:
        """Share of the step by kind of work, largest first."""
        parts = {
            "compute": self.compute_s, "pipeline bubble": self.bubble_s, "tensor parallel": self.tensor_s,
            "pipeline sends": self.pipeline_s, "gradient exchange": self.data_s, "parameter gathers": self.gather_s,
            "waiting for the slowest": self.straggler_s,
        }  # fmt: skip
        return {name: value / self.step_s for name, value in sorted(parts.items(), key=lambda item: -item[1])}


def best_step(plan: PlanInput) -> MappedStep:
    """The step of the requested mapping, or of the fastest one that fits.

    Raises:
        ConfigError: the mapping is impossible, or none fits; the way out names the nearest valid value.
    """
    steps = [build_step(each, mapping) for each in _recomputing(plan) for mapping in _mappings(each)]
    fitting = [step for step in steps if step.fits]
    if fitting:
        return max(fitting, key=lambda step: step.tokens_per_s)
    if not steps:
        raise _no_mapping(plan)
    least = min(steps, key=lambda step: step.memory.total_bytes)
    needed, usable = least.memory.total_bytes / 1e9, least.usable_bytes / 1e9
    reason = f"{plan.model} does not fit: it needs {needed:.1f} GB on each GPU, and {usable:.1f} GB of a {plan.hardware} can be used"
    raise ConfigError("gpus" if not plan.tp else "tp", plan.gpus if not plan.tp else plan.tp, reason, _more_room(plan))


def _recomputing(plan: PlanInput) -> list[PlanInput]:
    return [replace(plan, recompute=mode) for mode in ("selective", "full")] if plan.recompute == "auto" else [plan]


def _more_room(plan: PlanInput) -> str:
    """The nearest plan that fits: another mapping of these GPUs, or the fewest GPUs by doubling, with as few other changes as possible."""
    gpus = plan.gpus
    while gpus < 2**20:
        for kept in (("tp", "pp"), ("tp",), ("pp",), ()):
            freed = replace(plan, gpus=gpus, tp=plan.tp if "tp" in kept else 0, pp=plan.pp if "pp" in kept else 0, dp=0)
            changed = _changes(plan, freed)
            if changed:
                return f"The nearest valid value{'s are' if len(changed) > 1 else ' is'} {', '.join(changed)}{_sharding(plan)}."
        gpus = -(-(2 ** math.ceil(math.log2(gpus + 1))) // plan.replica_size) * plan.replica_size
    return f"Use a smaller micro_batch, or GPUs with more memory{_sharding(plan)}."


def _changes(plan: PlanInput, trial: PlanInput) -> list[str]:
    """Changes to ``plan`` that give the fastest mapping of ``trial`` that fits; empty where none does."""
    steps = [step for each in _recomputing(trial) for mapping in _mappings(each) if (step := build_step(each, mapping)).fits]
    if not steps:
        return []
    mapping = max(steps, key=lambda step: step.tokens_per_s).mapping
    found = {"gpus": trial.gpus, "tp": mapping.tensor, "pp": mapping.pipeline, "dp": mapping.data}
    return [f"{name} = {value}" for name, value in found.items() if getattr(plan, name) not in (0, value)]


def _sharding(plan: PlanInput) -> str:
    """Words on the nearest way to keep the state in which the requested mapping fits."""
    for more in _spread_further(plan):
        trials = _recomputing(replace(plan, **more))
        if any(build_step(trial, mapping).fits for trial in trials for mapping in _mappings(trial)):
            return f"; or {' with '.join(f'{name} = {value}' for name, value in more.items())}"
    return ""


def _spread_further(plan: PlanInput) -> list[dict[str, Any]]:
    """Changes that leave less of the state on each rank, the nearest first."""
    if not plan.whole:
        return [{"zero": zero} for zero in range(plan.zero + 1, 4)]
    ways: list[tuple[bool, dict[str, Any]]] = [
        (plan.optimizer_sharding == "none", {"optimizer_sharding": "zero1"}),
        (plan.optimizer_sharding != FSDP, {"optimizer_sharding": FSDP}),
        (plan.replica_size > 1, {"replica_size": 1}),
    ]
    return [way for further, way in ways if further]


def _mappings(plan: PlanInput) -> Iterator[Mapping3d]:
    model = plan.what
    if plan.pp > model.layers:
        raise ConfigError("pp", plan.pp, f"{plan.model} has {model.layers} layers", f"The nearest valid value is {model.layers}.")
    if plan.tp and model.heads % plan.tp:
        nearest = min((n for n in range(1, model.heads + 1) if model.heads % n == 0), key=lambda n: abs(n - plan.tp))
        raise ConfigError("tp", plan.tp, f"it does not divide the {model.heads} heads", f"The nearest valid value is {nearest}.")
    if plan.tp and plan.pp and plan.dp:
        yield _given(plan)
        return
    one = [1] if plan.whole else []
    tensors = [plan.tp] if plan.tp else one or [n for n in (1, 2, 4, 8) if n <= plan.chip.per_node and model.heads % n == 0]
    pipelines = [plan.pp] if plan.pp else one or [n for n in PIPELINES if n <= model.layers]
    for tensor in tensors:
        for pipeline in pipelines:
            replicas, rest = divmod(plan.gpus, tensor * pipeline)
            if rest == 0 and replicas >= 1 and plan.dp in (0, replicas) and replicas <= _sequences(plan):
                yield Mapping3d(tensor, pipeline, replicas)


def _given(plan: PlanInput) -> Mapping3d:
    try:
        mapping = check_mapping(plan.gpus, plan.tp, plan.pp, plan.dp)
    except ConfigError as error:
        raise ConfigError("dp", plan.dp, error.reason, error.way_out.replace("data =", "dp =")) from error
    if mapping.data > _sequences(plan):
        reason = f"the batch has {_sequences(plan)} micro-batches of {plan.micro_batch} sequence(s), fewer than replicas"
        least = mapping.data * plan.micro_batch * plan.sequence_tokens
        raise ConfigError("dp", mapping.data, reason, f"The nearest valid values are dp = {_sequences(plan)}, or batch_tokens = {least}.")
    return mapping


def _sequences(plan: PlanInput) -> int:
    return int(plan.step_tokens // (plan.sequence_tokens * plan.micro_batch))


def _no_mapping(plan: PlanInput) -> ConfigError:
    tensor, pipeline = plan.tp or 1, plan.pp or 1
    replica = tensor * pipeline
    if _sequences(plan) < 1:
        least = plan.sequence_tokens * plan.micro_batch
        return ConfigError("batch_tokens", plan.step_tokens, "less than one micro-batch", f"The nearest valid value is {least}.")
    if plan.gpus % replica:
        nearest = max(1, round(plan.gpus / replica)) * replica
        reason = f"no whole number of replicas of tp x pp = {replica} GPUs"
        return ConfigError("gpus", plan.gpus, reason, f"The nearest valid value is {nearest}.")
    if plan.dp and plan.dp * replica != plan.gpus:
        reason = f"tp x pp x dp is not {plan.gpus} for any tp and pp"
        return ConfigError("dp", plan.dp, reason, f"The nearest valid value is {plan.gpus // replica}; 0 finds it.")
    widest = max(1, 8 * max(PIPELINES) * _sequences(plan))
    reason = f"the batch of {plan.step_tokens:g} tokens has {_sequences(plan)} micro-batches, too few for so many replicas"
    least = plan.gpus // (8 * 64) * plan.sequence_tokens * plan.micro_batch
    way_out = f"The nearest valid value is {widest}; or batch_tokens = {max(least, 2 * int(plan.step_tokens))}."
    return ConfigError("gpus", plan.gpus, reason, way_out)


def build_step(plan: PlanInput, mapping: Mapping3d) -> MappedStep:
    """Memory and times of one step. Micro-batches and layers are whole: the replica and the stage with most of them set the pace."""
    model, sequence = plan.what, plan.sequence_tokens
    micro_batches = math.ceil(plan.step_tokens / (sequence * plan.micro_batch * mapping.data))
    layers = math.ceil(model.layers / mapping.pipeline)
    chunks = min(plan.interleave, layers) if mapping.pipeline > 1 else 1
    replica_tokens = micro_batches * plan.micro_batch * sequence
    recomputed = 4.0 / 3.0 if plan.recompute == "full" else 1.0
    flop = 6.0 * model.active + 6.0 * model.layers * model.width * sequence
    stage_share = layers / model.layers / mapping.tensor
    compute_s = replica_tokens * flop * stage_share * recomputed / (plan.chip.peak_flop_per_s * plan.kernel_efficiency)
    gather_s, data_s, hidden_s = _exchange(plan, mapping, micro_batches, compute_s, recomputed)
    step = MappedStep(
        mapping=mapping,
        recompute=plan.recompute,
        micro_batches=micro_batches,
        memory=_memory(plan, mapping, layers, micro_batches, chunks),
        usable_bytes=plan.chip.memory_bytes * (1.0 - plan.reserve_share),
        compute_s=compute_s,
        bubble_s=compute_s * (mapping.pipeline - 1) / (chunks * micro_batches),
        tensor_s=_tensor_s(plan, mapping, layers * micro_batches),
        pipeline_s=_pipeline_s(plan, mapping, chunks * micro_batches),
        data_s=data_s,
        gather_s=gather_s,
        straggler_s=compute_s * (1.0 / plan.slowest_speed - 1.0),
        hidden_s=hidden_s,
        tokens=float(replica_tokens * mapping.data),
        mfu=0.0,
    )
    return replace(step, mfu=step.tokens_per_s * flop / (mapping.gpus * plan.chip.peak_flop_per_s))


def _memory(plan: PlanInput, mapping: Mapping3d, layers: int, micro_batches: int, chunks: int) -> RankMemory:
    """State by ZeRO, and activations of the first stage under 1F1B; with interleaved chunks more activations are in flight."""
    model = plan.what
    if plan.whole:
        state = state_of(plan, mapping.data)
    else:
        state = model_state(model.parameters, mapping.tensor, mapping.pipeline, mapping.data, plan.zero)
    layer = layer_activation_bytes(plan.sequence_tokens, model.width, model.heads, plan.micro_batch, mapping.tensor, plan.recompute)
    in_flight = pipeline_activation_bytes(layers * mapping.pipeline, mapping.pipeline, micro_batches, layer)
    more = 1.0 + (mapping.pipeline - 1) / (mapping.pipeline * chunks) if chunks > 1 else 1.0
    return replace(state, activations=in_flight * more)


def _exchange(plan: PlanInput, mapping: Mapping3d, shards: int, compute_s: float, recomputed: float) -> tuple[float, float, float]:
    """(gathers, the gradients' exchange that is not hidden, the part that is)."""
    if plan.whole:
        forward_s = compute_s / (3.0 * recomputed)  # a forward computed again is a part of the backward
        found = exchange_of(plan, mapping.data, shards, forward_s, compute_s - forward_s)
        return found.gathers_s, found.sums_s, found.hidden_s
    data_s = _data_s(plan, mapping)
    hidden_s = min(plan.overlap * data_s, compute_s)
    return 0.0, data_s - hidden_s, hidden_s


def _tensor_s(plan: PlanInput, mapping: Mapping3d, layer_passes: int) -> float:
    """Two all-reduces forward and two backward of every layer and micro-batch, on the node's links where TP fits into the node."""
    if mapping.tensor == 1:
        return 0.0
    inside = mapping.tensor <= plan.chip.per_node
    rate, latency = (plan.chip.link_bytes_per_s, LINK_LATENCY_S) if inside else (plan.net.bytes_per_s, plan.net.latency_s)
    size = tensor_layer_bytes(plan.sequence_tokens, plan.what.width, plan.micro_batch)
    return layer_passes * 4.0 * ring_all_reduce_s(size / 4.0, mapping.tensor, rate, latency)


def _pipeline_s(plan: PlanInput, mapping: Mapping3d, sends: int) -> float:
    """One send forward and one backward of every chunk and micro-batch; each TP rank sends a slice."""
    if mapping.pipeline == 1:
        return 0.0
    size = boundary_bytes(plan.sequence_tokens, plan.what.width, plan.micro_batch) / mapping.tensor
    return 2.0 * sends * message_s(size, plan.net.bytes_per_s, plan.net.latency_s)


def _data_s(plan: PlanInput, mapping: Mapping3d) -> float:
    """Gradients in BF16, once a step: reduce-scatter and all-gather. ZeRO stage 3 gathers the weights once more."""
    size = 2.0 * plan.what.parameters / (mapping.tensor * mapping.pipeline)
    inner = min(mapping.data, max(1, plan.chip.per_node // mapping.tensor)) if mapping.pipeline == 1 else 1
    passes = 1.5 if plan.zero == 3 else 1.0
    return passes * hierarchical_all_reduce_s(
        size, mapping.data, inner, plan.chip.link_bytes_per_s, plan.net.bytes_per_s, LINK_LATENCY_S, plan.net.latency_s
    )
