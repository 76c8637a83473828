"""Runs that join a cluster of several hosts, by every way in: they end with the bits of an undisturbed run, and leave nothing behind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet.protocol.proof import Reason
from fleet.protocol.records import Committed, ProcessUp, RefusedLines, Resumed, RunEnded, RunStarted
from tests.support.host_runs import FOLDER, ON_THE_HEAD, Seen, Shell, wait_until_clean
from tests.support.host_store import HostStore
from tests.support.hosts import ROOT
from tests.support.journals import durable
from tests.support.ray_hosts import RayHosts, ray
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(1200)

LAUNCH = """
import json, sys
import ray
import fleet
from train import train

def launched(name, address):
    result = fleet.launch(train, world=4, spares=1, shards={shards}, storage={storage!r}, address=address, name=name)
    return [result.status, result.digest, sorted(result.state()["model"])]

alone = launched("from-python", {address!r})
ray.init(address="auto", log_to_driver=False)
inside = launched("launched-inside", "auto")
print(json.dumps(dict(alone=alone, inside=inside, connected=ray.is_initialized())))
"""
TRAINER = """
import json
import ray.train
from ray.train import RunConfig, ScalingConfig
import fleet
from train import train

def loop():
    assert ray.train.get_context().get_world_size() == 4
    train(fleet.current_run())

trainer = fleet.Trainer(
    loop, scaling_config=ScalingConfig(num_workers=4), run_config=RunConfig(name="trainer", storage_path={storage!r}),
    shards={shards}, spares=1, address={address!r},
)
result = trainer.fit()
print(json.dumps(dict(status=result.fleet.status, digest=result.fleet.digest)))
"""


@pytest.fixture
def shell(ray_hosts: RayHosts, store: HostStore, tmp_path: Path) -> Iterator[Shell]:
    """Nothing of a test's runs is left on any host when it ends, but for what the head keeps of them."""
    yield Shell(ray_hosts, store, tmp_path)
    wait_until_clean(list(ray_hosts.hosts))


def test_what_a_run_saves_and_prints_is_where_its_user_looks(undisturbed: Seen, shell: Shell) -> None:
    assert undisturbed.status == "completed" and undisturbed.report["closes"]
    assert "runs/undisturbed/saved/model.pt" in shell.store.keys("runs/undisturbed")
    assert "runs/undisturbed/journal.jsonl" in shell.store.keys("runs/undisturbed")
    here = shell.fleet("logs", "undisturbed").stdout
    assert set(re.findall(r"trains on (\w+)", here)) <= {worker.hostname for worker in shell.cluster.workers}
    assert {"[rank 0]", "[rank 1]"} <= set(re.findall(r"\[rank \d\]", here))
    assert shell.seen(f"{FOLDER}/runs/undisturbed").records == undisturbed.records


def test_gpt_in_a_storm_ends_as_its_twin(shell: Shell) -> None:
    script = str(ROOT / "examples" / "gpt.py")
    options = ("--chaos", "storm", "--twin", "--set", "steps=40", "--json", "gpt.json")
    done = shell.run("gpt", *options, script=script)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(shell.head.run(["cat", "gpt.json"], cwd=FOLDER).stdout)
    assert report["twin"]["equal"] and report["closes"] and report["counts"]["executed"] > 0
    assert len({record.process.node for record in shell.records(f"{ON_THE_HEAD}/gpt") if isinstance(record, ProcessUp)}) == 3


def test_a_submitted_job_ends_with_the_same_bits(shell: Shell, undisturbed: Seen) -> None:
    command = ["fleet", *shell.run_arguments("as-a-job", "--address", "auto")]
    submit = [*ray(shell.head), "job", "submit", "--address", shell.cluster.head.dashboard_url, "--working-dir", ".", "--", *command]
    done = shell.head.run(submit, 420, check=False, cwd=FOLDER)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert shell.seen(f"{ON_THE_HEAD}/as-a-job").digest == undisturbed.digest


def test_fleet_launch_from_a_script_and_in_a_driver_of_ray(shell: Shell, undisturbed: Seen) -> None:
    found = shell.script(_filled(LAUNCH, shell))
    weights = ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert found == {
        "alone": ["completed", undisturbed.digest, weights],
        "inside": ["completed", undisturbed.digest, weights],
        "connected": True,
    }


def test_fleet_trainer_on_the_cluster(shell: Shell, undisturbed: Seen) -> None:
    assert shell.script(_filled(TRAINER, shell)) == {"status": "completed", "digest": undisturbed.digest}


def _filled(program: str, shell: Shell) -> str:
    return program.format(address=shell.cluster.head.address, storage=shell.store.url("runs"), shards=8)


