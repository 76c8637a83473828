"""Faults of the network between the hosts of a run: rules of the kernel's packet filter, and a relay for packets that are only late.

A rule matches packets of this run alone. Some go between ports of the run's processes on this host and other hosts of the run. The others
go to the address and port of its store. A child of this process, ``nft -i``, owns the table of rules. The kernel removes the table when the
child ends in any way, and the child ends with this process. The relay is a child, too: see ``chaos.relay``. These faults need root, and the
programs ``nft`` and ``ip``.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from chaos import relay, store_relay
from chaos.programs import begin, ready
from fleet.host.clock import MonotonicClock
from fleet.protocol.operations import HEAL, START, Acts, Operation, perform

BEFORE_S = 0.1
"""Delay from an order to the cut: the answer to the order goes the same way."""
REFRESH_S = 0.02
"""Time between two looks for ports that the run has opened."""
FLAP_S = 1.0
"""A link that flaps is down for so long, and up for so long."""
LIMIT_S = 2.0
"""How long nft may take to answer: the agent waits for it."""
PARTS = 10_000
"""The unit of a share of packets."""
CHAINS = {"steer": "route hook output priority -150", "output": "filter hook output priority 0", "input": "filter hook input priority 0"}
DIVERTS = {"divert": "nat hook output priority -100"}
"""Chains of a table, and their hooks in the kernel. ``DIVERTS`` is only for faults that end connections at another place."""


def no_store() -> tuple[list[str], int]:
    """Stands for a store without an address. Raises OSError."""
    raise OSError("the address of the store is unknown")


def open_ports(pids: Iterable[int]) -> set[int]:
    """Local TCP ports of these processes, of listeners and of connections."""
    found: set[int] = set()
    for pid in pids:
        try:
            found |= {each.laddr.port for each in psutil.Process(pid).net_connections("tcp") if each.laddr}
        except psutil.Error:
            continue  # it has ended
    return found


class Table:
    """Rules of the packet filter that last as long as this object's child process. Raises OSError when there can be none."""

    def __init__(self, hosts: Iterable[str], diverts: bool = False) -> None:
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the child
        self._nft = subprocess.Popen(["nft", "-i"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._said, text=True)
        self.name = f"fleet_{self._nft.pid}"
        self._known: set[int] = set()
        table, chains = f"inet {self.name}", CHAINS | (DIVERTS if diverts else {})
        self._begin(
            f"chain {list(chains)[-1]}",
            f"add table {table} {{ flags owner; }}",
            f"add set {table} ports {{ type inet_service; }}",
            f"add set {table} hosts {{ type ipv4_addr; }}",
            *(f"add element {table} hosts {{ {host} }}" for host in hosts),
            *(f"add chain {table} {name} {{ type {where}; }}" for name, where in chains.items()),
        )

    def _begin(self, last: str, *lines: str) -> None:
        """Raises OSError, and leaves no child then."""
        try:
            self.run_lines(*lines)
            self._await(last)
        except BaseException:
            self.close()
            raise

    def run_lines(self, *lines: str) -> None:
        """Run commands, in the words of nft(8)."""
        assert self._nft.stdin is not None
        self._nft.stdin.write("\n".join([*lines, ""]))
        self._nft.stdin.flush()

    def rule(self, *rules: str) -> None:
        """Add rules, each of which begins with its chain."""
        self.run_lines(*(f"add rule inet {self.name} {rule}" for rule in rules))

    def pass_all(self) -> None:
        """Remove all rules."""
        self.run_lines(*(f"flush chain inet {self.name} {chain}" for chain in ("steer", "output", "input")))

    def counted(self) -> list[int]:
        """Packets that each counter among the rules has seen. Raises OSError.

        It reads nft's plain output: for a table with an owner, nft prints no complete JSON (1.0.6).
        """
        listed = self._list()
        if listed.returncode:
            raise OSError(listed.stderr.strip())
        return [int(packets) for packets in re.findall(r"counter packets (\d+)", listed.stdout)]

    def concern(self, ports: set[int]) -> None:
        """Apply the rules to these local ports, too."""
        if new := ports - self._known:
            self._known |= new
            self.run_lines(f"add element inet {self.name} ports {{ {', '.join(map(str, sorted(new)))} }}")

    def close(self) -> None:
        """End the child; the kernel removes the table."""
        self._nft.kill()
        self._nft.wait()
        assert self._nft.stdin is not None
        with suppress(OSError):  # input that nft has not read
            self._nft.stdin.close()
        self._said.close()

    def _await(self, words: str) -> None:
        """Wait until the kernel has the last commands. Raises OSError."""
        for _ in range(round(LIMIT_S / REFRESH_S)):
            listed = self._list()
            if words in listed.stdout:
                return
            if self._nft.poll() is not None or self._complaint():
                break
            threading.Event().wait(REFRESH_S)
        raise OSError(f"nft made no table: {self._complaint() or listed.stderr.strip() or 'it does not answer'}")

    def _list(self) -> subprocess.CompletedProcess[str]:
        command = ["nft", "list", "table", "inet", self.name]
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)

    def _complaint(self) -> str:
        self._said.seek(0)
        return " ".join(self._said.read().split())[:300]


