"""Families of simulated runs by seed, in which what is between processes fails, or who keeps the run going: links, stores, daemons.

Each is :func:`fleet.simulation.plan.random_plan` with troubles of its own, beside those of the seed in half of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from fleet.simulation.plan import POINTS, SHARDED_POINTS, Plan, Trouble, random_plan, random_troubles, with_troubles
from fleet.simulation.rng import stream

CLOSES_S = 0.3
"""The kernel sends nothing new on a connection once it has waited for an acknowledgement for about so long."""


def racks_plan(seed: int, *, sharded: bool = False) -> Plan:
    """As :func:`random_plan` on two or three racks of one or two nodes, of which one is lost at once, beside the troubles of the seed.

    Half of those with an even world have groups of two ranks.
    """
    rng, plan = stream(seed, "racks"), random_plan(seed, sharded=sharded)
    rack, racks = rng.choice((1, 2, 2)), rng.choice((2, 2, 3))
    settings = replace(plan.settings, nodes=rack * racks, peer_copies=rng.choice((1, 1, 2)), domains=("rack",))
    if settings.world % 2 == 0 and stream(seed, "groups").random() < 0.5:
        settings = replace(settings, replica_size=2)
    lost, at_s = rng.randrange(racks), rng.uniform(0.5, 6.0)
    ill = [Trouble(kind="lose_node", at_s=at_s, node=rack * lost + node, noticed=rng.random() < 0.5) for node in range(rack)]
    well = [Trouble(kind="join", at_s=at_s + rng.uniform(1.0, 5.0)) for _ in range(rack)]
    plan = replace(plan, settings=settings, rack=rack, capacity=-(-settings.slots // settings.nodes) + rng.choice((0, 1)))
    plan = replace(plan, copy_every_s=rng.choice((0.1, 0.4, 1.5)))
    others = [replace(trouble, node=trouble.node % settings.nodes) for trouble in plan.troubles if trouble.kind != "lose_node"]
    return with_troubles(plan, (*(others if rng.random() < 0.5 else ()), *ill, *well))


def mesh_plan(seed: int) -> Plan:
    """As :func:`random_plan`, with ranks that compute a shard together: two to four of them, in one to three replicas.

    The state of a column is whole on each of its ranks, or spread over them. In half of the seeds a node is announced to go, the world is
    resized, or the run is told to stop.
    """
    rng, plan = stream(seed, "mesh plan"), random_plan(seed)
    size, replicas = rng.choice((2, 2, 2, 3, 4)), rng.choice((1, 2, 2, 3))
    world, spares, nodes = size * replicas, rng.choice((0, 1, 1, 2)), rng.choice((1, 2, 2, 3))
    settings = replace(plan.settings, mesh={"tensor": size}, world=world, spares=spares, nodes=nodes, min_ranks=rng.choice((1, 1, size)))
    settings = replace(settings, peer_copies=rng.choice((0, 0, 1)) if nodes > 1 else 0)
    settings = replace(settings, optimizer_sharding=rng.choice(("none", "zero1", "fsdp")), optimizer_copies=rng.choice((1, 1, 2)))
    asked = rng.choice(("", "", "", "notice", "resize", "stop"))
    settings = replace(settings, max_world=size * (replicas + 1) if asked == "resize" and replicas < 3 else 0)
    plan = replace(plan, settings=settings, capacity=-(-settings.slots // nodes) + rng.choice((0, 0, 1)))
    plan = replace(plan, copy_every_s=rng.choice((0.1, 0.4, 1.5)) if settings.peer_copies else None)
    others = random_troubles(plan, stream(seed, "mesh troubles"))
    match asked:
        case "notice":
            others = (*others, _notice(plan, rng))
        case "resize":
            worlds = [size * rng.randint(1, settings.most // size) for _ in range(rng.choice((1, 2)))]
            others = (*others, *(Trouble(kind="resize", at_s=rng.uniform(0.5, 8.0), world=each) for each in worlds))
        case "stop":
            others = (*others, _somewhen(Trouble(kind="stop"), plan, rng))
    return with_troubles(plan, others)


def stages_plan(seed: int) -> Plan:
    """As :func:`mesh_plan`, with a model that is cut into two to four stages, of one to three ranks each. The state of a stage is whole."""
    plan = mesh_plan(seed)
    ((_, size),) = plan.settings.mesh.items()
    rng = stream(seed, "stages plan")
    settings = replace(plan.settings, mesh={"stage": size}, optimizer_sharding="none", shards=rng.choice((12, 12, 16)))
    troubles = [replace(each, point="backward") if each.point == "collective" else each for each in plan.troubles]
    return replace(plan, settings=settings, troubles=tuple(troubles))


def cut_plan(seed: int, *, sharded: bool = False) -> Plan:
    """As :func:`random_plan` on two to four nodes whose links are cut, beside the troubles of the seed in half of them."""
    rng, plan = stream(seed, "cuts"), random_plan(seed, sharded=sharded)
    nodes = rng.choice((2, 3, 3, 4))
    settings = replace(plan.settings, nodes=nodes, peer_copies=rng.choice((0, 1, 1)), on_partition=rng.choice(("go-on", "stall")))
    plan = replace(plan, settings=settings, capacity=-(-settings.slots // nodes) + rng.choice((0, 1)))
    plan = replace(plan, copy_every_s=rng.choice((0.1, 0.4, 1.5)) if settings.peer_copies else None)
    cuts = [_cut(plan, rng) for _ in range(rng.choice((1, 1, 2, 3)))]
    others = [replace(trouble, node=trouble.node % nodes) for trouble in plan.troubles] if rng.random() < 0.5 else []
    return with_troubles(plan, (*others, *cuts))


def _cut(plan: Plan, rng: random.Random) -> Trouble:
    """Some nodes from the others, at a time or at a point of a rank's loop; or the coordinator alone from all of them."""
    nodes = plan.settings.nodes
    side = tuple(sorted(rng.sample(range(nodes), rng.randint(1, nodes - 1)))) if rng.random() < 0.8 else ()
    duration_s = rng.choice((rng.uniform(0.05, 1.0), rng.uniform(1.0, 4.0), rng.uniform(4.0, 12.0)))
    cut = Trouble(kind="cut", at_s=rng.uniform(0.5, 6.0), nodes=side, with_head=not side or rng.random() < 0.3, duration_s=duration_s)
    points = (*POINTS, *SHARDED_POINTS) if plan.settings.optimizer_sharding == "zero1" else POINTS
    return replace(cut, point=rng.choice(points), step=rng.randrange(plan.steps)) if rng.random() < 0.6 else cut