def test_a_detached_run_goes_on_when_its_driver_is_killed(shell: Shell, undisturbed: Seen) -> None:
    address, folder = ("--address", shell.cluster.head.address), f"{ON_THE_HEAD}/detached"
    begun = shell.run("detached", "--detach", "--set", "pause_s=0.4", "--checkpoint", "2")
    assert begun.returncode == 0 and "goes on without this shell" in begun.stderr, begun.stderr[-3000:]
    until(lambda: _is_kept(shell.records(folder)), "a commit and a durable checkpoint", 240, tick_s=1.0)
    first = _driver(shell, "detached")
    shell.head.run(["kill", "-KILL", str(first)])
    until(lambda: _driver(shell, "detached") not in (0, first), "another process drives the run", 120, tick_s=1.0)
    assert "its driver was started again 1 time(s)" in shell.fleet("status", *address).stdout
    printed = shell.fleet("logs", "detached", *address).stdout
    assert {f"trains on {worker.hostname}" for worker in shell.cluster.workers} <= set(re.findall(r"trains on \w+", printed))
    until(lambda: any(isinstance(each, Resumed) for each in shell.records(folder)), "the run goes on", 120, tick_s=1.0)
    shell.go_fast()
    attached = shell.fleet("attach", "detached", *address, "--json", "detached.json")
    shell.go_slowly()
    assert attached.returncode == 0, attached.stderr[-3000:]
    seen = shell.seen(folder)
    assert seen.status == "completed" and seen.digest == undisturbed.digest and seen.report["closes"]
    assert json.loads(shell.head.run(["cat", "detached.json"], cwd=FOLDER).stdout)["status"] == "completed"
    assert "detached" not in shell.fleet("status", *address).stdout  # somebody has seen its end


def _driver(shell: Shell, run: str) -> int:
    """The process that drives a run, as ``fleet status`` names it; 0 when there is none."""
    said = shell.fleet("status", "--address", shell.cluster.head.address).stdout
    found = re.search(rf"^{run}  goes on, driven by process (\d+) of the head", said, re.MULTILINE)
    return int(found[1]) if found else 0


def _is_kept(records: list[Any]) -> bool:
    return bool(durable(records)) and any(isinstance(each, Committed) for each in records)


def ended_s(seen: Seen) -> float:
    """When the run ended, on its own clock."""
    return next(record.at_s for record in reversed(seen.records) if isinstance(record, RunEnded))


def test_ranks_are_where_labels_and_resources_have_them(shell: Shell, undisturbed: Seen) -> None:
    kept = shell.cluster.workers[:2]
    racks = f"rack=in({','.join(f'rack-{worker.hostname}' for worker in kept)})"
    done = shell.run("placed", "--labels", racks, "--config", "per_rank.cpus=1", world=3, spares=1)
    assert done.returncode == 0, done.stderr[-3000:]
    placed = shell.seen(f"{ON_THE_HEAD}/placed")
    assert placed.digest == undisturbed.digest
    homes = {each.process.node for each in placed.records if isinstance(each, ProcessUp)}
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in shell.cluster.head.nodes()}
    assert {addresses[home] for home in homes} == {worker.address for worker in kept}
    alone = shell.run("alone", "--resources", f"{kept[0].hostname}=0.5", "--config", "per_rank.cpus=0.5", world=2, spares=0)
    assert alone.returncode == 0, alone.stderr[-3000:]
    seen = shell.seen(f"{ON_THE_HEAD}/alone")
    assert {addresses[each.process.node] for each in seen.records if isinstance(each, ProcessUp)} == {kept[0].address}


def test_two_runs_at_once_do_not_meet(shell: Shell, undisturbed: Seen) -> None:
    names = ("left", "right")
    with shell.running(*shell.run_arguments("left", world=2)) as left, shell.running(*shell.run_arguments("right", world=2)) as right:
        for process in (left, right):
            said, _ = process.communicate(timeout=600)
            assert process.returncode == 0, said[-3000:]
    seen = [shell.seen(f"{ON_THE_HEAD}/{name}") for name in names]
    assert [each.digest for each in seen] == [undisturbed.digest] * 2
    refused = [record for each in seen for record in each.records if isinstance(record, RefusedLines)]
    assert {record.reason for record in refused} <= {Reason.HUNG_UP}  # a connection that ended early is no stranger's
    mine, other = ({record.process for record in each.records if isinstance(record, ProcessUp)} for each in seen)
    assert mine and other and not mine & other
    starts = [start for each in seen if isinstance(start := each.records[0], RunStarted)]
    spans = [(start.unix_time_s, start.unix_time_s - start.at_s + ended_s(each)) for start, each in zip(starts, seen, strict=True)]
    assert max(begin for begin, _ in spans) < min(end for _, end in spans), "they have not run at the same time"
