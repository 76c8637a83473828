"""Hosts that are lost, cut off, and back: the run goes on with the same bits, its ledger closes, and what was lost commits nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fleet.protocol.records import CheckpointRecord, Committed, DecisionMade, ProcessLost, ProcessUp, Record, Spans, ViewPublished
from fleet.protocol.types import Member, StateId
from tests.support.host_runs import ON_THE_HEAD, Seen, Shell, processes_on, wait_until_clean
from tests.support.host_store import HostStore
from tests.support.hosts import Host
from tests.support.ray_hosts import RayHosts, runs_raylet
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(1200)
WAIT_S = 240.0
CUT_S, SHORT_CUT_S = 20.0, 10.0
SLOTS = 5


@pytest.fixture
def shell(ray_hosts: RayHosts, store: HostStore, tmp_path: Path) -> Iterator[Shell]:
    yield Shell(ray_hosts, store, tmp_path)
    wait_until_clean([host for host in ray_hosts.hosts if host.alive])


@pytest.fixture
def digest(undisturbed: Seen) -> str:
    return undisturbed.digest


class Watched:
    """A run that goes on, on a cluster whose hosts are about to suffer."""

    def __init__(self, shell: Shell, name: str) -> None:
        self.shell, self.name = shell, name
        self.folder = f"{ON_THE_HEAD}/{name}"
        self._nodes: dict[str, str] = {}

    def records(self) -> list[Record]:
        return self.shell.records(self.folder)

    def until(self, condition: object, what: str) -> None:
        assert callable(condition)
        until(lambda: condition(self.records()), what, WAIT_S, tick_s=1.0)

    def host_of(self, records: list[Record], member: Member) -> Host:
        """Where a process of the run lives, or has lived."""
        node = next(each.process.node for each in records if isinstance(each, ProcessUp) and each.member == member)
        if node not in self._nodes:  # Ray is asked by a process of its own, which imports it
            self._nodes |= {each["NodeID"]: each["NodeManagerAddress"] for each in self.shell.cluster.head.nodes()}
        return next(worker for worker in self.shell.cluster.workers if worker.address == self._nodes[node])

    def living_on(self, host: Host) -> set[Member]:
        """The processes of the run that live on a host, as far as the journal says."""
        records = self.records()
        return {member for member in living(records) if self.host_of(records, member) is host}

    def donors_host(self) -> Host:
        """The host of the first rank of the view, whose state others get."""
        records = self.records()
        view = views(records)[-1].view
        return self.host_of(records, view.members[view.donor])

    def end(self) -> Seen:
        """Let the rest of it pass quickly, and wait until it has ended well."""
        self.shell.go_fast()
        attached = self.shell.fleet("attach", self.name, "--address", self.shell.cluster.head.address)
        assert attached.returncode == 0, attached.stderr[-3000:]
        return self.shell.seen(self.folder)


@contextmanager
def watched(shell: Shell, name: str, *options: str) -> Iterator[Watched]:
    """A run of four ranks and a spare, from its third view-wide commit on. It is stopped when the block fails."""
    begun = shell.run(name, "--detach", "--set", "pause_s=0.8", *options)
    assert begun.returncode == 0, begun.stderr[-3000:]
    run = Watched(shell, name)
    try:
        run.until(lambda records: full(records) and commits_since(records, views(records)[-1]) > 2, "four ranks train, with a spare")
        yield run
    except BaseException:
        for command in ("stop", "attach"):  # or it would be there when the next test begins
            shell.fleet(command, name, "--address", shell.cluster.head.address)
        raise
    finally:
        for worker in shell.cluster.workers:
            if worker.alive:
                worker.run(["rm", "-f", "/srv/fast"])


def views(records: list[Record]) -> list[ViewPublished]:
    return [each for each in records if isinstance(each, ViewPublished)]


def lost(records: list[Record]) -> set[Member]:
    return {each.member for each in records if isinstance(each, ProcessLost)}


def living(records: list[Record]) -> set[Member]:
    return {each.member for each in records if isinstance(each, ProcessUp)} - lost(records)


def full(records: list[Record]) -> bool:
    """All slots are filled, and the view has all its ranks."""
    return len(living(records)) == SLOTS and bool(views(records)) and len(views(records)[-1].view.members) == SLOTS - 1


def reported_room(records: list[Record]) -> list[str]:
    """What was said of ranks that have no place on the cluster."""
    return [each.action for each in records if isinstance(each, DecisionMade) and each.policy == "room"]


def commits_since(records: list[Record], mark: Record) -> int:
    return sum(isinstance(each, Committed) for each in records[records.index(mark) :])


def committed_s(records: list[Record]) -> float:
    """When the newest step was committed, on the run's clock."""
    return max(each.at_s for each in records if isinstance(each, Committed))


def committed(records: list[Record]) -> list[StateId]:
    return [each.state for each in records if isinstance(each, Committed)]


