"""A look at a Ray cluster that is there already: whether it can be reached, and which nodes it has."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.app.cluster.local import RANK_RESOURCE
from fleet.app.cluster.quiet import connect
from fleet.errors import ConfigError
from fleet.protocol.domains import locate

AUTO = "auto"
HELLO, FRAME_HEAD, SETTINGS_FRAME = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00", 9, 4
TRY_S = 3.0
"""Seconds for the address to accept a connection. Ray itself would try for longer, and say less."""


@dataclass(frozen=True, slots=True)
class ReachedNode:
    """One node. ``name`` is its host's, made unique; ``path`` its failure domains, and ``missing`` the labels that it should have had."""

    name: str
    id: str
    host: str
    address: str
    path: str
    missing: tuple[str, ...]
    slots: int


@contextlib.contextmanager
def reached(address: str) -> Iterator[None]:
    """This process is connected to the cluster at ``address`` until the context ends; see :func:`join`."""
    import ray

    join(address)
    try:
        yield
    finally:
        ray.shutdown()


def join(address: str, **arguments: Any) -> None:
    """Connect this process to the cluster at ``address``: ``auto``, or ``HOST:PORT``.

    ``arguments`` are those of ``ray.init``. Raises ConfigError: no cluster is there, it asks for another token, or it has another Ray or
    another Python.
    """
    if address != AUTO:
        _knock(address)
    try:
        connect(address, **arguments)
    except (ConnectionError, RuntimeError, OSError, ValueError) as error:
        words, roots = " ".join(str(error).split()), _roots(error)
        if asks_for_token(roots):
            words = f"the cluster asks for a token, and this process has none or another one: {words}"
        raise ConfigError("--address", address, words[:300] or type(error).__name__, _way_out(address, words + roots)) from error


def asks_for_token(words: str) -> bool:
    """Whether Ray's words say that the cluster refused its token."""
    return "uthenticat" in words or "AuthToken" in words


def _roots(error: BaseException) -> str:
    """The texts of an error and of its causes. Ray speaks of a token in a cause alone."""
    found, cause = [str(error)], error.__cause__
    while cause is not None:
        found.append(str(cause))
        cause = cause.__cause__
    return " ".join(found)


def _way_out(address: str, words: str = "") -> str:
    """The advice for Ray's words."""
    if asks_for_token(words):
        return "Set RAY_AUTH_TOKEN, or put the cluster's token into ~/.ray/auth_token; RAY_AUTH_MODE=disabled where it asks for none."
    if "ersion mismatch" in words:
        return "Use the same Ray and Python as the cluster has."
    if "find a node" in words or "node_ip_address" in words:
        return "This machine is no node of that cluster: use ray job submit, or a shell on one of its nodes."
    if address == AUTO:
        return "Start Ray on this machine, name a running cluster by --address HOST:PORT, or set RAY_ADDRESS."
    return "Name the head's HOST:PORT as ray start printed it. `fleet run` without --address starts a cluster of its own."


def _knock(address: str) -> None:
    """Raises ConfigError when no cluster answers. Ray itself would try for minutes, and say less."""
    scheme, _, place = address.rpartition("://")
    host, _, port = place.rpartition(":")
    if scheme or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        way_out = "Give auto, or HOST:PORT such as 10.0.0.1:6379; from a machine that is no node of the cluster, use ray job submit."
        raise ConfigError("--address", address, "is no address of a cluster", way_out)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), TRY_S) as line:
            speaks = _speaks_grpc(line)
    except OSError as error:
        reason = f"no cluster answers there: {error.strerror or error}"
        raise ConfigError("--address", address, reason, _way_out(address)) from error
    if not speaks:
        raise ConfigError("--address", address, "the process that listens there is no head of a Ray cluster", _way_out(address))


def _speaks_grpc(line: socket.socket) -> bool:
    """Whether the server answers with a frame of settings, as HTTP/2 does (RFC 9113, 3.4). Ray would wait minutes for another server.

    Not tried under TLS."""
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return True
    line.sendall(HELLO)
    head = line.recv(FRAME_HEAD, socket.MSG_WAITALL)
    return len(head) == FRAME_HEAD and head[3] == SETTINGS_FRAME


def nodes_seen(levels: Sequence[str], overrides: Mapping[str, str] | None = None) -> list[ReachedNode]:
    """The nodes that are alive, in the order of their hosts. ``overrides``: by name, the path that ``FLEET_DOMAIN`` gives.

    A slot is a unit of Fleet's own resource where a node has one; else a GPU where any node has one; else a CPU.
    """
    import ray

    return read_nodes(ray.nodes(), levels, overrides or {})


def read_nodes(listed: Sequence[Mapping[str, Any]], levels: Sequence[str], overrides: Mapping[str, str]) -> list[ReachedNode]:
    """As :func:`nodes_seen`, from what ``ray.nodes()`` gives."""
    alive = sorted((node for node in listed if node["Alive"]), key=lambda node: (node["NodeManagerHostname"], node["NodeID"]))
    resources = [node["Resources"] for node in alive]
    unit = next((name for name in (RANK_RESOURCE, "GPU") if any(name in one for one in resources)), "CPU")
    hosts = [str(node["NodeManagerHostname"]) for node in alive]
    found = []
    for node, host in zip(alive, hosts, strict=True):
        name = host if hosts.count(host) == 1 else f"{host}:{node['NodeID'][:6]}"
        located = locate(node.get("Labels") or {}, host, levels, overrides.get(name, ""))
        slots = int(node["Resources"].get(unit, 0))
        found.append(ReachedNode(name, str(node["NodeID"]), host, str(node["NodeManagerAddress"]), located.path, located.missing, slots))
    return found
