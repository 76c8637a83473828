"""One suite for every place where checkpoints may lie: a directory, memory, a real object store, and the memories of two nodes."""

from __future__ import annotations

import contextlib
import copy
import itertools
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from actors.rank.state.saving import StatePart
from actors.rank.state.tracked import TrackedState
from actors.rank.step.gradients import GradientBuffers
from actors.rank.zero1.chunked import OptimizerChunks
from actors.rank.zero1.whole import ShardedTensors
from fleet.protocol.chunks import bounds
from fleet.protocol.instructions import CommitCheckpoint
from fleet.protocol.levels import peers_url
from fleet.protocol.ports import CheckpointPort
from fleet.protocol.types import Part, StateId
from storage.backends.blocks import BLOCK_BYTES
from storage.backends.files import put
from storage.checkpoint.layout import Piece
from storage.checkpoint.manifest import CheckpointDamaged, checkpoint_id
from storage.checkpoint.parts import Parts
from storage.checkpoint.store import CheckpointStore, checkpoint_files, write_part
from storage.peers.memory import PeerMemory
from tests.support.seaweed import SeaweedServer


class Cursor:
    def state_dict(self) -> dict[str, int]:
        return {"epoch": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise NotImplementedError


META = TrackedState(cursor=Cursor()).flatten()[0]
"""A skeleton with a value, so that there is a file for it."""

PLACES = ["file", "path", "memory", "s3", "peers"]


@pytest.fixture(params=PLACES)
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = uuid.uuid4().hex
    if request.param == "s3":
        server: SeaweedServer = request.getfixturevalue("s3")
        for variable, value in server.environment.items():
            monkeypatch.setenv(variable, value)
        yield server.url(name)
    elif request.param == "peers":
        with contextlib.closing(PeerMemory("127.0.0.1", steps=None)) as one, contextlib.closing(PeerMemory("127.0.0.1", steps=None)) as two:
            yield peers_url([one.address, two.address])
    else:
        yield {"file": f"file://{tmp_path}/{name}", "path": f"{tmp_path}/{name}/", "memory": f"memory://{name}"}[request.param]
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


def order(checkpoint: str, parts: tuple[Part, ...], step: int = 7, meta: str = META) -> CommitCheckpoint:
    return CommitCheckpoint(checkpoint, StateId(0, step), parts, meta, 0.0, 0.0)


def save(url: str, step: int, history: int = 0) -> str:
    checkpoint = checkpoint_id(StateId(history, step), 1)
    CheckpointStore(url).commit(order(checkpoint, parts_of(url, checkpoint, state(step)), step))
    return checkpoint


def overwrite(url: str, name: str, data: bytes) -> None:
    put(checkpoint_files(url), name, data)


def content(url: str, name: str) -> bytes:
    return checkpoint_files(url).read(name)


def test_comes_back_as_it_was(url: str, store: CheckpointStore) -> None:
    port: CheckpointPort = store
    tensors = state(1)
    parts = parts_of(url, "c", tensors)
    assert store.list() == (), "parts alone are no checkpoint"
    size = port.commit(order("c", parts, meta='{"epoch": 1}'))
    assert size == sum(part.bytes for part in store.manifest("c").all_files) > sum(part.bytes for part in parts)
    meta, loaded = store.load("c")
    assert meta == '{"epoch": 1}'
    assert set(loaded) == set(tensors)
    assert all(loaded[i].dtype == tensors[i].dtype and torch.equal(loaded[i], tensors[i]) for i in tensors)
    assert store.manifest("c").state == StateId(0, 7)


def test_layout_and_recorded_parts(url: str) -> None:
    part = write_part(url, "c", 3, 4, [(5, torch.ones(3))])
    assert (part.name, part.tensors) == ("__3_0.distcp", (5,))
    assert len(content(url, f"c/{part.name}")) == part.bytes


def test_a_view_does_not_drag_its_storage_along(url: str) -> None:
    big = torch.randn(1_000_000)
    assert write_part(url, "c", 0, 1, [(0, big[:10])]).bytes < 10_000


def test_newest_and_list_follow_lineage_then_step(url: str, store: CheckpointStore) -> None:
    assert store.list() == ()
    ids = [save(url, 900), save(url, 1000), save(url, 50, history=1)]
    assert store.list() == tuple(ids)
    assert store.list()[-1] == store.newest_valid() == ids[-1]


def test_commit_needs_every_part_whole(url: str, store: CheckpointStore) -> None:
    parts = parts_of(url, "c", state(1))
    missing = Part("__2_0.distcp", 10, "", (6,), '[[6,0,10,-1,"float32",[1],[0],[1]]]')
    with pytest.raises(CheckpointDamaged, match="__2_0.distcp is missing"):
        store.commit(order("c", (*parts, missing)))
    name = f"c/{parts[1].name}"
    overwrite(url, name, content(url, name)[:-1])
    with pytest.raises(CheckpointDamaged, match=f"__1_0.distcp has {parts[1].bytes - 1} bytes"):
        store.commit(order("c", parts))
    assert store.list() == ()


def test_commit_needs_every_tensor_once(url: str, store: CheckpointStore) -> None:
    parts = parts_of(url, "c", state(1), count=3)
    with pytest.raises(CheckpointDamaged, match="tensor 1, 4 is in no part"):
        store.commit(order("c", (parts[0], parts[2], write_part(url, "c", 1, 3, [(6, torch.ones(1))]))))
    with pytest.raises(CheckpointDamaged, match="tensor 2 is in two parts"):
        store.commit(order("c", (*parts[:2], write_part(url, "c", 2, 3, [(2, torch.tensor(1)), (2, torch.tensor(1)), (5, torch.ones(1))]))))


@pytest.mark.parametrize("damage", ["torn", "flipped", "gone"])
@pytest.mark.parametrize("victim", ["__1_0.distcp", "__2_0.distcp", ".metadata"])
def test_a_damaged_file_is_named_and_an_older_checkpoint_is_found(url: str, store: CheckpointStore, damage: str, victim: str) -> None:
    older, newer = save(url, 1), save(url, 2)
    name = f"{newer}/{victim}"
    data = content(url, name)
    if damage == "gone":
        checkpoint_files(url).remove(name)
    else:
        overwrite(url, name, data[: len(data) // 2] if damage == "torn" else data[:-200] + bytes([data[-200] ^ 1]) + data[-199:])
    if victim == "__1_0.distcp":
        with pytest.raises(CheckpointDamaged, match=f"checkpoint {newer}: {victim}"):
            store.load(newer)
    with pytest.raises(CheckpointDamaged, match=f"checkpoint {newer}: {victim}"):
        store.verify(newer)
    assert store.list()[-1] == newer
    assert store.newest_valid() == older
    assert store.load(older)[0] == META


def test_a_damaged_manifest_is_passed_over(url: str, store: CheckpointStore) -> None:
    older, newer = save(url, 1), save(url, 2)
    overwrite(url, f"{newer}/manifest.json", b'{"version": 2')
    assert store.newest_valid() == older
    with pytest.raises(CheckpointDamaged, match="the manifest cannot be read"):
        store.load(newer)


def test_a_checkpoint_of_another_run_is_passed_over_and_the_run_is_named(url: str) -> None:
    mine, theirs = CheckpointStore(url, run="mine"), CheckpointStore(url, run="theirs")
    ids = [checkpoint_id(StateId(0, step), 1) for step in (1, 2)]
    for checkpoint, store in zip(ids, (mine, theirs), strict=True):
        store.commit(order(checkpoint, parts_of(url, checkpoint, state(1))))
    assert mine.newest_valid() == ids[0]
    with pytest.raises(CheckpointDamaged, match=f"checkpoint {ids[1]}: the manifest is that of run 'theirs', not of 'mine'"):
        mine.load(ids[1])
    assert CheckpointStore(url).newest_valid() == ids[1], "who names no run takes any"


def test_large_tensors_come_back_through_many_blocks(url: str, store: CheckpointStore) -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(n, generator=generator) for n in (BLOCK_BYTES // 4 + 1, 3, 2 * BLOCK_BYTES // 4, 300_000, 300_001)]
    part = write_part(url, "c", 0, 1, list(enumerate(tensors)))
    assert part.bytes > 3 * BLOCK_BYTES
    store.commit(order("c", (part,)))
    _, loaded = store.load("c")
    assert all(torch.equal(loaded[i], tensor) for i, tensor in enumerate(tensors))


@pytest.mark.parametrize("writers", [1, 2, 3])
def test_rectangles_of_a_tensor_come_back_as_one_whoever_wrote_them(url: str, store: CheckpointStore, writers: int) -> None:
    whole, vector = torch.arange(7 * 2000.0).reshape(7, 2000), torch.arange(10)
    rows = [round(7 * i / writers) for i in range(writers + 1)]
    pieces = [Piece(0, whole[start:stop], (start, 0), (7, 2000)) for start, stop in itertools.pairwise(rows)]
    parts = [write_part(url, "c", i, writers, [piece, *([(1, vector)] if i == 0 else [])]) for i, piece in enumerate(pieces)]
    store.commit(order("c", tuple(parts)))
    _, loaded = store.load("c")
    assert torch.equal(loaded[0], whole) and torch.equal(loaded[1], vector)


def test_rectangles_with_a_hole_or_an_overlap_are_refused(url: str, store: CheckpointStore) -> None:
    for stop, says in ((2, "part of tensor 0 is missing"), (4, "tensor 0 is in two parts")):
        pieces = [Piece(0, torch.zeros(size, 2), (start, 0), (6, 2)) for start, size in ((0, stop), (3, 3))]
        with pytest.raises(CheckpointDamaged, match=says):
            store.commit(order("c", (write_part(url, "c", 0, 1, pieces),)))


def module_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A small model with an odd shape, a step of AdamW taken."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(3, 40), torch.nn.LayerNorm(40), torch.nn.Linear(40, 1000))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model(torch.randn(8, 3)).square().mean().backward()
    optimizer.step()
    return model, optimizer


PLAIN_PYTORCH = """
import sys
sys.modules["fleet"] = sys.modules["storage"] = sys.modules["actors"] = None  # importing one of them raises
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
where, expected, reader = sys.argv[1:]
model = torch.nn.Sequential(torch.nn.Linear(3, 40), torch.nn.LayerNorm(40), torch.nn.Linear(40, 1000))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
weights, moments = get_state_dict(model, optimizer)
state = {"model": weights, "optimizer": moments}
if reader == "FsspecReader":
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
    dcp.load(state, storage_reader=FsspecReader(where))
else:
    dcp.load(state, checkpoint_id=where)
set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
known = torch.load(expected)
found = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
for name, tensor in known["model"].items():
    assert torch.equal(found["model"][name], tensor), name
for number, values in known["optimizer"]["state"].items():
    for name, value in values.items():
        assert torch.equal(found["optimizer"]["state"][number][name], value), (number, name)
assert found["optimizer"]["param_groups"][0]["lr"] == 0.125
"""


@pytest.mark.parametrize("url", ["file", "s3"], indirect=True)  # another process has another memory
@pytest.mark.parametrize("count", [1, 3])
def test_plain_pytorch_loads_it_in_a_process_that_cannot_import_fleet(url: str, store: CheckpointStore, tmp_path: Path, count: int) -> None:
    model, optimizer = module_and_optimizer()
    skeleton, tensors = TrackedState(model=model, optimizer=optimizer).flatten()
    store.commit(order("c", parts_of(url, "c", dict(enumerate(tensors)), count), meta=skeleton))
    plain_pytorch_loads(url, "c", model.state_dict(), optimizer.state_dict(), tmp_path)


def plain_pytorch_loads(url: str, checkpoint: str, model: dict[str, Any], optimizer: dict[str, Any], folder: Path) -> None:
    expected = folder / "expected.pt"
    torch.save({"model": model, "optimizer": optimizer}, expected)
    where = f"{url.rstrip('/').removeprefix('file://')}/checkpoints/{checkpoint}"
    reader = "FsspecReader" if url.startswith("s3") else "default"
    done = subprocess.run(
        [sys.executable, "-c", PLAIN_PYTORCH, where, str(expected), reader],
        cwd=folder, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("url", ["file", "s3"], indirect=True)
@pytest.mark.parametrize("count", [3])
def test_chunks_of_a_sharded_optimizer_are_an_unsharded_checkpoint(url: str, store: CheckpointStore, tmp_path: Path, count: int) -> None:
    """Each rank writes rectangles of what it owns. The whole loads without Fleet, and in an unsharded run, with the same bits."""
    model, optimizer = module_and_optimizer()
    weights, moments = model.state_dict(), copy.deepcopy(optimizer.state_dict())
    whole_bytes = sum(tensor.nbytes for tensor in TrackedState(model=model, optimizer=optimizer).flat().tensors)
    parts = []
    for index in range(count):
        of_rank, its_optimizer = module_and_optimizer()
        buffers = GradientBuffers({"model": of_rank}, 4)
        state = TrackedState(model=of_rank, optimizer=its_optimizer)
        chunks = OptimizerChunks([its_optimizer], buffers.parameters, buffers.layout.places, buffers.layout.extents)
        state.replace(its_optimizer, chunks.tracked[0])
        own = (count, index)
        chunks.adopt((own,), chunks.cut([(flat, *bounds(extent, own)) for flat, extent in enumerate(chunks.extents)]))
        chunks.owned = (own,)
        share = ShardedTensors(state, chunks, StatePart(index, count, index, count))
        flat = share.flat()
        assert sum(tensor.nbytes for tensor in flat.tensors) < 0.5 * whole_bytes
        written = Parts(url).write(StateId(0, 1), 1, index, count, share.items(flat.tensors))
        parts.append(written[1])
        checkpoint, skeleton = written[0], flat.skeleton
    store.commit(order(checkpoint, tuple(parts), meta=skeleton))
    plain_pytorch_loads(url, checkpoint, weights, moments, tmp_path)
    other, its_optimizer = module_and_optimizer()
    its_optimizer.state.clear()
    TrackedState(model=other, optimizer=its_optimizer).load(*Parts(url).load(checkpoint))
    for number, values in moments["state"].items():
        for name, value in values.items():
            assert torch.equal(its_optimizer.state_dict()["state"][number][name], value), (number, name)


def test_nothing_valid_is_none(url: str, store: CheckpointStore) -> None:
    assert store.newest_valid() is None
    overwrite(url, f"{save(url, 1)}/manifest.json", b"")
    assert store.newest_valid() is None


def write_part_elsewhere(url: str, part: Part) -> Part:
    """The same part under another name, so that nothing but the name differs."""
    put(checkpoint_files(url), f"c/again-{part.name}", content(url, f"c/{part.name}"))
    return Part(f"again-{part.name}", part.bytes, part.sha256, part.tensors, part.layout)


def test_committing_twice_changes_nothing_and_other_parts_are_refused(url: str, store: CheckpointStore) -> None:
    parts = parts_of(url, "c", state(1))
    assert store.commit(order("c", parts)) == store.commit(order("c", parts))
    with pytest.raises(FileExistsError, match="committed already, with other parts"):
        store.commit(order("c", (parts[0], write_part_elsewhere(url, parts[1]))))
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
    with pytest.raises(CheckpointDamaged, match="__0_0.distcp does not match"):
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


def test_retain_leaves_what_is_guarded(url: str, store: CheckpointStore) -> None:
    ids = [save(url, step) for step in (10, 20, 30, 40)]
    assert store.retain(1, guarded=(ids[1],)) == (ids[2], ids[0])
    assert store.list() == (ids[1], ids[3])


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
