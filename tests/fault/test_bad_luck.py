"""Misfortune on real processes, signals and sockets, without Ray. Whatever happens, the run ends with the bits of a run without it."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

import pytest

from fleet.ledger.goodput import Ledger
from fleet.ledger.story import why
from fleet.protocol.causes import ProcessEnded
from fleet.protocol.instructions import EndRun
from fleet.protocol.records import (
    COMPLETED,
    CheckpointRecord,
    DecisionMade,
    EvidenceKept,
    HistoryBegun,
    ProcessLost,
    ProcessUp,
    Spans,
    ViewPublished,
)
from fleet.protocol.types import Member, View
from fleet.settings.run import Budgets, CheckpointSettings, RunSettings, Timeouts
from tests.support import trains
from tests.support.plain import PlainFleet
from tests.support.undisturbed import Undisturbed

STEPS = 40
FAST = Timeouts(heartbeat_s=2.0, node_s=3.0, quiesce_s=5.0, form_s=10.0, progress_s=30.0, start_s=60.0)


def settings(folder: Path, world: int = 3, **changes: Any) -> RunSettings:
    """Gradients travel beside the backward, also where this machine is short of cores: more can go wrong then."""
    flags = folder / "flags"
    flags.mkdir(parents=True, exist_ok=True)
    options = {"flags": str(flags), "steps": str(STEPS), "pause_s": "0.02", "norm": "layer"} | changes.pop("options", {})
    reported: dict[str, Any] = {"shards": 8, "nodes": 2, "overlap_cores": 0.0, "timeouts": FAST} | changes
    return RunSettings(world=world, options=options, **reported)


def train_through(
    train: Callable[[Any], None], chosen: RunSettings, folder: Path, misfortune: Callable[[PlainFleet], None] = lambda fleet: None
) -> tuple[EndRun, list[Any], str]:
    """(how it ended, the journal, the final digest)."""
    with PlainFleet(train, chosen, folder) as fleet:
        misfortune(fleet)
        outcome = fleet.wait()
        digest = fleet.coordinator.machine.state.ending.record.digest
        return outcome, fleet.records(), digest


@pytest.fixture(scope="session")
def fault_free(undisturbed: Undisturbed) -> str:
    """The digest of an undisturbed run, of another world size: the truth for every test here."""
    return undisturbed(lambda folder: settings(folder, world=2))


def after(step: int) -> Callable[[PlainFleet], None]:
    return lambda fleet: fleet.wait_for(lambda: fleet.step >= step)


def survived(
    outcome: EndRun, records: list[Any], digest: str, truth: str, other_ratio: float = 0.01, hung: bool = False, status: str = COMPLETED
) -> None:  # fmt: skip
    assert outcome.status == status, outcome
    assert digest == truth
    assert hung == any("no progress" in kept.reason for kept in of(EvidenceKept, records))
    summary = Ledger().apply_all(records).summary()
    assert summary.closes
    assert summary.other_ratio <= other_ratio
    assert summary.samples is not None
    assert (summary.samples.skipped, summary.samples.repeated) == (0, 0)


def of(kind: type, records: list[Any]) -> list[Any]:
    return [record for record in records if isinstance(record, kind)]


def test_a_killed_rank_changes_no_bit(tmp_path: Path, fault_free: str) -> None:
    def misfortune(fleet: PlainFleet) -> None:
        after(8)(fleet)
        fleet.kill(1)

    outcome, records, digest = train_through(trains.plain, settings(tmp_path), tmp_path, misfortune)
    survived(outcome, records, digest, fault_free)
    assert [len(record.view.members) for record in of(ViewPublished, records)][:2] == [3, 2]


def test_two_ranks_in_the_same_step(tmp_path: Path, fault_free: str) -> None:
    def misfortune(fleet: PlainFleet) -> None:
        after(8)(fleet)
        fleet.kill(0)
        fleet.kill(2)

    survived(*train_through(trains.plain, settings(tmp_path), tmp_path, misfortune), fault_free)


def inject_beside_a_spare(fleet: PlainFleet) -> None:
    roster = fleet.coordinator.machine.state.roster
    fleet.wait_for(lambda: sum(rank.phase == "standby" for rank in roster.by_slot.values()) == 1 and fleet.step >= 4)
    fleet.kill(next(member.slot for member, _, in_view in fleet.census() if in_view))  # whoever came up last is the spare


@pytest.mark.parametrize("sharding", ["none", "zero1"])
def test_a_newcomer_that_enters_after_the_last_step_ends_with_the_same_state(tmp_path: Path, fault_free: str, sharding: str) -> None:
    """It has drawn no random numbers in any step, and the others have."""

    def misfortune(fleet: PlainFleet) -> None:
        machine = fleet.coordinator.machine
        fleet.wait_for(lambda: fleet.step == STEPS - 4)
        fleet.kill(0)
        (tmp_path / "flags" / "almost").touch()  # the others are in the last step long before its replacement is there
        fleet.wait_for(lambda: fleet.step == STEPS - 1 and machine.state.growth.proposal is not None)
        fleet.wait_for(lambda: machine.state.roster.by_slot[0].member.incarnation == 1)
        time.sleep(0.5)  # the members form it beside the step; if they should not have, the test is the ordinary one
        (tmp_path / "flags" / "end").touch()

    patient = replace(FAST, quiesce_s=30.0, form_s=60.0, progress_s=180.0)  # the last step takes as long as a process needs to start
    chosen = settings(tmp_path, optimizer_sharding=sharding, timeouts=patient)
    outcome, records, digest = train_through(trains.with_a_last_step_that_waits, chosen, tmp_path, misfortune)
    survived(outcome, records, digest, fault_free)
    assert [view.graceful for view in of(ViewPublished, records)][-1]


def grown(records: list[Any]) -> tuple[View, Member]:
    """The view that took a spare in, at a step boundary after a loss, and the spare."""
    first, alone, second = of(ViewPublished, records)[:3]
    assert [len(record.view.members) for record in (first, alone, second)] == [3, 2, 3]
    assert set(alone.view.members) < set(first.view.members) and second.graceful
    [spare] = set(second.view.members) - set(first.view.members)
    return second.view, spare


def test_survivors_go_on_without_a_spare_which_is_promoted_at_a_step_boundary(tmp_path: Path, fault_free: str) -> None:
    chosen = settings(tmp_path, spares=1, options={"pause_s": "0.2"})
    outcome, records, digest = train_through(trains.plain, chosen, tmp_path, inject_beside_a_spare)
    survived(outcome, records, digest, fault_free)
    view, spare = grown(records)
    assert [view.members[receiver] for receiver in view.receivers] == [spare]


@pytest.mark.parametrize(("norm", "computes"), [("layer", False), ("batch", True)])
def test_a_newcomer_computes_nothing_in_its_first_step_where_that_can_be(norm: str, computes: bool, tmp_path: Path) -> None:
    """It can not where a forward counts: a BatchNorm that has seen no batch of the step does not know its count."""
    chosen = settings(tmp_path, spares=1, options={"pause_s": "0.2", "norm": norm})
    outcome, records, _ = train_through(trains.with_shards_noted, chosen, tmp_path, inject_beside_a_spare)
    assert outcome.status == "completed", outcome
    view, spare = grown(records)
    entered = min(spans.step for spans in of(Spans, records) if (spans.member, spans.generation) == (spare, view.generation))
    pid = next(record.process.pid for record in of(ProcessUp, records) if record.member == spare)
    [noted] = (tmp_path / "flags").glob(f"shards-*{pid}")
    steps = [int(line.split()[0]) for line in noted.read_text().splitlines() if not line.startswith("0 ")]
    assert (entered in steps) == computes
    assert entered + 1 in steps


def test_a_spare_has_rehearsed_and_nothing_of_it_shows(tmp_path: Path, fault_free: str) -> None:
    chosen = settings(tmp_path, spares=1, options={"pause_s": "0.2"})
    outcome, records, digest = train_through(trains.with_tail, chosen, tmp_path, inject_beside_a_spare)
    survived(outcome, records, digest, fault_free)
    _, spare = grown(records)
    pid = next(record.process.pid for record in of(ProcessUp, records) if record.member == spare)
    assert (tmp_path / "flags" / f"tail-{spare.slot}-{pid}").read_text().splitlines()[0] == "0 False"


def test_what_survivors_have_computed_is_not_computed_again(tmp_path: Path, fault_free: str) -> None:
    """8 shards on 3 ranks: the one that dies takes 3 at most, and these alone are computed twice."""

    def misfortune(fleet: PlainFleet) -> None:
        after(8)(fleet)
        fleet.kill(1)

    survived(*train_through(trains.with_shards_noted, settings(tmp_path), tmp_path, misfortune), fault_free)
    lines = [line for path in (tmp_path / "flags").glob("shards-*") for line in path.read_text().splitlines()]
    computed = Counter(line for line in lines if not line.startswith("0 "))  # a rehearsal computes a shard of step 0
    again = [line for line, times in computed.items() if times > 1]
    assert len(computed) == (STEPS - 1) * 8
    assert len(again) <= 3, again
    assert len({line.split()[0] for line in again}) <= 1


def test_death_inside_the_optimizer_step(tmp_path: Path, fault_free: str) -> None:
    outcome, records, digest = train_through(trains.dies_in_optimizer, settings(tmp_path), tmp_path)
    survived(outcome, records, digest, fault_free)
    assert len(of(ProcessLost, records)) == 1


def test_death_between_reduction_and_commit(tmp_path: Path, fault_free: str) -> None:
    outcome, records, digest = train_through(trains.dies_before_commit, settings(tmp_path), tmp_path)
    survived(outcome, records, digest, fault_free)
    assert len(of(ProcessLost, records)) == 1


def test_a_rank_that_dies_while_it_receives(tmp_path: Path) -> None:
    """The state is large, so that the newcomer is caught in the transfer."""
    wide = {"width": "200000", "steps": "12", "pause_s": "0.02"}
    alone = tmp_path / "alone"
    truth = train_through(trains.plain, settings(alone, world=2, options=wide), alone)[2]

    def misfortune(fleet: PlainFleet) -> None:
        after(3)(fleet)
        fleet.kill(1)
        fleet.wait_for(lambda: fleet.coordinator.machine.state.growth.proposal is not None)
        fleet.wait_for(lambda: fleet.coordinator.machine.state.phase == "form")
        fleet.kill(1)

    outcome, records, digest = train_through(trains.plain, settings(tmp_path, options=wide), tmp_path, misfortune)
    survived(outcome, records, digest, truth)


def test_a_rank_that_dies_during_re_forming(tmp_path: Path, fault_free: str) -> None:
    def misfortune(fleet: PlainFleet) -> None:
        after(8)(fleet)
        fleet.kill(1)
        fleet.wait_for(lambda: fleet.coordinator.machine.state.phase != "run")
        fleet.kill(2)

    survived(*train_through(trains.plain, settings(tmp_path), tmp_path, misfortune), fault_free)


def test_all_ranks_die_and_the_run_goes_on_from_the_last_checkpoint(tmp_path: Path, fault_free: str) -> None:
    def misfortune(fleet: PlainFleet) -> None:
        fleet.wait_for(lambda: fleet.coordinator.machine.state.checkpoints.newest_id)
        for slot in range(3):
            fleet.kill(slot)

    chosen = settings(tmp_path, checkpoint=CheckpointSettings(policy="fixed", interval_s=0.5), options={"pause_s": "0.1"})
    outcome, records, digest = train_through(trains.plain, chosen, tmp_path, misfortune)
    survived(outcome, records, digest, fault_free)
    begun = of(HistoryBegun, records)
    assert len(begun) == 1
    assert begun[0].from_state.step > 0
    assert any(record.phase == "durable" for record in of(CheckpointRecord, records))


def test_a_store_that_is_gone_for_a_while_stops_nothing(tmp_path: Path) -> None:
    """Its folder is a file: nothing can be written. Training goes on, what fails is counted, and checkpoints come again when it is back."""
    store, away = tmp_path / "store", tmp_path / "aside"
    store.mkdir()

    def misfortune(fleet: PlainFleet) -> None:
        machine = fleet.coordinator.machine
        fleet.wait_for(lambda: machine.state.checkpoints.newest_id)
        store.rename(away)
        store.write_text("no folder")
        step = fleet.step
        fleet.wait_for(lambda: any(record.phase == "skipped" for record in of(CheckpointRecord, fleet.records())))
        assert fleet.step > step
        store.unlink()
        away.rename(store)
        newest = machine.state.checkpoints.newest_id
        fleet.wait_for(lambda: machine.state.checkpoints.newest_id != newest)

    chosen = settings(tmp_path, checkpoint=CheckpointSettings(policy="fixed", interval_s=0.2), options={"steps": "4000", "pause_s": "0.02"})
    with PlainFleet(trains.plain, chosen, tmp_path, url=f"file://{store}") as fleet:
        misfortune(fleet)


def test_a_survivor_is_stopped_while_another_is_replaced(tmp_path: Path, fault_free: str) -> None:
    def misfortune(fleet: PlainFleet) -> None:
        after(8)(fleet)
        fleet.kill(2, signal.SIGSTOP)
        fleet.kill(1)

    survived(*train_through(trains.plain, settings(tmp_path), tmp_path, misfortune), fault_free)


def test_a_zombie_that_wakes_after_its_replacement_is_in_is_fenced(tmp_path: Path, fault_free: str) -> None:
    """The whole node falls silent, agent and rank, so nobody can kill the rank; when it wakes, its place is taken."""

    def misfortune(fleet: PlainFleet) -> None:
        after(8)(fleet)
        zombie = fleet.processes[1]
        os.kill(zombie.pid, signal.SIGSTOP)
        fleet.call(fleet.agents["node1"].stop())
        fleet.wait_for(lambda: 1 not in fleet.coordinator.machine.state.roster.by_slot)
        fleet.spawn_on(1, "node0")
        fleet.wait_for(lambda: any(member.slot == 1 and in_view for member, _, in_view in fleet.census()))
        fleet.call(fleet.start_agent(1))
        os.kill(zombie.pid, signal.SIGCONT)
        zombie.join(20)
        assert zombie.exitcode not in (None, 0)

    chosen = settings(tmp_path, options={"steps": "60", "pause_s": "0.2"})
    alone = tmp_path / "alone"
    truth = train_through(trains.plain, settings(alone, world=2, options={"steps": "60"}), alone)[2]
    # Nobody recorded what the silent node did until it was given up, nor what its first agent had read and not reported: that time is
    # `other`, and much of a run that lasts seconds.
    survived(*train_through(trains.plain, chosen, tmp_path, misfortune), truth, other_ratio=0.1)


def test_a_node_with_two_ranks_is_lost(tmp_path: Path, fault_free: str) -> None:
    def misfortune(fleet: PlainFleet) -> None:
        after(8)(fleet)
        fleet.call(fleet.agents["node0"].stop())
        fleet.kill(0)
        fleet.kill(2)
        fleet.wait_for(lambda: not {0, 2} & set(fleet.coordinator.machine.state.roster.by_slot))
        fleet.call(fleet.start_agent(0))

    # What a node has not reported yet dies with it, a quarter of a second a rank and what it was at: much of a run that lasts seconds.
    survived(*train_through(trains.plain, settings(tmp_path), tmp_path, misfortune), fault_free, other_ratio=0.1)


async def _replace_coordinator(fleet: PlainFleet) -> None:
    await fleet.kill_coordinator()
    await fleet.start_coordinator(fleet.port)


def test_the_coordinator_dies_and_training_does_not_stop(tmp_path: Path, fault_free: str) -> None:
    def misfortune(fleet: PlainFleet) -> None:
        after(8)(fleet)
        fleet.call(_replace_coordinator(fleet))

    outcome, records, digest = train_through(trains.plain, settings(tmp_path), tmp_path, misfortune)
    survived(outcome, records, digest, fault_free)
    assert len(of(ViewPublished, records)) == 1
    assert len(of(ProcessUp, records)) == 3


def test_the_coordinator_dies_during_a_view_change(tmp_path: Path, fault_free: str) -> None:
    def misfortune(fleet: PlainFleet) -> None:
        after(8)(fleet)
        fleet.kill(1)
        fleet.wait_for(lambda: fleet.coordinator.machine.state.phase != "run")
        fleet.call(_replace_coordinator(fleet))

    survived(*train_through(trains.plain, settings(tmp_path), tmp_path, misfortune), fault_free)


def test_a_stale_journal(tmp_path: Path, fault_free: str) -> None:
    """The coordinator's last records are gone: it learns from the ranks what it forgot."""

    async def forget(fleet: PlainFleet) -> None:
        await fleet.kill_coordinator()
        lines = fleet.journal_path.read_bytes().splitlines(keepends=True)
        views = [index for index, line in enumerate(lines) if line.startswith(b'["ViewPublished"')]
        fleet.journal_path.write_bytes(b"".join(lines[: views[-1]]))
        await fleet.start_coordinator(fleet.port)

    def misfortune(fleet: PlainFleet) -> None:
        after(8)(fleet)
        fleet.kill(1)
        fleet.wait_for(lambda: fleet.coordinator.machine.state.assembly.generation >= 2 and fleet.coordinator.machine.state.phase == "run")
        fleet.call(forget(fleet))

    outcome, records, digest = train_through(trains.plain, settings(tmp_path), tmp_path, misfortune)
    assert outcome.status == "completed"
    assert digest == fault_free
    generations = [record.view.generation for record in of(ViewPublished, records)]
    assert generations == sorted(set(generations))


