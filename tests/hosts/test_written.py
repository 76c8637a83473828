"""What ``fleet cluster write`` writes, carried out: pods of KubeRay's as hosts, with the run that the file hands in, and its probes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.app.deploy.rules import amount
from fleet.protocol.records import Committed, ProcessLost, Record
from tests.support.deploy import write_files
from tests.support.host_runs import FAST, TRAIN, copied, records_in, seen_in
from tests.support.host_store import HostStore
from tests.support.hosts import Host, Hosts
from tests.support.ray_hosts import Head
from tests.support.waiting import until
from tests.support.written import IMAGE_HOME, OWN, Pods, container_of

pytestmark = pytest.mark.timeout(900)
WAIT_S = 240.0
JOB = "gpt-7xk2p"
WORDS = "two words; $HOME $(HOME) $$"
NOTE = "/srv/told"
SCRIPT = TRAIN.replace("print(", f'open("{NOTE}", "w").write(run.options["note"] + os.environ["GREETING"])\n    print(', 1)
PROBES = ("readinessProbe", "livenessProbe")


def spec(store: HostStore, name: str) -> dict[str, Any]:
    """Of a head and two worker nodes. Values are such that a shell or Kubernetes would make something else of them."""
    return {
        "name": name, "script": "train.py", "fleet": "dist/fleet_train-0.1.0-cp311-abi3-linux_x86_64.whl", "store": store.url("runs"),
        "world": 2, "spares": 1, "team": "vision",
        "image": "registry.example.com/team/gpt:1", "env": {"GREETING": WORDS, "AWS_ENDPOINT_URL": store.endpoint},
        "arguments": ["--shards", "8", "--set", "steps=60", "--set", "pause_s=0.4", "--set", f"note={WORDS}", "--checkpoint", "2"],
        "nodes": {"count": 2, "cpus": 2, "memory_gib": 4, "shm_gib": 1, "labels": {"pool": "train"}},
        "head": {"cpus": 1, "memory_gib": 4},
        "kubernetes": {"namespace": "research", "secret": "store-access", "secret_keys": sorted(store.credentials)},
    }  # fmt: skip


@dataclass(frozen=True)
class Ground:
    """Hosts for pods, and the last one outside of them, with the store."""

    hosts: Hosts
    store: HostStore

    def pods(self, folder: Path, name: str = "gpt") -> Pods:
        """The pods of the written RayJob of this name, all of them ready, on hosts that are as new."""
        *inside, outside = self.hosts
        document = yaml.safe_load((write_files(folder, spec(self.store, name), "kuberay") / "rayjob.yaml").read_text())
        pods = Pods(document, inside, outside, {"store-access": self.store.credentials}, {"train.py": SCRIPT}, folder)
        start_up(pods)
        return pods


def start_up(pods: Pods) -> None:
    """A new cluster, as at the beginning of a RayJob, and when it is tried again."""
    for host in (pods.head, *pods.workers):
        host.kill_all()
        host.boot()
    for host in (pods.head, *pods.workers):
        pods.start(host)
        pods.wait_until_well(host)


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    with Hosts(4, with_tree=range(4), own=OWN) as hosts:
        yield Ground(hosts, HostStore(hosts[3]))


@pytest.fixture(scope="module")
def pods(ground: Ground, tmp_path_factory: pytest.TempPathFactory) -> Pods:
    return ground.pods(tmp_path_factory.mktemp("kuberay"))


def journal(pods: Pods, copies: Path, name: str = "gpt") -> Path:
    """A copy of the run's journal as it is now."""
    return copied(pods.head, f"{IMAGE_HOME}/.fleet/runs/{name}", copies)


def records(pods: Pods, copies: Path, name: str = "gpt") -> list[Record]:
    return records_in(journal(pods, copies, name))


def commits(found: list[Record]) -> int:
    return sum(isinstance(each, Committed) for each in found)


def go_fast(pods: Pods) -> None:
    for worker in pods.workers:
        worker.run(["touch", FAST])


def end(host: Host, *pattern: str) -> None:
    """SIGKILL for the one process on a host that pgrep finds."""
    [pid] = host.run(["pgrep", *pattern]).stdout.split()
    host.run(["kill", "-KILL", pid])


def fail_soon(pods: Pods, host: Host, *probes: str) -> None:
    for probe in probes:
        until(lambda probe=probe: not pods.well(host, probe), f"{probe} of {host.hostname} fails", WAIT_S, tick_s=1.0)


def test_pods_are_nodes_of_what_the_file_gives_them(pods: Pods) -> None:
    nodes = {node["NodeManagerAddress"]: node for node in Head(pods.head).nodes() if node["Alive"]}
    assert sorted(nodes) == sorted(host.address for host in (pods.head, *pods.workers))
    assert "CPU" not in nodes[pods.head.address]["Resources"]
    for worker in pods.workers:
        node, limits = nodes[worker.address], container_of(pods.group(worker))["resources"]["limits"]
        assert node["Resources"]["CPU"] == amount(limits["cpu"]) and node["Resources"]["memory"] == amount(limits["memory"])
        assert node["Labels"]["pool"] == "train"
        shm_bytes = int(pods.run(worker, "df --output=size -B1 /dev/shm | tail -1").stdout)
        assert shm_bytes == 2**30 > node["Resources"]["object_store_memory"] > 0
    said = pods.run(pods.workers[0], 'id -u; echo "$GREETING"; test "$AWS_SECRET_ACCESS_KEY" && echo secret').stdout
    assert said.splitlines() == ["1000", WORDS, "secret"]


def test_the_entrypoint_ends_well_although_a_pod_is_replaced(pods: Pods, tmp_path: Path) -> None:
    victim, other = pods.workers
    with pods.submitted(JOB) as submitter:
        until(lambda: submitter.poll() is not None or commits(records(pods, tmp_path)) > 3, "the run trains", WAIT_S, tick_s=1.0)
        assert submitter.poll() is None, submitter.stdout.read()[-3000:]
        assert all(pods.well(host, probe) for host in (pods.head, *pods.workers) for probe in PROBES)
        end(victim, "-x", "raylet")
        fail_soon(pods, victim, *PROBES)
        assert pods.running[victim.hostname].wait(WAIT_S) != 0, "the container ends with Ray, so that its pod is replaced"
        until(lambda: any(isinstance(each, ProcessLost) for each in records(pods, tmp_path)), "ranks are lost", WAIT_S, tick_s=1.0)
        victim.kill_all()
        victim.boot()
        pods.start(victim)
        pods.wait_until_well(victim)
        before = commits(records(pods, tmp_path))
        until(lambda: commits(records(pods, tmp_path)) > before + 1, "the run goes on", WAIT_S, tick_s=1.0)
        assert all(pods.well(host, probe) for host in (pods.head, other) for probe in PROBES)
        go_fast(pods)
        said, _ = submitter.communicate(timeout=WAIT_S)
    assert "succeeded" in pods.job_status(JOB).lower(), said[-3000:]
    seen = seen_in(journal(pods, tmp_path))
    assert seen.status == "completed" and seen.report["closes"]
    assert other.run(["cat", NOTE]).stdout == WORDS * 2


def test_probes_fail_when_what_they_watch_is_dead(pods: Pods) -> None:
    """After the run: it ends the cluster."""
    worker = pods.workers[1]
    end(worker, "-f", "DashboardAgent")
    fail_soon(pods, worker, *PROBES)
    assert all(pods.well(pods.head, probe) for probe in PROBES)
    end(pods.head, "-x", "gcs_server")
    fail_soon(pods, pods.head, "readinessProbe")
