"""The decision core when ranks differ: who goes, what is taken back, and what stops."""

from __future__ import annotations

from fleet.machine.core import FleetMachine
from fleet.protocol.causes import Departure, EndWhy
from fleet.protocol.chunk_check import CHANGED, CHUNK, KEPT, SOUND
from fleet.protocol.decisions import Decision, Figures
from fleet.protocol.events import CheckpointDurable, Finished, Formed, NodeJoined, Quiesced, Ready
from fleet.protocol.facts import FaultRecord
from fleet.protocol.instructions import EndRun, Evict, Publish
from fleet.protocol.records import CheckpointRecord, DecisionMade, HistoryBegun
from fleet.protocol.replica_check import UNCOMPARED, WEIGHTS
from fleet.protocol.types import Fault, Finding, Member, StateId
from policies.corruption import MajorityRules
from policies.interval import CheckpointInterval
from policies.recovery import ReformPromoteRegrow
from tests.simulation.runs import Placement
from tests.unit.test_machine import Bench, member

AT, OLD = StateId(0, 40), StateId(0, 25)
NO_COPY = "no copy"
"""A rank has told of a difference in a chunk that it does not keep."""


class Court(Bench):
    def new_machine(self) -> FleetMachine:
        policy = ReformPromoteRegrow(self.settings.budgets, self.settings.timeouts.start_s)
        interval = CheckpointInterval(law="fixed", interval_s=1e6)
        return FleetMachine(self.settings, policy, Placement(), interval, corruption=MajorityRules(), checkpoint=self.checkpoint)

    def testify(self, *digests: str, cleared: StateId = AT, given: tuple[int, ...] = (), what: str = "weights") -> list[object]:
        """All ranks leave at ``AT``; slot ``i`` says ``digests[i]``, or nothing when that is empty."""
        generation = self.machine.state.assembly.generation
        out: list[object] = []
        for slot, digest in enumerate(digests):
            value = "" if digest == NO_COPY else digest
            said = Finding(what, generation, AT, value, cleared, slot not in given) if digest else None
            out += self.send(
                Quiesced(self.machine.state.roster.by_slot[slot].member, generation, AT, False, Departure.DIFFERS, "differ", said)
            )
        return [*out, *self.after(0.1)]

    def durable_at(self, step: int) -> Court:
        self.checkpoint = "good", StateId(0, step)
        self.machine = self.new_machine()
        return self

    def durable(self, name: str, state: StateId) -> None:
        self.send(CheckpointDurable(name, state, 1, 0.0, 0.0))


def of(kind: type, items: list[object]) -> list[object]:
    return [item for item in items if isinstance(item, kind)]


def test_the_outvoted_rank_is_evicted_before_a_view_is_made() -> None:
    court = Court().start(AT)
    out = court.testify("a", "b", "a", "a")
    [evicted] = of(Evict, out)
    [published] = of(Publish, out)
    assert evicted.member.slot == 1  # type: ignore[attr-defined]
    assert {member.slot for member in published.view.members} == {0, 2, 3}  # type: ignore[attr-defined]
    assert published.view.state == AT  # type: ignore[attr-defined]
    assert out.index(evicted) < out.index(published)


def decided(court: Court) -> list[str]:
    return [one.action for one in of(DecisionMade, court.journal) if one.policy == "corruption"]  # type: ignore[attr-defined]


def test_of_two_that_differ_nobody_is_accused_and_both_go_back() -> None:
    court = Court(world=2).start(AT)
    court.durable("good", StateId(0, 20))
    out = court.testify("a", "b")
    assert not of(Evict, out)
    [published] = of(Publish, out)
    assert (published.view.checkpoint, published.view.state) == ("good", StateId(1, 20))  # type: ignore[attr-defined]
    assert decided(court) == ["retry", "go_back"]


def test_a_rank_that_got_its_state_earlier_is_not_evicted_for_one_voters_word() -> None:
    """Found by the simulated run flips 2078400412: the voter was wrong, and so was what it had given to slot 1 since."""
    court = Court(world=3).start(AT)
    court.durable("good", StateId(0, 20))
    for slot in range(3):
        court.send(Quiesced(member(slot), 1, AT, False, Departure.CALLED))
    court.after(0.1)
    court.form(court.machine.state.view.members, AT)
    out = court.testify("wrong", "wrong", "right", given=(1, 2))
    assert not of(Evict, out)
    assert decided(court) == ["retry", "go_back"]


def test_a_newcomer_that_differs_from_the_one_who_gave_it_its_state_goes() -> None:
    court = Court(world=3).start(AT)
    [evicted] = of(Evict, court.testify("a", "a", "b", given=(1, 2)))
    assert evicted.member.slot == 2  # type: ignore[attr-defined]


def test_a_receiver_without_a_state_does_not_keep_the_others_from_being_judged() -> None:
    court = Court(world=4).start(AT)
    generation = court.machine.state.assembly.generation
    court.send(Quiesced(member(3), generation, None, True, Departure.BROKEN, "a peer is gone"))
    [evicted] = of(Evict, court.testify("a", "b", "a"))
    assert evicted.member.slot == 1  # type: ignore[attr-defined]


