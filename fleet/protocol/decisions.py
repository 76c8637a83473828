"""The decision that a policy returns, with its figures. The policy suggests, and the core alone acts.

Code reads the ``payload`` of a decision, one of a closed set of dataclasses. ``fields`` are the same figures for people, in reports. A
user's own policy gives :class:`Figures`, which no code reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fleet.protocol.causes import EndWhy, GatherWhy
from fleet.protocol.codec import Tagged

RecoveryAction = Literal[
    "gather", "wait", "form", "grow", "shrink", "restart", "reshare", "enter", "cancel", "go_on", "give_up", "excuse"
]  # fmt: skip
StragglerAction = Literal["accuse", "clear", "unknown", "tolerate", "rebalance", "replace", "evict"]
CorruptionAction = Literal["carry_on", "evict", "recompute", "retry", "stop", "go_back", "begin_anew"]
EndAction = Literal["conclude", "stop", "end"]
OtherAction = Literal["set", "keep", "save", "warn", "recovered", "keep_out", "admit", "leave", "stay", "released"]
PlacementAction = Literal["loosen", "meet", "lost", "call"]
AskAction = Literal["ask", "came", "withdraw"]
Action = Literal[RecoveryAction, StragglerAction, CorruptionAction, PlacementAction, EndAction, OtherAction, AskAction]


class Payload(Tagged):
    """The figures of one kind of decision: its fields that are numbers. None: not known."""

    __slots__ = ()

    def figures(self) -> dict[str, float]:
        """The figures by name, for people."""
        known = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in known.items() if isinstance(value, (int, float))}


@dataclass(frozen=True, slots=True)
class Figures(Payload):
    """Figures that people alone read."""

    values: dict[str, float]

    def figures(self) -> dict[str, float]:
        return dict(self.values)


# ---- recovery ----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gathering(Payload):
    """The rule by which members leave their view. ``member``: (slot, incarnation) of the member that the rule is about."""

    why: GatherWhy
    member: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class OfView(Payload):
    """The decision is about the view of this generation."""

    generation: int


# ---- stragglers --------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Suspect(Payload):
    """A slow rank, the ``kind`` of its slowness, and the evidence, by the names of the detector's scores."""

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
    """Seconds of one shard, of the rest of a step, and of a whole step in four cases.

    ``step_now_s``: with the present split of shards. ``step_even_s``: with an even split, as if no action had been taken. ``step_well_s``:
    with an even split, if no rank were slow. ``step_then_s``: with the proposed split.
    """

    shard_s: float
    fixed_s: float
    step_now_s: float
    step_even_s: float
    step_well_s: float
    step_then_s: float | None = None


@dataclass(frozen=True, slots=True)
class Prices(Payload):
    """The expected cost of each way, in lost rank-seconds, and the known facts of the slowness.

    ``limit``: the view changes that are used up. ``saved``: the present way's cost less that of the way taken. ``speeds``: by (slot,
    incarnation), the speed of each slow rank, which gets fewer shards. ``shunned``: nodes, and until when they stay out.
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

    ``resumed``: the step from which the run goes on; None where chaos has made the ranks differ.
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
    """The user has the run go back to the checkpoint of ``step`` of ``history``, and leave out the draws ``left_out`` from there on.

    ``left_out`` names all draws that are left out then, in the setting's form. ``asked`` identifies this request, which counts once.
    """

    history: int
    step: int
    left_out: tuple[str, ...]
    asked: str


@dataclass(frozen=True, slots=True)
class LoopEnded(Payload):
    """The loop of rank ``member`` (slot, incarnation) has ended the run after this state."""

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
    """The new progress time-out, the present one, and the number of steps that it was computed from."""

    steps: float
    progress_s: float
    present_s: float
    quantile_s: float | None = None
    wanted_s: float | None = None


@dataclass(frozen=True, slots=True)
class Interval(Payload):
    """The interval between checkpoints of one level, with its reasons: see ``policies.interval``."""

    interval_s: float
    blocked_s: float | None = None
    latency_s: float | None = None
    rate_per_s: float | None = None
    events: float | None = None
    exposure_s: float | None = None


@dataclass(frozen=True, slots=True)
class StoreOutage(Payload):
    """Checkpoints fail since ``since_s``, for ``outage_s``. The newest durable one is ``away_s`` old and ``steps`` behind the last step."""

    since_s: float
    outage_s: float
    away_s: float | None = None
    steps: float | None = None


@dataclass(frozen=True, slots=True)
class Notice(Payload):
    """A node will be taken away at ``until_s`` on the run's clock; None: it stays. ``released``: no view has ranks of the node any more."""

    node: str
    until_s: float | None = None
    released: bool = False

    def figures(self) -> dict[str, float]:
        return {} if self.until_s is None else {"until_s": self.until_s}


@dataclass(frozen=True, slots=True)
class Called(Payload):
    """The spare ``slot``, in this incarnation, takes a coordinate: axes and places in them."""

    slot: int
    incarnation: int
    coordinate: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Lemon(Payload):
    """A node's faults in earlier runs; see ``policies.lemons``."""

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
    """A group that spans several ``domains`` of ``level``. ``within``: level and name of the domain that holds it; "": none does."""

    replica: int
    level: str
    domains: tuple[str, ...]
    within: str = ""


@dataclass(frozen=True, slots=True)
class Beside(Tagged):
    """A view rank in ``domain`` whose copies all lie in the same domain."""

    rank: int
    level: str
    domain: str


@dataclass(frozen=True, slots=True)
class Lacking(Payload):
    """The requirements that a placement does not meet; see :mod:`fleet.protocol.topology`."""

    split: tuple[Split, ...] = ()
    beside: tuple[Beside, ...] = ()

    def figures(self) -> dict[str, float]:
        return {"split_replicas": float(len(self.split)), "ranks_beside_their_copies": float(len(self.beside))}


@dataclass(frozen=True, slots=True)
class DomainLost(Payload):
    """All ``nodes`` of a domain were lost within a short time, and with them ``members`` (slot, incarnation) of the run."""

    level: str
    domain: str
    nodes: tuple[str, ...]
    members: tuple[tuple[int, int], ...]
    in_view: int

    def figures(self) -> dict[str, float]:
        return {"nodes": float(len(self.nodes)), "ranks": float(len(self.members)), "in_view": float(self.in_view)}


AnyPayload = (
    Figures | Gathering | OfView | Suspect | Prices | TakenBack | Concluded | SettingTo | TimeOut | Interval | StoreOutage | Notice
    | Stopping | GoneBack | LoopEnded | Called | Lemon | Lacking | DomainLost
)  # fmt: skip


def figures(payload: Payload | None) -> dict[str, float]:
    """The figures of a decision, for people."""
    return {} if payload is None else payload.figures()


@dataclass(frozen=True, slots=True)
class Decision:
    """``action`` is a word of the policy's own vocabulary. ``payload`` holds the figures behind the decision.

    If no event comes, the policy gives the same decision until ``valid_until_s``. Neither a simulator nor a live run has to ask before.
    """

    action: Action
    reason: str
    payload: AnyPayload | None = None
    valid_until_s: float = float("inf")

    @property
    def fields(self) -> Mapping[str, float]:
        """The figures, for people."""
        return figures(self.payload)