def links_plan(seed: int, *, sharded: bool = False) -> Plan:
    """Two to four nodes whose links are cut one way, come and go, or are bad, or one rank of which is cut off."""
    rng, plan = stream(seed, "links plan"), random_plan(seed, sharded=sharded)
    plan, others = _on_nodes(plan, rng, rng.choice((2, 3, 3, 4)))
    plan = replace(plan, settings=replace(plan.settings, on_partition=rng.choice(("go-on", "stall"))))
    return with_troubles(plan, (*others, *(_link(plan, rng) for _ in range(rng.choice((1, 1, 2, 3))))))


def stores_plan(seed: int, *, sharded: bool = False) -> Plan:
    """The store is out of reach, refuses or is slow while checkpoints are due, and all ranks may be lost meanwhile."""
    rng, plan = stream(seed, "stores plan"), random_plan(seed, sharded=sharded)
    plan, others = _on_nodes(plan, rng, max(2, plan.settings.nodes))
    plan = replace(plan, save_every_s=rng.choice((0.3, 0.5, 1.5)))
    ill = [_store(plan, rng) for _ in range(rng.choice((1, 2, 2, 3)))]
    if rng.random() < 0.5:  # what is to be read then is a checkpoint in the store, and that is away
        lost = Trouble(kind="kill", at_s=rng.uniform(2.0, 8.0), slots=tuple(range(plan.settings.slots)))
        ill[0] = replace(ill[0], point="", step=0, at_s=rng.uniform(2.0, lost.at_s or 2.0))
        ill.append(lost)
    return with_troubles(plan, (*others, *ill))


def daemons_plan(seed: int, *, sharded: bool = False) -> Plan:
    """The coordinator and agents stand still or are killed, while links are cut in some: old words arrive late."""
    rng, plan = stream(seed, "daemons plan"), random_plan(seed, sharded=sharded)
    plan, others = _on_nodes(plan, rng, rng.choice((1, 2, 2, 3)))
    plan = replace(plan, settings=replace(plan.settings, on_partition=rng.choice(("go-on", "go-on", "stall"))))
    ill = [trouble for _ in range(rng.choice((1, 2, 2, 3))) for trouble in _daemon(plan, rng)]
    return with_troubles(plan, (*others, *ill))


