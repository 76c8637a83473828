"""Settings of a run: keyword-only, frozen, checked where they are made, so that nothing impossible reaches a process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fleet.errors import ConfigError

ORDER = ("heartbeat_s", "park_s", "form_s", "progress_s", "collective_s", "run_s")
"""Time-outs, from the check that must fire first to the one that must fire last."""


def check_order(timeouts: Mapping[str, float], order: Sequence[str] = ORDER) -> None:
    """Refuse time-outs of which a slower one would fire first and hide what the quicker one knows.

    Args:
        timeouts: name -> seconds. Names of ``order`` that are missing are not used by the run, and not compared.
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
    """Seconds. Sane is heartbeat <= node, and heartbeat < park < form < progress < collective < run: none may be hidden by a shorter one.

    ``hangup_s`` is how long a node whose agent's connection broke has to connect again: an agent that lives does so at once.
    ``progress_s`` is the longest that a rank may take without a step; the time-out follows the steps below that. ``collective_s`` bounds a
    wait inside a process group that nobody ends earlier: it is no sign of a hang, as all wait there for one that is in a long call.
    ``finish_s`` is how long the code behind the loop may take. ``store_s``: durable checkpoints may fail for so long before the run says
    what it would lose, and stops if it was told to. ``run_s``: the run is stopped in order after so long; None: never.
    """

    heartbeat_s: float = 3.0
    node_s: float = 4.0
    park_s: float = 5.0
    form_s: float = 10.0
    progress_s: float = 60.0
    collective_s: float = 600.0
    start_s: float = 60.0
    checkpoint_s: float = 120.0
    resend_s: float = 1.0
    hangup_s: float = 0.1
    finish_s: float = 3600.0
    store_s: float = 60.0
    run_s: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}
        check_order(given)
        for name, value in given.items():
            if not value > 0:
                raise ConfigError(f"timeouts.{name}", value, "a time-out must be greater than 0 s")
        if self.node_s < self.heartbeat_s:
            reason = f"less than timeouts.heartbeat_s = {self.heartbeat_s}: one late heartbeat would cost the whole node"
            raise ConfigError("timeouts.node_s", self.node_s, reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """How many losses that chaos did not inject end the run: by slot, node and (step, shard), and in all, within ``window_s``.

    ``slot_fruitless`` counts losses of one slot with no step committed by the run in between.
    """

    slot: int = 8
    node: int = 12
    shard: int = 3
    total: int = 64
    slot_fruitless: int = 4
    window_s: float = 600.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"budgets.{name}", getattr(self, name), "a budget must be greater than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """``policy``: fixed, young, daly or exact. ``interval_s`` is for fixed only.

    ``peer_interval_s`` fixes the interval of copies in the memory of other nodes; None: it follows from cost and rate, whatever the policy.
    ``on_store_failure``: what happens when durable checkpoints fail for ``timeouts.store_s``: go-on, or stop (the run ends in order).
    """

    policy: str = "exact"
    interval_s: float | None = None
    peer_interval_s: float | None = None
    keep: int = 3
    on_store_failure: str = "go-on"

    def __post_init__(self) -> None:
        if self.on_store_failure not in ("go-on", "stop"):
            reason = "unknown"
            raise ConfigError("on_store_failure", self.on_store_failure, reason, "Choose go-on, or stop (the run ends in order).")


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerSettings:
    """What is done about slow ranks. ``enabled`` False: they are borne.

    Args:
        compute_slowdown, network_slowdown, data_slowdown: own time / the others' from which a rank may be called slow.
        gain: share of what it costs to go on as now that another way must save.
        changes, window_s: so many view changes for slow ranks' sake are made in so many seconds at most.
    """

    enabled: bool = True
    compute_slowdown: float = 1.10
    network_slowdown: float = 1.18
    data_slowdown: float = 1.21
    gain: float = 0.1
    changes: int = 6
    window_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("compute_slowdown", "network_slowdown", "data_slowdown"):
            if not getattr(self, name) > 1:
                raise ConfigError(f"straggler.{name}", getattr(self, name), "a ratio of times: must be greater than 1")
        if not 0 <= self.gain < 1:
            raise ConfigError("straggler.gain", self.gain, "is a share, from 0 to below 1")
        if self.changes < 0:
            raise ConfigError("straggler.changes", self.changes, "must not be below 0")
        if not self.window_s > 0:
            raise ConfigError("straggler.window_s", self.window_s, "must be greater than 0 s")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySettings:
    """What silent corruption is looked for with. 0 turns each off, and costs nothing.

    ``replicas``: before each reduction the ranks compare digests of the state that all of them hold. ``compute``: now and then each rank
    computes a shard of another one again; off unless asked for, as the loop body runs for that shard, too. Both are the share of the time
    of a step that it may take. ``jumps``: a step whose loss or gradient is so many spreads above what is usual is computed once more.
    """

    replicas: float = 0.01
    compute: float = 0.0
    jumps: float = 10.0

    def __post_init__(self) -> None:
        if not 0 <= self.jumps < math.inf:
            raise ConfigError("verify.jumps", self.jumps, "is a number of spreads above the median, or 0 (off)", "The default is 10.")
        for name in ("replicas", "compute"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"verify.{name}", getattr(self, name), "is a share of a step, from 0 (off) to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Everything that defines a run, but for the train function and chaos.

    ``peer_copies``: on how many other nodes the memory keeps a copy of each rank's part of the state; 0: on none.
    ``steps``: how many the run has, whatever the train function says; 0: as it says.
    ``recovery``: in-place, or restart of all ranks after each loss. ``form_delay_s`` is put in before survivors go on (``fleet rehearse``).
    """

    world: int = 4
    spares: int = 0
    nodes: int = 2
    shards: int = 16
    min_ranks: int = 1
    steps: int = 0
    peer_copies: int = 1
    seed: int = 0
    reduction: str = "tree"
    optimizer_sharding: str = "none"
    optimizer_copies: int = 1
    threads_per_rank: int = 1
    recovery: str = "in-place"
    form_delay_s: float = 0.0
    storage: str = "runs"
    preflight: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    timeouts: Timeouts = field(default_factory=Timeouts)
    budgets: Budgets = field(default_factory=Budgets)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    straggler: StragglerSettings = field(default_factory=StragglerSettings)
    verify: VerifySettings = field(default_factory=VerifySettings)

    @property
    def slots(self) -> int:
        return self.world + self.spares

    def __post_init__(self) -> None:
        self._at_least("world", 1)
        self._at_least("spares", 0)
        self._at_least("nodes", 1)
        self._at_least("threads_per_rank", 1)
        self._at_least("min_ranks", 1)
        self._at_least("peer_copies", 0)
        self._at_least("steps", 0)
        if self.shards < self.world:
            raise ConfigError(
                "shards", self.shards, f"fewer batch shards than ranks ({self.world}): some ranks would have nothing to compute",
                "Set shards to a multiple of the largest world size you want.",
            )  # fmt: skip
        if self.min_ranks > self.world:
            raise ConfigError("min_ranks", self.min_ranks, f"more than the world of {self.world} ranks: the run could never start")
        if self.recovery not in ("in-place", "restart"):
            raise ConfigError("recovery", self.recovery, "unknown", "Choose in-place (survivors go on) or restart (of all ranks).")
        if not 0 <= self.form_delay_s < float("inf"):
            raise ConfigError("form_delay_s", self.form_delay_s, "must be finite and at least 0 s")
        if self.reduction not in ("tree", "native"):
            raise ConfigError("reduction", self.reduction, "unknown", "Choose tree (bit-identical) or native (plain all-reduce).")

        self._check_sharding()

    def _check_sharding(self) -> None:
        chosen = self.optimizer_sharding
        if chosen not in ("none", "zero1"):
            reason = "unknown"
            raise ConfigError(
                "optimizer_sharding", chosen, reason, "Choose none, or zero1 (each rank keeps a part of the optimizer's state)."
            )
        if chosen == "zero1" and self.reduction == "native":
            reason = "the ranks' chunks are those of the fixed-order reduction, and reduction is native"
            raise ConfigError("optimizer_sharding", chosen, reason, "Set reduction to tree.")
        if not 0 <= self.optimizer_copies <= 3:
            reason = "each chunk of the optimizer's state is kept by its owner and by up to 3 other ranks"
            raise ConfigError(
                "optimizer_copies", self.optimizer_copies, reason, "Choose 0 to 3; with 0 any loss goes back to a checkpoint."
            )

    def _at_least(self, name: str, least: int) -> None:
        if getattr(self, name) < least:
            raise ConfigError(name, getattr(self, name), f"must be at least {least}")
