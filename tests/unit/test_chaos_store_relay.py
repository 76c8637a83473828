"""What answers in the place of a store, and what cuts connections to it off, over real connections."""

from __future__ import annotations

import hashlib
import http.client
import os
import socket
import socketserver
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from chaos import store_relay
from chaos.programs import begin, ready
from chaos.relay import MARKS

DATA = os.urandom(3 << 20)


@contextmanager
def relay(what: str, port: int, seed: int = 1) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    process = begin(store_relay.__file__, "127.0.0.1", port, what, seed, MARKS)
    assert not ready(process, 10.0) and process.stdout is not None
    try:
        yield int(process.stdout.readline()), process
    finally:
        process.kill()
        process.wait()


def said(process: subprocess.Popen[str]) -> str:
    reported, _ = process.communicate(timeout=10)
    return reported.strip()


@pytest.mark.parametrize("method", ["PUT", "GET", "HEAD"])
def test_every_request_is_refused_as_with_wrong_credentials(method: str) -> None:
    with relay("deny", 9) as (port, process):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request(method, "/bucket/key", body=DATA if method == "PUT" else None)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        assert answer.status == 403 and (b"AccessDenied" in body) == (method != "HEAD")
        assert said(process) == "1 of 1 connections refused with 403"


def test_what_speaks_tls_is_closed_and_told() -> None:
    with relay("deny", 9) as (port, process):
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10)
        with pytest.raises(OSError):
            connection.connect()
        assert "1 speak TLS" in said(process)


def _sent(port: int) -> bytes | None:
    """What a store that keeps all it gets answers; None: the connection broke."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        try:
            connection.sendall(DATA)
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(1 << 16) or None
        except OSError:
            return None


def test_uploads_are_torn_at_any_byte_and_what_passes_is_whole() -> None:
    """A store that answers with the digest of what it got, and only to whom has sent all of it."""
    got = list[int]()

    class Keep(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            data = bytearray()
            with suppress(OSError):  # it is torn
                while piece := self.request.recv(1 << 16):
                    data += piece
                self.request.sendall(hashlib.sha256(data).digest())
            got.append(len(data))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Keep) as store:  # its end waits for its threads
        threading.Thread(target=store.serve_forever, kwargs={"poll_interval": 0.05}).start()
        with relay("tear", store.server_address[1]) as (port, process):
            answers = [_sent(port) for _ in range(40)]
            assert said(process) == f"{answers.count(None)} of 40 connections cut off in the middle"
        store.shutdown()
    assert {answer for answer in answers if answer} <= {hashlib.sha256(DATA).digest()}, "what passes is whole"
    assert answers.count(None) > 20 and len(set(got)) > 20, "at bytes that differ"


@pytest.mark.parametrize(
    ("head", "count"),
    [
        (b"PUT /k HTTP/1.1\r\nContent-Length: 12\r\n\r\n", 12),
        (b"PUT /k HTTP/1.1\r\ncontent-length:7\r\nExpect: 100-continue\r\n\r\n", 0),
        (b"GET /k HTTP/1.1\r\nX-Content-Length: 5\r\n\r\n", 0),
    ],
)
def test_what_a_request_sends_before_its_answer(head: bytes, count: int) -> None:
    assert store_relay.body_bytes(head) == count
