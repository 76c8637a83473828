"""A store that is down, slow, full, closed to us or not there: an OSError with a named cause, in bounded time, without a secret in it."""

from __future__ import annotations

import contextlib
import errno
import http.server
import logging
import os
import pickle
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fleet.protocol.instructions import CommitCheckpoint
from fleet.protocol.types import StateId
from storage.backends.blocks import BLOCK_BYTES
from storage.backends.files import StoreError, open_files
from storage.backends.s3 import S3Files
from storage.backends.urls import redact, without_credentials
from storage.checkpoint.parts import Parts, RetainingStore
from storage.checkpoint.store import CheckpointStore, checkpoint_files, write_part
from storage.mirror import JournalMirror
from tests.support.seaweed import SeaweedServer, serving

IMPATIENT = {"connect_timeout_s": 1.0, "read_timeout_s": 1.0, "attempts": 2}
SECRET = "wJalrXUtnFEMI-K7MDENG"


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Clients that do not wait for long."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in IMPATIENT.items():
            patch.setitem(S3Files.__init__.__kwdefaults__, name, value)
        yield


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """A server to be stopped and killed. The tests that use it come in order: the last one kills it."""
    with serving(tmp_path_factory.mktemp("own")) as server:
        yield server


@pytest.fixture
def reachable(own: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> SeaweedServer:
    for variable, value in own.environment.items():
        monkeypatch.setenv(variable, value)
    return own


def commit(url: str, checkpoint: str) -> None:
    part = write_part(url, checkpoint, 0, 1, [(0, torch.ones(8))])
    CheckpointStore(url).commit(CommitCheckpoint(checkpoint, StateId(0, 1), (part,), "", 0.0, 0.0))


def cause_of(action: Callable[[], object]) -> str:
    with pytest.raises(StoreError) as caught:
        action()
    assert isinstance(caught.value, OSError)
    return caught.value.cause


def test_a_server_that_hangs_is_a_time_out_and_all_is_well_when_it_goes_on(reachable: SeaweedServer) -> None:
    url = reachable.url("hangs")
    commit(url, "c1")
    reachable.pause()
    try:
        with impatient():
            assert cause_of(lambda: write_part(url, "c2", 0, 1, [(0, torch.ones(8))])) == "timeout"
            assert cause_of(lambda: CheckpointStore(url).list()) == "timeout"
            assert cause_of(lambda: CheckpointStore(url).load("c1")) == "timeout"
            assert cause_of(lambda: JournalMirror(url).copy(Path(__file__))) == "timeout"
    finally:
        reachable.go_on()
    commit(url, "c2")
    assert CheckpointStore(url).newest_valid() == "c2"


def test_a_bucket_that_is_not_there_is_named(reachable: SeaweedServer) -> None:
    assert cause_of(lambda: CheckpointStore("s3://no-such-bucket/run").list()) == "bucket"
    with pytest.raises(StoreError, match="s3://no-such-bucket/run/checkpoints: bucket: NoSuchBucket"):
        write_part("s3://no-such-bucket/run", "c", 0, 1, [(0, torch.ones(8))])
    with pytest.raises(StoreError, match="names no bucket"):
        open_files("s3:///run")


def test_credentials_that_do_not_fit_are_named_and_not_shown(own: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_S3_ENDPOINT", own.endpoint)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    url = f"s3://{own.key}:{SECRET}@{own.bucket}/run"
    with pytest.raises(StoreError) as caught:
        commit(url, "c")
    assert caught.value.cause == "credentials"
    assert SECRET not in "".join(traceback.format_exception(caught.value)) + repr(pickle.loads(pickle.dumps(caught.value)))
    assert cause_of(lambda: commit(f"s3://{own.bucket}/run", "c")) == "credentials", "none at all"


def test_credentials_in_the_url_work_and_are_written_nowhere(
    own: SeaweedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLEET_S3_ENDPOINT", own.endpoint)
    url = f"s3://{own.key}:{own.secret}@{own.bucket}/run"
    with caplog.at_level(logging.DEBUG, logger="storage"):
        commit(url, "000000-000000000001-g00000001")
        RetainingStore(url, 1).commit(_order(url, 2))
        assert len(Parts(url).load("000000-000000000002-g00000001")[1]) == 1
    files, newest = checkpoint_files(url), "000000-000000000002-g00000001"
    stored = b"".join(files.read(f"{newest}/{name}") for name in files.sizes(newest))
    assert own.secret not in caplog.text and own.secret not in CheckpointStore(url).url
    assert b"fleet-checkpoint" in stored and own.secret.encode() not in stored


def _order(url: str, step: int) -> CommitCheckpoint:
    checkpoint, part = Parts(url).write(StateId(0, step), 1, 0, 1, [(0, torch.ones(8))])
    return CommitCheckpoint(checkpoint, StateId(0, step), (part,), "", 0.0, 0.0)


def test_a_server_that_was_killed_is_unreachable(reachable: SeaweedServer) -> None:
    url = reachable.url("killed")
    commit(url, "c1")
    reachable.kill()
    with impatient():
        assert cause_of(lambda: write_part(url, "c2", 0, 1, [(0, torch.ones(8))])) == "unreachable"
        assert cause_of(lambda: CheckpointStore(url).newest_valid()) == "unreachable"


# ---- answers that a healthy server does not give -----------------------------------------------------------------------------------------


class Bad(http.server.ThreadingHTTPServer):
    """Answers everything with ``status`` and ``code``, and counts."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.status, self.code, self.requests = status, code, 0
        self.thread = threading.Thread(target=self.serve_forever)

    def __enter__(self) -> Bad:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()

    @property
    def environment(self) -> dict[str, str]:
        endpoint = f"http://127.0.0.1:{self.server_port}"
        return {"FLEET_S3_ENDPOINT": endpoint, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": SECRET}


class _Answer(http.server.BaseHTTPRequestHandler):
    server: Bad

    def _answer(self) -> None:
        self.server.requests += 1
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = f"<Error><Code>{self.server.code}</Code><Message>no</Message></Error>".encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Not on the terminal."""


@pytest.mark.parametrize(
    ("status", "code", "cause", "tries"),
    [
        (503, "ServiceUnavailable", "server", 2),
        (500, "InternalError", "server", 2),
        (503, "SlowDown", "server", 2),
        (400, "ExpiredToken", "credentials", 1),
        (403, "AccessDenied", "credentials", 1),
        (404, "NoSuchBucket", "bucket", 1),
        (507, "InsufficientStorage", "server", 1),
        (400, "EntityTooLarge", "refused", 1),
    ],
)
def test_what_the_server_says_is_named_and_tries_are_bounded(
    status: int, code: str, cause: str, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Bad(status, code) as server, impatient():
        for variable, value in server.environment.items():
            monkeypatch.setenv(variable, value)
        store = CheckpointStore("s3://bucket/run")
        with pytest.raises(StoreError, match=code) as caught:
            store.list()
        assert (caught.value.cause, server.requests) == (cause, tries)


# ---- a disk ------------------------------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_named_and_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, write = str(tmp_path), os.pwritev
    commit(url, "c1")

    def full(descriptor: int, data: list[memoryview], at: int) -> int:
        if at >= BLOCK_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, at)

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="No space left on device"):
        write_part(url, "c2", 0, 1, [(0, torch.ones(BLOCK_BYTES // 2))])
    monkeypatch.undo()
    assert list((tmp_path / "checkpoints" / "c2").iterdir()) == []
    assert CheckpointStore(url).newest_valid() == "c1"


def test_a_place_that_takes_no_files_is_an_oserror() -> None:
    with pytest.raises(OSError, match="/proc/"):
        commit("/proc/fleet", "c1")


def test_a_failed_deletion_undoes_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "the disk is ill")

    url = str(tmp_path)
    for step in (1, 2):
        order = _order(url, step)
        monkeypatch.setattr(CheckpointStore, "delete", fails)
        assert RetainingStore(url, 1).commit(order) > 0
        monkeypatch.undo()
    assert len(CheckpointStore(url).list()) == 2
    assert "older ones were not deleted" in caplog.text and "the disk is ill" in caplog.text


# ---- texts -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://key:sec/ret@bucket", "s3://key:sec/ret@bucket"),
        (f"s3://key:{SECRET}@bucket/a", "s3://***@bucket/a"),
        (f"cannot write s3://key:{SECRET}@bucket/a and sftp://me@host/b", "cannot write s3://***@bucket/a and sftp://***@host/b"),
        (f"http://h/b?X-Amz-Signature={SECRET}&x=1", "http://h/b?X-Amz-Signature=***&x=1"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("nothing to hide", "nothing to hide"),
    ],
)
def test_redaction(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(shown) == shown


def test_a_url_without_its_credentials() -> None:
    assert without_credentials(f"s3://key:{SECRET}@bucket/a") == "s3://bucket/a"
    assert without_credentials("s3://bucket/a") == "s3://bucket/a"
