"""Settings of a run: keyword-only and frozen. Each class checks its values when it is made: no impossible value reaches a process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleet.errors import ConfigError
from fleet.protocol.domains import HOST, check_levels
from fleet.protocol.draws import left_out_of
from fleet.protocol.layouts import LAYOUTS
from fleet.protocol.types import STAGE, Coordinate
from fleet.settings.cost import CostSettings
from fleet.settings.fields import setting, within
from fleet.settings.per_rank import PerRankSettings
from fleet.settings.track import TrackSettings

AXES = (STAGE, "tensor")
"""Of a mesh: ``stage``, whose ranks have layers one after the other, and ``tensor``, whose ranks have parts of the same layers."""

WINDOW_S = 600.0
"""The time in which losses, and view changes for slow ranks, are counted against their limits."""

HANGUP_S = 0.1
"""A node whose agent's connection broke has this long to connect again: an agent that lives does so at once."""

NODES_S = 900.0
"""With ``ask_for_nodes``: a run waits this long for its nodes before it begins."""

RESEND_S = 1.0
"""A message that was not answered is sent again after this long, or after half of the heartbeat's time-out if that is less."""

ORDER = ("heartbeat_s", "quiesce_s", "form_s", "progress_s", "collective_s", "run_s")
"""Time-outs, from the check that must fire first to the one that must fire last."""


