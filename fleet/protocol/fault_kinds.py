"""The kinds of fault: one row each, from which schema, labels, forecasts, checks, help and docs are derived. Pure.

A new kind is a row in ``TABLE``, and an entry in the ``ACTS`` of the module that carries it out: ``chaos.processes`` for what the agent of
a node does to processes, ``chaos.links`` for what agents do to the network, ``chaos.daemons`` for what is done to those who keep a run
going, ``actors.rank.rank_injector`` for what a rank's process does to itself, ``chaos.nodes`` for what the launcher does to whole nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from fleet.protocol.fault_parameters import DELAY, DURATION, JITTER, LOSS, NOTICE, RATE, SEVERITY, STOPPED, WRITTEN, Parameter
from fleet.protocol.types import Fault


class FaultPlace(StrEnum):
    """What a fault names as its target, and what an operation is done to: a slot's process, or a whole worker node. Of the others a run
    has one, so a fault names none."""

    RANK = "rank"
    NODE = "node"
    COORDINATOR = "coordinator"
    STORE = "store"

    @property
    def field(self) -> str:
        """The field of a ``Fault`` that names it; empty for what is not named."""
        return {FaultPlace.RANK: "slot", FaultPlace.NODE: "node"}.get(self, "")


class Performer(StrEnum):
    """Which process carries an operation out."""

    AGENT = "the node's agent"
    HOST = "the node's agent, to its host"
    CONFINED = "the node's agent, then the rank's process"
    COORDINATOR = "the coordinator, to its host"
    PROCESS = "the rank's process"
    LINKS = "the agents of all nodes"
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
    WAIT = "time: nobody is lost, and all wait until it is over"
    STARTS = "what is to be decided or started meanwhile"
    SAVES = "checkpoints that are due meanwhile"
    APART = "a node that is not heard: it is given up when it lasts, or all wait for it (`on_partition`)"
    WRONG = "a rank whose state is wrong: it is outvoted and evicted"
    AGAIN = "a shard that is computed again"
    BACK = "steps since the last copy or checkpoint, when all ranks go"


class Check(StrEnum):
    """How a checker knows that a fault was survived: see ``fleet.ledger.checkers``."""

    RANKS_LEFT = "ranks_left"
    GOES_ON = "goes_on"
    BITS = "bits"


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
        targets: what a fault of this kind may name. By hand it is the first.
        performer: who carries it out; None while nobody can: then ``why_not`` says why.
        unit: an operation is done to this, one for each that is hit.
        heal, may_cost: see there.
        blast_radius: who feels it.
        components: rows of the fault catalogue that it stands for.
        survived: the check that tells whether it was survived.
        parameters: which of ``PARAMETERS`` it has, or others of the same names with bounds of their own.
        summary: what was done, with ``{ranks}``, ``{node}``, ``{lasts}`` and ``{severity}``.
        ends: how its ranks' processes end, in words; empty where it ends none.
        shows_as: it is carried out as one of these kinds, drawn by the fault's name.
        needs_verify: nobody sees it unless what ranks compute is computed again (``verify.compute``).
        whole_rack: it is done to every node of the widest failure domain of the one that it names.
        whole_rail: it is done to the ranks at the same place of every node there; of all nodes where no rack is known.
        announced: the run is told before, so that nobody is there any more when it strikes.
        in_storm: ``--chaos storm`` has it.
        by_default: chaos plans it though nobody asks for it by name.
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
        """Its ranks are as good as lost: all but what is only slower, or is wrong for a moment and computed again."""
        return any(cost in self.may_cost for cost in (Cost.DEATH, Cost.STILL, Cost.APART, Cost.WRONG))

    @property
    def lasts(self) -> bool:
        """It has a length of its own."""
        return any(parameter.name == DURATION.name for parameter in self.parameters)

    @property
    def asks_for(self) -> str:
        """What an order or a trace has to name: a slot, a node, either, or nothing."""
        return " or ".join(f"a {place.field}" for place in self.targets if place.field) or "no place"


_Node = functools.partial(
    FaultKind,
    targets=(FaultPlace.NODE,),
    performer=Performer.LAUNCHER,
    unit=FaultPlace.NODE,
    heal=Heal.REPAIR,
    may_cost=(Cost.DEATH, Cost.NODE, Cost.BACK),
    survived=Check.RANKS_LEFT,
)
"""A row about whole nodes that are gone, and come back."""

_Flip = functools.partial(
    FaultKind, performer=Performer.PROCESS, heal=Heal.FOUND, may_cost=(Cost.WRONG,), blast_radius="the rank's state", survived=Check.BITS
)
"""A row about what is wrong in what a rank holds, or computes."""

_Cut = functools.partial(
    FaultKind,
    targets=(FaultPlace.NODE,),
    performer=Performer.LINKS,
    unit=FaultPlace.NODE,
    heal=Heal.ITSELF,
    may_cost=(Cost.APART,),
    survived=Check.GOES_ON,
    parameters=(DURATION,),
)
"""A row about the links of a node: such rows differ in what passes, and are alike in all else."""

_Away = functools.partial(
    _Cut,
    targets=(FaultPlace.STORE,),
    may_cost=(Cost.SAVES,),
    blast_radius="checkpoints; whoever else of these hosts uses the same store",
)
"""A row about the links to the store."""

_Daemon = functools.partial(
    FaultKind,
    targets=(FaultPlace.COORDINATOR,),
    performer=Performer.COORDINATOR,
    unit=FaultPlace.NODE,
    heal=Heal.ITSELF,
    may_cost=(Cost.STARTS,),
    survived=Check.GOES_ON,
    parameters=(DURATION,),
)
"""A row about a process that keeps the run going, and is no rank."""
_BesideRanks = functools.partial(_Daemon, targets=(FaultPlace.NODE,), performer=Performer.HOST)

TABLE = (
    FaultKind(
        name="kill_rank",
        sentence="SIGKILL to the process of a rank.",
        performer=Performer.AGENT,
        may_cost=(Cost.DEATH, Cost.BACK),
        blast_radius="the rank; all ranks where software fails and `lose_all` is set",
        components=("gpu", "hbm", "gpu_sram", "gpu_system_processor", "gpu_thermal", "nic", "software"),
        survived=Check.RANKS_LEFT,
        summary="SIGKILL to {ranks}",
        ends="killed (SIGKILL)",
        in_storm=True,
        simulated=("kill", "shard"),
    ),
    FaultKind(
        name="out_of_memory",
        sentence="The process of a rank takes memory that it may not have: the kernel kills it. It takes root, and cgroups.",
        performer=Performer.CONFINED,
        may_cost=(Cost.DEATH, Cost.BACK),
        blast_radius="the rank",
        survived=Check.RANKS_LEFT,
        summary="{ranks} out of memory",
        ends="killed for memory (SIGKILL)",
        simulated=("kill",),
    ),
    _Node(
        name="lose_node",
        sentence="SIGKILL to every process of a worker node, as when its power fails.",
        blast_radius="all ranks of the node, its agent, and the copies in its memory",
        components=("switch_or_cable", "host_parts"),
        summary="SIGKILL to all of node {node}, {ranks}",
        ends="killed (SIGKILL) with its node",
        in_storm=True,
        simulated=("lose_node",),
    ),
    _Node(
        name="maintenance",
        sentence="A worker node is taken away, as the run was told before: SIGKILL to every process of it, once its notice is over.",
        may_cost=(Cost.NODE,),
        blast_radius="the ranks of the node, which have left by then",
        components=("host_maintenance",),
        survived=Check.GOES_ON,
        parameters=(NOTICE,),
        summary="node {node} is taken away, {ranks}",
        ends="taken away with its node",
        announced=True,
        simulated=("notice",),
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
        summary="SIGSTOP to {ranks}{lasts}",
        in_storm=True,
        simulated=("freeze",),
    ),
    FaultKind(
        name="slow",
        sentence="The process of a rank, or those of all ranks of a node, run only a part of the time.",
        targets=(FaultPlace.RANK, FaultPlace.NODE),
        performer=Performer.AGENT,
        heal=Heal.ITSELF,
        may_cost=(Cost.SLOW,),
        blast_radius="the rank or node; the others wait for it in every step",
        components=("slow_compute", "slow_network"),
        survived=Check.GOES_ON,
        parameters=(DURATION, SEVERITY),
        summary="{ranks} at 1/{severity:g} of its speed{lasts}",
        in_storm=True,
        simulated=("slow",),
    ),
    _Flip(
        name="flip_weight",
        sentence="A bit of one weight that a rank holds, or, as in most real events, some.",
        simulated=("flip",),
    ),
    _Flip(
        name="flip_optimizer",
        sentence="The same of one number of the optimizer's state.",
        simulated=("flip",),
    ),
    _Flip(
        name="flip_gradient",
        sentence="The same of one gradient of one shard. Without `--verify` nobody sees it.",
        may_cost=(Cost.AGAIN,),
        blast_radius="the state of all ranks, where it is not seen",
        needs_verify=True,
    ),
    _Flip(
        name="flip_activation",
        sentence="The same of what the first layer gives to the next, once. Without `--verify` nobody sees it.",
        may_cost=(Cost.AGAIN,),
        blast_radius="the state of all ranks, where it is not seen",
        needs_verify=True,
    ),
    _Flip(
        name="nan",
        sentence="One value of one gradient is no number, once.",
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
        name="no_descriptors",
        sentence="The process of a rank can open no more files and connections.",
        performer=Performer.PROCESS,
        heal=Heal.AFTER,
        may_cost=(Cost.SAVES,),
        blast_radius="checkpoints that the rank has a part in; the rank, if it has to connect anew meanwhile",
        survived=Check.GOES_ON,
        parameters=(DURATION,),
    ),
    FaultKind(
        name="silent_corruption",
        sentence="The same of what a rank holds, in weights or optimizer: where it strikes is not published, so the fault's name draws it.",
        performer=Performer.PROCESS,
        heal=Heal.FOUND,
        may_cost=(Cost.WRONG,),
        blast_radius="the rank's state",
        components=("silent_corruption",),
        survived=Check.BITS,
        shows_as=("flip_weight", "flip_optimizer"),
        simulated=("flip",),
    ),
    _Cut(
        name="partition",
        sentence="Nothing passes between the run's processes of a node and those of the other nodes and the head: no connection is closed.",
        blast_radius="the node; the others wait for it until it is back, or given up",
        summary="node {node} with {ranks} cut off{lasts}",
        simulated=("cut",),
    ),
    _Cut(
        name="one_way",
        sentence="What the run's processes of a node send to other nodes and the head is lost; what they are sent arrives.",
        blast_radius="the node; the others wait for it until it is back, or given up",
        summary="node {node} with {ranks} not heard{lasts}",
        simulated=("one_way",),
    ),
    _Cut(
        name="lossy_link",
        sentence="A share of the packets between the run's processes of a node and other hosts is lost, each way.",
        heal=Heal.AFTER,
        may_cost=(Cost.SLOW,),
        parameters=(DURATION, LOSS),
        blast_radius="the node; the others wait for it in every step",
        summary="node {node} with {ranks} loses {loss:.1%} of packets{lasts}",
        simulated=("bad_link",),
    ),
    _Cut(
        name="slow_link",
        sentence="Packets between the run's processes of a node and other hosts take longer, each way, and fewer go in a second.",
        heal=Heal.AFTER,
        may_cost=(Cost.SLOW,),
        parameters=(DURATION, DELAY, RATE, JITTER),
        blast_radius="the node; the others wait for it in every step",
        summary="node {node} with {ranks} is {delay_s:g} s further away{lasts}",
        simulated=("bad_link", "slow_link"),
    ),
    _Cut(
        name="isolate_rank",
        sentence="Nothing passes between the process of a rank and other hosts; its node is reached as before.",
        targets=(FaultPlace.RANK,),
        unit=FaultPlace.RANK,
        may_cost=(Cost.STILL,),
        blast_radius="the rank; the others wait for it until it is back, or given up",
        summary="{ranks} cut off{lasts}",
        simulated=("isolate_rank",),
    ),
    _Cut(
        name="rail",
        sentence="Ranks at the same place of each node of a rack are cut off, as when the switch of their rail fails. It takes nodes with "
        "two ranks or more.",
        targets=(FaultPlace.RANK,),
        unit=FaultPlace.RANK,
        may_cost=(Cost.STILL,),
        blast_radius="one rank of each node; the others wait for them until they are back, or given up",
        summary="{ranks} of one rail cut off{lasts}",
        whole_rail=True,
        simulated=("isolate_rank",),
    ),
    _Cut(
        name="isolate_coordinator",
        sentence="Nothing passes between the run's processes of all nodes and the host of the coordinator.",
        targets=(FaultPlace.COORDINATOR,),
        may_cost=(Cost.WAIT,),
        blast_radius="all ranks: they wait",
        summary="the coordinator is cut off{lasts}",
        simulated=("cut", "one_way"),
    ),
    _Away(
        name="store_gone",
        sentence="What the nodes' hosts send to the store is lost, as when it is down. It takes a store with an address.",
        summary="the store is gone{lasts}",
        simulated=("store_gone",),
    ),
    _Away(
        name="store_refuses",
        sentence="The store's connections are refused. It takes a store with an address.",
        summary="the store refuses connections{lasts}",
        simulated=("store_refuses", "store"),
    ),
    _Away(
        name="store_slow",
        sentence="What the nodes' hosts send to the store takes longer, and less goes in a second. It takes a store with an address.",
        heal=Heal.AFTER,
        parameters=(DURATION, DELAY, RATE, JITTER),
        summary="the store is {delay_s:g} s further away{lasts}",
        simulated=("store_slow",),
    ),
    _Away(
        name="store_denies",
        sentence="The store answers 403 to every request, as to credentials that are refused. It takes a store with an address.",
        heal=Heal.AFTER,
        summary="the store refuses credentials{lasts}",
    ),
    _Away(
        name="store_tears",
        sentence="Connections to the store are cut off at any byte of what is sent. It takes a store with an address.",
        heal=Heal.AFTER,
        summary="connections to the store are torn{lasts}",
    ),
    _Cut(
        name="flap",
        sentence="As partition, for a second in every two.",
        blast_radius="the node; the others wait for it",
        summary="node {node} with {ranks} cut off every other second{lasts}",
        simulated=("flap",),
    ),
    _Daemon(
        name="kill_coordinator",
        sentence="SIGKILL to the coordinator; Ray starts it again, and it goes on from its journal.",
        heal=Heal.NEVER,
        parameters=(),
        blast_radius="commits and decisions; ranks compute on for as long as they need none",
        summary="SIGKILL to the coordinator",
        simulated=("coordinator",),
    ),
    _Daemon(
        name="stop_coordinator",
        sentence="SIGSTOP to the coordinator, and SIGCONT after its duration.",
        parameters=(STOPPED,),
        blast_radius="commits and decisions; ranks compute on for as long as they need none",
        summary="SIGSTOP to the coordinator{lasts}",
        simulated=("stop_coordinator",),
    ),
    _Daemon(
        name="stop_gcs",
        sentence="SIGSTOP to the control store of the Ray cluster (GCS), and SIGCONT after its duration. After 60 s Ray gives up.",
        blast_radius="whatever is to be started meanwhile",
        summary="SIGSTOP to Ray's control store{lasts}",
    ),
    _Daemon(
        name="kill_gcs",
        sentence="SIGKILL to the control store of the Ray cluster (GCS). Ray starts none again: the run ends in order before all does.",
        heal=Heal.NEVER,
        parameters=(),
        blast_radius="the cluster, and every job on it",
        summary="SIGKILL to Ray's control store",
    ),
    _Daemon(
        name="kill_controller",
        sentence="SIGKILL to Ray Train's controller, with which all ranks end; they begin again from copies or checkpoints.",
        heal=Heal.NEVER,
        may_cost=(Cost.DEATH, Cost.BACK),
        parameters=(),
        survived=Check.RANKS_LEFT,
        blast_radius="all ranks",
        summary="SIGKILL to Ray Train's controller",
        ends="killed with Ray Train's controller",
    ),
    _Daemon(
        name="stop_controller",
        sentence="SIGSTOP to Ray Train's controller, and SIGCONT after its duration.",
        blast_radius="ranks that are to be replaced meanwhile",
        summary="SIGSTOP to Ray Train's controller{lasts}",
    ),
    _BesideRanks(
        name="kill_agent",
        sentence="SIGKILL to the agent of a node; Ray starts it again. The ranks of the node end with it, and are replaced.",
        heal=Heal.NEVER,
        may_cost=(Cost.DEATH, Cost.BACK),
        parameters=(),
        survived=Check.RANKS_LEFT,
        blast_radius="the ranks of the node, and the copies in its memory",
        summary="SIGKILL to the agent of node {node}, {ranks}",
        ends="killed with the agent of its node",
        simulated=("kill_agent",),
    ),
    _BesideRanks(
        name="stop_agent",
        sentence="SIGSTOP to the agent of a node, and SIGCONT after its duration.",
        may_cost=(Cost.APART,),
        parameters=(STOPPED,),
        blast_radius="the node; the others wait for it until it is back, or given up",
        summary="SIGSTOP to the agent of node {node}, {ranks}{lasts}",
        simulated=("stop_agent",),
    ),
    _BesideRanks(
        name="stop_raylet",
        sentence="SIGSTOP to Ray's daemon on a node, and SIGCONT after its duration. Ray gives the node up when it lasts.",
        blast_radius="whatever is to be started on the node meanwhile",
        summary="SIGSTOP to Ray's daemon on node {node}{lasts}",
    ),
    _BesideRanks(
        name="busy_cores",
        sentence="Every core of a node's host has something else to do, too.",
        may_cost=(Cost.SLOW,),
        blast_radius="the host, and whatever else runs there",
        summary="all cores of the host of node {node} are busy{lasts}",
    ),
    _BesideRanks(
        name="shm_full",
        sentence="/dev/shm of a node's host has no room, where no more than a gibibyte of it was free.",
        may_cost=(Cost.SAVES,),
        blast_radius="copies and checkpoints of the node's ranks, a rank that starts there, and whoever else on the host uses it",
        summary="/dev/shm of node {node} is full{lasts}",
    ),
    _Daemon(
        name="store_full",
        sentence="The store has no room. It takes a folder on a filesystem of its own, at whose root a file `.fleet-may-fill` lies.",
        targets=(FaultPlace.STORE,),
        may_cost=(Cost.SAVES,),
        blast_radius="checkpoints",
        summary="the store is full{lasts}",
    ),
    _Daemon(
        name="disk_slow",
        sentence="Few bytes a second are written to the store's disk. It takes a folder as for `store_full`, on a device of its own.",
        targets=(FaultPlace.STORE,),
        may_cost=(Cost.SAVES,),
        parameters=(DURATION, WRITTEN),
        blast_radius="checkpoints, and the journal where it lies there, too",
        summary="the store's disk is slow{lasts}",
    ),
    FaultKind(
        name="lemon_node",
        sentence="A node that fails again and again.",
        targets=(FaultPlace.NODE,),
        why_not="a local cluster's nodes share one machine, of which no part is worse than another",
        blast_radius="the node, again and again",
        components=("lemon_node",),
    ),
    _Node(
        name="rack",
        sentence="All nodes of a rack are lost at once: of the widest of `domains` that the node is in.",
        blast_radius="16 to 72 GPUs",
        components=("rack",),
        summary="SIGKILL to all of the rack of node {node}, {ranks}",
        ends="killed (SIGKILL) with its rack",
        whole_rack=True,
        simulated=("lose_node",),
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
