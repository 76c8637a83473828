"""Ranks that compute shards together on several hosts: one host is lost, with a whole group."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.protocol.records import HistoryBegun, ProcessLost, ViewPublished
from fleet.protocol.types import columns
from tests.hosts.test_losses import Watched, check_bits, commits_since, full, lost, views
from tests.support.host_runs import FOLDER, ON_THE_HEAD, Shell, wait_until_clean
from tests.support.host_store import HostStore
from tests.support.hosts import ROOT
from tests.support.ray_hosts import RayHosts

pytestmark = pytest.mark.timeout(1200)
SCRIPT = str(ROOT / "examples" / "gpt_tensor.py")
MESH = ("--mesh", "tensor=2", "--shards", "2", "--set", "steps=40")


@pytest.fixture
def shell(ray_hosts: RayHosts, store: HostStore, tmp_path: Path) -> Iterator[Shell]:
    yield Shell(ray_hosts, store, tmp_path)
    wait_until_clean([host for host in ray_hosts.hosts if host.alive])


def test_a_host_is_lost_with_a_whole_group_and_no_bit_is_changed(shell: Shell) -> None:
    """The other group goes on at once, in the same history. The ranks that come for the lost ones are a group, too."""
    done = shell.run("one-group", *MESH, "--json", "one.json", script=SCRIPT, world=2, spares=0)
    assert done.returncode == 0, done.stderr[-3000:]
    digest = shell.seen(f"{ON_THE_HEAD}/one-group").digest
    assert json.loads(shell.head.run(["cat", "one.json"], cwd=FOLDER).stdout)["closes"]
    begun = shell.run("tensor", "--detach", *MESH, script=SCRIPT)
    assert begun.returncode == 0, begun.stderr[-3000:]
    run = Watched(shell, "tensor")
    run.until(lambda records: full(records) and commits_since(records, views(records)[-1]) > 2, "two groups train, with a spare")
    view = views(run.records())[-1].view
    victim = run.host_of(run.records(), view.members[view.donor])
    gone = run.living_on(victim)
    assert {member.coordinate for member in view.members if member in gone} == set(columns(view.members)), "a host has whole groups"
    victim.kill_all()
    run.until(lambda records: gone <= lost(records) and commits_since(records, views(records)[-1]) > 1, "the other group goes on")
    shell.cluster.restore()
    seen = run.end()
    check_bits(seen, digest)
    assert not [record for record in seen.records if isinstance(record, HistoryBegun)]
    at_s = {record.at_s for record in seen.records if isinstance(record, ProcessLost) and record.member in gone}
    assert len(at_s) == 1, "they are lost together"
    sizes = [len(record.view.members) for record in seen.records if isinstance(record, ViewPublished)]
    assert set(sizes) <= {2, 4} and sizes[-1] == 4
