"""Every port of a run: who listens, who may speak, how that is proved, what stays open, and what closes it. The code opens no other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.tidy.rules import SHIPPED

ROOT = Path(__file__).parents[2]
SECRET = "the run's secret"
READABLE = "bytes are readable on their way"
TLS, POLICY = "`--tls`", "network policy"
OPENS = {
    "create_server", "listen", "start_server", "start_unix_server", "create_unix_server", "TCPSite", "UnixSite", "Door", "Doorkeeper",
    "Reception", "create_device", "ThreadingTCPServer", "TCPServer", "HTTPServer", "ThreadingHTTPServer", "UnixStreamServer",
}  # fmt: skip
"""Names of what is called, or inherited from, to listen."""


@dataclass(frozen=True)
class Port:
    """One kind of listener. ``opened_in``: the modules whose code opens it; none where another program does."""

    name: str
    listens: str
    speaks: str
    proved: str
    open: str
    closed: str
    number: str
    opened_in: tuple[str, ...] = ()


PORTS = (
    Port(
        "coordinator", "the coordinator, on the head", "agents of all nodes; `fleet runs set`", SECRET, READABLE, TLS,
        "free; in `coordinator` of the run's folder", ("actors/coordinator.py",),
    ),
    Port("store", "each rank", "ranks of all nodes", SECRET, READABLE, TLS, "free", ("actors/rank/membership/store.py",)),
    Port(
        "memory", "each node's agent, with `peer_copies`", "ranks and agents of all nodes", SECRET, READABLE, TLS, "free",
        ("storage/peers/memory.py",),
    ),
    Port(
        "parameters", "each rank, with `fsdp`", "ranks of all nodes", f"{SECRET}, and a token of that rank", READABLE, TLS, "free",
        ("actors/rank/fsdp/serving.py",),
    ),
    Port(
        "gloo", "each rank; with `--tls` on loopback", "ranks of all nodes; with `--tls` of this host", "not at all",
        "a stranger reads gradients and state, and sends wrong ones", f"{POLICY}; {TLS}, but for users of the same host", "free",
        ("actors/rank/membership/process_group.py",),
    ),
    Port(
        "exchange", "each rank, with `--tls`, while a view forms", "ranks of other hosts, for gloo", f"{SECRET}, by TLS", "nothing", "-",
        "free; on loopback, too", ("actors/rank/membership/tunnels.py",),
    ),
    Port("NCCL", "each rank with a GPU", "ranks of all nodes", "not at all", "as gloo", f"{POLICY}; `--tls` refuses such runs", "free"),
    Port(
        "links", "each node, while `fleet doctor --cluster` or `--preflight` measures", "the other nodes", "a secret of that measurement",
        "zeros are readable on their way", POLICY, "free", ("actors/links.py",),
    ),
    Port(
        "live page", "`fleet run`, `fleet runs watch`, `fleet cluster up`", "browsers, Prometheus",
        "[tokens](dashboards.md#who-may-do-what); on loopback none",
        "no TLS", "loopback, or a proxy with TLS before it", "free, or `--port`", ("dashboards/server.py",),
    ),
    Port(
        "Prometheus", "that of `fleet cluster up`", "this host", "not at all", "users of the same host read metrics", "-",
        "free, on loopback",
    ),
    Port(
        "store's stand-in", "`fleet run` with faults of the store", "ranks of this host", "not at all",
        "users of the same host reach the store, with credentials of their own", "-", "free, on loopback", ("chaos/store_relay.py",),
    ),
    Port(
        "Unix sockets", "agent and fork server of a node; `--plain`", "ranks and agents of that host", "the kernel names the peer's user",
        "nothing", "-", "none", ("actors/node.py", "actors/fork_server.py", "actors/plain/crew.py"),
    ),
    Port(
        "Ray", "head and nodes", "nodes, drivers", "[Ray's token](https://docs.ray.io/en/latest/ray-security/token-auth.html)",
        "without it anybody runs programs; the run's secret is readable on its way",
        f"{POLICY}; token, and [Ray's TLS](https://docs.ray.io/en/latest/ray-core/configure.html#tls-authentication)",
        "[6379 and others](https://docs.ray.io/en/latest/ray-core/configure.html#ports-configurations)",
    ),
)  # fmt: skip

MEANS = {
    "fleet/host/lines.py": "what other modules listen with",
    "actors/lines.py": "the same, for asyncio",
    "fleet/host/ports.py": "tries whether a port is free, and closes it",
    "actors/rank/step/reduction.py": "asks for a message, and for no connection",
    "actors/rank/step/train_step.py": "the same",
}
"""Modules that open no port of a run, although they call something of :data:`OPENS`."""


def table() -> str:
    heads = ("listener", "who listens", "who may speak", "how that is proved", "what is open", "what closes it", "port")
    rows = [(each.name, each.listens, each.speaks, each.proved, each.open, each.closed, each.number) for each in PORTS]
    return "\n".join("| " + " | ".join(row) + " |" for row in (heads, ("---",) * len(heads), *rows)) + "\n"


def opening() -> Iterator[str]:
    """Modules of Fleet's that call, or inherit from, something of :data:`OPENS`."""
    for path in sorted(file for top in SHIPPED for file in (ROOT / top).rglob("*.py")):
        if any(named in OPENS for named in _used(ast.parse(path.read_text()))):
            yield path.relative_to(ROOT).as_posix()


def _used(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        for used in [node.func] if isinstance(node, ast.Call) else node.bases if isinstance(node, ast.ClassDef) else []:
            yield used.attr if isinstance(used, ast.Attribute) else used.id if isinstance(used, ast.Name) else ""
