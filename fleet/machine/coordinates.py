"""Which process takes which coordinate, where several ranks compute a shard together.

A rank keeps its coordinate as long as it lives, as its modules are built for it. There is a rank at each coordinate for each replica that
the world has room for. A process that comes where one is missing gets its coordinate at once. All others are spares, and have none. When a
rank is lost, the spare that is nearest to the rest of its group is called to its coordinate. It builds its model, and joins like any rank.

Where a run begins with spares, all processes are such at first. Those of a node that has enough for a whole group are called before others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from fleet.machine.candidates import room
from fleet.machine.roster import Rank
from fleet.machine.state import MachineState, Phase
from fleet.protocol.decisions import Called
from fleet.protocol.domains import Place, place_of
from fleet.protocol.instructions import Welcome
from fleet.protocol.probes import probe
from fleet.protocol.records import DecisionMade
from fleet.protocol.topology import shared
from fleet.protocol.types import Coordinate, Member, groups, in_words

POLICY = "mesh"


def of_newcomer(machine: MachineState, slot: int, node: str, claimed: Coordinate) -> Coordinate:
    """The coordinate of a new process in ``slot``: the one that it has from an earlier coordinator, or one at which ranks are missing.

    Of these it is the one that the fewest ranks on its ``node`` have, so that a node with enough ranks has whole groups. Where a run begins
    with spares, it is none yet: see :func:`call`.
    """
    if claimed or not machine.settings.mesh or (machine.view is None and machine.settings.slots > room(machine)):
        return claimed
    here = Counter(rank.member.coordinate for rank in machine.roster.by_slot.values() if rank.process.node == node)
    own = machine.settings.coordinates[slot % machine.settings.group]
    return min(_missing(machine), key=lambda coordinate: (here[coordinate], coordinate != own), default=())


def call(machine: MachineState, now_s: float) -> None:
    """Call spares to coordinates at which ranks are missing."""
    if not machine.settings.mesh or machine.phase in (Phase.CONCLUDE, Phase.END) or machine.liveness.grace_until_s is not None:
        return
    for coordinate, spare in _called(machine, now_s):
        probe("a spare is called to a coordinate")
        member = Member(spare.member.slot, spare.member.incarnation, coordinate)
        reason = f"rank {member} takes {in_words(coordinate)}, at which a rank is missing"
        machine.write(DecisionMade(POLICY, "call", reason, Called(member.slot, member.incarnation, coordinate), now_s))
        spare.member = member
        machine.say(Welcome(member.slot, spare.token, member.incarnation, coordinate))


def _called(machine: MachineState, now_s: float) -> Iterator[tuple[Coordinate, Rank]]:
    """Missing coordinates, and the spares that take them: those of whole groups on one node, then the nearest to each group's rest."""
    roster, every, on_node = machine.roster, machine.settings.coordinates, defaultdict[str, list[Rank]](list)
    for rank in roster.in_order():
        if not rank.member.coordinate and rank.process.node not in roster.leaving:
            on_node[rank.process.node].append(rank)
    missing = _missing(machine) if on_node else []
    for there in on_node.values():
        while len(there) >= len(every) and set(missing) == set(every):
            for coordinate in every:
                missing.remove(coordinate)
                yield coordinate, there.pop(0)
    spares = [rank for there in on_node.values() for rank in there]
    if machine.view is None and len(roster.by_slot) < machine.settings.slots and now_s - roster.came_s < machine.settings.timeouts.start_s:
        return  # the rest of a group may come to its node
    for coordinate in missing[: len(spares)]:
        near = [_place(machine, rank) for rank in _left_alone(machine, coordinate)]
        spare = min(spares, key=lambda rank: -max((len(shared([place, _place(machine, rank)])) for place in near), default=0))
        spares.remove(spare)
        yield coordinate, spare


def replay(machine: MachineState, called: Called) -> None:
    """Take in a call of the journal."""
    member = Member(called.slot, called.incarnation, called.coordinate)
    if (rank := machine.current(member)) is not None:
        rank.member = member


def _missing(machine: MachineState) -> list[Coordinate]:
    """The coordinates at which ranks are missing, or are about to go, as often as they are; those that lack most come first."""
    leaving = machine.roster.leaving
    there = Counter(rank.member.coordinate for rank in machine.roster.by_slot.values() if rank.process.node not in leaving)
    replicas = room(machine) // machine.settings.group
    lacking = {coordinate: replicas - there[coordinate] for coordinate in machine.settings.coordinates}
    found = sorted(((-lack, coordinate) for coordinate, lack in lacking.items() if lack > 0), key=lambda item: item[0])
    return [coordinate for lack, coordinate in found for _ in range(-lack)]


def _left_alone(machine: MachineState, coordinate: Coordinate) -> list[Rank]:
    """The ranks of groups of the present view that lack their member at ``coordinate``."""
    members = machine.view.members if machine.view is not None else ()
    found = list[Rank]()
    for group in groups(members):
        ranks = [(members[rank].coordinate, machine.current(members[rank])) for rank in group]
        if (coordinate, None) in ranks:
            found += [rank for _, rank in ranks if rank is not None]
    return found


def _place(machine: MachineState, rank: Rank) -> Place:
    node = rank.process.node
    return place_of(machine.roster.domains.get(node, ""), node)