def notices_plan(seed: int, *, sharded: bool = False) -> Plan:
    """Nodes are announced to be taken away, and are, or stay after all; some seeds have spares, some have none."""
    rng, plan = stream(seed, "notices plan"), random_plan(seed, sharded=sharded)
    plan, others = _on_nodes(plan, rng, rng.choice((2, 3, 3, 4)))
    notices = [_notice(plan, rng) for _ in range(rng.choice((1, 1, 2, 3)))]
    return with_troubles(plan, (*others, *notices))


def resizes_plan(seed: int, *, sharded: bool = False) -> Plan:
    """The world is made larger and smaller while the run goes on, within what it was begun with."""
    rng, plan = stream(seed, "resizes plan"), random_plan(seed, sharded=sharded)
    most = min(plan.settings.shards, plan.settings.world + rng.choice((0, 1, 1, 2)))
    plan = replace(plan, settings=replace(plan.settings, max_world=most))
    plan, others = _on_nodes(plan, rng, rng.choice((1, 2, 2, 3)))
    sizes = [rng.randint(plan.settings.min_ranks, most) for _ in range(rng.choice((1, 2, 3, 4)))]
    return with_troubles(plan, (*others, *(Trouble(kind="resize", at_s=rng.uniform(0.5, 8.0), world=size) for size in sizes)))


def stops_plan(seed: int, *, sharded: bool = False) -> Plan:
    """The run is told to stop, while it trains or is made whole again; in half of the seeds it trains long enough not to end before.

    In some the loops of some ranks, or of all, are in something that does not end before the grace is over.
    """
    rng, plan = stream(seed, "stops plan"), random_plan(seed, sharded=sharded)
    plan, others = _on_nodes(plan, rng, rng.choice((1, 2, 2, 3)))
    plan = replace(plan, steps=plan.steps * rng.choice((1, 10)), save_every_s=rng.choice((0.3, 1.5, 1000.0)))
    stop = _somewhen(Trouble(kind="stop"), plan, rng)
    rest = [trouble for trouble in others if trouble.kind != "stop"]
    return with_troubles(plan, (*rest, *_long_loops(plan, stop, stream(seed, "long loops"))))


def ended_plan(seed: int, *, sharded: bool = False) -> Plan:
    """As :func:`random_plan`; the loops end the run before its last step, and in half of the seeds all ranks or some are struck there."""
    rng, plan = stream(seed, "ended plan"), random_plan(seed, sharded=sharded)
    plan = replace(plan, ended_at=rng.randint(1, plan.steps - 1), on_top=rng.random() < 0.5)
    if rng.random() < 0.5:
        return plan
    everyone = range(plan.settings.slots)
    victims = tuple(rng.sample(everyone, rng.choice((1, 1, 2, len(everyone)))))
    point = rng.choice(("ending", "finished", "committed", "behind", "saving", "reducing"))
    kind = rng.choice(("kill", "kill", "freeze", "coordinator"))
    fault = Trouble(kind=kind, point=point, step=plan.ended_at, slot=victims[0], slots=victims[1:], duration_s=rng.uniform(0.2, 3.0))
    return with_troubles(plan, (*plan.troubles, fault))


def _long_loops(plan: Plan, stop: Trouble, rng: random.Random) -> Sequence[Trouble]:
    """A stop, in half of the seeds right after loops have begun something long, or so long after that that they pass for hung."""
    everyone = range(plan.settings.slots)
    slots = rng.sample(everyone, rng.choice((0, 0, 0, 1, len(everyone))))
    if not slots:
        return (stop,)
    at_s = rng.uniform(0.8, 6.0)
    stop = Trouble(kind="stop", at_s=at_s + rng.choice((rng.uniform(0.0, 0.5), rng.uniform(0.0, 2.0), rng.uniform(8.0, 10.5))))
    point = rng.choice(("compute", "compute", "committed"))
    long = [Trouble(kind="hang", point=point, at_s=at_s, slot=slot) for slot in slots]
    ill = rng.choice((
        (), (),
        (Trouble(kind="kill", point="saving", at_s=(stop.at_s or 0.0) + 1.0, slot=rng.choice(slots)),),
        (Trouble(kind="store", at_s=stop.at_s, duration_s=rng.uniform(5.0, 40.0)),),
    ))  # fmt: skip
    return (stop, *long, *ill)


def cold_plan(seed: int, *, sharded: bool = False) -> Plan:
    """The first step of each process takes longer than any time-out: it compiles, say. In half of the seeds nothing else goes wrong."""
    rng, plan = stream(seed, "cold plan"), random_plan(seed, sharded=sharded)
    plan = replace(plan, rehearse_s=rng.choice(((5.0, 15.0), (10.0, 12.0), (12.0, 20.0))))
    return with_troubles(plan, plan.troubles if rng.random() < 0.5 else ())


