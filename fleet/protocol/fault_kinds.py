"""The kinds of fault, one row each. Schema, labels, forecasts, checks, help and docs are derived from the rows. Pure.

The rows are in ``fault_kinds.toml``; ``TABLE`` has them. A new kind is a row there, and an entry in the ``ACTS`` of the module that carries
it out:

- ``chaos.processes``: the agent of a node acts on processes;
- ``chaos.links``: agents act on the network;
- ``chaos.daemons``: faults of the processes that keep a run going;
- ``actors.rank.rank_injector``: a rank's process acts on itself;
- ``chaos.nodes``: the launcher acts on whole nodes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from typing import Any

from fleet.protocol import fault_parameters
from fleet.protocol.fault_parameters import DURATION, Parameter
from fleet.protocol.types import Fault


class FaultPlace(StrEnum):
    """The target of a fault or of an operation: a slot's process, a whole worker node, the coordinator or the store. A run has one
    coordinator and one store, so a fault does not name them."""

    RANK = "rank"
    NODE = "node"
    COORDINATOR = "coordinator"
    STORE = "store"

    @property
    def field(self) -> str:
        """The field of a ``Fault`` that names the target; empty for a target that is not named."""
        return {FaultPlace.RANK: "slot", FaultPlace.NODE: "node"}.get(self, "")


class Performer(StrEnum):
    """The process that carries an operation out."""

    AGENT = "the node's agent"
    HOST = "the node's agent, to its host"
    CONFINED = "the node's agent, then the rank's process"
    COORDINATOR = "the coordinator, to its host"
    PROCESS = "the rank's process"
    LINKS = "the agents of all nodes"
    LAUNCHER = "the launcher"


class Heal(StrEnum):
    """How a fault ends."""

    NEVER = "never: lost processes are replaced"
    AFTER = "by an operation, after its duration"
    ITSELF = "by itself, after its duration"
    FOUND = "by itself: the shard is computed again, or the rank is replaced"
    REPAIR = "by an operation: the node comes back after `repair`"


class Cost(StrEnum):
    """A cost that a fault may have."""

    DEATH = "its ranks, at once"
    NODE = "a node, until it is repaired"
    STILL = "ranks that stand still, and are evicted when it lasts"
    SLOW = "steps that take longer"
    WAIT = "time: no rank is lost, and all wait until it is over"
    STARTS = "decisions and starts that are due meanwhile"
    SAVES = "checkpoints that are due meanwhile"
    APART = "a node that is not heard: it is given up when it lasts, or all wait for it (`on_partition`)"
    WRONG = "a rank whose state is wrong: it is outvoted and evicted"
    AGAIN = "a shard that is computed again"
    BACK = "steps since the last copy or checkpoint, when all ranks go"


class Check(StrEnum):
    """The test by which a checker knows that the run survived a fault: see ``fleet.ledger.checkers``."""

    RANKS_LEFT = "ranks_left"
    GOES_ON = "goes_on"
    BITS = "bits"


BY_HAND = "by hand"
"""``Fault.component`` of a fault that an operator ordered."""
KNOWN_S = 5.0
"""Seconds after which a wrong replica has been found, and its process is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """One kind of fault.

    Attributes:
        name: ``Fault.kind``.
        sentence: a description, for the docs.
        targets: the targets that a fault of this kind may name. By hand it is the first.
        performer: the process that carries it out; None where no process can: ``why_not`` says why.
        unit: one operation is done to each of these that is hit.
        heal, may_cost: see there.
        blast_radius: the parts of the run that feel it.
        components: rows of the fault catalogue that it stands for.
        survived: the check that tells whether the run survived it.
        parameters: its rows of ``PARAMETERS``, or others of the same names with bounds of their own.
        summary: a text on the operation, with ``{ranks}``, ``{node}``, ``{lasts}`` and ``{severity}``.
        ends: how its ranks' processes end, in words; empty where it ends none.
        shows_as: it is carried out as one of these kinds, drawn by the fault's name.
        needs_verify: it shows only where shards are computed again (``verify.compute``).
        whole_rack: it is done to every node of the named node's widest failure domain.
        whole_rail: it is done to the ranks at the same place of every node there; of all nodes where no rack is known.
        announced: the run is told before, so that no rank is there any more when it strikes.
        in_storm: ``--chaos storm`` has it.
        by_default: chaos plans it even where no setting names it.
        simulated: kinds of trouble that stand for it in ``fleet.simulation``.
    """

    name: str
    sentence: str
    targets: tuple[FaultPlace, ...] = (FaultPlace.RANK,)
    performer: Performer | None = None
    why_not: str = ""
    unit: FaultPlace = FaultPlace.RANK
    heal: Heal = Heal.NEVER
    may_cost: tuple[Cost, ...] = ()
    blast_radius: str
    components: tuple[str, ...] = ()
    survived: Check | None = None
    parameters: tuple[Parameter, ...] = ()
    summary: str = "{kind} in {ranks}{lasts}"
    ends: str = ""
    shows_as: tuple[str, ...] = ()
    needs_verify: bool = False
    whole_rack: bool = False
    whole_rail: bool = False
    announced: bool = False
    in_storm: bool = False
    by_default: bool = True
    simulated: tuple[str, ...] = ()

    @property
    def takes_ranks(self) -> bool:
        """Whether its ranks are as good as lost. They are not where it only slows them, or where a shard is only computed again."""
        return any(cost in self.may_cost for cost in (Cost.DEATH, Cost.STILL, Cost.APART, Cost.WRONG))

    @property
    def lasts(self) -> bool:
        """Whether it has a duration."""
        return any(parameter.name == DURATION.name for parameter in self.parameters)

    @property
    def asks_for(self) -> str:
        """The place that an order or a trace has to name: a slot, a node, either, or none."""
        return " or ".join(f"a {place.field}" for place in self.targets if place.field) or "no place"


