"""The decision core, event by event: what the simulator cannot show as plainly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import pytest

from fleet.machine.core import FleetMachine
from fleet.machine.roster import STOOD_STILL
from fleet.protocol.causes import AgentHungUp, AgentSilent, Departure, ProcessEnded
from fleet.protocol.events import (
    CheckpointDurable,
    CopiesHeld,
    Event,
    Finished,
    Formed,
    Heartbeat,
    Joined,
    NodeJoined,
    NodeLost,
    NodeSilent,
    PartFailed,
    PartWritten,
    Quiesced,
    Raised,
    Ready,
    Tick,
)
from fleet.protocol.facts import FaultRecord, ProcessLost
from fleet.protocol.instructions import (
    Cancel,
    CommitCheckpoint,
    EndRun,
    Evict,
    Fence,
    Instruction,
    Propose,
    Publish,
    Quiesce,
    SaveCheckpoint,
    Welcome,
    Write,
)
from fleet.protocol.levels import PEERS, level_of
from fleet.protocol.records import CheckpointRecord, Committed, HistoryBegun, Record, RunEnded, ViewPublished
from fleet.protocol.types import Copy, Fault, Member, Part, Process, Pulse, StateId
from fleet.settings.run import HANGUP_S, Budgets, RunSettings
from policies.interval import CheckpointInterval
from policies.recovery import SETTLE_S, ReformPromoteRegrow
from tests.simulation.runs import Placement

START, STEP_3, STEP_4 = StateId(0, 0), StateId(0, 3), StateId(0, 4)


def member(slot: int, incarnation: int = 0) -> Member:
    return Member(slot, incarnation)


class Bench:
    """A machine with its clock and everything that it has said."""

    def __init__(
        self, world: int = 4, checkpoint: tuple[str, StateId] | None = None, budgets: Budgets | None = None, interval_s: float = 1e6,
        peers_s: float | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        self.interval_s, self.peers_s = interval_s, peers_s
        self.settings = RunSettings(world=world, shards=max(16, world), budgets=budgets or Budgets(), **settings)
        self.checkpoint = checkpoint
        self.machine = self.new_machine()
        self.now_s = 0.0
        self.said: list[Instruction] = []
        self.journal: list[Record] = []

    def new_machine(self) -> FleetMachine:
        policy = ReformPromoteRegrow(self.settings.budgets, self.settings.timeouts.start_s)
        interval = CheckpointInterval(law="fixed", interval_s=self.interval_s)
        peers = CheckpointInterval(law="fixed", interval_s=self.peers_s) if self.peers_s is not None else None
        return FleetMachine(self.settings, policy, Placement(), interval, checkpoint=self.checkpoint, peers=peers)

    def send(self, *events: Event) -> list[Instruction]:
        """What the machine says to these, without what it writes."""
        out: list[Instruction] = []
        for event in events:
            for instruction in self.machine.handle(event, self.now_s):
                if isinstance(instruction, Write):
                    self.journal.append(instruction.record)
                else:
                    out.append(instruction)
        self.said += out
        return out

    def after(self, seconds: float, *silent: int) -> list[Instruction]:
        """A tick that much later; all ranks but those in ``silent`` have beaten."""
        self.now_s += seconds
        ranks = [rank for rank in self.machine.state.roster.in_order() if rank.member.slot not in silent]
        for rank in ranks:
            self.send(Heartbeat(rank.process.node, (Pulse(rank.member, rank.generation, rank.state or StateId(0, 0), 0.0, 0.0),)))
        return self.send(Tick())

    def through(self, seconds: float, *silent: int) -> list[Instruction]:
        """That much later, with ticks all the time."""
        ticks = math.ceil(seconds / STOOD_STILL / self.settings.timeouts.heartbeat_s) + 1
        return [instruction for _ in range(ticks) for instruction in self.after(seconds / ticks, *silent)]

    def join(self, slot: int, token: str = "", incarnation: int | None = None) -> list[Instruction]:
        return self.send(hello(slot, token, incarnation))

    def start(self, state: StateId = START) -> Bench:
        """All slots join, are ready, form the first view and hold ``state``."""
        slots = range(self.settings.slots)
        self.send(*(NodeJoined(f"n{slot % 2}", slot % 2) for slot in slots))
        for slot in slots:
            self.join(slot)
            self.send(Ready(member(slot)))
        self.after(0.1)
        assert self.machine.state.view is not None
        self.form(self.machine.state.view.members, state)
        assert self.machine.state.phase == "run"
        return self

    def form(self, members: Iterable[Member], state: StateId) -> list[Instruction]:
        return self.send(*(Formed(each, self.machine.state.assembly.generation, state) for each in members))

    def quiesce(self, slots: Iterable[int], state: StateId | None, dirty: bool = False) -> list[Instruction]:
        generation = self.machine.state.assembly.generation
        ranks = [self.machine.state.roster.by_slot[slot] for slot in slots]
        return self.send(*(Quiesced(rank.member, generation, state, dirty, Departure.CALLED) for rank in ranks))

    def of(self, kind: type[Record]) -> list[Any]:
        return [record for record in self.journal if isinstance(record, kind)]

    def restart(self) -> None:
        """Another machine from the same journal."""
        self.machine = self.new_machine()
        self.machine.replay(list(self.journal), self.now_s)


def hello(slot: int, token: str = "", incarnation: int | None = None) -> Joined:
    return Joined(slot, token or f"token-{slot}", Process(f"n{slot % 2}", 100 + slot, 1), f"host:{slot}", incarnation)


def only(kind: type, said: list[Instruction]) -> Any:
    (found,) = [instruction for instruction in said if isinstance(instruction, kind)]
    return found


def test_the_first_view_waits_for_the_full_world() -> None:
    bench = Bench()
    for slot in range(3):
        bench.join(slot)
        bench.send(Ready(member(slot)))
    assert not bench.after(1.0)
    bench.join(3)
    bench.send(Ready(member(3)))
    view = only(Publish, bench.after(0.1)).view
    assert view.members == tuple(member(slot) for slot in range(4))
    assert view.receivers == (1, 2, 3)
    assert view.state == StateId(0, 0)


def test_the_first_view_does_not_wait_for_ever() -> None:
    bench = Bench()
    bench.join(0)
    bench.send(Ready(member(0)))
    assert not bench.after(bench.settings.timeouts.start_s - 1)
    assert only(Publish, bench.after(1.5)).view.members == (member(0),)


def test_a_doubled_hello_is_welcomed_with_the_same_incarnation() -> None:
    bench = Bench()
    assert bench.join(0) == bench.join(0) == [Welcome(0, "token-0", 0)]
    assert bench.join(0, incarnation=0) == [], "it knows, and says so for as long as it waits"


def test_a_newer_process_supersedes_and_the_older_is_fenced() -> None:
    bench = Bench()
    bench.join(0, "old")
    said = bench.join(0, "new")
    assert only(Evict, said).member == member(0)
    assert only(Welcome, said) == Welcome(0, "new", 1)
    assert bench.join(0, "old", 0) == [Fence(0, "old", only(Fence, bench.said).reason)]


def test_a_loss_parks_the_others_and_the_greatest_clean_state_wins() -> None:
    bench = Bench().start(STEP_3)
    assert only(Quiesce, bench.send(ProcessLost(member(1), ProcessEnded()))).members == (member(0), member(2), member(3))
    bench.quiesce([0], STEP_3)
    bench.quiesce([2], StateId(0, 5), dirty=True)
    view = only(Publish, bench.quiesce([3], STEP_4)).view
    assert view.members == (member(0), member(2), member(3))
    assert view.donor == 2
    assert view.receivers == (0, 1)
    assert view.state == STEP_4
    assert bench.of(ViewPublished)[-1].causes == ("1.0",)


def test_a_step_is_committed_when_the_next_view_holds_it_not_when_it_is_published() -> None:
    bench = Bench().start(STEP_3)
    bench.send(ProcessLost(member(1), ProcessEnded()))
    bench.quiesce([0, 2], STEP_3)
    bench.quiesce([3], STEP_4)
    assert bench.machine.state.committed == STEP_3
    bench.send(ProcessLost(member(3), ProcessEnded()))
    assert only(Publish, bench.quiesce([0, 2], STEP_3)).view.state == STEP_3
    bench.form([member(0), member(2)], STEP_3)
    assert [record.state for record in bench.of(Committed)] == [STEP_3]


def test_all_dirty_begins_a_lineage_from_the_checkpoint() -> None:
    bench = Bench(world=2).start(STEP_4)
    bench.send(CheckpointDurable("c3", STEP_3, 1, 0.1, 0.1))
    bench.send(ProcessLost(member(1), ProcessEnded()))
    bench.quiesce([0], STEP_4, dirty=True)
    view = only(Publish, bench.after(bench.settings.timeouts.start_s + 1)).view
    assert view.checkpoint == "c3"
    assert view.state == StateId(1, 3)
    assert bench.of(HistoryBegun)[0].from_state == STEP_3


def test_without_a_checkpoint_only_a_fresh_process_can_begin_again() -> None:
    bench = Bench(world=2).start(STEP_4)
    bench.send(ProcessLost(member(1), ProcessEnded()))
    assert not [one for one in bench.quiesce([0], STEP_4, dirty=True) if isinstance(one, Publish)]
    said = bench.after(bench.settings.timeouts.start_s + 1)
    assert only(Evict, said).member == member(0)
    bench.join(0, "fresh")
    bench.send(Ready(member(0, 1)))
    view = only(Publish, bench.after(bench.settings.timeouts.start_s + 1)).view
    assert view.members == (member(0, 1),)
    assert view.state == StateId(1, 0)


def test_a_state_from_before_the_committed_step_is_no_source() -> None:
    bench = Bench(world=2, spares=1).start(STEP_4)
    bench.send(CheckpointDurable("c3", STEP_3, 1, 0.1, 0.1))
    bench.send(Quiesced(member(2), 1, StateId(0, 2), False, Departure.CALLED))
    view = only(Publish, bench.send(ProcessLost(member(0), ProcessEnded()), ProcessLost(member(1), ProcessEnded()))).view
    assert view.checkpoint == "c3"
    assert view.state.history == 1


def with_a_replacement_ready() -> Bench:
    """Slot 1 was lost at step 3, the others have trained on for a moment, and its next process has built its model."""
    bench = Bench().start(STEP_3)
    bench.send(ProcessLost(member(1), ProcessEnded()))
    bench.quiesce([0, 2, 3], STEP_3)
    bench.form([member(0), member(2), member(3)], STEP_3)
    bench.after(SETTLE_S)
    bench.join(1, "new")
    bench.send(Ready(member(1, 1)))
    return bench


def test_nobody_joins_and_no_checkpoint_begins_right_after_a_loss_while_somebody_waits_to_join() -> None:
    bench = Bench(world=2, spares=1, interval_s=0.1).start(STEP_4)
    bench.send(ProcessLost(member(1), ProcessEnded()))
    bench.quiesce([0], STEP_4)
    bench.form([member(0)], STEP_4)
    said = bench.after(SETTLE_S / 2)
    assert not [one for one in said if isinstance(one, (Propose, SaveCheckpoint))]
    assert only(Propose, bench.after(SETTLE_S)).view.members == (member(0), member(2))


def test_a_replacement_is_proposed_and_entered_beside_running_steps() -> None:
    bench = with_a_replacement_ready()
    view = only(Propose, bench.after(0.1)).view
    assert view.members == (member(0), member(1, 1), member(2), member(3))
    assert (view.donor, view.receivers) == (0, (1,))
    assert bench.machine.state.phase == "run"
    bench.form(view.members, STEP_4)
    assert bench.machine.state.view == view
    assert bench.machine.state.phase == "run"
    assert not bench.of(HistoryBegun)


def test_a_proposal_whose_newcomer_is_lost_is_cancelled_and_training_goes_on() -> None:
    bench = with_a_replacement_ready()
    bench.after(0.1)
    assert only(Cancel, bench.send(ProcessLost(member(1, 1), ProcessEnded()))).generation == 3
    assert bench.machine.state.phase == "run"


def test_a_cancelled_proposal_that_was_entered_all_the_same_is_parked() -> None:
    bench = with_a_replacement_ready()
    bench.after(0.1)
    bench.send(Quiesced(member(1, 1), 3, None, False, Departure.CALLED))
    quiesce = only(Quiesce, bench.send(Formed(member(0), 3, STEP_4)))
    assert quiesce.generation == 3
    assert bench.machine.state.phase == "gather"


def test_words_of_another_incarnation_are_ignored() -> None:
    bench = Bench().start(STEP_3)
    before = bench.machine.state.roster.by_slot[1].state
    assert not bench.send(
        Quiesced(member(1, 7), 9, StateId(5, 5), True, Departure.CALLED),
        Formed(member(1, 7), 9, STEP_4),
        ProcessLost(member(1, 7), ProcessEnded()),
    )
    assert bench.machine.state.roster.by_slot[1].state == before
    assert bench.machine.state.phase == "run"


def test_a_late_formed_after_parked_does_not_seat_again() -> None:
    bench = Bench().start(STEP_3)
    bench.quiesce([0], STEP_3)
    bench.send(Formed(member(0), 1, STEP_4))
    assert bench.machine.state.roster.by_slot[0].state == STEP_3
    assert bench.machine.state.roster.by_slot[0].phase == "standby"


def test_a_silent_node_is_lost_with_all_its_ranks_in_one_view_change() -> None:
    bench = Bench().start(STEP_3)
    bench.send(NodeLost("n1", AgentHungUp(), 0.0))
    assert [record.member for record in bench.of(ProcessLost)] == [member(1), member(3)]
    assert only(Publish, bench.quiesce([0, 2], STEP_3)).view.members == (member(0), member(2))


def test_an_agent_that_connects_again_at_once_costs_no_rank() -> None:
    bench = Bench().start(STEP_3)
    assert not bench.send(NodeSilent("n1", 0.0), NodeJoined("n1", 1))
    bench.after(HANGUP_S)
    assert not bench.of(ProcessLost)


def test_a_node_whose_agent_hangs_up_and_does_not_come_back_is_lost() -> None:
    bench = Bench().start(STEP_3)
    bench.send(NodeSilent("n1", bench.now_s))
    assert not bench.of(ProcessLost)
    bench.after(2 * HANGUP_S, 1, 3)
    assert {record.member for record in bench.of(ProcessLost)} == {member(1), member(3)}


def test_a_broken_connection_beside_missing_ranks_is_a_lost_node() -> None:
    bench = Bench().start(STEP_3)
    bench.send(NodeSilent("n1", 0.0))
    bench.quiesce([0], STEP_3)
    assert {record.member for record in bench.of(ProcessLost)} == {member(1), member(3)}
    assert only(Publish, bench.quiesce([2], STEP_3)).view.members == (member(0), member(2))


def test_a_ghost_is_evicted_again_when_its_node_comes_back() -> None:
    bench = Bench().start(STEP_3)
    bench.send(NodeLost("n1", AgentSilent(9.0), 0.0))
    said = bench.send(Heartbeat("n1", (Pulse(member(1), 1, STEP_3, 0.0, 0.0),)))
    assert only(Evict, said).process == Process("n1", 101, 1)


def test_the_same_error_in_the_same_step_ends_the_run() -> None:
    bench = Bench().start(STEP_3)
    bench.after(0.1)
    assert only(Evict, bench.send(Raised(member(1), 3, 5, "ValueError: NaN", "line 7"))).member == member(1)
    end = only(EndRun, bench.send(Raised(member(2), 3, 6, "ValueError: NaN", "line 7")))
    assert end.status == "failed"
    assert "step 3" in end.reason
    assert end.detail == "line 7"


def test_what_raised_before_the_coordinator_died_is_not_forgotten() -> None:
    bench = Bench().start(STEP_3)
    bench.after(0.1)
    bench.send(Raised(member(1), 3, 5, "ValueError: NaN", "line 7"))
    bench.restart()
    bench.send(hello(2, incarnation=0))
    assert only(EndRun, bench.send(Raised(member(2), 3, 6, "ValueError: NaN", "line 7"))).status == "failed"


def test_a_verdict_that_died_with_the_coordinator_is_given_again() -> None:
    bench = Bench(budgets=Budgets(slot=1)).start(STEP_3)
    said = bench.send(ProcessLost(member(1), ProcessEnded(), at_s=0.0, detail="segmentation fault"))
    assert only(EndRun, said).status == "failed"
    bench.journal = [record for record in bench.journal if not isinstance(record, RunEnded)]
    bench.restart()
    end = only(EndRun, bench.after(bench.settings.timeouts.node_s + 0.1))
    assert "slot 1" in end.reason
    assert "segmentation fault" in end.reason


def test_injected_losses_do_not_count_after_a_restart_either() -> None:
    bench = Bench(budgets=Budgets(slot=1)).start(STEP_3)
    bench.send(FaultRecord(Fault("f1", 0.0, "gpu", "kill_rank", 1), "executed", (member(1),), at_s=0.0))
    bench.restart()
    assert not [one for one in bench.send(ProcessLost(member(1), ProcessEnded())) if isinstance(one, EndRun)]
    assert bench.of(ProcessLost)[0].fault == "f1"


def test_what_the_coordinator_finds_of_a_loss_is_not_what_an_agent_says_of_it() -> None:
    bench = Bench().start(STEP_3)
    bench.send(ProcessLost(member(1), ProcessEnded(), "made-up", 77, 5, 2, "said", at_s=0.5, event=99))
    [lost] = bench.of(ProcessLost)
    assert (lost.fault, lost.generation, lost.step, lost.shard, lost.detail, lost.at_s) == (None, 1, 5, 2, "said", 0.5)
    assert lost.event == bench.machine.state.output.event


def test_a_restart_leaves_a_whole_view_alone() -> None:
    bench = Bench().start(STEP_3)
    bench.restart()
    for slot in range(4):
        bench.send(hello(slot, incarnation=0), Formed(member(slot), 1, STEP_4))
    said = bench.after(bench.settings.timeouts.node_s + 0.1)
    assert not [one for one in said if isinstance(one, Quiesce | Publish | Evict)]
    assert bench.machine.state.phase == "run"


def test_a_restart_gives_silent_ranks_a_grace_and_then_up() -> None:
    bench = Bench().start(STEP_3)
    bench.restart()
    for slot in range(3):
        bench.send(hello(slot, incarnation=0), Formed(member(slot), 1, STEP_4))
    assert not bench.after(bench.settings.timeouts.node_s - 1, 3)
    bench.after(1.5, 3)
    assert [record.member for record in bench.of(ProcessLost)] == [member(3)]


def test_generations_go_on_above_what_ranks_report() -> None:
    bench = Bench(world=2).start(STEP_3)
    bench.restart()
    for slot in range(2):
        bench.send(hello(slot, incarnation=0), Quiesced(member(slot), 5_000, StateId(7, 3), False, Departure.CALLED))
    view = only(Publish, bench.after(bench.settings.timeouts.node_s + 0.1)).view
    assert view.generation > 5_000
    assert bench.machine.state.assembly.history == 7


def test_a_new_cluster_goes_on_from_the_checkpoint_and_owes_nothing_for_the_old_one() -> None:
    bench = Bench(world=2, budgets=Budgets(total=2)).start(STEP_3)
    bench.send(CheckpointDurable("c3", STEP_3, 1, 0.1, 0.1))
    bench.machine = bench.new_machine()
    written = bench.machine.resume(list(bench.journal), bench.now_s)
    assert [type(one.record).__name__ for one in written if isinstance(one, Write)] == ["ProcessLost", "ProcessLost"]
    bench.machine.state.validate()  # nobody is waited for of the view that ended with its cluster
    bench.send(hello(0, "a"), hello(1, "b"), Ready(member(0, 1)), Ready(member(1, 1)))
    view = only(Publish, bench.after(0.1)).view
    assert view.checkpoint == "c3"
    assert view.state == StateId(1, 3)


def test_a_rank_lost_at_the_finish_calls_the_others_back() -> None:
    bench = Bench(world=3).start(STEP_3)
    bench.send(Finished(member(0), 1, STEP_4, "digest"))
    assert only(Quiesce, bench.send(ProcessLost(member(1), ProcessEnded()))).members == (member(0), member(2))


def test_parts_of_an_older_request_or_of_strangers_do_not_count() -> None:
    bench = Bench(world=2, interval_s=1.0).start(STEP_3)
    save = only(SaveCheckpoint, bench.after(1.5))
    part = Part("p", 1, "", (0,))
    assert not bench.send(PartWritten(member(0), save.request - 1, "c", STEP_4, part, 0.1))
    assert not bench.send(PartWritten(member(5), save.request, "c", STEP_4, part, 0.1))


def test_a_checkpoint_that_fails_is_tried_again_soon_then_later_then_skipped_and_counted() -> None:
    bench = Bench(world=2, interval_s=10.0).start(STEP_3)
    asked: list[float] = []
    while not any(record.phase == "skipped" for record in bench.of(CheckpointRecord)):
        for one in bench.after(0.5):
            if isinstance(one, SaveCheckpoint):
                asked.append(bench.now_s)
                bench.send(PartFailed(member(0), one.request, "the disk is full"))
    assert [round(late - early) for early, late in itertools.pairwise(asked)] == [2, 4, 8, 16]
    assert [record.phase for record in bench.of(CheckpointRecord)] == ["requested", "failed"] * 5 + ["skipped"]
    assert "the disk is full" in bench.of(CheckpointRecord)[1].detail
    assert not [one for _ in range(18) for one in bench.after(0.5) if isinstance(one, SaveCheckpoint)], "not before the next one is due"
    assert only(SaveCheckpoint, bench.after(1.5))


def test_an_interval_is_from_one_saved_state_to_the_next_however_long_that_took_to_write() -> None:
    bench = Bench(world=1, interval_s=10.0).start(STEP_3)
    asked: list[float] = []
    for _ in range(60):
        for one in bench.after(0.5):
            if isinstance(one, SaveCheckpoint):
                asked.append(bench.now_s)
                bench.after(4.0)
                bench.send(CheckpointDurable(f"c{len(asked)}", STEP_4, 1, 0.1, latency_s=4.0))
    assert [late - early for early, late in itertools.pairwise(asked)] == pytest.approx([10.0] * (len(asked) - 1)) and len(asked) > 3


def with_copies(**settings: Any) -> Bench:
    """Two ranks on two nodes, whose memories keep copies; the store is never asked."""
    bench = Bench(world=2, nodes=2, peers_s=1.0, **settings)
    bench.send(*(CopiesHeld(f"n{i}", f"n{i}:1", "", ()) for i in range(2)))
    return bench.start(STEP_3)


def held(node: int, state: StateId, parts: tuple[int, ...], count: int = 2) -> CopiesHeld:
    name = f"{state.history:06d}-{state.step:012d}-g00000001"
    return CopiesHeld(f"n{node}", f"n{node}:1", "", (Copy(name, state, parts, count),))


def test_copies_are_asked_for_where_the_other_node_has_memory() -> None:
    bench = with_copies()
    assert bench.machine.state.view is not None and bench.machine.state.view.copies == (("n1:1",), ("n0:1",))
    save = only(SaveCheckpoint, bench.after(1.0))
    assert level_of(save.request) == PEERS
    parts = [PartWritten(member(slot), save.request, "c4", STEP_4, Part(f"p{slot}", 1, "", (slot,)), 0.1) for slot in range(2)]
    assert only(CommitCheckpoint, bench.send(*parts)).place == "peers://n0:1,n1:1"


def lose_both(bench: Bench, *silent: int) -> list[Instruction]:
    bench.send(ProcessLost(member(0), ProcessEnded(), at_s=bench.now_s), ProcessLost(member(1), ProcessEnded(), at_s=bench.now_s))
    bench.send(hello(0, "a"), hello(1, "b"), Ready(member(0, 1)), Ready(member(1, 1)))
    return bench.after(0.1, *silent)


@pytest.mark.parametrize(
    ("parts", "durable", "begins"),
    [
        (((1,), (0,)), None, "peers://n0:1,n1:1/000000-000000000004-g00000001"),
        (((1,), (0,)), STEP_3, "peers://n0:1,n1:1/000000-000000000004-g00000001"),
        (((1,), (1,)), STEP_3, "store"),
        (((1,), (0,)), StateId(0, 5), "store"),
    ],
    ids=["memory", "memory is newer", "a part is missing", "the store is newer"],
)
def test_when_all_ranks_are_lost_the_newest_complete_checkpoint_is_used(
    parts: tuple[tuple[int, ...], tuple[int, ...]], durable: StateId | None, begins: str
) -> None:
    bench = with_copies()
    bench.send(held(0, STEP_4, parts[0]), held(1, STEP_4, parts[1]))
    if durable is not None:
        bench.send(CheckpointDurable("store", durable, 1, 0.1, 0.1))
    view = only(Publish, lose_both(bench)).view
    assert view.checkpoint == begins
    assert view.state.history == 1
    assert bench.machine.state.checkpoints.peers is not None
    assert (bench.machine.state.checkpoints.peers.events, bench.machine.state.checkpoints.store.events) == (
        (0, 1) if begins == "store" else (1, 0)
    )


def test_a_silent_node_that_may_hold_the_newest_copy_is_waited_for_until_it_is_lost() -> None:
    bench = with_copies()
    bench.send(NodeJoined("n2", 2), held(0, STEP_4, (1,)), held(2, STEP_4, (0,)), NodeSilent("n2", bench.now_s + 0.1))
    assert not [one for one in lose_both(bench) if isinstance(one, Publish)]
    bench.send(NodeJoined("n2", 2), held(2, STEP_4, (0,)))
    assert (only(Publish, bench.after(0.1)).view.checkpoint or "").startswith("peers://")


def test_a_memory_that_began_anew_gets_a_view_that_knows_its_address() -> None:
    bench = with_copies()
    said = bench.send(CopiesHeld("n1", "n1:2", "", ()))
    assert only(Quiesce, said).members == (member(0), member(1))
    assert only(Publish, bench.quiesce([0, 1], STEP_3)).view.copies == (("n1:2",), ("n0:1",))


@pytest.mark.parametrize("world", [16, 64, 256])
def test_a_view_change_is_a_handful_of_instructions_at_any_world_size(world: int) -> None:
    """The coordinator says a thing once; routing takes it to each node once."""
    bench = Bench(world=world).start(STEP_3)
    before = len(bench.said)
    bench.send(ProcessLost(member(1), ProcessEnded()))
    rest = [slot for slot in range(world) if slot != 1]
    bench.quiesce(rest, STEP_3)
    bench.form([member(slot) for slot in rest], STEP_3)
    kinds = [type(one).__name__ for one in bench.said[before:]]
    assert kinds == ["Quiesce", "Publish"]


def test_nothing_is_said_twice_before_its_time() -> None:
    bench = Bench().start(STEP_3)
    bench.send(ProcessLost(member(1), ProcessEnded()))
    assert not bench.after(0.1)
    assert only(Quiesce, bench.after(bench.settings.timeouts.resend_s)).members == (member(0), member(2), member(3))
