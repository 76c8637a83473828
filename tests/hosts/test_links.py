"""Links between hosts are cut by rules of the kernel's packet filter: what is cut, what passes, and what is left when nobody tidies up."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.hosts import ROOT, Host, Hosts
from tests.support.waiting import until

PORT, STORE_PORT = 7001, 7002
"""What answers, on the far host."""
SERVE = f"""
import socket, threading
def echo(connection):
    while data := connection.recv(1 << 20):
        connection.sendall(data[:1])
    connection.close()
def answer(port):
    listening = socket.create_server(("0.0.0.0", port))
    while True:
        connection, _ = listening.accept()
        threading.Thread(target=echo, args=(connection,), daemon=True).start()
threading.Thread(target=answer, args=({STORE_PORT},), daemon=True).start()
answer({PORT})
"""
ASK = "import socket; c = socket.create_connection(('{host}', 7002), 5); c.sendall(b'x'); print(c.recv(9))"
CLIENT = """
import json, os, socket, sys, time
import chaos.links as links
from fleet.protocol.operations import HEAL, START, Operation
from fleet.protocol.types import Process
links.BEFORE_S = 0.0
far = sys.argv[1]
def connect(port):
    line = socket.create_connection((far, port), 2.0)
    line.settimeout(0.5)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line
def passes(line):
    try:
        line.sendall(b"x")
        return line.recv(64) != b""
    except TimeoutError:
        return False
port, store = map(int, sys.argv[2:])
line, old = connect(port), connect(store)
local = links.LocalLinks(lambda: [os.getpid()], f"{far}:{port}", lambda: ([far], store))
for word in iter(sys.stdin.readline, ""):
    what, *rest = json.loads(word)
    if what == "order":
        kind, phase, duration_s, is_target, amounts = rest
        process = Process("near", os.getpid(), 1) if kind == "isolate_rank" else None
        order = Operation("f", kind, phase, process, 0, duration_s, hosts=(far,), is_target=is_target, **amounts)
        said = local.operate(order)
    elif what == "passes":
        said = passes(line)
    elif what == "connects":
        try:
            said = passes(connect(rest[0] if rest else port))
        except OSError as error:
            said = False if isinstance(error, TimeoutError) else type(error).__name__
    elif what == "trip_s":
        line.settimeout(5.0)
        began_s = time.monotonic()
        line.sendall(b"x"); line.recv(64)
        said = time.monotonic() - began_s
        line.settimeout(0.5)
    elif what == "bulk_s":
        bulk = connect(port)
        bulk.settimeout(120.0)
        time.sleep(0.5)  # what is open is looked for now and then
        began_s = time.monotonic()
        bulk.sendall(bytes(rest[0])); bulk.shutdown(socket.SHUT_WR)
        while bulk.recv(1 << 16):
            pass
        said = time.monotonic() - began_s
    elif what == "http":
        try:
            with connect(store) as asking:
                asking.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
                said = asking.recv(64).split(b"\\r")[0].decode()
        except OSError as error:
            said = type(error).__name__
    elif what == "old":
        try:
            old.sendall(b"x")
            said = old.recv(64) != b""
        except OSError as error:
            said = type(error).__name__
    elif what == "upload":
        try:
            with connect(store) as sending:
                sending.settimeout(20.0)
                sending.sendall(bytes(6_000_000)); sending.shutdown(socket.SHUT_WR)
                while sending.recv(1 << 16):  # an answer to the first bytes says nothing of the last
                    pass
            said = True
        except OSError as error:
            said = type(error).__name__
    elif what == "applied":
        said = local.applied("f")
    elif what == "drain":
        line.settimeout(5.0); said = line.recv(64) != b""; line.settimeout(0.5)
    print(json.dumps(said), flush=True)
"""


class Client:
    """A process of a run on a host, with a connection to another host."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, *words: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def order(self, kind: str, phase: str = "start", duration_s: float = 60.0, is_target: bool = True, **amounts: float) -> Any:
        return self.ask("order", kind, phase, duration_s, is_target, amounts)

    def heal(self, kind: str) -> str:
        """What was applied."""
        assert self.order(kind, "heal") is None
        return str(self.ask("applied"))


def tables(host: Host) -> str:
    return host.run(["nft", "list", "tables"]).stdout


@contextmanager
def talking(near: Host, far: Host) -> Iterator[Client]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = far.popen([far.python, "-c", SERVE])
    until(lambda: far.run(["sh", "-c", f"grep -c :{PORT:04X} /proc/net/tcp || true"]).stdout.strip() != "0", "the server listens")
    client = near.popen([near.python, "-c", CLIENT, far.address, str(PORT), str(STORE_PORT)], env={"PYTHONPATH": str(ROOT)}, **pipes)
    try:
        yield Client(client)
    finally:
        client.kill()
        client.communicate()
        server.kill()
        server.wait()