def check_nothing_of_the_lost(records: list[Record]) -> None:
    """After its loss a process is in no view, no step is committed by a view that it is in, and it has no time in later views."""
    gone: dict[Member, int] = {}
    members: tuple[Member, ...] = ()
    for record in records:
        match record:
            case ProcessLost(member=member, generation=generation):
                gone[member] = generation
            case ViewPublished(view=view):
                members = view.members
                assert not gone.keys() & set(members)
            case Committed():
                assert not gone.keys() & set(members), record
            case Spans(member=member, generation=generation) if member in gone:
                assert generation <= gone[member]
            case _:
                continue


def check_bits(seen: Seen, digest: str) -> None:
    assert seen.status == "completed" and seen.digest == digest
    assert seen.report["closes"]
    check_nothing_of_the_lost(seen.records)
    durable = [each.state for each in seen.records if isinstance(each, CheckpointRecord) and each.phase == "durable"]
    assert durable
    for state in durable:  # ranks report states in pulses: a record can be of the step behind it
        assert any(kept.history == state.history and kept.step >= state.step for kept in committed(seen.records)), state


def test_a_host_is_cut_off_for_a_while_and_another_dies_and_boots(shell: Shell, digest: str) -> None:
    with watched(shell, "lost") as run:
        check_a_cut_host_comes_back_as_a_new_node(run)
        check_a_dead_host_is_replaced_by_itself(run)
        seen = run.end()
    check_bits(seen, digest)


def check_a_cut_host_comes_back_as_a_new_node(run: Watched) -> None:
    """What the run has there ends by itself and commits nothing, and so does Ray. Once Ray is started there again, the host joins."""
    cluster, victim = run.shell.cluster, run.donors_host()
    gone = run.living_on(victim)
    victim.cut()
    began_s = committed_s(run.records())
    run.until(lambda records: committed_s(records) - began_s > CUT_S, "the others go on for as long as the cut")
    assert gone <= lost(run.records())
    assert victim.address not in cluster.head.alive()
    victim.mend()
    back_s = committed_s(run.records())
    run.until(lambda records: committed_s(records) > back_s, "and go on when it is back")
    assert not gone & living(run.records())
    until(lambda: not processes_on(victim), "nothing of the run goes on there", WAIT_S, tick_s=1.0)
    until(lambda: not runs_raylet(victim), "Ray's daemon learns that it is out, and ends", WAIT_S, tick_s=1.0)
    cluster.join(victim)  # an agent that Ray's daemon has taken along leaves files, which the next one removes
    run.until(full, "its slots are filled again, on the node that is new")
    assert run.living_on(victim)


def check_a_dead_host_is_replaced_by_itself(run: Watched) -> None:
    victim = run.donors_host()
    gone = run.living_on(victim)
    warned = reported_room(run.records()).count("warn")
    victim.kill_all()
    run.until(lambda records: gone <= lost(records) and commits_since(records, views(records)[-1]) > 1, "the others go on")
    run.until(lambda records: reported_room(records).count("warn") > warned, "it is said that there is no room for all ranks")
    run.shell.cluster.restore()
    run.until(full, "its slots are filled again, on the node that is new")
    run.until(lambda records: reported_room(records)[-1] == "recovered", "and that there is room again")
    assert run.living_on(victim)


def test_when_the_heads_link_is_cut_ranks_wait_and_nobody_is_lost(shell: Shell, digest: str) -> None:
    with watched(shell, "head") as run:
        before = living(run.records())
        check_all_wait(run, shell.head)
        assert living(run.records()) == before
        seen = run.end()
    check_bits(seen, digest)


def test_with_stall_all_wait_for_a_host_that_is_cut_off(shell: Shell, digest: str) -> None:
    with watched(shell, "stall", "--config", "on_partition=stall") as run:
        before = living(run.records())
        check_all_wait(run, run.donors_host())
        assert living(run.records()) == before and all(worker.address in shell.cluster.head.alive() for worker in shell.cluster.workers)
        seen = run.end()
    check_bits(seen, digest)


def check_all_wait(run: Watched, victim: Host) -> None:
    """Cut ``victim`` off for a while: all wait meanwhile, and go on with the same view's members once the link is mended."""
    members = views(run.records())[-1].view.members
    victim.cut()
    run.until(lambda records: waited(records) == ["wait"], "it is told that all wait")
    at_step = committed_step(run.records())
    time.sleep(SHORT_CUT_S)
    assert committed_step(run.records()) == at_step
    victim.mend()
    run.until(lambda records: committed_step(records) > at_step + 2, "they go on when it is back")
    assert waited(run.records()) == ["wait", "recovered"]
    assert views(run.records())[-1].view.members == members


def waited(records: list[Record]) -> list[str]:
    """What was said of nodes that are waited for."""
    return [each.action for each in records if isinstance(each, DecisionMade) and each.policy == "partition"]


def committed_step(records: list[Record]) -> int:
    return max(each.state.step for each in records if isinstance(each, Committed))