def test_dataloader_workers_of_a_killed_rank_hold_nothing_up(tmp_path: Path, fault_free: str) -> None:
    def misfortune(fleet: PlainFleet) -> None:
        after(8)(fleet)
        fleet.kill(1)

    outcome, records, digest = train_through(trains.with_loader, settings(tmp_path), tmp_path, misfortune)
    survived(outcome, records, digest, fault_free)
    assert of(ProcessLost, records)[0].cause == ProcessEnded()
    moments = [moment.text for moment in why(records, "1.0").moments]
    assert moments[0] == "has seen the end of rank 1.0"
    assert [each for each in moments if "of its shards" in each] and [each for each in moments if "training goes on" in each]
    assert {moment.who for moment in why(records, "1").moments} >= {"agent node1", "coordinator", "rank 0.0", "rank 2.0"}


def test_a_tail_after_commit_sees_each_step_committed_once(tmp_path: Path, fault_free: str) -> None:
    def misfortune(fleet: PlainFleet) -> None:
        after(8)(fleet)
        fleet.kill(1)

    survived(*train_through(trains.with_tail, settings(tmp_path), tmp_path, misfortune), fault_free)
    for path in (tmp_path / "flags").glob("tail-[02]-*"):
        seen: dict[int, list[str]] = defaultdict(list)
        for line in path.read_text().splitlines():
            number, committed = line.split()
            seen[int(number)].append(committed)
        assert all(words.count("True") <= 1 and (words[-1] == "True" or len(words) == 1) for words in seen.values()), seen


