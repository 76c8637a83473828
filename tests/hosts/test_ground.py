"""The ground of the tests on several hosts: hosts are apart, can be lost, cut off and slowed down, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.hosts import ROOT, Host, Hosts
from tests.support.ray_hosts import RayHosts, ray, ray_head, ray_worker, runs_raylet
from tests.support.waiting import until

PORT = 4000
ECHO = f"""
import socket
listener = socket.create_server(("", {PORT}))
print("ready", flush=True)
while True:
    connection = listener.accept()[0]
    while data := connection.recv(65536):
        connection.sendall(data)
"""
TALK = """
import socket, sys
line = socket.create_connection((sys.argv[1], int(sys.argv[2])), 30)
for said in sys.stdin:
    word, _, limit_s = said.partition(" ")
    line.settimeout(float(limit_s))
    line.sendall(word.encode()) if word != "wait" else None
    try:
        print(line.recv(99).decode() or "closed", flush=True)
    except TimeoutError:
        print("silence", flush=True)
"""
SINK = f"""
import socket
listener = socket.create_server(("", {PORT}))
print("ready", flush=True)
while True:
    connection = listener.accept()[0]
    while connection.recv(65536):
        continue
    connection.sendall(b"all")
    connection.close()
"""
SEND = """
import socket, sys, time
line, began_s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 30), time.monotonic()
line.sendall(bytes(int(sys.argv[3])))
line.shutdown(socket.SHUT_WR)
assert line.recv(3) == b"all"
print(time.monotonic() - began_s)
"""
HOLD = """
import subprocess
from tests.support.hosts import Hosts
with Hosts(2) as hosts:
    sleepers = [host.popen(["sh", "-c", "echo; exec sleep 1000"], stdout=subprocess.PIPE) for host in hosts]
    assert all(sleeper.stdout.readline() for sleeper in sleepers)
    print(hosts.holder_pid, *(sleeper.pid for sleeper in sleepers), flush=True)
    for sleeper in sleepers:
        sleeper.wait()
