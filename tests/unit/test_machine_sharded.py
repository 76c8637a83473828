"""The decision core with sharded state: the ranks find out whether all of it is there, and say so."""

from __future__ import annotations

from collections.abc import Iterable

from fleet.protocol.causes import Departure, ProcessEnded
from fleet.protocol.events import NodeJoined, Quiesced, Ready, SettingChanged
from fleet.protocol.facts import ProcessLost
from fleet.protocol.instructions import Instruction, Propose, Publish
from fleet.protocol.records import DecisionMade, HistoryBegun
from fleet.protocol.types import StateId
from tests.unit.test_machine import STEP_3, STEP_4, Bench, member, only


def leave(bench: Bench, states: dict[int, StateId], incomplete: Iterable[int]) -> list[Instruction]:
    generation = bench.machine.state.assembly.generation
    why = [Departure.INCOMPLETE if slot in incomplete else Departure.CALLED for slot in states]
    return bench.send(
        *(Quiesced(member(slot), generation, state, False, one) for (slot, state), one in zip(states.items(), why, strict=True))
    )


def three_of_four() -> Bench:
    """Slot 3 is lost; slot 0 has taken a step, for which the others have the sums; the three find some of the state missing."""
    bench = Bench(world=4, optimizer_sharding="zero1", optimizer_copies=0, min_ranks=2).start(STEP_3)
    bench.send(ProcessLost(member(3), ProcessEnded(), at_s=bench.now_s))
    view = only(Publish, leave(bench, {0: STEP_4, 1: STEP_3, 2: STEP_3}, ())).view
    assert (view.state, len(view.members)) == (STEP_4, 3)
    assert not [one for one in leave(bench, {0: STEP_4, 1: STEP_4, 2: STEP_3}, (0, 1)) if isinstance(one, Publish)]
    return bench


def test_a_rank_that_was_late_brings_what_was_missed_and_the_furthest_is_the_donor() -> None:
    """Found by the simulated run cuts 2078400417: only the late rank could be the donor, and it was a step behind."""
    bench = three_of_four()
    bench.join(3, "late", 1)
    bench.send(Quiesced(member(3, 1), 1, STEP_3, False, Departure.IDLE))
    view = only(Publish, bench.after(0.1)).view
    assert view.state == STEP_4
    assert view.members[view.donor] in {member(0), member(1)}
    assert not bench.of(HistoryBegun)


def test_when_no_other_rank_may_have_it_a_new_history_begins() -> None:
    bench = three_of_four()
    assert not [one for one in bench.after(0.1) if isinstance(one, Publish)]  # a fuller world costs only the wait
    bench.join(3, "fresh")
    bench.send(Ready(member(3, 1)))
    view = only(Publish, bench.after(0.1)).view
    assert (view.state, view.checkpoint) == (StateId(1, 0), None)
    [begun] = bench.of(HistoryBegun)
    assert "some of the optimizer's state was lost" in begun.reason


def test_a_spare_that_lacks_memory_for_a_part_is_named_with_the_bytes_and_stands_by_without() -> None:
    bench = Bench(world=2, spares=1, optimizer_sharding="fsdp").start(STEP_3)
    assert only(Propose, bench.after(1.0)).view.spares == (member(2),)
    other = Bench(world=2, spares=1, optimizer_sharding="fsdp").start(STEP_3)
    other.send(ProcessLost(member(2), ProcessEnded(), at_s=other.now_s))
    other.join(2, "roomless", 1)
    other.send(Ready(member(2, 1), "it takes 7 GiB, and there is room for 5"))
    assert not [one for one in other.after(1.0) if isinstance(one, Propose)]
    said = [one.reason for one in other.of(DecisionMade) if one.action == "warn"]
    why = "it takes 7 GiB, and there is room for 5"
    assert said == [f"as a spare, rank 2.1 stands by without a part of the {other.settings.spread}: {why}"]


def test_where_a_forward_counts_a_smaller_world_has_no_spare_inside() -> None:
    """Each rank says so. The one that is too many leaves, and does not stay as a spare, which would not know the count."""
    bench = Bench(world=3, spares=1, optimizer_sharding="zero1")
    bench.send(*(NodeJoined(f"n{slot % 2}", slot % 2) for slot in range(4)))
    for slot in range(4):
        bench.join(slot)
        bench.send(Ready(member(slot), "a forward changes a count"))
    bench.after(0.1)
    assert bench.machine.state.view is not None
    bench.form(bench.machine.state.view.members, STEP_3)
    assert not [one for one in bench.after(1.0) if isinstance(one, Propose)]
    bench.send(SettingChanged("world", 2.0))
    proposal = only(Propose, bench.after(1.0)).view
    assert (len(proposal.computing), proposal.spares) == (2, ())
