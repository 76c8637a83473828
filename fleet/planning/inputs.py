"""The question of a plan, with its assumptions for all that the user does not give."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_type_hints

from fleet.errors import ConfigError
from fleet.laws.hardware import Accelerator, Fabric, accelerator, fabric
from fleet.laws.law import AtLeastOne, Count, CountOrZero, Domain, NonNegative, Positive, PositiveShare, Probability, Share
from fleet.laws.memory import RECOMPUTE
from fleet.laws.models import Model, model
from fleet.laws.registry import find
from fleet.settings.run import RecoverySettings

RECOVERIES = ("in-place", "restart")
AUTO, FSDP = "auto", "fsdp"
SHARDINGS = (AUTO, "none", "zero1", FSDP)
MOST_COPIES = 3
DEFAULT_BATCH_TOKENS = 16_777_216.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    """All inputs of a plan. "0: ..." means that 0 finds the value. Raises ConfigError for impossible inputs."""

    gpus: Annotated[Count, "GPUs that train"] = 16_384
    model: Annotated[str, "model of the registry"] = "llama3-70b"
    hardware: Annotated[str, "accelerator of the registry"] = "h100"
    fabric: Annotated[str, "network between nodes, of the registry"] = "ib-ndr"
    tp: Annotated[CountOrZero, "tensor-parallel ranks; 0: the best that fits"] = 0
    pp: Annotated[CountOrZero, "pipeline stages; 0: the best that fits"] = 0
    dp: Annotated[CountOrZero, "data-parallel replicas; 0: gpus / (tp x pp)"] = 0
    zero: Annotated[CountOrZero, "ZeRO stage, 0 to 3"] = 1
    optimizer_sharding: Annotated[str, "how Fleet's ranks keep the state: none (whole), zero1, fsdp; auto: by zero, in any system"] = AUTO
    optimizer_copies: Annotated[CountOrZero, "with zero1 and fsdp: other ranks that keep each part"] = 1
    replica_size: Annotated[Count, "with fsdp: ranks of a group that is a replica; 1: no groups"] = 1
    parameter_bytes: Annotated[Positive, "with optimizer_sharding: of a kept parameter, of its gradient, and of each moment"] = 4.0
    compute_bytes: Annotated[Positive, "with optimizer_sharding: of a parameter that is gathered for compute"] = 2.0
    moments: Annotated[CountOrZero, "with optimizer_sharding: numbers that the optimizer keeps beside each parameter"] = 2
    exchange_bytes_per_s: Annotated[
        NonNegative, "with optimizer_sharding: measured rate of a rank's exchange; 0: that of the fabric, or of the node's links within it"
    ] = 0.0
    interleave: Annotated[Count, "chunks of layers a pipeline stage holds, as far as it has layers"] = 8
    micro_batch: Annotated[Count, "sequences of one micro-batch"] = 1
    recompute: Annotated[str, "activations computed again: none, selective, full; auto: full where selective does not fit"] = "auto"
    batch_tokens: Annotated[NonNegative, "tokens of one step; 0: as published, or 16 Mi"] = 0.0
    sequence: Annotated[CountOrZero, "tokens of one sequence; 0: the model's"] = 0
    tokens: Annotated[NonNegative, "tokens of the whole run; 0: as published"] = 0.0
    kernel_efficiency: Annotated[PositiveShare, "share of the peak that kernels reach while they run"] = 0.525
    overlap: Annotated[Share, "share of the gradient exchange that hides behind computation"] = 0.8
    slowest_speed: Annotated[PositiveShare, "speed of the slowest rank, of the others' speed"] = 1.0
    reserve_share: Annotated[Probability, "share of memory for buffers and fragmentation"] = 0.08
    gpu_mttf_hours: Annotated[Positive, "mean GPU-hours between interruptions, of all causes"] = 50_000.0
    in_place_share: Annotated[Share, "share of faults that take a rank or a node, and leave replicas of its state"] = 0.835
    durable_share: Annotated[Share, "share of faults that need a checkpoint from the object store"] = 0.014
    recovery: Annotated[str, "in-place (survivors go on) or restart (all ranks start again)"] = RecoverySettings().policy
    detect_s: Annotated[NonNegative, "from a fault to its detection"] = 10.0
    reform_s: Annotated[NonNegative, "new groups among the survivors"] = 15.0
    restart_s: Annotated[NonNegative, "start of all processes after a fault that takes the job"] = 300.0
    replace_s: Annotated[NonNegative, "until a spare has taken a lost rank's place"] = 600.0
    snapshot_bytes_per_s: Annotated[Positive, "copy of a GPU's state to its host, a GPU"] = 25e9
    local_bytes_per_s: Annotated[Positive, "local disks, a node"] = 10e9
    object_bytes_per_s: Annotated[Positive, "object store, all nodes together"] = 100e9
    spares: Annotated[int, "spare nodes; -1: as many as the risk needs"] = -1
    risk: Annotated[Probability, "accepted share of time with more nodes down than spares"] = 0.01
    repair_hours: Annotated[Positive, "until a broken node is back"] = 24.0
    usd_per_gpu_hour: Annotated[NonNegative, "rent of one GPU"] = 2.0
    pue: Annotated[AtLeastOne, "power usage effectiveness"] = 1.12
    g_per_kwh: Annotated[NonNegative, "g CO2 of one kWh"] = 480.0

    def __post_init__(self) -> None:
        for name, domain in _domains().items():
            domain.check(name, getattr(self, name))
        choices = {"recovery": RECOVERIES, "recompute": ("auto", *RECOMPUTE), "optimizer_sharding": SHARDINGS}
        for name, known in choices.items():
            find(name, getattr(self, name), {each: each for each in known})
        self._check_keeping()
        if self.zero > 3:
            raise ConfigError("zero", self.zero, "ZeRO has the stages 0, 1, 2 and 3", "The nearest valid value is 3.")
        if self.spares < -1:
            raise ConfigError("spares", self.spares, "must be at least 0, or -1 for as many as the risk needs", "Use -1.")
        if self.spares == -1 and self.risk <= 0:
            raise ConfigError("risk", self.risk, "no finite number of spares makes the risk 0", "Give a risk greater than 0, such as 0.01.")
        if self.in_place_share + self.durable_share > 1.0:
            left = 1.0 - self.in_place_share
            reason = f"with in_place_share = {self.in_place_share:g} the shares of faults add up to more than 1"
            raise ConfigError("durable_share", self.durable_share, reason, f"The nearest valid value is {left:g}.")
        accelerator(self.hardware), fabric(self.fabric), model(self.model)

    def _check_keeping(self) -> None:
        """Refuse the combinations that a run's settings refuse, too."""
        chosen = self.optimizer_sharding
        if chosen != AUTO and self.optimizer_copies > MOST_COPIES:
            raise ConfigError("optimizer_copies", self.optimizer_copies, "each copy is memory of a rank", "Choose 0 to 3.")
        if self.replica_size > 1 and chosen != FSDP:
            reason = f"a group is a replica of a sharded model, and optimizer_sharding is {chosen}"
            raise ConfigError("replica_size", self.replica_size, reason, "Set optimizer_sharding=fsdp, or replica_size=1.")
        if self.gpus % self.replica_size:
            nearest = max(1, self.gpus // self.replica_size) * self.replica_size
            reason = f"it does not divide the {self.gpus} GPUs into groups"
            raise ConfigError(
                "replica_size", self.replica_size, reason, f"The nearest valid value is gpus = {nearest}; or replica_size = 1."
            )
        for name in ("tp", "pp"):
            if chosen != AUTO and getattr(self, name) > 1:
                reason = f"with optimizer_sharding = {chosen} each rank computes the whole model"
                raise ConfigError(name, getattr(self, name), reason, "The nearest valid value is 1; or leave optimizer_sharding at auto.")

    @property
    def whole(self) -> bool:
        """Whether Fleet keeps the state, and each rank computes the whole model."""
        return self.optimizer_sharding != AUTO

    @property
    def what(self) -> Model:
        """The model."""
        return model(self.model)

    @property
    def chip(self) -> Accelerator:
        """The accelerator."""
        return accelerator(self.hardware)

    @property
    def net(self) -> Fabric:
        """The fabric."""
        return fabric(self.fabric)

    @property
    def nodes(self) -> int:
        """Nodes that hold the GPUs."""
        return -(-self.gpus // self.chip.per_node)

    @property
    def sequence_tokens(self) -> int:
        """Tokens of one sequence."""
        return self.sequence or self.what.sequence

    @property
    def step_tokens(self) -> float:
        """Tokens of one step, before they are rounded to whole sequences a replica."""
        return self.batch_tokens or self.what.batch_tokens or DEFAULT_BATCH_TOKENS

    @property
    def run_tokens(self) -> float:
        """Tokens of the run."""
        return self.tokens or self.what.tokens


@cache
def _hints() -> dict[str, Any]:
    return get_type_hints(PlanInput, include_extras=True)


@cache
def _domains() -> dict[str, Domain]:
    return {name: meta for name, hint in _hints().items() for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, Domain)}


def fields() -> Mapping[str, dataclasses.Field[Any]]:
    """Name -> field, in the order for readers."""
    return {each.name: each for each in dataclasses.fields(PlanInput)}


def parse(name: str, text: str) -> Any:
    """The value of field ``name`` from text. Raises ConfigError for an unknown field or a text of another type."""
    find(f"--set {name}", name, fields())
    kind = getattr(_hints()[name], "__origin__", _hints()[name])
    if kind is str:
        return text
    try:
        value = float(text)
    except ValueError as error:
        raise ConfigError(name, text, "not a number", f"Its default is {fields()[name].default}.") from error
    if kind is int and not value.is_integer():
        raise ConfigError(name, text, "must be a whole number", f"The nearest valid value is {round(value) if abs(value) < 1e18 else 1}.")
    return int(value) if kind is int else value


def parse_pairs(pairs: Iterable[str]) -> dict[str, Any]:
    """``field=value`` texts as keyword arguments of :class:`PlanInput`."""
    found = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError("--set", pair, "not of the form field=value", f"Fields: {', '.join(fields())}.")
        found[name] = parse(name, text)
    return found