def again(court: Court, found: StateId, *digests: str) -> list[object]:
    """The ranks differ once more, at ``found``, in the view that they are in by now."""
    for rank in list(court.machine.state.roster.by_slot.values()):
        court.send(Formed(rank.member, court.machine.state.assembly.generation, found))
    generation, out = court.machine.state.assembly.generation, list[object]()
    for slot, digest in enumerate(digests):
        said = Finding("weights", generation, found, digest, found)
        out += court.send(
            Quiesced(court.machine.state.roster.by_slot[slot].member, generation, found, False, Departure.DIFFERS, "differ", said)
        )
    return [*out, *court.after(0.1)]


def test_ranks_that_differ_again_where_they_went_on_run_a_loop_that_is_wrong() -> None:
    court = Court(world=2).start(AT)
    court.durable("good", StateId(0, 20))
    court.testify("a", "b")
    [end] = of(EndRun, again(court, StateId(1, 22), "a", "b"))
    assert end.why is EndWhy.LOOP_WRONG
    assert "differ again" in end.reason  # type: ignore[attr-defined]


def test_long_after_it_is_another_flipped_bit() -> None:
    court = Court(world=2).start(AT)
    court.durable("good", StateId(0, 20))
    court.testify("a", "b")
    assert not of(EndRun, again(court, StateId(1, 90), "a", "b"))
    assert decided(court) == ["retry", "go_back"] * 2


def test_what_is_said_twice_of_one_view_is_judged_once() -> None:
    court = Court(world=2).start(AT)
    court.durable("good", StateId(0, 20))
    court.testify("a", "b")
    said = [Finding("weights", 1, AT, digest, AT) for digest in "ab"]
    court.send(
        *(
            Quiesced(Member(slot, 0), court.machine.state.assembly.generation, AT, False, Departure.DIFFERS, "differ", one)
            for slot, one in enumerate(said)
        )
    )
    court.after(0.1)
    assert decided(court) == ["retry", "go_back"]


def test_what_chaos_did_twice_is_no_mistake_of_the_loop() -> None:
    court = Court(world=2).start(AT)
    court.durable("good", StateId(0, 20))
    for number, found in enumerate((AT, StateId(1, 22))):
        court.send(FaultRecord(Fault(f"flip-{number}", 1.0, "sdc", "flip_weight", 1), "executed", (Member(1, 0),), at_s=1.0))
        out = court.testify("a", "b") if found == AT else again(court, found, "a", "b")
        assert not of(EndRun, out)


def test_more_than_one_flipped_bit_does_is_the_loop() -> None:
    [end] = of(EndRun, Court().start(AT).testify("a", "b", "c", "d"))
    assert end.why is EndWhy.LOOP_WRONG
    assert "4 different results" in end.reason  # type: ignore[attr-defined]


def test_who_was_given_its_state_has_no_voice() -> None:
    """Three say b, but two of them have it from the third: it is one word against another, and then against two."""
    assert not of(Evict, Court().durable_at(20).start(AT).testify("b", "b", "b", "a", given=(1, 2)))
    evicted = of(Evict, Court(world=5).start(AT).testify("b", "b", "b", "a", "a", given=(1, 2)))
    assert [one.member.slot for one in evicted] == [0, 1, 2]  # type: ignore[attr-defined]


def test_with_sharded_state_a_wrong_copy_of_the_weights_is_outvoted_where_the_chunks_were_compared() -> None:
    out = Court(optimizer_sharding="zero1").start(AT).testify("a", "b", "a", "a")
    assert [one.member.slot for one in of(Evict, out)] == [1]  # type: ignore[attr-defined]


def test_most_ranks_may_repeat_what_an_owner_has_sent_so_without_that_all_go_back() -> None:
    court = Court(optimizer_sharding="zero1").start(AT)
    court.durable("good", StateId(0, 20))
    court.durable("doubtful", StateId(0, 39))
    out = court.testify("a", "b", "a", "a", what=WEIGHTS + UNCOMPARED)
    assert not of(Evict, out) and not of(EndRun, out)
    assert court.machine.state.checkpoints.newest_id == "good"


def test_a_rank_whose_own_chunks_have_changed_is_evicted_and_no_step_is_taken_back() -> None:
    court = Court(optimizer_sharding="fsdp").start(AT)
    court.durable("newest", StateId(0, 39))
    out = court.testify(SOUND, CHANGED, SOUND, SOUND, what=KEPT)
    assert [one.member.slot for one in of(Evict, out)] == [1]  # type: ignore[attr-defined]
    assert court.machine.state.checkpoints.newest_id == "newest"


def test_two_keepers_that_differ_are_a_tie_whatever_the_other_ranks_have() -> None:
    """These keep no copy of the chunk, and so have no digest of it."""
    court = Court(optimizer_sharding="fsdp").start(AT)
    court.durable("good", StateId(0, 20))
    out = court.testify("a", "b", NO_COPY, NO_COPY, what=f"{CHUNK} 0 of 4")
    assert not of(Evict, out) and not of(EndRun, out)


