"""Ports that are told before somebody listens there."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from fleet.host import ports


def test_no_outgoing_connection_is_given_it() -> None:
    """Ray opens hundreds of connections between the choice and the server's start; one took a coordinator's port."""
    first, last = map(int, ports.RANGE_FILE.read_text().split())
    assert not any(first <= ports.free_port() <= last for _ in range(20))


def test_a_port_that_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, free = ports.free_port(), ports.free_port()
    monkeypatch.setattr(ports.random, "sample", lambda *_: [taken, free])
    with socket.create_server(("127.0.0.1", taken)):
        assert ports.free_port() == free
    assert ports.free_port() == taken


def test_a_system_that_keeps_no_port_back_gives_any(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    range_file = tmp_path / "range"
    range_file.write_text("1024\t60999\n")
    monkeypatch.setattr(ports, "RANGE_FILE", range_file)
    assert ports.free_port() >= 1024
