"""``--tls`` on hosts: through a kill a run ends with the bits of its twin. Nothing of it is seen on the links, and nothing else is open."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fleet.host import secret
from fleet.host.tls import AUTHORITY, CERTIFICATE, KEY
from fleet.protocol.proof import Purpose
from tests.hosts.test_bad_input import refusal
from tests.support.certificates import DAY, Authority
from tests.support.host_runs import FOLDER, ON_THE_HEAD, Shell, wait_until_clean
from tests.support.host_store import S3_PORT, HostStore, write
from tests.support.hosts import LINK, Host, Hosts
from tests.support.ray_hosts import RayHosts
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(1200)
SRV = "/srv"
TLS = f"{SRV}/tls"
MARKED = "marked.py"
SCRIPT = """
import os, time
import torch

def train(run):
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 4))
    model.mark = torch.nn.Parameter(torch.full((4096,), 12345.678), requires_grad=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
    for step in run.steps(run.track(model=model, optimizer=optimizer), total=int(run.options["steps"])):
        for batch in step.batches(data, batch_size=16):
            time.sleep(0.02)
            step.backward(model(batch).square().mean())
        step.commit()
"""
"""Its state has a mark that is easy to find where it travels: to the rank that replaces a killed one, and to memories."""

LISTEN = f"""
import json, select, socket, struct, sys
NEEDLES = {{"hello": b"\\x93FLEET\\r\\n", "mark": struct.pack("<4f", *[12345.678] * 4)}}
seen, packets = dict.fromkeys(NEEDLES, 0), 0
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
wire.setsockopt(socket.SOL_SOCKET, 33, 256 << 20)
wire.bind(("{LINK}", 0))
print("listening", flush=True)
while True:
    ready, _, _ = select.select([wire, sys.stdin], [], [])
    if wire in ready:
        data = wire.recv(1 << 17)
        if len(data) < 40 or data[12:14] != b"\\x08\\0" or data[23] != 6:
            continue
        ports = struct.unpack_from("!HH", data, 14 + 4 * (data[14] & 15))
        if {S3_PORT} in ports:
            continue
        packets += 1
        for name, needle in NEEDLES.items():
            seen[name] += needle in data
    elif not sys.stdin.read():
        break
dropped = struct.unpack("II", wire.getsockopt(263, 6, 8))[1]
print(json.dumps(dict(seen, packets=packets, dropped=dropped)))
"""
"""Counts packets on a host's link that hold what is looked for, until its input ends. The store of checkpoints is another affair."""

OPEN = r"""
import json, os, re, glob
ours = re.compile(r"ray::(RayTrainWorker|AgentHost|CoordinatorHost)|-m (fleet|actors)\.")
sockets = {}
for folder in glob.glob("/proc/[0-9]*"):
    try:
        args = open(f"{folder}/cmdline", "rb").read().replace(b"\0", b" ").decode()
        links = [os.readlink(each) for each in glob.glob(f"{folder}/fd/*")]
    except OSError:
        continue
    if ours.search(args):
        sockets |= {link[8:-1]: args for link in links if link.startswith("socket:[")}
found = []
for line in open("/proc/net/tcp").read().splitlines()[1:]:
    fields = line.split()
    address, port = fields[1].split(":")
    host = ".".join(str(int(address[at:at + 2], 16)) for at in (6, 4, 2, 0))
    if fields[3] == "0A" and fields[9] in sockets:
        found.append([host, int(port, 16), sockets[fields[9]].split()[0]])
print(json.dumps(found))
"""
"""Where processes of a run listen on a host."""

ASK = """
import json, sys
from pathlib import Path
from fleet.host import secret, tls
from fleet.host.lines import Knock
from fleet.protocol.proof import Purpose
folder, places = sys.argv[1], json.loads(sys.argv[2])
tls.hold("{tls}", lambda connection: True)
found = {{}}
for host, port in places:
    answers = []
    for purpose in Purpose:
        try:
            with tls.connect((host, port), 5.0) as line:
                Knock(line, purpose, secret.read(Path(folder)), limit_s=5.0).proof()
                answers.append(purpose)
        except OSError as error:
            print(host, port, purpose, error, file=sys.stderr)
    found[f"{{host}}:{{port}}"] = answers
print(json.dumps(found))
"""
"""The purposes of each place, by TLS and the proof."""
RAY_BELOW = 20_000
"""Ray gives its workers the ports below; above are Fleet's, in processes that are ranks, agents or coordinators."""


@pytest.fixture(scope="module")
def three() -> Iterator[tuple[RayHosts, HostStore]]:
    """A head, and two hosts that hold ranks; one of these sees the source tree, to ask the head as another host does."""
    with Hosts(3, with_tree=(0, 1)) as hosts:
        store = HostStore(hosts[0])
        yield RayHosts(hosts, prepare=store.admit), store


@pytest.fixture
def authority(three: tuple[RayHosts, HostStore]) -> Authority:
    made = Authority()
    for host in three[0].hosts:
        give(host, made)
    return made


@pytest.fixture
def shell(three: tuple[RayHosts, HostStore], tmp_path: Path) -> Iterator[Shell]:
    cluster, store = three
    shell = Shell(cluster, store, tmp_path)
    write(shell.head, f"{FOLDER}/{MARKED}", SCRIPT)
    yield shell
    wait_until_clean(list(cluster.hosts))


def give(host: Host, authority: Authority, **made: Any) -> None:
    """A folder for TLS on a host."""
    authority.folder(host.root / TLS[1:], **made)


@contextmanager
def listening(host: Host) -> Iterator[list[dict[str, int]]]:
    """The counts of packets on the host's link meanwhile, once the block has ended."""
    found = list[dict[str, int]]()
    process = host.popen([host.python, "-c", LISTEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "listening\n"
    try:
        yield found
        found.append(json.loads(process.communicate("", timeout=60)[0]))
    finally:
        process.kill()
        process.communicate()


def tapped(shell: Shell, name: str, *options: str) -> tuple[dict[str, int], dict[str, Any]]:
    """(the counts on the link of a host that takes part, the report) of a run in which a rank is killed, and its twin."""
    faults = ("--chaos", "at=step:40,kinds=kill_rank", "--expect", "faults>=1", "--twin", "--json", f"{name}.json")
    with listening(shell.cluster.workers[0]) as found:
        done = shell.run(name, "--set", "steps=80", *faults, *options, script=MARKED, world=3)
    assert done.returncode == 0, done.stderr[-3000:]
    return found[0], json.loads(shell.head.run(["cat", f"{name}.json"], cwd=FOLDER).stdout)


def test_through_a_kill_a_run_ends_as_its_twin_and_nothing_of_it_is_seen(shell: Shell, authority: Authority) -> None:
    """Plainly its hellos and its state are seen: so who listens hears well."""
    for name, options in (("tapped", ()), ("encrypted", ("--tls", TLS))):
        counted, report = tapped(shell, name, *options)
        assert report["status"] == "completed" and report["twin"]["equal"] and report["counts"]["executed"] == 1 and report["closes"]
        assert counted["dropped"] == 0 and counted["packets"] > 1000
        assert bool(counted["hello"]) is bool(counted["mark"]) is (name == "tapped"), counted


def test_each_port_that_a_run_opens_to_other_hosts_asks_for_a_certificate_and_the_secret(shell: Shell, authority: Authority) -> None:
    """Fleet's own ports are those of ``docs/security.md``; gloo listens on loopback alone."""
    address = ("--address", shell.cluster.head.address)
    assert shell.run("ports", "--detach", "--tls", TLS, "--set", "steps=100000", script=MARKED, world=3).returncode == 0
    folder = f"{ON_THE_HEAD}/ports"
    try:
        until(lambda: any(type(each).__name__ == "Committed" for each in shell.records(folder)), "a commit", 240, tick_s=1.0)
        places, at_home = list[tuple[str, int]](), 0
        for host in shell.cluster.hosts:
            for bound, port, _ in json.loads(host.run([host.python, "-c", OPEN]).stdout):
                if bound.startswith("127."):
                    at_home += 1
                elif port >= RAY_BELOW:
                    places.append((bound if bound != "0.0.0.0" else host.address, port))
        assert at_home >= 3, "gloo of three ranks"
        other = shell.cluster.workers[0]
        secret.keep(other.root / SRV[1:], secret.read(shell.head.root / folder[1:]))
        answers, said = dict[str, list[str]](), ""
        for asking, at in ((shell.head, folder), (other, SRV)):  # a host asks itself plainly, whatever the run does between hosts
            asked = [place for place in places if (place[0] == shell.head.address) is (asking is other)]
            done = asking.run([asking.python, "-c", ASK.format(tls=TLS), at, json.dumps(asked)], 240)
            answers, said = answers | json.loads(done.stdout), said + done.stderr
        assert not [place for place, purposes in answers.items() if not purposes], said
        seen = {purpose for purposes in answers.values() for purpose in purposes}
        assert seen == {Purpose.AGENT, Purpose.SETTING, Purpose.STORE, Purpose.MEMORY}
    finally:
        shell.fleet("stop", "ports", *address)
        shell.fleet("attach", "ports", *address)


def test_hosts_that_do_not_encrypt_alike_are_refused_by_name(shell: Shell, authority: Authority) -> None:
    one, two = shell.cluster.workers[0], shell.cluster.workers[1]
    give(one, Authority())
    asked = ("--tls", TLS, "--set", "steps=80")
    refusal(shell.run("stranger", *asked, script=MARKED, world=3), "tls", f"node {one.address}", AUTHORITY, "is not that of the head")
    give(one, authority)
    two.run(["rm", f"{TLS}/{KEY}"])
    refusal(shell.run("without", *asked, script=MARKED, world=3), "tls", f"node {two.address}", f"{KEY} cannot be read")
    give(two, authority)
    give(shell.head, authority, begin=-2 * DAY, end=-DAY)
    refusal(
        shell.run("late", "--tls", TLS, script=MARKED, world=3), "tls", f"{CERTIFICATE} does not pass {AUTHORITY}: certificate has expired"
    )
    refusal(shell.fleet("run", MARKED, "--tls", TLS), "tls", "none of its connections leaves it")