"""


@contextmanager
def serving(host: Host, script: str) -> Iterator[subprocess.Popen[str]]:
    """A script on a host, from when it says that it is ready."""
    process = host.popen([host.python, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def talking(host: Host, other: Host) -> Iterator[Any]:
    """A connection from a host to the echo on another: a function that says a word, and returns what comes back within a time."""
    process = host.popen([host.python, "-c", TALK, other.address, str(PORT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def say(word: str, limit_s: float = 60.0) -> str:
        process.stdin.write(f"{word} {limit_s}\n")
        process.stdin.flush()
        return str(process.stdout.readline().strip())

    try:
        yield say
    finally:
        process.kill()
        process.communicate()


def said(host: Host, *command: str) -> str:
    return host.run(command).stdout.strip()


def reaches(host: Host, other: Host) -> bool:
    """Whether the echo on ``other`` takes a connection from ``host``."""
    connect = f"import socket; socket.create_connection(({other.address!r}, {PORT}), 3).close()"
    return host.run([host.python, "-c", connect], check=False).returncode == 0


def test_names_and_addresses_are_apart(pair: Hosts) -> None:
    one, other = pair
    assert [said(host, "hostname") for host in pair] == [one.hostname, other.hostname] == ["host1", "host2"]
    assert one.address != other.address
    for host in pair:
        links = json.loads(said(host, "ip", "-json", "-4", "address", "show", "scope", "global"))
        assert [each["local"] for link in links for each in link["addr_info"]] == [host.address]
        assert said(other, "getent", "hosts", host.hostname).split() == [host.address, host.hostname]


def test_no_folder_that_can_be_written_is_shared(pair: Hosts) -> None:
    one, other = pair
    folders = ["/tmp", "/var/tmp", "/dev/shm", "/run", os.path.expanduser("~")]
    for folder in folders:
        one.run(["touch", f"{folder}/mine"])
        assert other.run(["test", "-e", f"{folder}/mine"], check=False).returncode and not Path(folder, "mine").exists()
    for folder in ("/etc", "/usr", "/var", "/var/log", str(ROOT), str(Path(one.python).parents[1])):
        assert one.run(["touch", f"{folder}/mine"], check=False).returncode, folder


def test_processes_of_other_hosts_are_unseen(pair: Hosts) -> None:
    one, other = pair
    sleeper = one.popen(["sleep", "987"])
    assert one.pids() == [sleeper.pid] and other.pids() == []
    assert "sleep 987" in said(one, "ps", "ax") and "sleep 987" not in said(other, "ps", "ax")


def test_an_end_of_a_process_is_seen_and_an_orphan_is_reaped(pair: Hosts) -> None:
    host = pair[0]
    process = host.popen(["sh", "-c", "exit 7"])
    assert process.wait(60) == 7
    host.run(["sh", "-c", "sleep 0 & exit 0"])
    until(lambda: host.pids() == [], "the orphan is reaped")
    process = host.popen(["sleep", "1000"])
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM


def test_the_project_is_seen_by_the_head_alone(pair: Hosts) -> None:
    head, worker = pair
    assert head.python != worker.python
    assert said(head, head.python, "-c", "import fleet; print(fleet.__file__)") == str(ROOT / "fleet" / "__init__.py")
    assert "Usage: fleet" in said(head, "fleet", "--help")
    missing = worker.run([worker.python, "-c", "import torch, ray, fleet"], check=False)
    assert missing.returncode == 1 and "No module named 'fleet'" in missing.stderr
    assert said(worker, "sh", "-c", f"ls -A {ROOT} 2>/dev/null || true") == ""


def test_a_hosts_clock_can_be_an_hour_off(pair: Hosts) -> None:
    one, other = pair
    other.clock_ahead_s = 3600
    now_s = [float(said(host, host.python, "-c", "import time; time.sleep(0.001); print(time.time())")) for host in pair]
    assert 1800 < now_s[1] - now_s[0] < 5400
    other.clock_ahead_s = -3600
    assert float(said(other, "date", "+%s")) < float(said(one, "date", "+%s")) - 1800


def test_a_link_that_is_cut_is_silent_and_comes_back(pair: Hosts) -> None:
    one, other = pair
    with serving(other, ECHO), talking(one, other) as say:
        assert say("first") == "first"
        one.cut()
        assert say("lost?", 1.0) == "silence"
        one.mend()
        assert say("wait") == "lost?"


def test_two_hosts_can_lose_each_other_alone() -> None:
    with Hosts(3) as hosts:
        first, second, third = hosts
        with serving(second, ECHO), serving(third, ECHO):
            hosts.cut_between(second, third)
            assert reaches(first, second) and reaches(first, third)
            assert not reaches(second, third) and not reaches(third, second)
            hosts.mend()
            assert reaches(second, third) and reaches(third, second)


def test_a_link_has_the_rate_that_it_is_given(pair: Hosts) -> None:
    one, other = pair

    def took_s(sender: Host, receiver: Host) -> float:
        with serving(receiver, SINK):
            return float(said(sender, sender.python, "-c", SEND, receiver.address, str(PORT), str(2**21)))

    for sender, receiver in ((one, other), (other, one)):  # of the two, the same link is limited in both directions
        free_s = took_s(sender, receiver)
        one.shape(rate_bits_per_s=8_000_000)
        shaped_s = took_s(sender, receiver)
        one.unshape()
        assert shaped_s > 2 * free_s


def test_a_host_that_dies_is_dead_at_once_and_boots_empty(pair: Hosts) -> None:
    one, other = pair
    with serving(other, ECHO) as server, talking(one, other) as say:
        assert say("first") == "first"
        other.run(["touch", "/tmp/mine"])
        other.kill_all()
        assert server.poll() == -signal.SIGKILL and other.pids() == [] and not other.alive
        assert say("wait") == "closed"
    with pytest.raises(RuntimeError, match="host2 is down"):
        other.run(["true"])
    other.boot()
    assert said(other, "ls", "-A", "/tmp") == ""
    with serving(other, ECHO), talking(one, other) as say:
        assert say("again") == "again"


def test_two_sets_of_hosts_do_not_see_each_other(pair: Hosts) -> None:
    with Hosts(2) as others, serving(others[1], ECHO):
        assert others[1].address != pair[1].address
        assert reaches(others[0], others[1]) and not reaches(pair[0], others[1])


def spaces(pid: int) -> set[str]:
    """The namespaces of a process that are not this one's."""
    found = set()
    for kind in ("net", "mnt", "pid", "uts", "ipc"):
        try:
            found.add(os.readlink(f"/proc/{pid}/ns/{kind}"))
        except OSError:  # it is gone, or a zombie
            return set()
    return found - {os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "mnt", "pid", "uts", "ipc")}