def test_lost_shards_join_the_attempt_that_is_under_way(tmp_path: Path, fault_free: str) -> None:
    """Who still computes its own when a rank is lost runs the loop body once for both."""
    survived(*train_through(trains.dies_while_others_compute, settings(tmp_path), tmp_path), fault_free)
    tails = [path.read_text().splitlines() for path in (tmp_path / "flags").glob("tail-[02]-*")]
    assert [[line for line in lines if line.startswith("10 ")] for lines in tails] == [["10 True"]] * 2


def test_a_shard_that_kills_whoever_computes_it_ends_the_run_by_name(tmp_path: Path) -> None:
    outcome, _, _ = train_through(trains.poisoned_shard, settings(tmp_path, budgets=Budgets()), tmp_path)
    assert outcome.status == "failed"
    assert "shard 5 of step 10" in outcome.reason
    assert "3 times" in outcome.reason


def test_a_nan_is_computed_again_and_its_rank_is_named(tmp_path: Path, fault_free: str) -> None:
    outcome, records, digest = train_through(trains.nan_once, settings(tmp_path), tmp_path)
    survived(outcome, records, digest, fault_free)
    [reported] = [record for record in of(DecisionMade, records) if record.action == "recompute"]
    assert (reported.fields["step"], reported.fields["shard"]) == (10, 3)
    assert reported.reason.startswith("step 10, shard 3, computed by ")


def test_a_nan_that_comes_again_is_named(tmp_path: Path) -> None:
    outcome, _, _ = train_through(trains.nan_always, settings(tmp_path), tmp_path)
    assert outcome.status == "failed"
    assert "step 10, shard 3" in outcome.reason + outcome.detail


def test_a_users_exception_shows_the_users_traceback_and_no_endless_retry(tmp_path: Path) -> None:
    outcome, records, _ = train_through(trains.raises, settings(tmp_path), tmp_path)
    assert outcome.status == "failed"
    assert "a bug of the user's, at step 10" in outcome.reason
    assert "in inject" in outcome.detail
    assert "actors/rank" not in outcome.detail
    assert len(of(ProcessUp, records)) <= 6


@pytest.fixture(autouse=True)
def no_process_is_left_behind() -> Iterator[None]:
    ensure_running()  # what ranks are forked off stays, whichever test is the first of the session
    before = _children()
    yield
    assert _children() <= before


def _children() -> set[int]:
    path = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    mine = {int(pid) for pid in path.read_text().split()}
    return {pid for pid in mine if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()}