class Relay:
    """The process that holds back marked packets. It ends with this object, or with this process. Raises OSError."""

    def __init__(self, program: str, *words: object) -> None:
        self._process = begin(program, *words)
        if why := ready(self._process, LIMIT_S):
            self.close()
            raise OSError(why)
        self.mark = relay.mark_of(self._process.pid)

    @property
    def ended(self) -> bool:
        """Whether it has ended, and holds back no packets any more."""
        return self._process.poll() is not None

    @property
    def verdict(self) -> str:
        """The action of a rule on its packets."""
        return f"counter meta mark set {self.mark}"

    def close(self) -> str:
        """End it: packets go as before. Returns its last line of output."""
        try:
            said, _ = self._process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            said, _ = self._process.communicate()
        return said.strip()


class StoreRelayProcess(Relay):
    """The process that takes connections in place of the store; it ends as a relay does. Raises OSError."""

    def __init__(self, host: str, port: int, what: str, seed: int) -> None:
        super().__init__(store_relay.__file__, host, port, what, seed, relay.MARKS)
        assert self._process.stdout is not None
        self._port = int(self._process.stdout.readline())

    @property
    def verdict(self) -> str:
        return f"counter redirect to :{self._port}"


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of a fault on packets.

    Attributes:
        sends, receives: the direction of this host's packets that it strikes.
        loss: share of them that is lost.
        flaps: all or none of them, in turn.
        refuses: each lost packet is answered, which ends its connection.
        held: packets go through a relay, with the delay and the rate of the order.
        instead: the treatment of connections that end at a relay in place of the store: ``deny`` or ``tear``.
    """

    sends: bool = True
    receives: bool = True
    loss: float = 1.0
    flaps: bool = False
    refuses: bool = False
    held: bool = False
    instead: str = ""

    @property
    def verdict(self) -> str:
        """The action in the words of nft(8), where no relay is needed."""
        if self.loss < 1:
            return f"numgen random mod {PARTS} < {round(self.loss * PARTS)} counter drop"
        return "counter reject with tcp reset" if self.refuses else "counter drop"


class LocalLinks:
    """The links between this host and others of the run, for the agent of this node.

    Args:
        pids: the run's processes on this host, now.
        coordinator: ``host:port`` at which the coordinator listens.
        store: IPv4 addresses and the port of the store; it raises OSError with the reason when there are none.
    """

    def __init__(self, pids: Callable[[], Iterable[int]], coordinator: str, store: Callable[[], tuple[list[str], int]] = no_store) -> None:
        self._pids, self._store = pids, store
        self._coordinator = coordinator.rpartition(":")
        self._cuts: dict[str, _Cut] = {}
        if os.geteuid() == 0 and shutil.which("ip"):
            with suppress(OSError):  # rules left by another run lead nowhere, and do no harm
                relay.sweep()

    def operate(self, order: Operation) -> str | None:
        """Carry out the order, by ``ACTS``. Returns the reason of a refusal, or None."""
        return perform(ACTS, self, order)

    def between_hosts(self, order: Operation, effect: Effect) -> str | None:
        """For its duration, strike packets between the run's processes here and ``order.hosts``, or only those of the order's process."""
        if wrong := [host for host in order.hosts if not _is_ipv4(host)]:
            return f"{order.kind}: {wrong[0]} is no IPv4 address"
        host, _, port = self._coordinator
        matches = [("output", "ip daddr @hosts tcp sport @ports")] if effect.sends else []
        if effect.sends and host in order.hosts and order.process is None:
            matches.append(("output", f"ip daddr {host} tcp dport {port}"))
        matches += [("input", "ip saddr @hosts tcp dport @ports")] if effect.receives else []
        pids = self._pids if order.process is None else functools.partial(list, [order.process.pid])
        return self._begin(order, effect, order.hosts, matches, lambda: open_ports(pids()))

    def to_store(self, order: Operation, effect: Effect) -> str | None:
        """For its duration, strike packets of this host to the store."""
        try:
            hosts, port = self._store()
        except OSError as error:
            return f"{order.kind}: {error}"
        return self._begin(order, effect, hosts, [("output", f"ip daddr @hosts tcp dport {port}")], set, port)

    def heal(self, order: Operation) -> None:
        """End the rules of the same fault; without effect when it is over."""
        cut = self._cuts.get(order.fault)
        if cut is not None:
            cut.end()

    def applied(self, fault: str) -> str:
        """The measured effect of a healed fault, in words; empty without a measurement."""
        cut = self._cuts.pop(fault, None)
        return cut.applied if cut is not None else ""

    def close(self) -> None:
        """End all rules."""
        for fault in list(self._cuts):
            self._cuts.pop(fault).end()

    def _begin(
        self, order: Operation, effect: Effect, hosts: Sequence[str], matches: Sequence[tuple[str, str]], ports: Callable[[], set[int]],
        port: int = 0,
    ) -> str | None:  # fmt: skip
        self.heal(order)
        kept: Relay | None = None
        try:
            if effect.instead:
                kept = StoreRelayProcess(hosts[0], port, effect.instead, order.seed)
            elif effect.held:
                kept = Relay(relay.__file__, order.delay_s, order.bytes_per_s, order.jitter_s)
            table = Table(hosts, bool(effect.instead))
        except (OSError, subprocess.SubprocessError) as error:
            if kept is not None:
                kept.close()
            return f"{order.kind}: {error}; it takes root and the programs nft and ip"
        self._cuts[order.fault] = _Cut(table, kept, _rules(effect, matches, kept), ports, order.duration_s, effect)
        return None


def _rules(effect: Effect, matches: Sequence[tuple[str, str]], kept: Relay | None) -> list[str]:
    """Rules, each with its chain: for each match, the action on its packets."""
    if kept is not None and effect.instead:  # existing connections end
        others = [f"{match} meta mark != {kept.mark}" for _, match in matches]
        return [rule for match in others for rule in (f"divert {match} {kept.verdict}", f"output {match} counter reject with tcp reset")]
    verdict = kept.verdict if kept is not None else effect.verdict
    return [f"{'steer' if effect.held else chain} {match} {part}" for chain, match in matches for part in ("counter", verdict)]


def _send_lost(links: LocalLinks, order: Operation) -> str | None:
    """Drop packets that the struck node sends: there on their way out, elsewhere on their way in."""
    return links.between_hosts(order, Effect(sends=order.is_target, receives=not order.is_target))


def _some_lost(links: LocalLinks, order: Operation) -> str | None:
    return links.between_hosts(order, Effect(receives=False, loss=order.loss))


def _by_hosts(effect: Effect) -> Callable[[LocalLinks, Operation], str | None]:
    return lambda links, order: links.between_hosts(order, effect)


def _by_store(effect: Effect) -> Callable[[LocalLinks, Operation], str | None]:
    return lambda links, order: links.to_store(order, effect)


STARTS: Acts = {
    ("partition", START): _by_hosts(Effect()),
    ("flap", START): _by_hosts(Effect(flaps=True)),
    ("one_way", START): _send_lost,
    ("lossy_link", START): _some_lost,
    ("slow_link", START): _by_hosts(Effect(receives=False, held=True)),
    ("isolate_rank", START): _by_hosts(Effect()),
    ("rail", START): _by_hosts(Effect()),
    ("isolate_coordinator", START): _by_hosts(Effect()),
    ("store_gone", START): _by_store(Effect(receives=False)),
    ("store_refuses", START): _by_store(Effect(receives=False, refuses=True)),
    ("store_slow", START): _by_store(Effect(receives=False, held=True)),
    ("store_denies", START): _by_store(Effect(receives=False, instead="deny")),
    ("store_tears", START): _by_store(Effect(receives=False, instead="tear")),
}
ACTS: Acts = {**STARTS, **{(kind, HEAL): lambda links, order: links.heal(order) for kind, _ in STARTS}}
"""The agent of a node performs these on the links of its host."""


class _Cut:
    """Applies rules for a while, in a thread of its own. ``applied``: their measured effect, in words, once it is over."""

    def __init__(
        self, table: Table, kept: Relay | None, rules: list[str], ports: Callable[[], set[int]], duration_s: float, effect: Effect
    ) -> None:
        self._table, self._relay, self._rules, self._ports, self._effect = table, kept, rules, ports, effect
        self.applied = ""
        self._over, self._clock = threading.Event(), MonotonicClock()
        self._thread = threading.Thread(target=self._run, args=(duration_s,), daemon=True, name="link-cut")
        self._thread.start()

    def end(self) -> None:
        """Returns when all packets pass again."""
        self._over.set()
        self._thread.join()

    def _run(self, duration_s: float) -> None:
        try:
            if self._over.wait(BEFORE_S):
                return
            self._apply(duration_s)
            self.applied = self._measured()
        finally:
            if self._relay is not None:
                self.applied = self._relay.close() or self.applied
            self._table.close()

    def _apply(self, duration_s: float) -> None:
        down, began_s = False, self._clock.now_s()
        while (lasted_s := self._clock.now_s() - began_s) < duration_s:
            wanted = not self._effect.flaps or int(lasted_s / FLAP_S) % 2 == 0
            if wanted:
                self._table.concern(self._ports())
            if wanted != down:
                self._table.rule(*self._rules) if wanted else self._table.pass_all()
                down = wanted
            if self._over.wait(REFRESH_S):
                return

    def _measured(self) -> str:
        """The measured effect, in words. Counters come in pairs: matched packets, and struck packets."""
        if self._effect.flaps:
            return ""  # a removed rule takes its counter along
        try:
            counted = self._table.counted()
        except (OSError, subprocess.SubprocessError) as error:
            return f"not measured: {error}"
        seen, affected = sum(counted[::2]), sum(counted[1::2])
        if self._relay is not None and self._relay.ended:
            return "the relay has ended before its time: packets went as before"
        return f"{affected} of {seen} packets" + (f" ({affected / seen:.2%})" if seen else "")


def _is_ipv4(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 4
    except ValueError:
        return False
