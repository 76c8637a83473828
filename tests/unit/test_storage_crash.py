"""Writers and readers that die at every labelled point: what was committed restores, nothing partial is listed, what is left is swept."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fleet.protocol.instructions import CommitCheckpoint
from fleet.protocol.types import StateId
from storage import failpoints
from storage.backends.blocks import BLOCK_BYTES, BlockStream
from storage.backends.files import TEMPORARY, LocalFiles
from storage.checkpoint.manifest import CheckpointDamaged, checkpoint_id
from storage.checkpoint.store import CheckpointStore, checkpoint_files, write_part
from tests.support.seaweed import SeaweedServer

ROOT = Path(__file__).parents[2]
KEEP = 2
LABELS = (
    "save: file opened", "save: block stored", "save: about to flush", "save: about to be placed", "save: placed",
    "upload: begun", "upload: block sent", "upload: about to complete", "upload: completed",
    "commit: parts checked", "commit: values written", "commit: metadata written", "commit: manifest written",
    "retain: looked around", "retain: about to delete", "delete: manifest gone", "delete: one file gone", "retain: swept",
    "restore: manifest read", "restore: block read", "restore: verified",
)  # fmt: skip
"""Every label, so that a sweep over them can show that it left none out."""

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
    newest = store.newest()
    assert newest is not None and store.newest_valid() == newest
    _, tensors = store.load(newest)
    step = int(tensors[2])
    assert newest == name(step)
    assert all(torch.equal(tensors[index], tensor) for index, tensor in state(url, step).items())
    return step


def life(url: str) -> None:
    save(url, 3)
    restore(url)


class Killer:
    """Counts the points that are reached, and dies at one of them; a dead process reaches nothing."""

    def __init__(self, at: int | None) -> None:
        self.at, self.seen = at, list[str]()

    def __call__(self, label: str) -> None:
        if self.at is not None and len(self.seen) > self.at:
            raise Died(label)
        self.seen.append(label)
        if len(self.seen) - 1 == self.at:
            raise Died(label)


def reached(url: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Labels in the order in which a life without a crash comes to them."""
    killer = Killer(None)
    monkeypatch.setattr(failpoints, "listener", killer)
    life(url)
    monkeypatch.setattr(failpoints, "listener", None)
    return killer.seen


def die_and_check(url: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    killer = Killer(at)
    monkeypatch.setattr(failpoints, "listener", killer)
    with pytest.raises(Died):
        life(url)
    monkeypatch.setattr(failpoints, "listener", None)
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


def test_a_crash_at_any_point_on_a_disk(two_saved: Callable[[int], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = reached(two_saved(0), monkeypatch)
    assert {label for label in LABELS if not label.startswith("upload")} <= set(labels)
    for at in range(len(labels)):
        die_and_check(two_saved(at + 1), at, monkeypatch)
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


def test_a_crash_at_each_point_on_an_object_store(s3_urls: Callable[[int], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last time that each label is reached: all times would take minutes."""
    labels = reached(s3_urls(0), monkeypatch)
    assert {label for label in LABELS if not label.startswith("save")} <= set(labels)
    last = {label: at for at, label in enumerate(labels)}
    for at in sorted({labels.index(label) for label in labels} | set(last.values())):
        die_and_check(s3_urls(at + 1), at, monkeypatch)


# ---- for real ----------------------------------------------------------------------------------------------------------------------------


KILLED = """
import os, signal, sys
from storage import failpoints
from tests.unit.test_storage_crash import life
url, label = sys.argv[1:]
failpoints.listener = lambda reached: os.kill(os.getpid(), signal.SIGKILL) if reached == label else None
life(url)
"""


def killed_at(url: str, label: str) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, url, label], cwd=ROOT, timeout=120, check=False, capture_output=True)
    assert ended.returncode == -9, ended.stderr.decode()


@pytest.mark.parametrize("label", ["save: block stored", "commit: metadata written", "delete: manifest gone"])
def test_a_process_that_is_killed(two_saved: Callable[[int], str], label: str) -> None:
    url = two_saved(0)
    killed_at(url, label)
    check_what_is_left(url)


@pytest.mark.parametrize("label", ["upload: block sent", "upload: about to complete"])
def test_a_process_that_is_killed_while_it_uploads(s3_urls: Callable[[int], str], label: str) -> None:
    url = s3_urls(0)
    killed_at(url, label)
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