_READ: Mapping[str, Callable[[Any], Any]] = {
    "targets": lambda names: tuple(FaultPlace[name] for name in names),
    "performer": lambda name: Performer[name],
    "unit": lambda name: FaultPlace[name],
    "heal": lambda name: Heal[name],
    "may_cost": lambda names: tuple(Cost[name] for name in names),
    "components": tuple,
    "survived": lambda name: Check[name],
    "parameters": lambda names: tuple(getattr(fault_parameters, name) for name in names),
    "shows_as": tuple,
    "simulated": tuple,
}
"""Readers of the fields that are neither text nor boolean."""


def _row(said: Mapping[str, Any], families: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The fields of one table of the file, over those of its family (``like``)."""
    family = _row(families[said["like"]], families) if "like" in said else {}
    return family | {name: _READ[name](value) if name in _READ else value for name, value in said.items() if name != "like"}


_FILE = tomllib.loads(files("fleet.protocol").joinpath("fault_kinds.toml").read_text(encoding="utf-8"))
TABLE = tuple(FaultKind(**_row(said, _FILE["families"])) for said in _FILE["kinds"])
KINDS: Mapping[str, FaultKind] = {kind.name: kind for kind in TABLE}
EXECUTABLE = tuple(kind.name for kind in TABLE if kind.performer is not None)
"""Kinds that have an operation. The others are planned, and suppressed with the reason when they are due."""
KIND_OF_COMPONENT: Mapping[str, str] = {component: kind.name for kind in TABLE for component in kind.components}


def kind_of(name: str) -> FaultKind:
    """The row of a kind. For a kind of another version, which this version does not know, a row that promises nothing."""
    return KINDS.get(name) or FaultKind(
        name=name, sentence="Not known to this version.", why_not="this version does not know it", blast_radius="not known"
    )


def drawn(fault: Fault) -> FaultKind:
    """The kind by which a fault is carried out: its own, or one of ``shows_as`` that the fault's name draws."""
    kind = kind_of(fault.kind)
    return kind_of(kind.shows_as[sum(fault.id.encode()) % len(kind.shows_as)]) if kind.shows_as else kind
