"""The cluster file for ``ray up`` and machines that are there: its README.md typed on a host that reaches the others by ssh."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import ssh_hosts
from tests.support.deploy import write_files
from tests.support.host_runs import ON_THE_HEAD, TRAIN, copied, seen_in
from tests.support.host_store import HostStore, write
from tests.support.hosts import Host, Hosts
from tests.support.ray_hosts import Head, ray_head, runs_raylet
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(1200)
CODE = "/srv/job"
WAIT_S = 300.0


class Rack:
    """A host to type on, those of the cluster, each with sshd and Fleet in an environment, and two with a cluster of somebody else's."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.desk, *self.machines, other = hosts
        self.store = HostStore(self.desk)
        key = ssh_hosts.make_key(self.desk, ".ssh/cluster")
        for host in self.machines:
            ssh_hosts.serve_ssh(host, key)
            write(host, "environment.sh", f"export PATH={sys.prefix}/bin:$PATH\n")
            self.store.admit(host)
        self.other = ray_head(other, num_cpus=1)
        written = write_files(folder, self.spec(), "ray-up")
        texts = {path.name: path.read_text().replace(f"{folder}/", "") for path in written.iterdir()}
        self._readme = texts["README.md"]
        write(self.desk, f"{CODE}/train.py", TRAIN)
        for name, text in texts.items():
            write(self.desk, f"{CODE}/{written.name}/{name}", text)

    def spec(self) -> dict[str, Any]:
        head, *workers = (host.address for host in self.machines)
        login = {"provider": "local", "head_ip": head, "worker_ips": workers, "ssh_user": "root", "ssh_private_key": "~/.ssh/cluster"}
        return {
            "name": "gpt", "script": "train.py", "store": self.store.url("runs"), "world": 2, "spares": 1,
            "arguments": ["--shards", "8"], "activate": ". ~/environment.sh", "env": {"GREETING": "two words"},
            "nodes": {"count": len(workers), "cpus": 2, "labels": {"pool": "train"}}, "ray_up": login,
        }  # fmt: skip

    def type(self, line: str) -> str:
        """A command of the README, where it says that it is typed; ended well."""
        done = self.desk.run(["bash", "-c", line], WAIT_S, check=False, cwd=CODE)
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout + done.stderr

    def commands(self) -> list[str]:
        """Those of the README that bring the cluster up, begin the run, see it, and end the cluster."""
        blocks = re.findall(r"```bash\n(.*?)```", self._readme, re.DOTALL)
        return [line.replace("ray up ", "ray up --no-config-cache ") for block in blocks[:2] for line in block.splitlines()]


@pytest.fixture
def rack(tmp_path: Path) -> Iterator[Rack]:
    ssh_hosts.programs()
    with Hosts(5, with_tree=range(5)) as hosts:
        yield Rack(hosts, tmp_path)


def alive(host: Host, process: subprocess.Popen[Any]) -> bool:
    return process.poll() is None and process.pid in host.pids()


def test_ray_up_brings_a_cluster_on_which_a_run_ends_and_ray_down_ends_that_alone(rack: Rack, tmp_path: Path) -> None:
    before = {host.hostname: set(host.pids()) for host in rack.machines}
    bystanders = {host: host.popen(["sleep", "5000"]) for host in rack.machines}
    up, begin, attach, *down = rack.commands()
    rack.type(up)
    head, workers = rack.machines[0], rack.machines[1:]
    everyone = sorted(host.address for host in rack.machines)
    until(lambda: Head(head).alive() == everyone, "the autoscaler has started the workers", WAIT_S, tick_s=2.0)
    nodes = {node["NodeManagerAddress"]: node for node in Head(head).nodes() if node["Alive"]}
    assert all(nodes[worker.address]["Resources"]["CPU"] == 2 for worker in workers) and "CPU" not in nodes[head.address]["Resources"]
    assert all(nodes[worker.address]["Labels"]["pool"] == "train" for worker in workers)
    rack.type(begin)
    rack.type(attach)
    seen = seen_in(copied(head, f"{ON_THE_HEAD}/gpt", tmp_path))
    assert seen.status == "completed" and seen.report["closes"]
    for line in down:
        rack.type(line)
    for host in rack.machines:
        wanted = before[host.hostname] | {bystanders[host].pid}
        until(lambda host=host, wanted=wanted: set(host.pids()) <= wanted, f"all of it ends on {host.hostname}", WAIT_S, tick_s=1.0)
        assert alive(host, bystanders[host]) and set(host.pids()) == wanted
    assert runs_raylet(rack.other.host) and rack.other.alive() == [rack.other.host.address]
