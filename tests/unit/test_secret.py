"""The file of a run's secret, and the Unix sockets beside it: of one user alone."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest

from actors.lines import same_user
from fleet.errors import LineRefused, RunFailed
from fleet.host import secret
from fleet.host.lines import user_of
from fleet.host.refusals import Refusals
from fleet.host.wire import connect_unix
from fleet.protocol.proof import Reason


def test_what_is_kept_is_read_and_forgotten(tmp_path: Path) -> None:
    held = secret.fresh()
    secret.keep(tmp_path, held)
    secret.keep(tmp_path, held)
    assert secret.read(tmp_path) == held
    assert [path.name for path in tmp_path.iterdir()] == [secret.FILE]
    assert stat.S_IMODE((tmp_path / secret.FILE).stat().st_mode) == 0o600
    secret.forget(tmp_path)
    secret.forget(tmp_path)
    with pytest.raises(FileNotFoundError):
        secret.read(tmp_path)


def test_two_secrets_are_never_the_same() -> None:
    assert len({secret.fresh() for _ in range(50)}) == 50


def test_a_file_that_others_may_read_is_no_secret(tmp_path: Path) -> None:
    secret.keep(tmp_path, secret.fresh())
    (tmp_path / secret.FILE).chmod(0o640)
    with pytest.raises(RunFailed, match="mode 640: others may know"):
        secret.read(tmp_path)


@pytest.mark.parametrize("data", [b"", b"s" * 31, b"s" * 33])
def test_a_file_of_another_length_is_no_secret(tmp_path: Path, data: bytes) -> None:
    secret.keep(tmp_path, secret.fresh())
    (tmp_path / secret.FILE).write_bytes(data)
    with pytest.raises(RunFailed, match="has 32"):
        secret.read(tmp_path)
    with pytest.raises(ValueError, match="32 bytes"):
        secret.keep(tmp_path, data)


def test_a_nodes_folder_is_this_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_ = tmp_path / "open"
    open_.mkdir(mode=0o755)
    assert [stat.S_IMODE(secret.private(folder).stat().st_mode) for folder in (open_, tmp_path / "new")] == [0o700, 0o700]
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(RunFailed, match="belongs to user"):
        secret.private(open_)


def test_the_kernel_says_who_is_at_the_other_end() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert user_of(one) == (os.getpid(), os.geteuid())


def test_another_users_socket_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        connect_unix(path, 5.0).close()
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        with pytest.raises(LineRefused, match="served by user"):
            connect_unix(path, 5.0)


def test_another_user_is_refused_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is at the other end is what the kernel says; who this process is, the test does."""
    refusals = Refusals()

    async def answered() -> bytes:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if same_user(writer, "agent socket", refusals):
                writer.write(b"welcome")
            writer.close()

        server = await asyncio.start_unix_server(serve, tmp_path / "socket")
        reader, writer = await asyncio.open_unix_connection(tmp_path / "socket")
        try:
            return await asyncio.wait_for(reader.read(), 10.0)
        finally:
            writer.close()
            server.close()

    assert asyncio.run(answered()) == b"welcome"
    (tmp_path / "socket").unlink()
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert asyncio.run(answered()) == b""
    assert [(one.listener, one.reason, one.count) for one in refusals.take("node-0")] == [("agent socket", Reason.USER, 1)]


def test_what_is_refused_is_logged_at_a_bounded_rate(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    for _ in range(1000):
        refusals.note("store", Reason.SECRET, "10.0.0.9:1", "it does not hold this run's secret")
    assert len(caplog.records) <= 3
    assert "store: a connection from 10.0.0.9:1 was refused: secret: it does not hold" in caplog.records[0].getMessage()
    [counted] = refusals.take("node-0")
    assert (counted.listener, counted.reason, counted.count) == ("store", "secret", 1000)
    refusals.note("store", Reason.SECRET, "10.0.0.9:1")
    assert refusals.take("node-0") == [], "it was told just now"