def test_of_three_keepers_two_outvote_the_third() -> None:
    out = Court(optimizer_sharding="fsdp").start(AT).testify("a", "b", "a", NO_COPY, what=f"{CHUNK} 0 of 4")
    assert [one.member.slot for one in of(Evict, out)] == [1]  # type: ignore[attr-defined]


def test_with_sharded_state_gradients_are_judged_all_the_same() -> None:
    out = Court(optimizer_sharding="zero1").start(AT).testify("a", "b", "a", "a", what="gradients of shard 5")
    assert [one.member.slot for one in of(Evict, out)] == [1]  # type: ignore[attr-defined]


def test_with_sharded_state_nobody_is_evicted_at_the_finish_barrier() -> None:
    court = Court(optimizer_sharding="zero1").start(AT)
    out = court.send(
        *(Finished(Member(slot, 0), court.machine.state.assembly.generation, AT, "b" if slot == 1 else "a") for slot in range(4))
    )
    assert not of(Evict, out)
    assert "different states" in of(EndRun, out)[0].reason  # type: ignore[attr-defined]


def test_while_one_is_silent_nobody_is_accused() -> None:
    out = Court().start(AT).testify("a", "b", "", "a")
    assert not of(Evict, out)
    assert of(Publish, out)


def test_equal_testimonies_mean_nothing() -> None:
    out = Court().start(AT).testify("a", "a", "", "a")
    assert not of(Evict, out)


def test_what_is_in_doubt_is_taken_back_to_a_checkpoint_from_before() -> None:
    court = Court().start(AT)
    court.durable("good", StateId(0, 20))
    court.durable("doubtful", StateId(0, 30))
    [published] = of(Publish, court.testify("a", "b", "a", "a", cleared=OLD))
    view = published.view  # type: ignore[attr-defined]
    assert (view.checkpoint, view.state) == ("good", StateId(1, 20))
    assert len(view.receivers) == 2
    [begun] = of(HistoryBegun, court.journal)
    assert begun.from_state == StateId(0, 20)  # type: ignore[attr-defined]
    withdrawn = [one.checkpoint for one in of(CheckpointRecord, court.journal) if one.phase == "withdrawn"]  # type: ignore[attr-defined]
    assert withdrawn == ["doubtful"]


def test_a_checkpoint_of_the_very_state_is_withdrawn_also_when_it_is_late() -> None:
    court = Court().start(AT)
    court.durable("good", StateId(0, 20))
    court.testify("a", "b", "a", "a")
    court.durable("late", AT)
    assert court.machine.state.checkpoints.newest_id == "good"


def test_without_any_good_checkpoint_a_fresh_process_begins_anew() -> None:
    court = Court().start(AT)
    court.durable("doubtful", StateId(0, 30))
    out = court.testify("a", "b", "a", "a", cleared=OLD)
    assert court.machine.state.checkpoints.newest_id is None
    assert [one.member.slot for one in of(Evict, out)] == [1]  # type: ignore[attr-defined]
    assert not of(Publish, out)
    court.join(1, "fresh")
    [published] = of(Publish, [*court.send(Ready(Member(1, 1))), *court.after(0.1)])
    view = published.view  # type: ignore[attr-defined]
    assert (view.state, view.members[view.donor]) == (StateId(1, 0), Member(1, 1)), "whoever takes its place begins anew"


def test_a_coordinator_that_dies_after_the_verdict_does_not_forget_what_is_tainted() -> None:
    court = Court().start(AT)
    court.durable("good", StateId(0, 20))
    court.testify("a", "b", "a", "a", cleared=OLD)
    upto = next(i for i, record in enumerate(court.journal) if isinstance(record, DecisionMade) and record.action == "go_back")
    reborn = court.new_machine()
    reborn.replay(court.journal[: upto + 1], 100.0)
    assert reborn.state.doubts.tainted == AT
    assert reborn.state.doubts.floor(reborn.state.committed) == StateId(1, 0)
    assert reborn.state.checkpoints.newest_id == "good"


def test_ranks_of_a_node_that_is_kept_out_wait_beside_the_run() -> None:
    court = Court(min_ranks=1)
    court.machine.state.roster.lemons = {1: Decision("keep_out", "it fails 9 times as often", Figures({"faults": 7.0}))}
    court.send(NodeJoined("n0", 0), NodeJoined("n1", 1), NodeJoined("n1", 1), NodeJoined("n2", 2, "matmul_wrong on cuda:3"))
    for slot in range(4):
        court.join(slot)
        court.send(Ready(Member(slot, 0)))
    court.after(0.1)
    out = court.after(court.settings.timeouts.start_s + 1)
    [published] = of(Publish, out)
    assert {member.slot for member in published.view.members} == {0, 2}  # type: ignore[attr-defined]
    reported = [(one.policy, one.reason) for one in of(DecisionMade, court.journal) if one.action == "keep_out"]  # type: ignore[attr-defined]
    assert [policy for policy, _ in reported] == ["lemons", "preflight"]
    assert "it fails 9 times as often" in reported[0][1]
    assert "matmul_wrong" in reported[1][1]