def check_order(timeouts: Mapping[str, float], order: Sequence[str] = ORDER) -> None:
    """Refuse time-outs out of order: a slower check would fire first and hide the cause that the quicker one knows.

    Args:
        timeouts: name -> seconds. A run does not use time-outs of ``order`` that are missing, and nothing compares them.
        order: names, shortest first.

    Raises:
        ConfigError: names the first pair that is out of order, or a time-out that is not a positive number.
    """
    used = [name for name in order if name in timeouts]
    for name in used:
        if not timeouts[name] > 0:
            raise ConfigError(f"timeouts.{name}", timeouts[name], "a time-out must be greater than 0 s")
    for short, long in itertools.pairwise(used):
        if not timeouts[short] < timeouts[long]:
            reason = f"must be greater than timeouts.{short} = {timeouts[short]:g}, or it fires first and hides the cause"
            way_out = f"Sane is {' < '.join(used)}: raise {long} above {timeouts[short]:g} s, or lower {short}."
            raise ConfigError(f"timeouts.{long}", timeouts[long], reason, way_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Time-outs. Sane is heartbeat <= node, and heartbeat < quiesce < form < progress < collective < run: none hides a longer one."""

    heartbeat_s: float = setting(3.0, "A rank that is silent for so long is lost.")
    node_s: float = setting(4.0, "A node whose agent is silent for so long is lost.")
    quiesce_s: float = setting(5.0, "How long ranks may take to come out of a step when their view breaks.")
    form_s: float = setting(10.0, "How long a view may take to form.")
    progress_s: float = setting(
        300.0, "The longest time that a rank may go without a step. The time-out that follows the steps stays below it.", live=True
    )
    collective_s: float = setting(
        600.0, "Bound of a wait inside a process group, where no other check ends it earlier. It finds no hang: all ranks wait there."
    )
    start_s: float = setting(60.0, "How long a process may take to start and to join.")
    checkpoint_s: float = setting(120.0, "How long a checkpoint may take to be durable.")
    stall_s: float = setting(600.0, "With on_partition = stall: a node that is silent for so long is still lost.")
    finish_s: float = setting(3600.0, "How long the code behind the loop may take.")
    store_s: float = setting(60.0, "Durable checkpoints may fail for so long before the run says which steps it would lose.")
    run_s: float | None = setting(None, "The run stops in order after so long.", live=True)
    grace_s: float = setting(25.0, "Within so long, a run that has to stop keeps its last commit and ends its processes.")
    notice_s: float = setting(30.0, "A node whose agent gets SIGTERM is expected to end after so long: Kubernetes' default grace period.")

    @property
    def resend_s(self) -> float:
        """A message that was not answered is sent again after so long."""
        return min(RESEND_S, self.heartbeat_s / 2)

    def __post_init__(self) -> None:
        given = {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}
        check_order(given)
        for name, value in given.items():
            if not value > 0:
                raise ConfigError(f"timeouts.{name}", value, "a time-out must be greater than 0 s")
        if self.node_s < self.heartbeat_s:
            reason = f"less than timeouts.heartbeat_s = {self.heartbeat_s}: one late heartbeat would cost the whole node"
            raise ConfigError("timeouts.node_s", self.node_s, reason)
        if self.stall_s < self.node_s:
            raise ConfigError(
                "timeouts.stall_s", self.stall_s, f"less than timeouts.node_s = {self.node_s:g}: no rank would wait for a node"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """How many losses within ``WINDOW_S`` end the run, of those that chaos did not inject. Other limits follow from ``slot``."""

    slot: int = setting(8, "Losses of one slot in 10 minutes that end the run; other limits follow from it.", least=1)
    total: int = setting(64, "Losses in all in 10 minutes that end the run.", least=1)

    def __post_init__(self) -> None:
        within(self, "budgets.")

    @property
    def node(self) -> int:
        """Losses of ranks of one node."""
        return math.ceil(1.5 * self.slot)

    @property
    def shard(self) -> int:
        """Losses of the ranks that computed one shard of one step."""
        return math.ceil(0.375 * self.slot)

    @property
    def slot_fruitless(self) -> int:
        """Losses of one slot with no step committed by the run in between."""
        return math.ceil(0.5 * self.slot)


OWN = "Settings of the policy itself; see the policy."


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySettings:
    """Ranks that train on after a loss."""

    policy: str = setting("in-place", "in-place (survivors go on), restart (of all ranks), or package.module:Class.")
    settings: Mapping[str, Any] = field(default_factory=dict, metadata={"meaning": OWN})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSettings:
    """Which rank computes which shards, and where copies go."""

    policy: str = setting("blocks", "blocks (the fewest partial sums), or package.module:Class.")
    settings: Mapping[str, Any] = field(default_factory=dict, metadata={"meaning": OWN})


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """Times of checkpoints, and the answer to a checkpoint that fails."""

    policy: str = setting("exact", "Interval policy: exact, daly, young, fixed (needs interval_s), or package.module:Class.")
    interval_s: float | None = setting(None, "Time from one durable checkpoint to the next; for policy fixed only.", live=True, above=0)
    peer_interval_s: float | None = setting(
        None, "Time from one copy in other nodes' memory to the next; none: it follows from cost and rate, with every policy.", above=0
    )
    keep: int = setting(3, "How many durable checkpoints are kept, beside the one that the last resume started from.", least=1)
    on_store_failure: str = setting("go-on", "When checkpoints fail for timeouts.store_s: go-on, or stop (in order).")
    settings: Mapping[str, Any] = field(default_factory=dict, metadata={"meaning": OWN})

    def __post_init__(self) -> None:
        if self.on_store_failure not in ("go-on", "stop"):
            way_out = "Choose go-on, or stop (the run ends in order)."
            raise ConfigError("checkpoint.on_store_failure", self.on_store_failure, "unknown", way_out)
        within(self, "checkpoint.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerSettings:
    """Remedies for slow ranks."""

    policy: str = setting("least-loss", "least-loss (the cheapest of tolerate, rebalance, replace and evict), or package.module:Class.")
    enabled: bool = setting(True, "Off: the run tolerates slow ranks.", live=True)
    gain: float = setting(
        0.1, "A remedy must save this share of the cost of tolerating the slow rank: measured slowness wavers.", live=True, least=0, below=1
    )
    changes: int = setting(6, "At most so many view changes because of slow ranks in 10 minutes.", live=True, least=0)
    settings: Mapping[str, Any] = field(default_factory=dict, metadata={"meaning": OWN})

    def __post_init__(self) -> None:
        within(self, "straggler.")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySettings:
    """Checks for silent corruption. 0 turns a check off, and costs nothing."""

    replicas: float = setting(0.01, "Share of a step for comparing digests of the replicated state before each reduction.", least=0, most=1)
    compute: float = setting(0.0, "Share of compute for computing shards again on another rank; 0: off.", least=0, most=1)
    jumps: float = setting(10.0, "Ranks compute a step once more when its loss or gradient is so many spreads above the usual.", least=0)

    def __post_init__(self) -> None:
        within(self, "verify.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Everything that defines a run, but for the train function and chaos."""

    world: int = setting(4, "Ranks that train.", live=True, least=1)
    max_world: int = setting(0, "Most ranks that fleet runs set may let train. The run holds their slots all the time. 0: world.")
    spares: int = setting(0, "Ranks that stand by. Of sharded state each keeps a part.", least=0)
    nodes: int = setting(2, "Worker nodes of the local cluster.", least=1)
    shards: int = setting(16, "Batch shards of each step; fixed for the whole run.")
    min_ranks: int = setting(1, "Wait instead of training with fewer.", least=1)
    on_partition: str = setting(
        "go-on", "When nodes fall silent: go-on (without them), or stall (all ranks wait for them, up to timeouts.stall_s)."
    )
    steps: int = setting(0, "Optimizer steps of the run, in place of the train function's number; 0: the train function's number.", least=0)
    peer_copies: int = setting(1, "Number of other nodes that keep a copy of the state in memory; 0: none.", least=0)
    seed: int = setting(0, "Seed of model, data and chaos.")
    left_out: tuple[str, ...] = setting((), "FIRST:END: no step takes the samples of these steps; see fleet run --skip-steps.")
    reduction: str = setting("tree", "tree (bit-identical) or native (plain all-reduce).")
    optimizer_sharding: str = setting(
        "none", "none; zero1: each rank has a part of the optimizer's state; fsdp: also of the parameters, as fully_shard cuts the model."
    )
    optimizer_copies: int = setting(
        1,
        "With zero1 and fsdp: so many other ranks keep each part, up to 3; 0: any loss goes back to a checkpoint.",
        least=0,
        most=3,
    )
    overlap_cores: float = setting(
        2.0,
        "Without fsdp: cores that a rank needs on a shared machine to send gradients beside its backward; 0: none, inf: never (0014).",
        least=0,
        most=math.inf,
    )
    two_level_sums: bool = setting(
        False, "Without fsdp: ranks of one host (domains: the narrowest) add up gradients before they cross: docs/decisions/0014."
    )
    threads_per_rank: int = setting(1, "Threads that a rank computes with.", least=1)
    form_delay_s: float = setting(0.0, "A delay before survivors go on, in seconds; see fleet experiment rehearse.", least=0)
    domains: tuple[str, ...] = setting(
        (HOST,), "Labels of Ray nodes (or NAME=LABEL) that name domains of failure, from narrow to wide; host: the host. docs/placement.md."
    )
    replica_size: int = setting(1, "So many successive ranks are a group in one domain, with fsdp a replica; 1: no groups.", least=1)
    mesh: Mapping[str, int] = field(
        default_factory=dict, metadata={"meaning": "Axes of ranks that compute a shard together, and their sizes: tensor = 2."}
    )
    storage: str = setting("runs", "Folder or fsspec URL for journals and checkpoints.")
    tls: str = setting("", "Encrypt between hosts: a folder of each host, with ca.pem, cert.pem and key.pem. Empty: off. docs/security.md.")
    ask_for_nodes: bool = setting(
        False, "Ask the autoscaler of a cluster that the run joined for nodes that the run lacks, and release nodes that it does not need."
    )
    preflight: bool = setting(False, "Check each node before its ranks join; see fleet doctor.")
    options: Mapping[str, str] = field(
        default_factory=dict, metadata={"meaning": "The train function reads them as run.options; see --set."}
    )
    timeouts: Timeouts = field(default_factory=Timeouts)
    budgets: Budgets = field(default_factory=Budgets)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    recovery: RecoverySettings = field(default_factory=RecoverySettings)
    placement: PlacementSettings = field(default_factory=PlacementSettings)
    straggler: StragglerSettings = field(default_factory=StragglerSettings)
    verify: VerifySettings = field(default_factory=VerifySettings)
    cost: CostSettings = field(default_factory=CostSettings)
    track: TrackSettings = field(default_factory=TrackSettings)
    per_rank: PerRankSettings = field(default_factory=PerRankSettings)

    @property
    def replica_ranks(self) -> int:
        """So many successive ranks together keep one replica of a sharded model; 1: all ranks of a view keep one."""
        return self.replica_size if self.optimizer_sharding == "fsdp" else 1

    @property
    def group(self) -> int:
        """So many ranks compute a shard together: one at each of the :attr:`coordinates`."""
        return math.prod(self.mesh.values())

    @property
    def staged(self) -> bool:
        """The model is cut into stages, or into one."""
        return STAGE in self.mesh

    @property
    def of_unit(self) -> int:
        """So many ranks compute one stage of a shard together."""
        return self.group // self.mesh.get(STAGE, 1)

    @property
    def coordinates(self) -> tuple[Coordinate, ...]:
        """Of the ranks of a group, the last axis first to change. Without a mesh each rank computes alone, at the empty one."""
        return tuple(tuple(zip(self.mesh, places, strict=True)) for places in itertools.product(*map(range, self.mesh.values())))

    @property
    def replicated(self) -> bool:
        """Each rank has the whole state."""
        return not self.spread and not self.in_columns

    @property
    def in_columns(self) -> bool:
        """Ranks compute shards together, or could: a mesh with stages trains alike with one stage."""
        return self.group > 1 or self.staged

    @property
    def spread(self) -> str:
        """The part of the state that is spread over the ranks; empty where each rank has the whole state."""
        return LAYOUTS[self.optimizer_sharding].spread

    @property
    def slots(self) -> int:
        """The number of slots, for ranks and spares. It does not follow the world size."""
        return self.most + self.spares

    @property
    def most(self) -> int:
        """The largest world that the run may have."""
        return self.max_world or self.world

    def __post_init__(self) -> None:
        within(self)
        if self.max_world and self.world > self.max_world:
            reason = f"more than max_world = {self.max_world}, which is fixed when a run begins"
            raise ConfigError(
                "world", self.world, reason, f"Choose {self.min_ranks} to {self.max_world} ranks, or begin with another max_world."
            )
        self._check_mesh()
        if self.shards * self.group < self.most:
            ranks = f"ranks ({self.most})" if self.group == 1 else f"groups of ranks ({self.most // self.group})"
            raise ConfigError(
                "shards", self.shards, f"fewer batch shards than {ranks}: some ranks would have nothing to compute",
                "Set --shards to a multiple of the largest world you want, and the global batch to a multiple of --shards.",
            )  # fmt: skip
        self._check_stages()
        self._check_groups()
        if self.min_ranks > self.world:
            raise ConfigError("min_ranks", self.min_ranks, f"more than the world of {self.world} ranks: the run could never start")
        if self.reduction not in ("tree", "native"):
            raise ConfigError("reduction", self.reduction, "unknown", "Choose tree (bit-identical) or native (plain all-reduce).")
        if self.on_partition not in ("go-on", "stall"):
            way_out = "Choose go-on, or stall (all ranks wait for silent nodes)."
            raise ConfigError("on_partition", self.on_partition, "unknown", way_out)
        check_levels(self.domains)
        left_out_of(self.left_out)
        if self.tls and self.per_rank.gpus:
            reason = "ranks with GPUs exchange by NCCL, which encrypts nothing"
            raise ConfigError("tls", self.tls, reason, "Train on CPUs, or leave it out and keep the ranks' network to yourself.")
        self._check_sharding()

    def _check_mesh(self) -> None:
        for axis, size in self.mesh.items():
            if axis not in AXES:
                raise ConfigError(f"mesh.{axis}", size, "there is no such axis", f"The axes are {', '.join(AXES)}.")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigError(f"mesh.{axis}", size, "it takes a number of ranks, at least 1", f"Such as mesh.{axis} = 2.")
        for name in ("world", "max_world"):
            if getattr(self, name) % self.group:
                axes = " x ".join(f"{axis}={size}" for axis, size in self.mesh.items())
                reason = f"no multiple of the {self.group} ranks that compute a shard together ({axes})"
                raise ConfigError(name, getattr(self, name), reason, f"Take {self.group} ranks for each replica, or a smaller axis.")
        if not self.in_columns:
            return
        if self.staged and self.optimizer_sharding != "none":
            reason = "the ranks of a stage have all of its state"
            raise ConfigError("optimizer_sharding", self.optimizer_sharding, reason, f"Set it to none, or leave {STAGE} out.")
        together = f"mesh has groups of {self.group} ranks"
        if self.replica_size > 1:
            raise ConfigError("replica_size", self.replica_size, f"{together} already", "Leave replica_size out.")
        if self.reduction == "native":
            raise ConfigError("reduction", self.reduction, f"{together}, whose gradients are summed in fixed order", "Set it to tree.")
        if self.verify.compute:
            reason = f"{together}, and no rank can compute a shard of another group again by itself"
            raise ConfigError("verify.compute", self.verify.compute, reason, "Set it to 0.")

    def _check_stages(self) -> None:
        stages, replicas = self.mesh.get(STAGE, 1), self.world // self.group
        each = self.shards / replicas
        if each < stages:
            waits = (stages - 1) / (each + stages - 1)
            reason = f"{each:g} for each replica, fewer than its {stages} stages: ranks would wait in {waits:.0%} of each step"
            raise ConfigError("shards", self.shards, reason, f"Set --shards to {stages * replicas} or more.")

    def _check_groups(self) -> None:
        for name in ("world", "max_world"):
            if getattr(self, name) % self.replica_size:
                reason = f"does not divide {name} = {getattr(self, name)}: one group would be smaller than the others"
                way_out = f"Choose a divisor of the ranks that train, or a {name} that is a multiple of {self.replica_size}."
                raise ConfigError("replica_size", self.replica_size, reason, way_out)

    def _check_sharding(self) -> None:
        chosen = self.optimizer_sharding
        if chosen not in LAYOUTS:
            way_out = "Choose one of " + "; ".join(f"{kind.name} ({kind.meaning})" for kind in LAYOUTS.values()) + "."
            raise ConfigError("optimizer_sharding", chosen, "unknown", way_out)
        if self.spread and self.reduction == "native":
            reason = "the ranks' chunks are those of the fixed-order reduction, and reduction is native"
            raise ConfigError("optimizer_sharding", chosen, reason, "Set reduction to tree.")
        if chosen == "fsdp" and self.verify.compute:
            reason = 'with optimizer_sharding "fsdp" gradients leave a rank in the backward, and are not there to be compared'
            raise ConfigError("verify.compute", self.verify.compute, reason, "Set it to 0, or optimizer_sharding to none or zero1.")
