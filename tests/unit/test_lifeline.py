"""A rank's lifeline ends with its process, whoever else holds its files, and with a farewell when it is closed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.rank.membership.lifeline import FAREWELL, TOKEN_BYTES, Lifeline

BOUND_S = 30.0
TOKEN = "t" * TOKEN_BYTES

RANK = """
import os, socket, sys, time
from actors.rank.membership.lifeline import Lifeline
plain = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
lifeline = Lifeline(sys.argv[1], "t" * 32)
if os.fork() == 0:
    time.sleep(600)
print("forked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "life.sock"))
        listening.listen()
        listening.settimeout(BOUND_S)
        yield listening


def accept(server: socket.socket) -> socket.socket:
    connection = server.accept()[0]
    connection.settimeout(BOUND_S)
    assert connection.recv(TOKEN_BYTES, socket.MSG_WAITALL) == TOKEN.encode()
    return connection


def test_it_ends_with_the_process_though_a_child_holds_all_its_files(server: socket.socket) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        arguments = [server.getsockname(), str(other.getsockname()[1])]
        rank = subprocess.Popen(
            [sys.executable, "-c", RANK, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        try:
            assert rank.stdout is not None and rank.stdin is not None
            plain, lifeline = other.accept()[0], accept(server)
            assert rank.stdout.readline() == b"forked\n"
            rank.kill()
            assert lifeline.recv(1) == b""
            rank.wait(BOUND_S)
            plain.setblocking(False)
            with pytest.raises(BlockingIOError):  # the control: a connection that the child holds, too
                plain.recv(1)
        finally:
            os.killpg(rank.pid, signal.SIGKILL)
            rank.stdout.close()
            rank.stdin.close()
            plain.close()
            lifeline.close()


def test_it_says_farewell_when_it_is_closed(server: socket.socket) -> None:
    lifeline = Lifeline(server.getsockname(), TOKEN)
    with accept(server) as connection:
        lifeline.close()
        assert connection.recv(10) == FAREWELL
        assert connection.recv(10) == b""


def test_it_comes_back_when_the_agent_hangs_up(server: socket.socket) -> None:
    lifeline = Lifeline(server.getsockname(), TOKEN)
    accept(server).close()
    with accept(server):
        lifeline.close()


def test_files_of_other_threads_are_left_alone(server: socket.socket, tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        lifeline = Lifeline(server.getsockname(), TOKEN)
        with accept(server):
            file.write("still open")
            file.flush()
            lifeline.close()
    assert (tmp_path / "file").read_text() == "still open"
