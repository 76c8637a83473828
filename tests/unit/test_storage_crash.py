"""Writers and readers that die before any call that a store gets: what was committed restores, no part is listed, what is left is swept."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from botocore.client import BaseClient

from fleet.protocol.instructions import CommitCheckpoint
from fleet.protocol.types import StateId
from storage.backends.blocks import BLOCK_BYTES, BlockStream
from storage.backends.files import TEMPORARY, LocalFiles
from storage.checkpoint.manifest import CheckpointDamaged, checkpoint_id
from storage.checkpoint.store import CheckpointStore, checkpoint_files, write_part
from tests.support.seaweed import SeaweedServer

ROOT = Path(__file__).parents[2]
KEEP = 2
CALLS = (
    *((os, name) for name in ("pwritev", "fsync", "preadv", "link")),
    *((Path, name) for name in ("mkdir", "open", "replace", "unlink", "rmdir")),
)
"""By which a store on a disk changes it, or reads it. All of them are made, as a sweep over them shows."""

OPERATIONS = {
    "PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "HeadObject", "GetObject", "ListObjectsV2",
    "DeleteObject", "ListMultipartUploads",
}  # fmt: skip
"""The same of an object store."""

LARGE = BLOCK_BYTES // 4 + 1


class Died(BaseException):
    """As if the process had ended: nothing that comes after it happens."""


def state(url: str, step: int) -> dict[int, torch.Tensor]:
    """Of several blocks where that makes a difference: an upload is in parts then."""
    count = LARGE if url.startswith("s3") and step == 3 else 5
    return {0: torch.full((3, 4), float(step)), 1: torch.full((count,), float(step)), 2: torch.tensor(step)}


def name(step: int) -> str:
    return checkpoint_id(StateId(0, step), 1)


def save(url: str, step: int) -> None:
    """All that happens for one checkpoint: two parts, the commit, and the deletion of what is old."""
    parts = tuple(write_part(url, name(step), rank, 2, [(i, t) for i, t in state(url, step).items() if i % 2 == rank]) for rank in range(2))
    store = CheckpointStore(url)
    store.commit(CommitCheckpoint(name(step), StateId(0, step), parts, "", 0.0, 0.0))
    store.retain(KEEP)


def restore(url: str) -> int:
    """The step of the newest checkpoint, which must be as it was saved."""
    store = CheckpointStore(url)
    newest = store.list()[-1]
    assert store.newest_valid() == newest
    _, tensors = store.load(newest)
    step = int(tensors[2])
    assert newest == name(step)
    assert all(torch.equal(tensors[index], tensor) for index, tensor in state(url, step).items())
    return step


def life(url: str) -> None:
    save(url, 3)
    restore(url)


class Killer:
    """Counts the calls, and dies before one of them; a dead process makes none."""

    def __init__(self, at: int | None) -> None:
        self.at, self.seen = at, list[str]()

    def __call__(self, call: str) -> None:
        self.seen.append(call)
        if self.at is not None and len(self.seen) > self.at:
            raise Died(call)


@contextmanager
def watched(note: Callable[[str], object]) -> Iterator[None]:
    """Within, ``note`` hears the name of each call to a disk or an object store before it is made."""

    def noting(right: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
        @functools.wraps(right)
        def call(*args: Any, **kwargs: Any) -> Any:
            note(name(*args))
            return right(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in CALLS:
            patch.setattr(owner, name, noting(getattr(owner, name), lambda *_, name=name: name))
        patch.setattr(BaseClient, "_make_api_call", noting(BaseClient._make_api_call, lambda client, operation, *_: operation))
        yield


def made(url: str) -> list[str]:
    """The calls of a life without a crash, in order."""
    killer = Killer(None)
    with watched(killer):
        life(url)
    return killer.seen


def die_and_check(url: str, at: int) -> None:
    with watched(Killer(at)), pytest.raises(Died):
        life(url)
    check_what_is_left(url)


def check_what_is_left(url: str) -> None:
    """After a crash while step 3 was saved, with 1 and 2 there before."""
    store = CheckpointStore(url)
    assert restore(url) in (2, 3)
    for listed in store.list():
        store.verify(listed)
    save(url, 4)
    assert restore(url) == 4
    files = checkpoint_files(url)
    assert sorted(files.directories()) == list(store.list()), "orphans are swept"
    assert files.unfinished() == []
    for listed in store.list():
        assert set(files.sizes(listed)) == {part.name for part in store.manifest(listed).all_files} | {"manifest.json"}


@pytest.fixture
def two_saved(tmp_path: Path) -> Callable[[int], str]:
    """Fresh copies of a directory with checkpoints of steps 1 and 2."""
    for step in (1, 2):
        save(str(tmp_path / "first"), step)

    def copy(number: int) -> str:
        shutil.copytree(tmp_path / "first", tmp_path / str(number))
        return str(tmp_path / str(number))

    return copy


def test_a_crash_before_any_call_on_a_disk(two_saved: Callable[[int], str], tmp_path: Path) -> None:
    calls = made(two_saved(0))
    assert {name for _, name in CALLS} == set(calls)
    for at in range(len(calls)):
        die_and_check(two_saved(at + 1), at)
        shutil.rmtree(tmp_path / str(at + 1))


@pytest.fixture
def s3_urls(s3: SeaweedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], str]:
    for variable, value in s3.environment.items():
        monkeypatch.setenv(variable, value)

    def fresh(number: int) -> str:
        url = s3.url(f"{tmp_path.name}/{number}")
        for step in (1, 2):
            save(url, step)
        return url

    return fresh


def test_a_crash_before_each_operation_on_an_object_store(s3_urls: Callable[[int], str]) -> None:
    """Whenever a file is put, and the first and the last time of all others: all times would take minutes."""
    calls = made(s3_urls(0))
    assert set(calls) >= OPERATIONS
    last = {call: at for at, call in enumerate(calls)}
    some = {calls.index(call) for call in calls} | set(last.values()) | {at for at, call in enumerate(calls) if call == "PutObject"}
    for at in sorted(some):
        die_and_check(s3_urls(at + 1), at)


# ---- for real ----------------------------------------------------------------------------------------------------------------------------


KILLED = """
import os, signal, sys
from tests.unit.test_storage_crash import life, watched
url, last, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
calls = []
def note(call):
    calls.append(call)
    if calls.count(last) == times:
        os.kill(os.getpid(), signal.SIGKILL)
