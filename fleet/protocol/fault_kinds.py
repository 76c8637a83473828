"""The kinds of fault: one row each, from which schema, labels, forecasts, checks, help and docs are derived. Pure.

A new kind is a row in ``TABLE``, and an entry in the ``ACTS`` of the module that carries it out: ``chaos.processes`` for what the agent of
a node does, ``actors.rank.saboteur`` for what a rank's process does to itself, ``chaos.nodes`` for what the launcher does to whole nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from zlib import crc32

from fleet.protocol.types import Fault, Process


class Place(StrEnum):
    """What a fault names as its target, and what an operation is done to: a slot's process, or a whole worker node."""

    RANK = "rank"
    NODE = "node"


class Performer(StrEnum):
    """Which process carries an operation out."""

    AGENT = "the node's agent"
    PROCESS = "the rank's process"
    LAUNCHER = "the launcher"


class Heal(StrEnum):
    """How a fault ends."""

    NEVER = "never: what it took is replaced"
    AFTER = "by an operation, after its duration"
    ITSELF = "by itself, after its duration"
    FOUND = "by itself: what is wrong is computed again, or its rank is replaced"
    REPAIR = "by an operation: the node comes back after `repair`"


class Cost(StrEnum):
    """What a fault may cost."""

    DEATH = "its ranks, at once"
    NODE = "a node, until it is repaired"
    STILL = "ranks that stand still, and are evicted when it lasts"
    SLOW = "steps that take longer"
    WRONG = "a rank whose state is wrong: it is outvoted and evicted"
    AGAIN = "a shard that is computed again"
    BACK = "steps since the last copy or checkpoint, when all ranks go"


class Check(StrEnum):
    """How a checker knows that a fault was survived: see ``fleet.ledger.checkers``."""

    RANKS_LEFT = "ranks_left"
    GOES_ON = "goes_on"
    BITS = "bits"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number that a fault has. By hand it is above ``above`` or at least ``least``, and at most ``most``."""

    name: str
    meaning: str
    default: float
    most: float
    least: float | None = None
    above: float | None = None

    def holds(self, value: float) -> bool:
        """Whether ``value`` is within the bounds; what is no number is not."""
        return (self.least is None or value >= self.least) and (self.above is None or value > self.above) and value <= self.most

    @property
    def bounds(self) -> str:
        """In words."""
        low = f"at least {self.least:g}" if self.least is not None else f"above {self.above:g}"
        return f"{low} and at most {self.most:g}"


DURATION = Parameter("duration_s", "seconds that it lasts", 5.0, 600.0, above=0.0)
SEVERITY = Parameter("severity", "how many times slower: 1 is full speed, 2 half of it", 2.0, 100.0, least=1.0)
PARAMETERS = (DURATION, SEVERITY)
BY_HAND = "by hand"
"""``Fault.component`` of what an operator ordered."""
KNOWN_S = 5.0
"""By then a wrong replica is found out, and its process is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """One kind of fault.

    Attributes:
        name: ``Fault.kind``.
        sentence: what it is, for the docs.
        strikes: what a fault of this kind may name. By hand it is the first.
        performer: who carries it out; None while nobody can: then ``why_not`` says why.
        unit: an operation is done to this, one for each that is hit.
        heal, may_cost: see there.
        blast_radius: who feels it.
        components: rows of the fault catalogue that it stands for.
        survived: the check that tells whether it was survived.
        parameters: which of ``PARAMETERS`` it has.
        told: what was done, with ``{ranks}``, ``{node}``, ``{lasts}`` and ``{severity}``.
        ends: how its ranks' processes end, in words; empty where it ends none.
        shows_as: it is carried out as one of these kinds, drawn by the fault's name.
        in_storm: ``--chaos storm`` has it.
        by_default: chaos plans it though nobody asks for it by name.
        simulated: kinds of trouble that stand for it in ``fleet.simulation``.
    """

    name: str
    sentence: str
    strikes: tuple[Place, ...] = (Place.RANK,)
    performer: Performer | None = None
    why_not: str = ""
    unit: Place = Place.RANK
    heal: Heal = Heal.NEVER
    may_cost: tuple[Cost, ...] = ()
    blast_radius: str
    components: tuple[str, ...] = ()
    survived: Check | None = None
    parameters: tuple[Parameter, ...] = ()
    told: str = "{kind} in {ranks}{lasts}"
    ends: str = ""
    shows_as: tuple[str, ...] = ()
    in_storm: bool = False
    by_default: bool = True
    simulated: tuple[str, ...] = ()

    @property
    def takes_ranks(self) -> bool:
        """Its ranks are as good as lost: all but what is only slower, or is wrong for a moment and computed again."""
        return any(cost in self.may_cost for cost in (Cost.DEATH, Cost.STILL, Cost.WRONG))

    @property
    def lasts(self) -> bool:
        """It has a length of its own."""
        return DURATION in self.parameters

    @property
    def asks_for(self) -> str:
        """What an order or a trace has to name: a slot, a node, or either."""
        return " or ".join("a slot" if place is Place.RANK else "a node" for place in self.strikes)


