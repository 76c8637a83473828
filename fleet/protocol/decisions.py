"""A policy suggests, one place enforces: what a policy returns, and the facts that it was decided on.

What code reads of a decision is its ``payload``, one of a closed set of dataclasses; ``fields`` are the same figures as people see them in
reports. A policy of one's own gives :class:`Figures`, which nothing reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fleet.protocol.causes import EndWhy, GatherWhy
from fleet.protocol.codec import Tagged

RecoveryAction = Literal[
    "gather", "wait", "form", "grow", "restart", "reshare", "enter", "cancel", "go_on", "give_up", "excuse"
]  # fmt: skip
StragglerAction = Literal["accuse", "clear", "unknown", "tolerate", "rebalance", "replace", "evict"]
CorruptionAction = Literal["carry_on", "evict", "recompute", "retry", "stop", "go_back", "begin_anew"]
EndAction = Literal["conclude", "stop", "end"]
OtherAction = Literal["set", "keep", "save", "warn", "recovered", "keep_out", "admit", "leave", "stay", "released"]
PlacementAction = Literal["loosen", "meet", "lost"]
AskAction = Literal["ask", "came", "withdraw"]
Action = Literal[RecoveryAction, StragglerAction, CorruptionAction, PlacementAction, EndAction, OtherAction, AskAction]


class Payload(Tagged):
    """The figures of one kind of decision: those of its fields that are numbers; what is None is not known."""

    __slots__ = ()

    def figures(self) -> dict[str, float]:
        """As people see them."""
        known = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in known.items() if isinstance(value, (int, float))}


@dataclass(frozen=True, slots=True)
class Figures(Payload):
    """What only people read."""

    values: dict[str, float]

    def figures(self) -> dict[str, float]:
        return dict(self.values)


# ---- recovery ----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gathering(Payload):
    """Which rule has the members leave their view; ``member``: (slot, incarnation) of the one that it is about."""

    why: GatherWhy
    member: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class OfView(Payload):
    """It is about the view of this generation."""

    generation: int


# ---- stragglers --------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Suspect(Payload):
    """A rank, in what it is slow, and the evidence, by the names of the detector's scores."""

    slot: float
    incarnation: float
    score: float
    confidence: float
    since_step: float
    step: float
    kind: str
    evidence: dict[str, float]

    def figures(self) -> dict[str, float]:
        own = {name: getattr(self, name) for name in ("slot", "incarnation", "score", "confidence", "since_step", "step")}
        return own | {f"kind {self.kind}": 1.0} | self.evidence


@dataclass(frozen=True, slots=True)
class StepFigures(Payload):
    """Seconds: of one shard, of the rest of a step; of a step as shards are split, had nothing ever been done, without slowness, and as
    they would be split."""

    shard_s: float
    fixed_s: float
    step_now_s: float
    step_even_s: float
    step_well_s: float
    step_then_s: float | None = None


@dataclass(frozen=True, slots=True)
class Prices(Payload):
    """What each way costs, in expected lost rank-seconds, and what is known of the slowness.

    ``limit``: the view changes that are used up. ``saved``: what the way that is taken costs less than to go on as now. ``speeds``: of the
    ranks, by (slot, incarnation), that are not of full speed and get fewer shards. ``shunned``: nodes, and until when they stay out.
    """

    costs: dict[str, float]
    slowdown: float = 1.0
    slow_ranks: float | None = None
    expected_left_s: float | None = None
    elapsed_s: float | None = None
    spares: float | None = None
    changes: float | None = None
    limit: float | None = None
    saved: float | None = None
    steps: StepFigures | None = None
    speeds: tuple[tuple[tuple[int, int], float], ...] = ()
    shunned: tuple[tuple[str, float], ...] = ()

    def figures(self) -> dict[str, float]:
        names = ("slowdown", "slow_ranks", "expected_left_s", "elapsed_s", "spares", "changes", "limit", "saved")
        known = {name: value for name in names if (value := getattr(self, name)) is not None}
        speeds = {f"speed {slot}.{incarnation}": speed for (slot, incarnation), speed in self.speeds}
        shunned = {f"shun {node}": until_s for node, until_s in self.shunned}
        steps = self.steps.figures() if self.steps is not None else {}
        return {f"cost_{way}": cost for way, cost in self.costs.items()} | known | steps | speeds | shunned


# ---- corruption --------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TakenBack(Payload):
    """Ranks differed in the view ``generation``, at ``found``; no checkpoint from ``doubted`` to there is used. States are (history, step).

    ``resumed``: the step that the run goes on from; None where chaos has made the ranks differ.
    """

    generation: int
    found: tuple[int, int]
    doubted: tuple[int, int]
    resumed: int | None
    others: dict[str, float]

    def figures(self) -> dict[str, float]:
        (history, found), (suspected_history, suspected_step) = self.found, self.doubted
        own: dict[str, float] = {
            "generation": self.generation, "history": history, "found": found,
            "doubted_history": suspected_history, "doubted_step": suspected_step,
        }  # fmt: skip
        return self.others | own | ({} if self.resumed is None else {"resumed": self.resumed})