@pytest.fixture
def client(pair: Hosts) -> Iterator[Client]:
    with talking(pair[0], pair[1]) as client:
        assert client.ask("passes") and client.ask("connects")
        yield client


def test_a_partition_cuts_old_and_new_connections_until_it_is_healed(client: Client, pair: Hosts) -> None:
    assert client.order("partition") is None
    until(lambda: not client.ask("passes"), "the connection is cut")
    assert not client.ask("connects") and "fleet_" in tables(pair[0])
    assert client.order("partition", "heal") is None
    assert client.ask("drain"), "what was lost is sent again by the kernel"
    assert client.ask("passes") and client.ask("connects") and "fleet_" not in tables(pair[0])


def test_it_ends_by_itself(client: Client, pair: Hosts) -> None:
    assert client.order("partition", duration_s=1.0) is None
    until(lambda: "fleet_" not in tables(pair[0]), "it is over", 20)
    assert client.ask("connects")


@pytest.mark.parametrize("is_target", [True, False])
def test_one_way_loses_what_the_struck_host_sends(client: Client, is_target: bool) -> None:
    """Either way nothing that needs an answer passes."""
    assert client.order("one_way", is_target=is_target) is None
    until(lambda: not client.ask("passes"), "the connection is cut")
    client.order("one_way", "heal")
    assert client.ask("drain")


def test_a_link_that_flaps_passes_in_between(client: Client) -> None:
    assert client.order("flap", duration_s=20.0) is None
    until(lambda: not client.ask("passes"), "it is down", 10, tick_s=0.05)
    assert client.ask("drain"), "it is up again"


def test_others_on_the_host_are_not_touched(client: Client, pair: Hosts) -> None:
    """Who is not of the run reaches the same host."""
    assert client.order("partition") is None
    until(lambda: not client.ask("passes"), "the connection is cut")
    assert "b'x'" in pair[0].run([pair[0].python, "-c", ASK.format(host=pair[1].address)]).stdout


def test_a_share_of_packets_is_lost_and_it_is_told_how_many(client: Client) -> None:
    """Drawn packet by packet: what is told is within four standard deviations of what was asked."""
    assert client.order("lossy_link", loss=0.05) is None
    client.ask("bulk_s", 200_000_000)
    lost, seen = map(int, re.findall(r"\d+", client.heal("lossy_link"))[:2])
    assert seen > 1000 and abs(lost - 0.05 * seen) < 4 * (0.05 * 0.95 * seen) ** 0.5, (lost, seen)


def test_packets_come_later_and_in_no_time_again_when_it_is_healed(client: Client, pair: Hosts) -> None:
    assert client.order("slow_link", delay_s=0.1) is None
    until(lambda: client.ask("trip_s") >= 0.1, "what is sent comes later")
    assert min(client.ask("trip_s") for _ in range(5)) >= 0.1
    assert "fleet" in devices(pair[0]) and "fwmark" in rules(pair[0])
    assert re.fullmatch(r"[1-9]\d* of \d+ packets \(100\.00%\)", client.heal("slow_link"))
    assert min(client.ask("trip_s") for _ in range(5)) < 0.1
    assert "fleet" not in devices(pair[0]) + tables(pair[0]) and "fwmark" not in rules(pair[0])


def test_packets_change_places_and_all_arrive(client: Client) -> None:
    assert client.order("slow_link", delay_s=0.01, jitter_s=0.03) is None
    until(lambda: client.ask("trip_s") >= 0.01, "what is sent comes later")
    trips_s = [client.ask("trip_s") for _ in range(30)]
    assert min(trips_s) >= 0.01 and max(trips_s) - min(trips_s) > 0.01
    client.ask("bulk_s", 3_000_000)
    client.heal("slow_link")


def test_no_more_than_so_many_bytes_go_in_a_second(client: Client) -> None:
    """Two seconds' worth, less what was in the kernel's hands before its port was known."""
    assert client.order("slow_link", delay_s=0.0, bytes_per_s=2e6) is None
    assert client.ask("bulk_s", 6_000_000) > 1.0


def test_a_rank_that_is_isolated_is_cut_off_and_its_host_is_not(client: Client, pair: Hosts) -> None:
    assert client.order("isolate_rank") is None
    until(lambda: not client.ask("passes"), "the connection is cut")
    assert "b'x'" in pair[0].run([pair[0].python, "-c", ASK.format(host=pair[1].address)]).stdout
    client.heal("isolate_rank")
    assert client.ask("drain")


