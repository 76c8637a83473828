"""A cluster that is there already: addresses at which none is, and what nodes' words come to."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
from typer.testing import CliRunner

from fleet.app.cli import main as cli
from fleet.app.cluster.reach import reached, read_nodes
from fleet.errors import ConfigError


def node(number: int, host: str, alive: bool = True, labels: dict[str, str] | None = None, **resources: float) -> dict[str, Any]:
    return {
        "NodeID": f"{number:06d}ffff", "Alive": alive, "NodeManagerHostname": host, "NodeManagerAddress": f"10.0.0.{number}",
        "Labels": labels or {}, "Resources": resources,
    }  # fmt: skip


def test_nodes_are_named_after_their_hosts_and_the_dead_are_left_out() -> None:
    listed = [node(2, "b", CPU=4), node(1, "a", CPU=2), node(3, "b", CPU=1), node(4, "c", alive=False, CPU=9)]
    assert [(seen.name, seen.slots) for seen in read_nodes(listed, ("host",), {})] == [("a", 2), ("b:000002", 4), ("b:000003", 1)]


def test_a_slot_is_fleets_own_resource_else_a_gpu_else_a_cpu() -> None:
    assert [seen.slots for seen in read_nodes([node(1, "a", CPU=8, GPU=2), node(2, "b", CPU=8)], ("host",), {})] == [2, 0]
    assert [seen.slots for seen in read_nodes([node(1, "a", GPU=2, fleet_rank=3), node(2, "b", GPU=8)], ("host",), {})] == [3, 0]


def test_labels_say_where_a_node_is_and_what_is_missing_is_named() -> None:
    seen = read_nodes([node(1, "a", labels={"rack": "r1"}, CPU=1), node(2, "b", CPU=1)], ("host", "rack"), {})
    assert [(each.path, each.missing) for each in seen] == [("r1/a", ()), ("b/b", ("rack",))]
    assert read_nodes([node(1, "a", CPU=1)], ("host", "rack"), {"a": "feed-2/r7"})[0].path == "feed-2/r7"


@pytest.mark.parametrize(
    "address", ["nonsense", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:99999", "http://127.0.0.1:80", "ray://127.0.0.1", ":80"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is no address of a cluster"), reached(address):
        pytest.fail("there is no such cluster")


def test_nobody_at_the_address_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        address = f"127.0.0.1:{there.getsockname()[1]}"
    with pytest.raises(ConfigError, match="no cluster answers there"), reached(address):
        pytest.fail("there is no such cluster")


def test_a_stranger_at_the_address_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would wait for it for minutes."""

    def answer(listening: socket.socket) -> None:
        line, _ = listening.accept()
        with line:
            line.recv(1024)
            line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as there:
        serving = threading.Thread(target=answer, args=(there,))
        serving.start()
        with pytest.raises(ConfigError, match="no head of a Ray cluster"), reached(f"127.0.0.1:{there.getsockname()[1]}"):
            pytest.fail("there is no such cluster")
        serving.join()


def test_the_command_refuses_what_is_about_a_cluster_where_none_is_asked_for() -> None:
    refused = CliRunner().invoke(cli.app, ["doctor", "--world", "4"])
    assert isinstance(refused.exception, ConfigError) and refused.exception.field == "--world"
    refused = CliRunner().invoke(cli.app, ["doctor", "--cluster", "--address", "127.0.0.1:1"])
    assert isinstance(refused.exception, ConfigError) and refused.exception.field == "--address"


def test_a_refused_token_is_told_from_what_ray_was_refused_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray raises says that it could not connect; why, the error says that it was raised from."""

    def refuse(address: str, **arguments: Any) -> None:
        try:
            raise RuntimeError("RPC error: InvalidAuthToken: Authentication token is missing or incorrect.")
        except RuntimeError as error:
            raise ConnectionError(f"Failed to connect to Ray cluster at {address}") from error

    monkeypatch.setattr("fleet.app.cluster.reach.connect", refuse)
    with pytest.raises(ConfigError, match=r"asks for a token.*RAY_AUTH_TOKEN"), reached("auto"):
        pytest.fail("it was refused")