# ---- the rest ----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Concluded(Payload):
    """All members of the view ``generation`` have the last state; ``kept``: it is durable."""

    generation: float
    kept: bool

    def figures(self) -> dict[str, float]:
        return {"generation": self.generation, "kept": float(self.kept)}


@dataclass(frozen=True, slots=True)
class GoneBack(Payload):
    """Its user has the run go back to the checkpoint of ``step`` of ``history``, and from there on leave out what ``left_out`` says.

    ``left_out`` is all that is left out then, as the setting has it. ``asked`` tells this word from others: it holds once.
    """

    history: int
    step: int
    left_out: tuple[str, ...]
    asked: str


@dataclass(frozen=True, slots=True)
class LoopEnded(Payload):
    """The loop of a rank, ``member`` by slot and incarnation, has ended the run behind this state."""

    history: int
    step: int
    member: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Stopping(Payload):
    """The run is to end in order."""

    why: EndWhy


@dataclass(frozen=True, slots=True)
class SettingTo(Payload):
    """The user has changed a setting; on and off are 1 and 0."""

    key: str
    value: float

    def figures(self) -> dict[str, float]:
        return {self.key: self.value}


@dataclass(frozen=True, slots=True)
class TimeOut(Payload):
    """The progress time-out that holds, the one before, and the steps that it follows."""

    steps: float
    progress_s: float
    present_s: float
    quantile_s: float | None = None
    wanted_s: float | None = None


@dataclass(frozen=True, slots=True)
class Interval(Payload):
    """How often a level of checkpoints is due, and why: see ``policies.interval``."""

    interval_s: float
    blocked_s: float | None = None
    latency_s: float | None = None
    rate_per_s: float | None = None
    events: float | None = None
    exposure_s: float | None = None


@dataclass(frozen=True, slots=True)
class StoreOutage(Payload):
    """Checkpoints fail since then, for so long; the newest durable one is so old, and so many steps before the last."""

    since_s: float
    outage_s: float
    away_s: float | None = None
    steps: float | None = None


@dataclass(frozen=True, slots=True)
class Notice(Payload):
    """A node will be taken away at ``until_s`` on the run's clock; None: it stays. ``released``: no view has ranks of it any more."""

    node: str
    until_s: float | None = None
    released: bool = False

    def figures(self) -> dict[str, float]:
        return {} if self.until_s is None else {"until_s": self.until_s}


@dataclass(frozen=True, slots=True)
class Lemon(Payload):
    """What a node did in earlier runs; see ``policies.lemons``."""

    faults: float
    hours: float
    lemon_probability: float
    rate_ratio: float
    factor: float
    certainty: float
    runs: float


# ---- placement ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Split(Tagged):
    """A group that spans several ``domains`` of ``level``; ``within``: the level and the domain that holds it, "" where none does."""

    replica: int
    level: str
    domains: tuple[str, ...]
    within: str = ""


@dataclass(frozen=True, slots=True)
class Beside(Tagged):
    """A view rank all of whose copies lie in ``domain``, as it does itself."""

    rank: int
    level: str
    domain: str


@dataclass(frozen=True, slots=True)
class Lacking(Payload):
    """What a placement lacks of what was asked for; see :mod:`fleet.protocol.topology`."""

    split: tuple[Split, ...] = ()
    beside: tuple[Beside, ...] = ()

    def figures(self) -> dict[str, float]:
        return {"split_replicas": float(len(self.split)), "ranks_beside_their_copies": float(len(self.beside))}


@dataclass(frozen=True, slots=True)
class DomainLost(Payload):
    """All ``nodes`` of a domain are lost within a short time, and ``members`` (slot, incarnation) of the run with them."""

    level: str
    domain: str
    nodes: tuple[str, ...]
    members: tuple[tuple[int, int], ...]
    in_view: int

    def figures(self) -> dict[str, float]:
        return {"nodes": float(len(self.nodes)), "ranks": float(len(self.members)), "in_view": float(self.in_view)}


AnyPayload = (
    Figures | Gathering | OfView | Suspect | Prices | TakenBack | Concluded | SettingTo | TimeOut | Interval | StoreOutage | Notice
    | Stopping | GoneBack | LoopEnded | Lemon | Lacking | DomainLost
)  # fmt: skip


def figures(payload: Payload | None) -> dict[str, float]:
    """Of a decision, as people see them."""
    return {} if payload is None else payload.figures()


@dataclass(frozen=True, slots=True)
class Decision:
    """``action`` is a word from the policy's own vocabulary; ``payload`` holds the figures it was decided on.

    Until ``valid_until_s`` the policy would say the same again if nothing happens; neither a simulator nor a live run need ask before.
    """

    action: Action
    reason: str
    payload: AnyPayload | None = None
    valid_until_s: float = float("inf")

    @property
    def fields(self) -> Mapping[str, float]:
        """The figures, for people."""
        return figures(self.payload)