@pytest.mark.parametrize(("kind", "answer"), [("store_gone", False), ("store_refuses", "ConnectionRefusedError")])
def test_the_store_is_out_of_reach_and_all_else_is_not(client: Client, kind: str, answer: object) -> None:
    assert client.order(kind) is None
    until(lambda: client.ask("connects", STORE_PORT) == answer, "the store is cut off")
    assert client.ask("passes") and client.ask("connects")
    client.heal(kind)
    assert client.ask("connects", STORE_PORT) is True


def test_the_store_is_slow(client: Client, pair: Hosts) -> None:
    assert client.order("store_slow", delay_s=0.05) is None
    until(lambda: "mark set" in pair[0].run(["nft", "list", "ruleset"]).stdout, "the rule is there", 10, tick_s=0.05)
    assert client.ask("connects", STORE_PORT) is True and client.ask("trip_s") < 0.05
    assert re.match(r"[1-9]\d* of", client.heal("store_slow"))


def test_the_store_refuses_credentials(client: Client, pair: Hosts) -> None:
    """Connections that are there already end, too; nobody else's port is touched."""
    assert client.ask("old") is True and client.ask("http") == "G"
    assert client.order("store_denies") is None
    until(lambda: client.ask("http") == "HTTP/1.1 403 Forbidden", "the store refuses", 10, tick_s=0.05)
    assert client.ask("old") == "ConnectionResetError" and client.ask("passes")
    assert re.fullmatch(r"[1-9]\d* of \d+ connections refused with 403", client.heal("store_denies"))
    assert client.ask("http") == "G" and "store_relay" not in pair[0].run(["ps", "-eo", "args", "-ww"]).stdout


def test_what_is_sent_to_the_store_is_torn(client: Client) -> None:
    assert client.ask("upload") is True
    assert client.order("store_tears") is None
    torn = ("ConnectionResetError", "BrokenPipeError")
    until(lambda: client.ask("upload") in torn, "it has begun, which ends connections that are there already", 10, tick_s=0.05)
    assert client.ask("upload") in torn
    assert re.match(r"[1-9]\d* of \d+ connections cut off", client.heal("store_tears"))
    assert client.ask("upload") is True


def devices(host: Host) -> str:
    return host.run(["ip", "-o", "link"]).stdout


def rules(host: Host) -> str:
    return host.run(["ip", "rule"]).stdout


@pytest.mark.parametrize("kind", ["partition", "slow_link", "store_tears"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_process_is_killed(client: Client, pair: Hosts, number: signal.Signals, kind: str) -> None:
    assert client.order(kind) is None
    assert "fleet_" in tables(pair[0])
    client.process.send_signal(number)
    client.process.wait()
    until(lambda: "fleet_" not in tables(pair[0]), "the kernel has removed the table", 5)
    until(lambda: "fleet" not in devices(pair[0]) and "fwmark" not in rules(pair[0]), "the relay has tidied up", 5)


def test_a_rule_whose_relay_was_killed_too_leads_nowhere_and_is_swept(client: Client, pair: Hosts) -> None:
    assert client.order("slow_link", delay_s=0.1) is None
    until(lambda: client.ask("trip_s") >= 0.1, "what is sent comes later")
    pids = pair[0].run(["pgrep", "-f", "chaos/relay.py"]).stdout.split()
    pair[0].run(["kill", "-KILL", *pids])
    until(lambda: client.ask("trip_s") < 0.1, "packets go as before")
    assert "fwmark" in rules(pair[0])
    pair[0].run([pair[0].python, "-c", "from chaos.relay import sweep; sweep()"], env={"PYTHONPATH": str(ROOT)})
    assert "fwmark" not in rules(pair[0])


def test_what_cannot_be_done_is_refused_with_the_reason(pair: Hosts) -> None:
    ask = (
        "from chaos.links import LocalLinks; from fleet.protocol.operations import Operation\n"
        "print(LocalLinks(lambda: [], 'h:1').operate(Operation('f', 'partition', 'start', node=0, duration_s=1.0, hosts=('10.0.0.1',))))\n"
        "print(LocalLinks(lambda: [], 'h:1').operate(Operation('f', 'partition', 'start', node=0, duration_s=1.0, hosts=('::1',))))"
    )
    bare = pair[0].run(
        ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin", pair[0].python, "-c", ask], env={"PYTHONPATH": str(ROOT)}
    )
    refused, wrong = bare.stdout.splitlines()
    assert "Operation not permitted" in refused and "root and the programs nft and ip" in refused
    assert wrong == "partition: ::1 is no IPv4 address"
