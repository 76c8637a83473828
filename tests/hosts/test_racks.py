"""All hosts of a rack are lost at once, as their labels say: the other rack goes on, with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet.protocol.decisions import DomainLost
from fleet.protocol.records import DecisionMade, FaultRecord, HistoryBegun, ProcessLost, ViewPublished
from tests.hosts.test_losses import check_nothing_of_the_lost
from tests.support.host_runs import FOLDER, ON_THE_HEAD, Shell
from tests.support.host_store import HostStore, write
from tests.support.hosts import Hosts
from tests.support.ray_hosts import TwoRacks

pytestmark = pytest.mark.timeout(900)


def test_a_rack_is_lost_and_the_other_goes_on(tmp_path: Path) -> None:
    with Hosts(5) as hosts:
        store = HostStore(hosts[0])
        shell = Shell(TwoRacks(hosts, prepare=store.admit), store, tmp_path)
        write(shell.head, f"{FOLDER}/faults.csv", "at_s,component,kind,slot,node\n6,rack,rack,,0\n")
        slow = ("--set", "steps=100", "--set", "pause_s=0.2", "--config", 'domains=["rack"]')
        done = shell.run("racks", *slow, "--chaos", "trace=faults.csv,repair=10s", world=6, spares=0)
        assert done.returncode == 0, done.stderr[-3000:]
        assert len(shell.cluster.head.alive()) == 5, "Ray keeps its nodes: chaos takes only what the run has there"
        seen = shell.seen(f"{ON_THE_HEAD}/racks")
        calm = shell.run("calm", "--set", "steps=100", world=3, spares=0)
        assert calm.returncode == 0, calm.stderr[-3000:]
        assert seen.digest == shell.seen(f"{ON_THE_HEAD}/calm").digest
    injected = next(each for each in seen.records if isinstance(each, FaultRecord) and each.phase == "executed")
    lost = {each.member for each in seen.records if isinstance(each, ProcessLost)}
    assert len(injected.members) >= 2 and set(injected.members) <= lost
    (whole,) = [each.payload for each in seen.records if isinstance(each, DecisionMade) and isinstance(each.payload, DomainLost)]
    assert whole.level == "rack" and len(whole.nodes) == 2 and len(whole.members) == len(injected.members), "the rack is one loss"
    assert not any(isinstance(each, HistoryBegun) for each in seen.records), "the other rack held the state"
    assert len([each for each in seen.records if isinstance(each, ViewPublished)][-1].view.members) == 6, "the rack came back"
    assert seen.status == "completed" and seen.report["closes"]
    check_nothing_of_the_lost(seen.records)