def gathers_plan(seed: int, *, sharded: bool = True) -> Plan:
    """Always sharded, parameters too, which are gathered on demand: a run of one of the families, and losses while ranks serve."""
    rng = stream(seed, "gathers plan")
    plan = rng.choice((random_plan, random_plan, racks_plan, cut_plan, links_plan, stores_plan, daemons_plan, notices_plan, resizes_plan))(
        seed, sharded=True
    )
    settings = replace(plan.settings, optimizer_sharding="fsdp")
    plan = replace(plan, settings=settings)
    if stream(seed, "replicas").random() < 0.4:
        plan = _in_groups(plan, stream(seed, "replicas plan"))
    ill = [_while_serving(plan, rng) for _ in range(rng.choice((0, 1, 1, 2)))]
    plan = replace(plan, evaluates=stream(seed, "evaluations").choice(((0, False), (1, False), (1, True), (3, True))))
    return with_troubles(plan, (*plan.troubles, *ill))


def _in_groups(plan: Plan, rng: random.Random) -> Plan:
    """Two or three groups of ranks that are replicas of each other; a world that does not divide by them is refused."""
    world, size = rng.choice(((4, 2), (4, 2), (6, 2), (6, 3)))
    most = 6 if plan.settings.max_world else 0
    settings = replace(plan.settings, world=world, max_world=most, replica_size=size if most % size == 0 else 2)
    return replace(plan, settings=settings, capacity=max(plan.capacity, -(-settings.slots // settings.nodes)))


def _while_serving(plan: Plan, rng: random.Random) -> Trouble:
    """A rank that serves or fetches, or is about to say where it serves, is killed or stands still; or nodes are cut off just then."""
    point, step = rng.choice(("gathering", "gathering", "serving", "serving", "serving", "introduced")), rng.randrange(plan.steps)
    slot, duration_s = rng.choice((None, rng.randrange(plan.settings.slots))), rng.choice((rng.uniform(0.01, 0.3), rng.uniform(0.3, 6.0)))
    kind = rng.choice(("kill", "kill", "freeze", "cut"))
    if kind == "cut" and plan.settings.nodes > 1:
        nodes = tuple(rng.sample(range(plan.settings.nodes), 1))
        return Trouble(kind="cut", point=point, step=step, nodes=nodes, duration_s=duration_s, with_head=rng.random() < 0.3)
    return Trouble(kind="freeze" if kind == "cut" else kind, point=point, step=step, slot=slot, duration_s=duration_s)


def overflows_plan(seed: int) -> Plan:
    """Gradients that are not finite, each once: whole replicas, sharded optimizer state and sharded parameters in turn.

    Behind half of them a rank is lost within the vote, and half of the seeds have their other troubles as well.
    """
    rng, sharding = stream(seed, "overflows plan"), ("none", "zero1", "fsdp")[seed % 3]
    plan = random_plan(seed, sharded=sharding != "none")
    plan = replace(plan, settings=replace(plan.settings, optimizer_sharding=sharding))
    ill: list[Trouble] = []
    for step in rng.sample(range(plan.steps), rng.choice((1, 1, 2, 4))):
        slot = rng.choice((None, rng.randrange(plan.settings.slots)))
        ill.append(Trouble(kind="overflow", point="compute", step=step, slot=slot))
        if rng.random() < 0.5:
            point = rng.choice(("reduced", *(("ready", "decided") if sharding != "none" else ())))
            ill.append(Trouble(kind=rng.choice(("kill", "kill", "freeze")), point=point, step=step, duration_s=rng.uniform(0.1, 6.0)))
    return with_troubles(plan, (*(plan.troubles if rng.random() < 0.5 else ()), *ill))


def _notice(plan: Plan, rng: random.Random) -> Trouble:
    lasts_s = rng.choice((rng.uniform(0.1, 2.0), rng.uniform(2.0, 6.0), rng.uniform(6.0, 15.0)))
    trouble = Trouble(kind="notice", node=rng.randrange(plan.settings.nodes), duration_s=lasts_s, withdrawn=rng.random() < 0.2)
    return replace(trouble, at_s=rng.uniform(0.5, 8.0))


def _on_nodes(plan: Plan, rng: random.Random, nodes: int) -> tuple[Plan, Sequence[Trouble]]:
    """``plan`` on so many nodes, and its own troubles there, in half of all seeds."""
    settings = replace(plan.settings, nodes=nodes, peer_copies=rng.choice((0, 1, 1)) if nodes > 1 else 0)
    plan = replace(plan, settings=settings, capacity=-(-settings.slots // nodes) + rng.choice((0, 1)))
    plan = replace(plan, copy_every_s=rng.choice((0.1, 0.4, 1.5)) if settings.peer_copies else None)
    return plan, [replace(trouble, node=trouble.node % nodes) for trouble in plan.troubles] if rng.random() < 0.5 else []


def _somewhen(trouble: Trouble, plan: Plan, rng: random.Random) -> Trouble:
    """At a time, or when a rank is at a point of its loop."""
    points = (*POINTS, *SHARDED_POINTS) if plan.settings.optimizer_sharding == "zero1" else POINTS
    if rng.random() < 0.5:
        return replace(trouble, point=rng.choice(points), step=rng.randrange(plan.steps))
    return replace(trouble, at_s=rng.uniform(0.5, 6.0))


def _lasts_s(rng: random.Random) -> float:
    return rng.choice((rng.uniform(0.05, 1.0), rng.uniform(1.0, 4.0), rng.uniform(4.0, 12.0)))


def _link(plan: Plan, rng: random.Random) -> Trouble:
    nodes = plan.settings.nodes
    side = tuple(sorted(rng.sample(range(nodes), rng.randint(1, nodes - 1)))) if rng.random() < 0.8 else ()
    kind = rng.choice(("one_way", "one_way", "one_way", "flap", "flap", "isolate_rank", "bad_link", "bad_link"))
    trouble = Trouble(kind=kind, nodes=side, with_head=not side or rng.random() < 0.3, duration_s=_lasts_s(rng))
    match kind:
        case "one_way":
            into = rng.random() < 0.4
            trouble = replace(trouble, into=into, closes_s=rng.choice((CLOSES_S, None)) if not into else CLOSES_S)
        case "isolate_rank":
            trouble = replace(trouble, nodes=(), with_head=False, slot=rng.choice((None, rng.randrange(plan.settings.slots))))
        case "bad_link":
            delay_s, loss = rng.choice(((0.05, 0.0), (0.3, 0.0), (0.8, 0.0), (0.0, 0.05), (0.0, 0.3)))
            trouble = replace(trouble, delay_s=delay_s, loss=loss)
    trouble = _somewhen(trouble, plan, rng)
    return trouble if trouble.point or trouble.slot is not None or kind != "isolate_rank" else replace(trouble, slot=0)


def _store(plan: Plan, rng: random.Random) -> Trouble:
    kind = rng.choice(("store_gone", "store_gone", "store_refuses", "store_slow"))
    return _somewhen(Trouble(kind=kind, duration_s=_lasts_s(rng), delay_s=rng.choice((0.5, 2.0, 5.0))), plan, rng)


def _daemon(plan: Plan, rng: random.Random) -> list[Trouble]:
    """One of them, and in some runs what makes its words late: the coordinator is killed while it stands still, or cannot be heard."""
    node, lasts_s = rng.randrange(plan.settings.nodes), _lasts_s(rng)
    kind = rng.choice(("stop_coordinator", "stop_coordinator", "late_words", "coordinator", "stop_agent", "stop_agent", "kill_agent"))
    kills = Trouble(kind="coordinator", duration_s=rng.uniform(0.05, 3.0), after=rng.randrange(6), stale=rng.choice((0, 0, 1, 4)))
    if kind == "coordinator":
        return [_somewhen(kills, plan, rng)]
    if kind == "late_words":
        at_s, silent = rng.uniform(0.8, 6.0), tuple(sorted(rng.sample(range(plan.settings.nodes), rng.randint(1, plan.settings.nodes))))
        cut = Trouble(kind="one_way", at_s=at_s, nodes=silent, into=True, duration_s=lasts_s, closes_s=CLOSES_S)
        return [cut, replace(kills, at_s=at_s + rng.uniform(0.0, min(1.0, lasts_s)))]
    absence_s = min(lasts_s, 8.0) if kind != "kill_agent" else rng.uniform(0.1, 2.5)
    trouble = _somewhen(Trouble(kind=kind, node=node, duration_s=absence_s), plan, rng)
    if kind == "stop_coordinator" and trouble.at_s is not None and rng.random() < 0.4:
        return [trouble, replace(kills, at_s=trouble.at_s + rng.uniform(0.0, trouble.duration_s))]
    return [trouble]
