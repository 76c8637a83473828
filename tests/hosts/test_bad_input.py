"""What cannot be trained on a cluster is refused by name, with the node, before a rank starts; nothing is left of it on any host."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.host_runs import FOLDER, ON_THE_HEAD, SCRIPT, Shell, kept_on, wait_until_clean
from tests.support.host_store import S3_PORT, HostStore, write
from tests.support.hosts import HOME, Host, Hosts
from tests.support.ray_hosts import Head, RayHosts, ray_head
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(900)
TOKEN = "a-token-of-this-test-alone-0123456789"
HIDE = 'mount -t tmpfs hidden "$(echo /srv/*-python/lib/python*/site-packages/torch/lib)"'
SHOW = 'umount "$(echo /srv/*-python/lib/python*/site-packages/torch/lib)"'

OTHER_RAY = """
import json, ray
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
ray.init(address={address!r}, log_to_driver=False)
facts = json.loads(_internal_kv_get(b"CLUSTER_METADATA", namespace=b"cluster"))
_internal_kv_put(b"CLUSTER_METADATA", json.dumps(facts | {{"ray_version": "2.9.9"}}).encode(), overwrite=True, namespace=b"cluster")
"""
"""The cluster says of itself that another Ray has started it."""


@pytest.fixture
def shell(ray_hosts: RayHosts, store: HostStore, tmp_path: Path) -> Iterator[Shell]:
    """Whatever a test has the cluster refuse: nothing of it is left on any host."""
    shell = Shell(ray_hosts, store, tmp_path)
    before = noted(shell)
    yield shell
    wait_until_clean(list(ray_hosts.hosts))
    assert noted(shell) == before


def noted(shell: Shell) -> tuple[list[str], list[str]]:
    """Names of the runs that the cluster keeps, and of those in the user's folder."""
    return kept_on(shell.head), shell.head.run(["sh", "-c", "ls runs 2>/dev/null || true"], cwd=FOLDER).stdout.split()


@pytest.fixture(scope="module")
def guarded() -> Iterator[Head]:
    """A head alone, which asks for a token."""
    with Hosts(1) as hosts:
        yield ray_head(hosts[0], num_cpus=1, token=TOKEN)


def refusal(done: subprocess.CompletedProcess[str], *words: str) -> str:
    """The one message of a command that was refused, which has all ``words``."""
    messages = [line for line in done.stderr.splitlines() if line.startswith("fleet: ")]
    assert done.returncode == 2 and len(messages) == 1, (done.returncode, done.stderr[-3000:])
    assert not [word for word in words if word not in messages[0]], messages
    assert "Traceback" not in done.stderr
    return messages[0]


def test_an_address_without_a_cluster(shell: Shell) -> None:
    head = shell.head.address
    for address, words in {
        "nonsense": "is no address of a cluster",
        f"http://{head}:6379": "is no address of a cluster",
        f"{head}:6390": "no cluster answers there",
        f"{head.rpartition('.')[0]}.250:6379": "no cluster answers there",
        f"{head}:{S3_PORT}": "no head of a Ray cluster",
        f"ray://{head}:10001": "is no address of a cluster",
    }.items():
        refusal(shell.fleet("run", SCRIPT, "--address", address), "--address", address, words)


def test_a_cluster_with_another_token_or_another_ray(guarded: Head) -> None:
    shell, run = guarded.host, ["fleet", "run", SCRIPT, "--no-trial", "--address", guarded.address]
    shell.run(["sh", "-c", f"echo 'def train(run): pass' >{SCRIPT}"])
    env = dict(guarded.env)
    wrong = shell.run(run, 240, check=False, env=env | {"RAY_AUTH_TOKEN": "another-token-0123456789"})
    refusal(wrong, "--address", guarded.address, "RAY_AUTH_TOKEN")
    guarded.script(OTHER_RAY.format(address=guarded.address))
    refusal(
        shell.run(run, 240, check=False, env=env), "--address", guarded.address, "2.9.9", "Use the same Ray and Python as the cluster has."
    )
    assert shell.run(["sh", "-c", "ls runs"]).stdout == "" and kept_on(shell) == []


@contextmanager
def holding(shell: Shell, name: str) -> Iterator[None]:
    """A run of four slots that goes on until the block ends, and is then stopped by command."""
    address = ("--address", shell.cluster.head.address)
    assert shell.run(name, "--detach", "--set", "pause_s=0.5", "--set", "steps=100000", spares=0).returncode == 0
    try:
        until(lambda: "goes on" in shell.fleet("status", *address).stdout, "the run goes on", tick_s=1.0)
        until(
            lambda: any(type(record).__name__ == "Committed" for record in shell.records(f"{ON_THE_HEAD}/{name}")), "a commit", tick_s=1.0
        )
        yield
    finally:
        shell.fleet("stop", name, *address)
        shell.fleet("attach", name, *address)
        shell.head.run(["rm", "-rf", f"{ON_THE_HEAD}/{name}", f"{FOLDER}/runs/{name}"])


