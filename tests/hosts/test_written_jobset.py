"""The JobSet that ``fleet cluster write`` writes, carried out: a host is a pod, whose container starts again in its place when it fails."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.app.deploy.pods import CODE
from fleet.protocol.records import Committed, ProcessLost, Record, Resumed
from tests.hosts.test_written import NOTE, SCRIPT, WORDS, end, spec
from tests.support.deploy import write_files
from tests.support.host_runs import FAST, copied, records_in, seen_in
from tests.support.host_store import HostStore, write
from tests.support.hosts import Host, Hosts
from tests.support.journals import durable
from tests.support.waiting import until
from tests.support.written import AS_USER, IMAGE_HOME, OWN, answers, container_of, expanded, mounts, variables

pytestmark = pytest.mark.timeout(900)
WAIT_S = 240.0


class JobSetPods:
    """Pods of a JobSet on hosts, with what its controller and a kubelet do for them: names, volumes, containers, one more try on failure.

    Args:
        document: the JobSet, of one head and as many workers as there are further hosts.
        hosts: of the head and of each worker.
        outside: a host that is no pod: probes are asked from there.
        secrets: name of a Secret -> what is in it.
        logs: a folder of this machine for what containers say.
    """

    def __init__(self, document: Mapping[str, Any], hosts: list[Host], outside: Host, secrets: Mapping[str, Any], logs: Path) -> None:
        head, ranks = (job["template"]["spec"] for job in document["spec"]["replicatedJobs"])
        assert (head["parallelism"], ranks["parallelism"]) == (1, len(hosts) - 1)
        self.head, *self.workers = hosts
        self._outside, self._secrets, self._logs = outside, secrets, logs
        self._of = {host.hostname: head if host is self.head else ranks for host in hosts}
        self._name = f"{document['metadata']['name']}-head-0-0.{document['spec']['network']['subdomain']}"
        self.running = dict[str, subprocess.Popen[bytes]]()
        """Name of a host -> the process of its container."""

    def group(self, host: Host) -> dict[str, Any]:
        """The part of the JobSet that a pod is made from."""
        return dict(self._of[host.hostname])

    def create(self, host: Host) -> None:
        """A pod on an empty host: its name, volumes, the image's folder of the script, and the first container."""
        host.run(["sh", "-c", f"echo '{self.head.address} {self._name}' >>/etc/hosts"])
        write(host, f"{CODE}/train.py", SCRIPT)
        for step in (*mounts(self.group(host)), ["chown", "-R", "1000:100", IMAGE_HOME]):
            host.run(step)
        self.start(host)

    def start(self, host: Host) -> None:
        """A container in the pod, whose last one has ended."""
        container = container_of(self.group(host))
        own = variables(container, self._secrets)
        env = {"HOME": IMAGE_HOME, "USER": "ray", **own}
        command = [*container["command"], *(expanded(each, own) for each in container["args"])]
        with (self._logs / f"{host.hostname}.log").open("ab") as log:
            quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self.running[host.hostname] = host.popen([*AS_USER, *command], env=env, cwd=container["workingDir"], **quiet)

    def restart_on_failure(self, host: Host) -> None:
        """``restartPolicy: OnFailure``, as a kubelet does it: when the container has failed, start it anew."""
        assert self.group(host)["template"]["spec"]["restartPolicy"] == "OnFailure"
        assert self.running[host.hostname].wait(WAIT_S) != 0, f"the container of {host.hostname} ends as if all were done"
        self.clear(host)
        self.start(host)

    def clear(self, host: Host) -> None:
        """SIGKILL for all processes of a container, as when its first process has ended or its memory is used up."""
        host.run(["pkill", "-KILL", "-u", "1000"], check=False)

    def wait_until_started(self, host: Host) -> None:
        container = container_of(self.group(host))
        for name in ("startupProbe", "readinessProbe"):
            until(partial(answers, self._outside, host, container[name]), f"{name} of {host.hostname}", WAIT_S, tick_s=1.0)

    def log(self, host: Host) -> str:
        return (self._logs / f"{host.hostname}.log").read_text(errors="replace")


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[JobSetPods]:
    with Hosts(4, with_tree=range(4), own=OWN) as hosts:
        *inside, outside = hosts
        store = HostStore(outside)
        document = yaml.safe_load((write_files(tmp_path, spec(store, "gpt"), "jobset") / "jobset.yaml").read_text())
        made = JobSetPods(document, inside, outside, {"store-access": store.credentials}, tmp_path)
        for host in inside:
            made.create(host)
        yield made


def test_the_run_goes_on_where_containers_of_a_worker_and_of_the_head_start_again(pods: JobSetPods, tmp_path: Path) -> None:
    def records() -> list[Record]:
        return records_in(copied(pods.head, f"{IMAGE_HOME}/.fleet/runs/gpt", tmp_path))

    def committed(more_than: int) -> bool:
        head = pods.running[pods.head.hostname]
        assert head.poll() is None, pods.log(pods.head)[-3000:]
        return sum(isinstance(each, Committed) for each in records()) > more_than

    for host in (pods.head, *pods.workers):
        pods.wait_until_started(host)
    until(lambda: committed(3), "the run trains", WAIT_S, tick_s=1.0)

    victim, other = pods.workers
    end(victim, "-x", "raylet")
    until(lambda: any(isinstance(each, ProcessLost) for each in records()), "ranks are lost", WAIT_S, tick_s=1.0)
    pods.restart_on_failure(victim)
    pods.wait_until_started(victim)
    before = sum(isinstance(each, Committed) for each in records())
    until(lambda: committed(before + 1), "the run goes on", WAIT_S, tick_s=1.0)
    assert pods.running[other.hostname].poll() is None, "the other worker's container was left alone"

    until(lambda: bool(durable(records())), "a checkpoint is durable", WAIT_S, tick_s=1.0)
    pods.clear(pods.head)
    pods.restart_on_failure(pods.head)
    for worker in pods.workers:
        pods.restart_on_failure(worker)  # Ray's nodes end without their head
    until(
        lambda: any(isinstance(each, Resumed) and each.gap for each in records()), "the next container resumes the run", WAIT_S, tick_s=1.0
    )
    for worker in pods.workers:
        worker.run(["touch", FAST])
    assert pods.running[pods.head.hostname].wait(WAIT_S) == 0, pods.log(pods.head)[-3000:]
    seen = seen_in(copied(pods.head, f"{IMAGE_HOME}/.fleet/runs/gpt", tmp_path))
    assert seen.status == "completed" and seen.report["closes"]
    assert other.run(["cat", NOTE]).stdout.endswith(WORDS)