def machine() -> tuple[str, list[str]]:
    """What hosts could leave on the machine: mounts, links and named networks."""
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, timeout=60, check=True).stdout
    named = sorted(os.listdir("/run/netns")) if Path("/run/netns").exists() else []
    return Path("/proc/self/mounts").read_text(), sorted(line.split()[0] for line in links.splitlines()) + named


@pytest.mark.parametrize("killed", ["maker", "holder"])
def test_nothing_is_left_when_a_process_is_killed(killed: str) -> None:
    before = machine()
    maker = subprocess.Popen([sys.executable, "-c", HOLD], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert maker.stdout is not None
        holder, *sleepers = map(int, maker.stdout.readline().split())
        theirs = set[str]().union(*map(spaces, (holder, *sleepers)))
        assert len(theirs) == 5 + 2 * 5 and machine() == before
        os.kill({"maker": maker.pid, "holder": holder}[killed], signal.SIGKILL)
        until(lambda: not any(theirs & spaces(pid) for pid in psutil.pids()), "nobody is in the namespaces")
    finally:
        maker.kill()
        maker.communicate()
    assert machine() == before


def test_ray_knows_every_host_by_its_address_and_labels(ray_hosts: RayHosts) -> None:
    nodes = {node["NodeManagerAddress"]: node for node in ray_hosts.head.nodes() if node["Alive"]}
    assert sorted(nodes) == sorted(host.address for host in ray_hosts.hosts)
    racks = [nodes[worker.address]["Labels"]["rack"] for worker in ray_hosts.workers]
    assert racks == ["rack-host2", "rack-host3", "rack-host4"]


ACTORS = """
import json, ray, socket, sys
ray.init(address="auto", log_to_driver=False)

@ray.remote
class Actor:
    def where(self):
        return [ray.util.get_node_ip_address(), socket.gethostname(), sys.executable]

actors = [Actor.options(resources={name: 0.1}).remote() for name in %r]
print(json.dumps(ray.get([actor.where.remote() for actor in actors])))
"""


def test_an_actor_runs_on_each_host_with_that_hosts_python(ray_hosts: RayHosts) -> None:
    where = json.loads(ray_hosts.head.script(ACTORS % [worker.hostname for worker in ray_hosts.workers]))
    assert where == [[worker.address, worker.hostname, worker.python] for worker in ray_hosts.workers]


def test_a_host_that_died_joins_ray_again(ray_hosts: RayHosts) -> None:
    worker = ray_hosts.workers[0]
    [old] = [node["NodeID"] for node in ray_hosts.head.nodes() if node["Alive"] and node["NodeManagerAddress"] == worker.address]
    worker.kill_all()
    assert not runs_raylet(worker)
    ray_hosts.restore()
    [new] = [node["NodeID"] for node in ray_hosts.head.nodes() if node["Alive"] and node["NodeManagerAddress"] == worker.address]
    assert new != old and runs_raylet(worker)


def test_a_cluster_with_a_token_takes_jobs_from_who_has_it() -> None:
    with Hosts(2) as hosts:
        head = ray_head(hosts[0], num_cpus=1, dashboard=True, token="a-token-of-this-test-alone-0123456789")
        ray_worker(hosts[1], head, num_cpus=1)
        assert head.alive() == [host.address for host in hosts]
        print_it = "import ray; ray.init(); print('nodes', len(ray.nodes()))"
        submit = [*ray(hosts[1]), "job", "submit", "--address", head.dashboard_url, "--", "python", "-c", print_it]
        assert "nodes 2" in hosts[1].run(submit, 240, env=head.env).stdout
        refused = hosts[1].run(submit, 240, env={**head.env, "RAY_AUTH_TOKEN": "another"}, check=False)
        assert refused.returncode and "nodes" not in refused.stdout
        head.remove(hosts[1])
        assert head.alive() == [hosts[0].address]


def test_a_silent_node_can_be_taken_out_of_ray(ray_hosts: RayHosts) -> None:
    worker = ray_hosts.workers[1]
    worker.cut()
    ray_hosts.head.remove(worker)
    assert worker.address not in ray_hosts.head.alive() and runs_raylet(worker)
    worker.mend()
    until(lambda: not runs_raylet(worker), "Ray's daemon learns that it is out, and ends")