def test_too_few_slots_and_a_name_that_is_taken(shell: Shell) -> None:
    with holding(shell, "holder"):
        few = refusal(shell.run("second", world=3, spares=0), "--world and --spares", "= 3", "room for 2 ranks", "held by holder")
        assert all(f"{worker.address}: " in few for worker in shell.cluster.workers)
        refusal(shell.run("holder", world=1, spares=0), "--name", "holder", "is there already")
        shell.head.run(["mv", f"{FOLDER}/runs", f"{FOLDER}/elsewhere"])  # as a shell finds it that did not begin this run
        try:
            refusal(shell.run("holder", world=1, spares=0), "--name", "holder", "the cluster has a run of this name")
        finally:
            shell.head.run(["sh", "-c", f"rm -rf {FOLDER}/runs; mv {FOLDER}/elsewhere {FOLDER}/runs"])


def test_resources_and_labels_that_no_node_has(shell: Shell) -> None:
    worker = shell.cluster.workers[0]
    rack = f"rack=rack-{worker.hostname}"
    refusal(shell.run("gpus", "--gpus-per-rank", "1"), "--world and --spares", "room for 0 ranks", "1 GPU", "no node has such resources")
    few = refusal(shell.run("one", "--labels", rack, world=3, spares=0), "room for 2 ranks", f"where {rack}", f"{worker.address}: 2 of 2")
    assert not [other for other in shell.cluster.workers[1:] if other.address in few]
    refusal(shell.run("nowhere", "--labels", "rack=r9"), "per_rank.labels", "rack=r9", f"of rack they have a, rack-{worker.hostname}")
    refusal(shell.run("rail", "--labels", "rail=!a", "--labels", "rail=b"), "per_rank.labels", "has a condition already")


def test_a_store_that_one_node_cannot_use(shell: Shell) -> None:
    poor = shell.cluster.workers[1]
    shell.store.banish(poor)
    try:
        refusal(shell.run("poor"), "--storage", f"node {poor.address}", "could not write")
    finally:
        shell.store.admit(poor)


def test_a_folder_that_nodes_do_not_share(shell: Shell) -> None:
    message = refusal(shell.run("apart", "--storage", "/srv/checkpoints"), "--storage", "/srv/checkpoints")
    assert any(worker.address in message for worker in shell.cluster.workers)
    assert shell.head.run(["sh", "-c", "ls /srv/checkpoints 2>/dev/null || true"]).stdout == ""


def test_chaos_without_the_operators_token(shell: Shell) -> None:
    write(shell.head, f"{HOME}/.fleet/chaos-token", "opensesame\n")
    try:
        refusal(shell.run("unasked", "--chaos", "storm"), "--allow-chaos", "set a token for chaos", "FLEET_CHAOS_TOKEN has none")
    finally:
        shell.head.run(["rm", f"{HOME}/.fleet/chaos-token"])


def test_a_working_directory_of_gigabytes(shell: Shell) -> None:
    data = f"{FOLDER}/samples.bin"
    shell.head.run(["truncate", "-s", "5G", data])
    try:
        refusal(shell.run("heavy"), "working directory", FOLDER, "samples.bin (5,120 MiB)", ".rayignore")
    finally:
        shell.head.run(["rm", data])


def test_a_node_with_little_shared_memory(shell: Shell) -> None:
    small = shell.cluster.workers[2]
    small.run(["mount", "-o", "remount,size=32m", "/dev/shm"])
    try:
        refusal(shell.run("small"), "/dev/shm", f"node {small.address}", "MiB free", "--shm-size")
    finally:
        small.run(["mount", "-o", "remount,size=8g", "/dev/shm"])


def test_a_node_without_a_package(shell: Shell) -> None:
    bare = shell.cluster.workers[0]
    bare.run(["sh", "-c", HIDE])
    try:
        refusal(shell.run("bare"), "package = 'torch'", f"node {bare.address}", "cannot be imported there", "Install it on that node")
    finally:
        bare.run(["sh", "-c", SHOW])


def test_a_node_whose_clock_is_an_hour_off(shell: Shell) -> None:
    late: Host = shell.cluster.workers[1]
    late.clock_ahead_s = 3600
    shell.cluster.replace(late)
    try:
        refusal(shell.run("late"), "clock", f"node {late.address}", "NTP")
    finally:
        late.clock_ahead_s = 0
        shell.cluster.replace(late)