TABLE = (
    FaultKind(
        name="kill_rank",
        sentence="SIGKILL to the process of a rank.",
        performer=Performer.AGENT,
        may_cost=(Cost.DEATH, Cost.BACK),
        blast_radius="the rank; all ranks where software fails and `lose_all` is set",
        components=("gpu", "hbm", "gpu_sram", "gpu_system_processor", "gpu_thermal", "nic", "software"),
        survived=Check.RANKS_LEFT,
        told="SIGKILL to {ranks}",
        ends="killed (SIGKILL)",
        in_storm=True,
        simulated=("kill", "shard"),
    ),
    FaultKind(
        name="lose_node",
        sentence="SIGKILL to every process of a worker node, as when its power fails.",
        strikes=(Place.NODE,),
        performer=Performer.LAUNCHER,
        unit=Place.NODE,
        heal=Heal.REPAIR,
        may_cost=(Cost.DEATH, Cost.NODE, Cost.BACK),
        blast_radius="all ranks of the node, its agent, and the copies in its memory",
        components=("switch_or_cable", "host_parts", "host_maintenance"),
        survived=Check.RANKS_LEFT,
        told="SIGKILL to all of node {node}, {ranks}",
        ends="killed (SIGKILL) with its node",
        in_storm=True,
        simulated=("lose_node",),
    ),
    FaultKind(
        name="hang",
        sentence="SIGSTOP to the process of a rank, and SIGCONT after its duration.",
        performer=Performer.AGENT,
        heal=Heal.AFTER,
        may_cost=(Cost.STILL,),
        blast_radius="the rank; the others wait for it",
        components=("hang",),
        survived=Check.GOES_ON,
        parameters=(DURATION,),
        told="SIGSTOP to {ranks}{lasts}",
        in_storm=True,
        simulated=("freeze",),
    ),
    FaultKind(
        name="slow",
        sentence="The process of a rank, or those of all ranks of a node, run only a part of the time.",
        strikes=(Place.RANK, Place.NODE),
        performer=Performer.AGENT,
        heal=Heal.ITSELF,
        may_cost=(Cost.SLOW,),
        blast_radius="the rank or node; the others wait for it in every step",
        components=("slow_compute", "slow_network"),
        survived=Check.GOES_ON,
        parameters=(DURATION, SEVERITY),
        told="{ranks} at 1/{severity:g} of its speed{lasts}",
        in_storm=True,
        simulated=("slow",),
    ),
    FaultKind(
        name="flip_weight",
        sentence="One bit of one weight that a rank holds.",
        performer=Performer.PROCESS,
        heal=Heal.FOUND,
        may_cost=(Cost.WRONG,),
        blast_radius="the rank's state",
        survived=Check.BITS,
        simulated=("flip",),
    ),
    FaultKind(
        name="flip_optimizer",
        sentence="One bit of the optimizer's state that a rank holds.",
        performer=Performer.PROCESS,
        heal=Heal.FOUND,
        may_cost=(Cost.WRONG,),
        blast_radius="the rank's state",
        survived=Check.BITS,
        simulated=("flip",),
    ),
    FaultKind(
        name="flip_gradient",
        sentence="One bit of one gradient of one shard. Without `--verify` nobody sees it.",
        performer=Performer.PROCESS,
        heal=Heal.FOUND,
        may_cost=(Cost.AGAIN,),
        blast_radius="the state of all ranks, where it is not seen",
        survived=Check.BITS,
    ),
    FaultKind(
        name="flip_activation",
        sentence="One bit of what the first layer gives to the next, once. Without `--verify` nobody sees it.",
        performer=Performer.PROCESS,
        heal=Heal.FOUND,
        may_cost=(Cost.AGAIN,),
        blast_radius="the state of all ranks, where it is not seen",
        survived=Check.BITS,
    ),
    FaultKind(
        name="nan",
        sentence="One value of one gradient is no number, once.",
        performer=Performer.PROCESS,
        heal=Heal.FOUND,
        may_cost=(Cost.AGAIN,),
        blast_radius="the step",
        survived=Check.GOES_ON,
    ),
    FaultKind(
        name="hang_loop",
        sentence="The training loop of a rank stands still, while its process beats.",
        performer=Performer.PROCESS,
        heal=Heal.AFTER,
        may_cost=(Cost.STILL,),
        blast_radius="the rank; the others wait for it",
        survived=Check.GOES_ON,
        parameters=(DURATION,),
        simulated=("hang",),
    ),
    FaultKind(
        name="hold_gil",
        sentence="The interpreter of a rank is locked: none of its threads runs.",
        performer=Performer.PROCESS,
        heal=Heal.AFTER,
        may_cost=(Cost.STILL,),
        blast_radius="the rank; the others wait for it",
        survived=Check.GOES_ON,
        parameters=(DURATION,),
        simulated=("freeze",),
    ),
    FaultKind(
        name="silent_corruption",
        sentence="One bit of what a rank holds, in weights or optimizer: where it strikes is not published, so the fault's name draws it.",
        performer=Performer.PROCESS,
        heal=Heal.FOUND,
        may_cost=(Cost.WRONG,),
        blast_radius="the rank's state",
        components=("silent_corruption",),
        survived=Check.BITS,
        shows_as=("flip_weight", "flip_optimizer"),
        simulated=("flip",),
    ),
    FaultKind(
        name="lemon_node",
        sentence="A node that fails again and again.",
        strikes=(Place.NODE,),
        why_not="a local cluster's nodes share one machine, of which no part is worse than another",
        blast_radius="the node, again and again",
        components=("lemon_node",),
    ),
    FaultKind(
        name="rack",
        sentence="All nodes of a rack are lost at once.",
        strikes=(Place.NODE,),
        why_not="a local cluster has no racks",
        blast_radius="16 to 72 GPUs",
        components=("rack",),
        by_default=False,
    ),
)
KINDS: Mapping[str, FaultKind] = {kind.name: kind for kind in TABLE}
EXECUTABLE = tuple(kind.name for kind in TABLE if kind.performer is not None)
"""Kinds that have an operation. The others are planned, and suppressed with the reason when they are due."""
KIND_OF_COMPONENT: Mapping[str, str] = {component: kind.name for kind in TABLE for component in kind.components}


