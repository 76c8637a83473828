"""One suite for every place where checkpoints may lie. Set FLEET_TEST_S3 to the URL of a bucket of a test server to run it there too."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch

from fleet.instructions import CommitCheckpoint
from fleet.ports import CheckpointPort
from fleet.types import Part, StateId
from storage.checkpoint import CheckpointStore, write_part
from storage.manifest import CheckpointDamaged, checkpoint_id

PLACES = ["file", "path", "memory", *(["s3"] if "FLEET_TEST_S3" in os.environ else [])]


@pytest.fixture(params=PLACES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    name = uuid.uuid4().hex
    here = {"file": f"file://{tmp_path}/{name}", "path": f"{tmp_path}/{name}/", "memory": f"memory://{name}"}
    yield here.get(request.param) or f"{os.environ['FLEET_TEST_S3'].rstrip('/')}/{name}"
    if request.param == "memory":
        fsspec.filesystem("memory").rm(f"/{name}", recursive=True) if fsspec.filesystem("memory").exists(f"/{name}") else None


@pytest.fixture
def store(url: str) -> CheckpointStore:
    return CheckpointStore(url)


def state(seed: int) -> dict[int, torch.Tensor]:
    """A training state of mixed types and shapes, a scalar and an empty tensor among them."""
    generator = torch.Generator().manual_seed(seed)
    return {
        0: torch.randn(33, 7, generator=generator),
        1: torch.randn(64, generator=generator).to(torch.bfloat16),
        2: torch.tensor(seed),
        3: torch.zeros(0, 4),
        4: torch.randn(1000, generator=generator)[100:200],
        5: torch.randint(0, 255, (9,), generator=generator, dtype=torch.uint8),
    }


def parts_of(url: str, checkpoint: str, tensors: dict[int, torch.Tensor], count: int = 2) -> tuple[Part, ...]:
    return tuple(
        write_part(url, checkpoint, index, count, [(i, tensor) for i, tensor in tensors.items() if i % count == index])
        for index in range(count)
    )


def order(checkpoint: str, parts: tuple[Part, ...], step: int = 7, meta: str = "meta") -> CommitCheckpoint:
    return CommitCheckpoint(checkpoint, StateId(0, step), parts, meta, 0.0, 0.0)


def save(url: str, step: int, lineage: int = 0) -> str:
    checkpoint = checkpoint_id(StateId(lineage, step), 1)
    CheckpointStore(url).commit(order(checkpoint, parts_of(url, checkpoint, state(step)), step))
    return checkpoint


def place(url: str, checkpoint: str, part: Part) -> str:
    return f"{url.rstrip('/')}/checkpoints/{checkpoint}/{part.name}"


def overwrite(path: str, data: bytes) -> None:
    with fsspec.open(path, "wb") as file:
        file.write(data)


def content(path: str) -> bytes:
    with fsspec.open(path, "rb") as file:
        return bytes(file.read())


def test_comes_back_as_it_was(url: str, store: CheckpointStore) -> None:
    port: CheckpointPort = store
    tensors = state(1)
    parts = parts_of(url, "c", tensors)
    assert port.newest() is None, "parts alone are no checkpoint"
    assert port.commit(order("c", parts, meta='{"epoch": 1}')) == sum(part.bytes for part in parts)
    meta, loaded = store.load("c")
    assert meta == '{"epoch": 1}'
    assert set(loaded) == set(tensors)
    assert all(loaded[i].dtype == tensors[i].dtype and torch.equal(loaded[i], tensors[i]) for i in tensors)
    assert store.manifest("c").state == StateId(0, 7)


def test_layout_and_recorded_parts(url: str) -> None:
    part = write_part(url, "c", 3, 4, [(5, torch.ones(3))])
    assert (part.name, part.tensors) == ("part-00003-of-00004.pt", (5,))
    assert len(content(place(url, "c", part))) == part.bytes


def test_a_view_does_not_drag_its_storage_along(url: str) -> None:
    big = torch.randn(1_000_000)
    assert write_part(url, "c", 0, 1, [(0, big[:10])]).bytes < 10_000


def test_newest_and_list_follow_lineage_then_step(url: str, store: CheckpointStore) -> None:
    assert store.list() == ()
    ids = [save(url, 900), save(url, 1000), save(url, 50, lineage=1)]
    assert store.list() == tuple(ids)
    assert store.newest() == store.newest_valid() == ids[-1]


def test_commit_needs_every_part_whole(url: str, store: CheckpointStore) -> None:
    parts = parts_of(url, "c", state(1))
    missing = Part("part-00002-of-00003.pt", 10, "", (9,))
    with pytest.raises(CheckpointDamaged, match="part-00002-of-00003.pt is missing"):
        store.commit(order("c", (*parts, missing)))
    path = place(url, "c", parts[1])
    overwrite(path, content(path)[:-1])
    with pytest.raises(CheckpointDamaged, match=f"part-00001-of-00002.pt has {parts[1].bytes - 1} bytes"):
        store.commit(order("c", parts))
    assert store.newest() is None


@pytest.mark.parametrize("damage", ["torn", "flipped", "gone"])
def test_a_damaged_part_is_named_and_an_older_checkpoint_is_found(url: str, store: CheckpointStore, damage: str) -> None:
    older, newer = save(url, 1), save(url, 2)
    part = store.manifest(newer).parts[1]
    path = place(url, newer, part)
    data = content(path)
    if damage == "gone":
        system, bare = fsspec.core.url_to_fs(path)
        system.rm(bare)
    else:
        overwrite(path, data[: len(data) // 2] if damage == "torn" else data[:-200] + bytes([data[-200] ^ 1]) + data[-199:])
    with pytest.raises(CheckpointDamaged, match=f"checkpoint {newer}: {part.name}"):
        store.load(newer)
    assert store.newest() == newer
    assert store.newest_valid() == older
    assert store.load(older)[0] == "meta"


def test_a_damaged_manifest_is_passed_over(url: str, store: CheckpointStore) -> None:
    older, newer = save(url, 1), save(url, 2)
    overwrite(f"{url.rstrip('/')}/checkpoints/{newer}/manifest.json", b'{"version": 1')
    assert store.newest_valid() == older
    with pytest.raises(CheckpointDamaged, match="the manifest cannot be read"):
        store.load(newer)


def test_nothing_valid_is_none(url: str, store: CheckpointStore) -> None:
    assert store.newest_valid() is None
    overwrite(f"{url.rstrip('/')}/checkpoints/{save(url, 1)}/manifest.json", b"")
    assert store.newest_valid() is None


def test_committing_twice_changes_nothing_and_other_parts_are_refused(url: str, store: CheckpointStore) -> None:
    parts = parts_of(url, "c", state(1))
    assert store.commit(order("c", parts)) == store.commit(order("c", parts))
    with pytest.raises(FileExistsError, match="committed already, with other parts"):
        store.commit(order("c", parts[:1]))
    assert store.manifest("c").parts == parts


def test_a_late_writer_cannot_change_a_committed_checkpoint(url: str, store: CheckpointStore) -> None:
    store.commit(order("c", parts_of(url, "c", state(1))))
    with pytest.raises(FileExistsError, match="checkpoint c is committed"):
        write_part(url, "c", 0, 2, [(0, torch.zeros(3))])
    assert torch.equal(store.load("c")[1][0], state(1)[0])


def test_two_writers_of_one_part_leave_one_whole_part_and_a_mixed_up_one_is_noticed(url: str, store: CheckpointStore) -> None:
    first = write_part(url, "c", 0, 1, [(0, torch.zeros(8))])
    second = write_part(url, "c", 0, 1, [(0, torch.ones(8))])
    assert first.bytes == second.bytes, "so that only the digest can tell them apart"
    store.commit(order("c", (first,)))
    with pytest.raises(CheckpointDamaged, match=r"part-00000-of-00001.pt does not match"):
        store.load("c")


def test_retain_keeps_the_newest_and_sweeps_what_was_left_unfinished(url: str, store: CheckpointStore) -> None:
    abandoned = checkpoint_id(StateId(0, 15), 1)
    ids = [save(url, step) for step in (10, 20, 30)]
    parts_of(url, abandoned, state(1))
    under_way = checkpoint_id(StateId(0, 40), 1)
    parts_of(url, under_way, state(1))
    assert set(store.retain(2)) == {ids[0], abandoned}
    assert store.list() == tuple(ids[1:])
    assert store.commit(order(under_way, parts_of(url, under_way, state(1)), 40)) > 0
    with pytest.raises(ValueError, match="keep = 0"):
        store.retain(0)


def test_deleted_is_gone_and_may_be_deleted_again(url: str, store: CheckpointStore) -> None:
    checkpoint = save(url, 1)
    store.delete(checkpoint)
    store.delete(checkpoint)
    assert store.list() == ()
    with pytest.raises(FileNotFoundError):
        store.load(checkpoint)


def test_names_cannot_leave_the_store(url: str, store: CheckpointStore) -> None:
    with pytest.raises(ValueError, match="file name"):
        write_part(url, "../elsewhere", 0, 1, [(0, torch.zeros(1))])
    with pytest.raises(ValueError, match="file name"):
        store.delete("..")


def test_a_store_that_cannot_be_reached_is_an_oserror(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        write_part(str(tmp_path / "file"), "c", 0, 1, [(0, torch.zeros(1))])
