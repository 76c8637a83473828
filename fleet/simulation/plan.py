"""The plan of one simulated run: its size, its network, and its troubles."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from fleet.protocol.causes import EndWhy
from fleet.settings.run import Budgets, RunSettings, StragglerSettings, Timeouts
from fleet.simulation.rng import stream

POINTS = (
    "building", "forming", "donating", "receiving", "received", "compute", "reducing", "reduced", "mutating", "committed", "entering",
    "saving", "finished", "behind",
)  # fmt: skip
"""Points of a rank's loop at which a trouble can be fired."""

SHARDED_POINTS = ("ready", "decided", "gathering", "advancing", "placing", "placed", "slices")
"""More points with sharded state: within the commit, and while chunks move to their places."""

COLUMN_POINTS = ("collective", "ready", "decided", "advancing")
"""More points where ranks compute a shard together: within it, and within the commit."""

STAGE_POINTS = ("backward", "ready", "decided", "advancing")
"""More points where the model is cut into stages: before the second half of a unit, and within the commit."""

FAST = Timeouts(
    heartbeat_s=1.0, node_s=1.5, stall_s=20.0, quiesce_s=2.0, form_s=4.0, progress_s=8.0, start_s=10.0, checkpoint_s=6.0
)  # fmt: skip
PATIENT = Budgets(slot=2667, total=1000)
IMPATIENT = Budgets(slot=3, total=7)
WEIGHTS = {
    "kill": 12, "point": 18, "freeze": 6, "hang": 2, "lose_node": 4, "partition": 4, "forget": 2, "coordinator": 10, "store": 2, "raise": 2,
    "shard": 2, "stop": 1, "pair": 4, "all": 1,
}  # fmt: skip
"""Weights of the kinds of random trouble."""

BOUND_S = 150.0
"""Seconds after the last trouble in which a run must end."""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """One trouble, at a time, or at a named point of a rank's loop, at ``step`` and ``at_s`` or later.

    Values of ``kind`` for ranks:

    - kill, raise, freeze, hang: a rank that hangs still beats;
    - shard: kills each rank that computes ``shard``; nan: each rank that comes to the point raises;
    - flip: a bit of the rank's state flips; overflow: the rank's next gradient is not finite;
    - slow, slow_link: the victims' compute, or exchange, takes ``severity`` times as long;
    - busy: their compute does, as other programs have their cores;
    - forget: Ray Train takes a living process for dead.

    For nodes and links:

    - lose_node, partition, join;
    - notice: the node will be lost ``duration_s`` later, and this is announced at once;
    - amnesia: the node's agent begins anew, with an empty memory;
    - cut: links between ``nodes`` and the others;
    - one_way: messages from ``nodes`` are held up, or messages to them;
    - flap: a cut for one second of every two;
    - isolate_rank: a cut between the victim's process and all other hosts;
    - bad_link: messages of ``nodes`` are late, or lose packets.

    For the rest of the run:

    - store: it fails; store_gone: no message gets there; store_refuses: it also gives no checkpoint; store_slow;
    - coordinator: it dies; stop_coordinator, stop_agent: they stand still; kill_agent: with its ranks;
    - stop: the user stops the run; resize: the user sets ``world`` ranks.

    Args:
        slot: the victim; None at a point: the first rank that comes there.
        slots: more victims at the same moment.
        nodes: nodes whose links to all others are cut. ``with_head``: the coordinator is on their side, and not on the others'.
        into: messages to the nodes are held up, and not messages from them.
        closes_s: seconds after which a link that is cut one way passes no message the other way either; None: it always does.
        delay_s, loss: largest delay of messages, or of the store's answers; the share of lost packets.
        duration_s: seconds of a freeze, partition, cut, store failure or the coordinator's absence; for a lost node, how long its ranks
            outlive its agent.
        after: the coordinator dies so many instructions later, in the middle of a list if need be.
        stale: number of the journal's last records that are lost with it.
        withdrawn: the announced node stays.
        noticed: the connection breaks at once (node lost or partitioned), or the fault is reported as injected (rank killed).
    """

    kind: str
    at_s: float | None = None
    point: str = ""
    step: int = 0
    slot: int | None = None
    slots: tuple[int, ...] = ()
    node: int = 0
    nodes: tuple[int, ...] = ()
    with_head: bool = False
    into: bool = False
    closes_s: float | None = None
    delay_s: float = 0.0
    loss: float = 0.0
    shard: int = -1
    duration_s: float = 0.0
    after: int = 0
    stale: int = 0
    withdrawn: bool = False
    world: int = 0
    noticed: bool = False
    times: int = 1
    severity: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """``capacity``: ranks per node. As (least, most): ``delay_s`` of the network, ``restart_s`` of Ray Train, ``build_s`` of a rank, and
    ``rehearse_s`` of its first step, in which it loads and compiles.

    ``between_s``: (a number of steps, seconds). After each such number of commits, the loop body runs its own code for these seconds.
    ``evaluates``: (a number of steps, whether all ranks ask). After each such number of commits the first rank evaluates, and needs all
    parameters for that. The other ranks ask for the result and wait, or do not.

    ``ended_at``: the loop ends the run after so many steps; 0: after the last one. It does so behind the commit, or ``on_top`` of the next
    body. ``ended_by``: in these slots alone; (): in all.

    ``jitter``: least and largest time of computing a shard, as a share of ``shard_s``.

    ``rack``: number of nodes in a row that are in one failure domain; 0: domains are not known.

    ``roomless``: slots whose processes have no room for a part of a sharded state while they stand by.

    ``statuses``: the allowed ends of the run. A failed run fails for one of ``failures``.
    """

    seed: int = 0
    settings: RunSettings = field(default_factory=RunSettings)
    steps: int = 10
    capacity: int = 2
    rack: int = 0
    shard_s: float = 0.01
    jitter: tuple[float, float] = (0.5, 1.5)
    delay_s: tuple[float, float] = (0.0005, 0.005)
    fifo: bool = True
    loss: float = 0.0
    duplicates: float = 0.0
    abrupt: bool = False
    restart_s: tuple[float, float] = (0.3, 2.5)
    build_s: tuple[float, float] = (0.1, 1.0)
    rehearse_s: tuple[float, float] = (0.0, 0.0)
    between_s: tuple[int, float] = (0, 0.0)
    evaluates: tuple[int, bool] = (0, False)
    ended_at: int = 0
    on_top: bool = False
    ended_by: tuple[int, ...] = ()
    roomless: tuple[int, ...] = ()
    save_every_s: float = 1.5
    copy_every_s: float | None = None
    troubles: tuple[Trouble, ...] = ()
    statuses: tuple[str, ...] = ("completed",)
    failures: tuple[EndWhy, ...] = ()
    quiet_s: float = 0.0

    @property
    def deadline_s(self) -> float:
        return self.quiet_s + BOUND_S

    @property
    def last(self) -> int:
        """The number of steps of a completed run."""
        return self.ended_at or self.steps

    def ends(self, step: int, slot: int, *, on_top: bool = False) -> bool:
        """Whether the loop in ``slot`` ends the run at this place behind ``step``."""
        return step == self.ended_at > 0 and on_top == self.on_top and (not self.ended_by or slot in self.ended_by)


