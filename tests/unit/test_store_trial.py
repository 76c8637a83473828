"""A store is tried before a run depends on it: what fails is named, in bounded time, and nothing is left behind."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dashboards.identities import Identity
from fleet.app import recipes
from fleet.app.cli import main as cli
from fleet.app.cli import queue as cli_queue
from fleet.errors import ConfigError
from storage.backends import trial
from storage.backends.files import Files, LocalFiles
from storage.backends.trial import Failure, StoreTrial, check_folder, try_store
from tests.support.seaweed import SeaweedServer, s3_client

SECRET = "wJalrXUtnFEMI-K7MDENG"
SOON = {"connect_timeout_s": 0.5, "read_timeout_s": 0.5, "attempts": 1}


def failed(failure: Failure | None) -> tuple[str, str]:
    assert failure is not None
    return failure.operation, failure.cause


# ---- a folder ----------------------------------------------------------------------------------------------------------------------------


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_folder_that_works_is_made_and_empty(tmp_path: Path) -> None:
    check_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "cause", "way_out"),
    [
        (errno.ENOSPC, "no space", "Free some space"),
        (errno.EROFS, "read-only", "not mounted read-only"),
        (errno.EACCES, "permission", "may write"),
    ],
)
def test_a_folder_that_takes_nothing_is_named_and_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, cause: str, way_out: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwritev", refuse)
    with pytest.raises(ConfigError) as refused:
        check_folder(tmp_path / "a" / "b")
    assert (refused.value.field, refused.value.value) == ("--storage", str(tmp_path / "a" / "b"))
    assert re.match(rf"this machine could not write a small object there: {cause}: ", refused.value.reason)
    assert way_out in refused.value.way_out
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_no_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nope")):
        with pytest.raises(ConfigError, match="folder: .*Error: .*Choose a folder that exists"):
            check_folder(path)


# ---- an object store ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket(s3: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> SeaweedServer:
    for variable, value in s3.environment.items():
        monkeypatch.setenv(variable, value)
    return s3


def keys_below(server: SeaweedServer, prefix: str) -> list[str]:
    found = s3_client(server).list_objects_v2(Bucket=server.bucket, Prefix=prefix)
    return [entry["Key"] for entry in found.get("Contents", [])]


def test_an_object_store_that_works_keeps_nothing_of_it(bucket: SeaweedServer) -> None:
    assert try_store(bucket.url("trial/run")) is None
    assert keys_below(bucket, "trial/") == []


def test_a_bucket_that_is_not_there(bucket: SeaweedServer) -> None:
    assert failed(try_store("s3://no-such-bucket/run")) == ("write", "bucket")
    assert failed(try_store("s3:///run")) == ("write", "bucket")


def test_credentials_that_do_not_fit_are_not_shown(bucket: SeaweedServer) -> None:
    with pytest.raises(ConfigError) as refused:
        StoreTrial(f"s3://{bucket.key}:{SECRET}@{bucket.bucket}/run").check("node 1")
    reported = str(refused.value)
    assert "--storage = 's3://***@fleet/run': node 1 could not write a small object there: credentials: SignatureDoesNotMatch" in reported
    assert "Check AWS_ACCESS_KEY_ID" in reported
    assert SECRET not in reported and bucket.key not in reported


def test_a_server_that_is_not_there_and_one_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "IMPATIENT", SOON)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("FLEET_S3_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert failed(StoreTrial(f"s3://key:{SECRET}@bucket/run").result()) == ("write", "timeout")
    assert failed(StoreTrial(f"s3://key:{SECRET}@bucket/run").result()) == ("write", "unreachable")


def test_a_scheme_that_nobody_knows() -> None:
    with pytest.raises(ConfigError, match="'nonsense://bucket/run': here could not write .*Protocol not known.* such as s3://bucket/runs"):
        StoreTrial("nonsense://bucket/run").check("here")


# ---- stores that misbehave ---------------------------------------------------------------------------------------------------------------


class Odd(LocalFiles):
    """``wrong`` maps a method to what it answers instead, or raises."""

    def __init__(self, root: Path, wrong: dict[str, Any]) -> None:
        super().__init__(root)
        self._wrong = wrong

    def _answer(self, method: str, name: str) -> Any:
        answer = self._wrong.pop(method, None)
        if isinstance(answer, Exception):
            raise answer
        return answer if answer is not None else getattr(super(), method)(name)

    def read(self, name: str) -> bytes:
        return bytes(self._answer("read", name))

    def sizes(self, directory: str) -> dict[str, int]:
        return dict(self._answer("sizes", directory))

    def size(self, name: str) -> int | None:
        return self._answer("size", name)

    def remove(self, name: str) -> None:
        self._answer("remove", name)


@pytest.mark.parametrize(
    ("wrong", "operation", "detail"),
    [
        ({"read": b"other"}, "read", "returned other bytes"),
        ({"read": PermissionError(errno.EACCES, "no reading")}, "read", "no reading"),
        ({"sizes": {}}, "list", "is not listed"),
        ({"remove": PermissionError(errno.EACCES, "no deleting")}, "delete", "no deleting"),
        ({"size": 64}, "delete", "still exists"),
        ({"read": ValueError("a client's own error")}, "read", "a client's own error"),
    ],
)
def test_what_fails_is_named_and_tidied_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], operation: str, detail: str
) -> None:
    monkeypatch.setattr(trial, "open_files", lambda url: Odd(tmp_path, wrong))
    failure = try_store("odd://place")
    assert failure is not None and failure.operation == operation
    assert detail in failure.detail
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()

    class Hangs(LocalFiles):
        def read(self, name: str) -> bytes:
            free.wait(30.0)
            return super().read(name)

    hanging: Files = Hangs(tmp_path)
    monkeypatch.setattr(trial, "open_files", lambda url: hanging)
    monkeypatch.setattr(trial, "LIMIT_S", 0.5)
    one = StoreTrial("odd://place")
    failure = one.result()
    assert failure == Failure("odd://place", "read", "timeout", "no answer within 0.5 s")
    free.set()
    assert one.result() is None
    assert list(tmp_path.iterdir()) == []


# ---- the command line --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """The command, run here in a folder with a script; a cluster is not started, and no run begins."""

    @contextlib.contextmanager
    def no_cluster(*_: object) -> Iterator[None]:
        yield

    monkeypatch.setattr(recipes, "local_cluster", no_cluster)
    monkeypatch.setattr(recipes, "LiveRun", lambda *_: pytest.fail("a run began"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("def train(run):\n    pass\n")

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["fleet", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), " ".join(capsys.readouterr().err.split())

    return call


def test_no_run_begins_with_a_folder_that_takes_nothing(
    fleet: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for storage in ("/proc/nope", str(tmp_path / "file")):
        code, reported = fleet("run", "train.py", "--no-trial", "--storage", storage)
        assert code == 2 and reported.startswith(f"fleet: --storage = '{storage}': this machine could not write"), reported
        assert "Traceback" not in reported
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        code, reported = fleet("run", "train.py", "--no-trial")
    assert code == 2 and "no space: OSError: [Errno 28] No space left on device. Free some space there" in reported, reported
    assert not (tmp_path / "runs").exists()


def test_no_run_begins_with_an_object_store_that_takes_nothing(
    fleet: Callable[..., tuple[int, str]], bucket: SeaweedServer, tmp_path: Path
) -> None:
    storage = f"s3://{bucket.key}:{SECRET}@{bucket.bucket}/runs"
    code, reported = fleet("run", "train.py", "--no-trial", "--storage", storage, "--name", "one")
    assert code == 2, reported
    assert "--storage = 's3://***@fleet/runs/one': this machine could not read the holder of the run there: credentials: " in reported
    assert SECRET not in reported and not (tmp_path / "runs" / "one").exists()


def test_a_run_is_not_resumed_from_a_store_that_fails(fleet: Callable[..., tuple[int, str]], bucket: SeaweedServer) -> None:
    code, reported = fleet("run", "--resume", "one", "--storage", f"s3://{bucket.key}:{SECRET}@{bucket.bucket}/runs")
    assert code == 2, reported
    assert "--storage = 's3://***@fleet/runs/one': this machine could not read the run's journal there: credentials: " in reported
    assert "Check AWS_ACCESS_KEY_ID" in reported and SECRET not in reported


def test_a_service_needs_a_folder_that_takes_files(fleet: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    code, reported = fleet("cluster", "up", "--storage", "/proc/nope")
    assert code == 2 and "--storage = '/proc/nope': this machine could not write" in reported, reported
    code, reported = fleet("cluster", "up", "--storage", f"s3://key:{SECRET}@bucket/runs")
    assert code == 2 and "'s3://***@bucket/runs': the service keeps its own files in a folder, and this is a URL" in reported, reported
    assert not list(tmp_path.glob("s3*"))


def test_a_queue_whose_folder_is_full_takes_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("def train(run):\n    pass\n")
    queue = cli_queue.queue_of(tmp_path / "runs", 4)
    asked = {"script": "train.py", "arguments": ["--world", "1"], "directory": str(tmp_path), "priority": 0}
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(ConfigError, match="no space"):
            cli_queue.Submissions(queue, tmp_path).submit(asked, Identity("me", operator=True))
    assert queue.jobs() == []
    name = cli_queue.Submissions(queue, tmp_path).submit(asked, Identity("me", operator=True))["name"]
    assert [job.name for job in queue.jobs()] == [name] == [json.loads(path.read_text())["name"] for path in queue.folder.glob("*.json")]