def kind_of(name: str) -> FaultKind:
    """The row of a kind. A journal of another version may name one that is not known here: then a row that promises nothing."""
    return KINDS.get(name) or FaultKind(
        name=name, sentence="Not known to this version.", why_not="this version does not know it", blast_radius="not known"
    )


def drawn(fault: Fault) -> FaultKind:
    """What a fault is carried out as: its own kind, or the one that its name draws."""
    kind = kind_of(fault.kind)
    return kind_of(kind.shows_as[sum(fault.id.encode()) % len(kind.shows_as)]) if kind.shows_as else kind


# ---- operations --------------------------------------------------------------------------------------------------------------------------


START, HEAL = "start", "heal"


@dataclass(frozen=True, slots=True)
class Operation:
    """What is to be done for a fault: the one message from the conductor to whoever does it.

    It goes to ``process`` (a kind whose unit is the rank) or to worker node ``node``, by its index. ``fault`` is the fault's id, ``phase``
    is ``START`` or ``HEAL``; ``seed`` draws what the fault leaves open, such as the bit that flips.
    """

    fault: str
    kind: str
    phase: str
    process: Process | None = None
    node: int | None = None
    duration_s: float = 0.0
    severity: float = 1.0
    seed: int = 0

    @property
    def place(self) -> str:
        """The target in words, for refusals."""
        return f"process {self.process.pid} of node {self.process.node}" if self.process is not None else f"node {self.node}"


def operation(fault: Fault, phase: str, *, process: Process | None = None, node: int | None = None) -> Operation:
    """``phase`` of ``fault``, to one target."""
    seed = crc32(fault.id.encode())
    return Operation(fault.id, drawn(fault).name, phase, process, node, fault.duration_s, fault.severity, seed)


Acts = Mapping[tuple[str, str], Callable[[Any, Operation], str | None]]
"""(kind, phase) -> how one performer carries it out; each returns why it was refused, or None."""


def perform(acts: Acts, performer: object, order: Operation) -> str | None:
    """Carry ``order`` out as ``acts`` say. Returns why it was refused, or None."""
    act = acts.get((order.kind, order.phase))
    return act(performer, order) if act is not None else f"{order.phase} of {order.kind}: nobody does that to {order.place} here"


def kinds_table() -> str:
    """The kinds, as a table for the docs."""
    heads = ("kind", "what it is", "strikes", "by", "may cost", "who feels it", "ends", "stands for", "survived when")
    rows = [_cells(kind) for kind in TABLE]
    return "\n".join("| " + " | ".join(row) + " |" for row in (heads, ("---",) * len(heads), *rows)) + "\n"


def _cells(kind: FaultKind) -> tuple[str, ...]:
    by = str(kind.performer) if kind.performer is not None else f"no operation yet: {kind.why_not}"
    ends = str(kind.heal) if kind.performer is not None else ""
    survived = f"`{kind.survived}`" if kind.survived is not None else ""
    places = " or ".join(kind.strikes)
    costs, components = "; ".join(kind.may_cost), ", ".join(f"`{name}`" for name in kind.components)
    return f"`{kind.name}`", kind.sentence, places, by, costs, kind.blast_radius, ends, components, survived