def small(world: int = 4, spares: int = 0, nodes: int = 2, budgets: Budgets = PATIENT, min_ranks: int = 1) -> RunSettings:
    """Settings of a small run with short time-outs."""
    return RunSettings(
        world=world, spares=spares, nodes=nodes, shards=8, min_ranks=min_ranks, timeouts=FAST, budgets=budgets
    )  # fmt: skip


def random_plan(seed: int, *, sharded: bool = False) -> Plan:
    """The plan of ``seed``: its size, network and troubles, each from its own stream; with ``sharded`` optimizer state or without."""
    rng = stream(seed, "plan")
    world, spares, nodes = rng.randint(2, 5), rng.choice((0, 0, 1)), rng.randint(1, 3)
    capacity = -(-(world + spares) // nodes) + rng.choice((0, 0, 1))
    budgets = IMPATIENT if rng.random() < 0.2 else PATIENT
    settings = small(world, spares, nodes, budgets, min_ranks=rng.choice((1, 1, 1, 2)))
    if sharded:
        settings = replace(settings, optimizer_sharding="zero1", optimizer_copies=rng.choice((0, 1, 1, 1, 2)))
    steps = rng.randint(10, 40)
    plan = Plan(
        seed=seed,
        settings=settings,
        steps=steps,
        capacity=capacity,
        abrupt=rng.random() < 0.2,
        shard_s=rng.choice((0.01, 0.02, 0.05)),
        restart_s=rng.choice(((0.1, 0.5), (0.3, 2.5))),
        build_s=rng.choice(((0.01, 0.1), (0.1, 1.0))),
        save_every_s=rng.choice((0.5, 1.5, 6.0, 1000.0)),
    )
    if sharded and spares and stream(seed, "room").random() < 0.25:
        plan = replace(plan, roomless=(settings.slots - 1,))
    plan = _with_network(plan, stream(seed, "network plan"))
    plan, more = _with_copies(plan, stream(seed, "copies"))
    return with_troubles(plan, random_troubles(plan, stream(seed, "troubles")) + more)


def _with_copies(plan: Plan, rng: random.Random) -> tuple[Plan, tuple[Trouble, ...]]:
    """Half of the runs keep copies in memory. Troubles that need such copies come more often there."""
    if plan.settings.nodes == 1 or rng.random() < 0.5:
        return plan, ()
    everyone = tuple(range(plan.settings.slots))
    rare = rng.choice((
        (),
        (Trouble(kind="kill", at_s=rng.uniform(1.0, 6.0), slots=everyone),),
        (Trouble(kind="amnesia", at_s=rng.uniform(0.5, 6.0), node=rng.randrange(plan.settings.nodes)),),
        (Trouble(kind="kill", point=rng.choice(("mutating", "saving", "committed")), step=rng.randrange(plan.steps), slots=everyone),),
    ))  # fmt: skip
    settings = replace(plan.settings, peer_copies=rng.choice((1, 1, 2)))
    return replace(plan, settings=settings, copy_every_s=rng.choice((0.1, 0.4, 1.5))), rare


def slow_plan(seed: int) -> Plan:
    """The plan of ``seed`` with slow ranks and links for a while, and a few other troubles. The run is long enough to detect slowness."""
    rng = stream(seed, "slow plan")
    world, spares, nodes = rng.randint(2, 5), rng.choice((0, 0, 1)), rng.randint(1, 3)
    settings = replace(small(world, spares, nodes), shards=rng.choice((8, 16)), straggler=StragglerSettings(changes=rng.choice((1, 3, 6))))
    plan = Plan(
        seed=seed, settings=settings, steps=rng.randint(120, 220), capacity=-(-(world + spares) // nodes) + 1, shard_s=0.02,
        jitter=rng.choice(((0.97, 1.03), (0.9, 1.1), (0.7, 1.3))), save_every_s=rng.choice((3.0, 1000.0)),
    )  # fmt: skip
    troubles = [_slowness(plan, rng) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
    for kind in rng.sample(("kill", "freeze", "coordinator", "lose_node"), rng.choice((0, 0, 1, 2))):
        at_s, slot, node = rng.uniform(3.0, 15.0), rng.randrange(settings.slots), rng.randrange(settings.nodes)
        troubles.append(Trouble(kind=kind, at_s=at_s, slot=slot, node=node, duration_s=rng.uniform(0.1, 0.9)))
        troubles += [Trouble(kind="join", at_s=at_s + 2.0)] if kind == "lose_node" else []
    return with_troubles(plan, tuple(troubles))


def _slowness(plan: Plan, rng: random.Random) -> Trouble:
    one, everyone = (rng.randrange(plan.settings.slots),), tuple(range(plan.settings.slots))
    return Trouble(
        kind=rng.choice(("slow", "slow", "slow_link")), at_s=rng.uniform(1.0, 15.0), slots=rng.choice((one, one, one, everyone)),
        severity=rng.choice((1.3, 2.0, 4.0, 8.0)), duration_s=rng.choice((1.0, 5.0, 60.0)),
    )  # fmt: skip


def flipped_plan(seed: int, *, sharded: bool = False) -> Plan:
    """As :func:`random_plan` with at least two ranks, and bits flip in the states of some ranks."""
    rng = stream(seed, "flips")
    plan = random_plan(seed, sharded=sharded)
    settings = replace(plan.settings, world=max(2, plan.settings.world), budgets=PATIENT)
    capacity = -(-settings.slots // settings.nodes) + 1
    flips = [_flip(plan, rng, rng.randrange(settings.slots)) for _ in range(rng.choice((1, 1, 2)))]
    others = plan.troubles if rng.random() < 0.6 else ()
    mortal = tuple(trouble for trouble in others if trouble.kind != "shard")  # a shard that kills its ranks never lets a patient run end
    return with_troubles(replace(plan, settings=settings, capacity=capacity), (*mortal, *flips))


def _flip(plan: Plan, rng: random.Random, slot: int) -> Trouble:
    if rng.random() < 0.5:
        return Trouble(kind="flip", at_s=rng.uniform(1.0, 5.0), slot=slot)
    point = rng.choice(("compute", "reducing", "reduced", "committed", "donating", "saving", "finished", "forming"))
    return Trouble(kind="flip", point=point, step=rng.randrange(1, plan.steps), slot=rng.choice((slot, None)))


def with_troubles(plan: Plan, troubles: tuple[Trouble, ...]) -> Plan:
    """``plan`` with these troubles, quiet after the last one that has a time."""
    quiet_s = max((trouble.at_s + trouble.duration_s for trouble in troubles if trouble.at_s is not None), default=0.0)
    kinds = {trouble.kind for trouble in troubles}
    failures = [EndWhy.CRASH_LOOP] if plan.settings.budgets != PATIENT else []
    failures += [EndWhy.TRAIN_RAISED] if kinds & {"raise", "nan"} else []
    if "flip" in kinds:
        failures += [EndWhy.ENDS_DIFFER, EndWhy.UNJUDGED]
    if sum(trouble.kind == "flip" for trouble in troubles) > 1:  # one flip never looks like a mistake of the loop; two at once do
        failures += [EndWhy.LOOP_WRONG]
    statuses = ["completed", *(["stopped"] if "stop" in kinds else []), *(["failed"] if failures else [])]
    return replace(plan, troubles=troubles, statuses=tuple(statuses), failures=tuple(failures), quiet_s=max(quiet_s, 10.0))


def _with_network(plan: Plan, rng: random.Random) -> Plan:
    match rng.choice(("good", "good", "slow", "lossy", "bad")):
        case "slow":
            return replace(plan, delay_s=(0.01, 0.2))
        case "lossy":
            return replace(plan, fifo=False, loss=0.05, duplicates=0.05)
        case "bad":
            return replace(plan, fifo=False, delay_s=(0.001, 0.4), loss=0.15, duplicates=0.1)
    return plan


def random_troubles(plan: Plan, rng: random.Random) -> tuple[Trouble, ...]:
    """Up to eight troubles, of all kinds that ``plan`` can have."""
    troubles: list[Trouble] = []
    for _ in range(rng.choice((0, 1, 2, 3, 4, 5, 6, 8))):
        troubles += _random_trouble(plan, rng)
    return tuple(troubles)


def _random_trouble(plan: Plan, rng: random.Random) -> list[Trouble]:
    settings = plan.settings
    more = (
        *(SHARDED_POINTS if settings.optimizer_sharding == "zero1" else ()),
        *(COLUMN_POINTS if settings.of_unit > 1 else ()),
        *(STAGE_POINTS if settings.staged else ()),
    )
    points = (*POINTS, *more, *more)
    at_s, slot, node = rng.uniform(0.2, 6.0), rng.randrange(settings.slots), rng.randrange(settings.nodes)
    match rng.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))[0]:
        case "kill":
            return [Trouble(kind="kill", at_s=at_s, slot=slot, noticed=rng.random() < 0.3)]
        case "point":
            kind = rng.choice(("kill", "kill", "kill", "freeze", "coordinator"))
            return [Trouble(kind=kind, point=rng.choice(points), step=rng.randrange(plan.steps), slot=rng.choice((slot, None)),
                            duration_s=rng.uniform(0.1, 3.0), after=rng.randrange(6))]  # fmt: skip
        case "freeze":
            return [Trouble(kind="freeze", at_s=at_s, slot=slot, duration_s=rng.choice((rng.uniform(0.1, 0.9), rng.uniform(1.0, 6.0))))]
        case "lose_node":
            lost = Trouble(kind="lose_node", at_s=at_s, node=node, duration_s=rng.choice((0.0, 0.3, 3.0)), noticed=rng.random() < 0.5)
            return [lost, Trouble(kind="join", at_s=at_s + rng.uniform(1.0, 15.0))]
        case "partition":
            return [Trouble(kind="partition", at_s=at_s, node=node, duration_s=rng.uniform(0.2, 5.0), noticed=rng.random() < 0.5)]
        case "coordinator":
            stale = rng.choice((0, 0, 0, 1, 2, 4))
            return [Trouble(kind="coordinator", at_s=at_s, duration_s=rng.uniform(0.05, 3.0), after=rng.randrange(8), stale=stale)]
        case "pair":
            other = rng.randrange(settings.slots)
            return [Trouble(kind="kill", at_s=at_s, slot=slot, slots=(other,)), Trouble(kind="kill", at_s=at_s + 0.05, slot=other)]
        case "all":
            return [Trouble(kind="kill", at_s=at_s, slots=tuple(range(settings.slots)))]
        case "raise":
            nan = rng.random() < 0.5
            times, victim = (10, None) if nan else (1, slot)
            step = rng.randrange(plan.steps)
            return [Trouble(kind="nan" if nan else "raise", point="compute", step=step, slot=victim, times=times)]
        case "hang":
            return [Trouble(kind="hang", point=rng.choice(("compute", "reducing")), step=rng.randrange(plan.steps))]
        case "shard":
            step, shard, times = rng.randrange(plan.steps), rng.randrange(settings.shards), 99 if settings.budgets != PATIENT else 3
            return [Trouble(kind="shard", point="compute", step=step, shard=shard, times=times)]
        case kind:
            return [Trouble(kind=kind, at_s=at_s, slot=slot, duration_s=rng.uniform(0.5, 4.0))]