with watched(note):
    life(url)
"""


def killed_before(url: str, call: str, times: int) -> None:
    """Before ``call`` is made for the n-th time."""
    words = [sys.executable, "-c", KILLED, url, call, str(times)]
    ended = subprocess.run(words, cwd=ROOT, timeout=120, check=False, capture_output=True)
    assert ended.returncode == -9, ended.stderr.decode()


@pytest.mark.parametrize(("call", "times"), [("pwritev", 2), ("link", 1), ("unlink", 2)], ids=["a block", "the manifest", "a part"])
def test_a_process_that_is_killed(two_saved: Callable[[int], str], call: str, times: int) -> None:
    url = two_saved(0)
    killed_before(url, call, times)
    check_what_is_left(url)


@pytest.mark.parametrize(("call", "times"), [("UploadPart", 2), ("CompleteMultipartUpload", 1)])
def test_a_process_that_is_killed_while_it_uploads(s3_urls: Callable[[int], str], call: str, times: int) -> None:
    url = s3_urls(0)
    killed_before(url, call, times)
    assert checkpoint_files(url).unfinished(), "it died with an upload begun"
    check_what_is_left(url)


# ---- damage ------------------------------------------------------------------------------------------------------------------------------


def test_a_flipped_byte_anywhere_is_found_and_the_one_before_is_used(tmp_path: Path) -> None:
    url, store = str(tmp_path), CheckpointStore(str(tmp_path))
    for step in (1, 2):
        part = write_part(url, name(step), 0, 1, [(0, torch.arange(2000.0)), (1, torch.tensor(step))])
        store.commit(CommitCheckpoint(name(step), StateId(0, step), (part,), "", 0.0, 0.0))
    for file in sorted((tmp_path / "checkpoints" / name(2)).iterdir()):
        data = file.read_bytes()
        for at in sorted({0, len(data) - 1, *range(0, len(data), 97)}):
            file.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
            with pytest.raises(CheckpointDamaged, match=name(2)):
                store.verify(name(2))
        assert store.newest_valid() == name(1), file.name
        file.write_bytes(data)
    assert store.newest_valid() == name(2)


def test_a_writer_that_raises_leaves_no_file_and_keeps_the_one_before(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    with files.writing("d/f") as sink:
        sink.whole([bytearray(b"old")])

    def half() -> None:
        with files.writing("d/f") as sink, BlockStream(sink) as stream:
            stream.write(bytes(BLOCK_BYTES + 1))
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        half()
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["f"]
    assert (tmp_path / "d" / "f").read_bytes() == b"old"


def test_what_a_dead_writer_left_in_a_committed_checkpoint_is_swept(tmp_path: Path) -> None:
    save(str(tmp_path), 1)
    left = tmp_path / "checkpoints" / name(1) / f"{TEMPORARY}0"
    left.write_bytes(b"half a part")
    under_way = tmp_path / "checkpoints" / name(2) / f"{TEMPORARY}1"
    under_way.parent.mkdir()
    under_way.write_bytes(b"may be going on")
    CheckpointStore(str(tmp_path)).retain(1)
    assert not left.exists() and under_way.exists()


def test_importing_storage_loads_neither_ray_nor_torch() -> None:
    code = "import sys, storage.checkpoint.parts, storage.backends.s3; sys.exit(bool({'ray', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0
