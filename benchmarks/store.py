"""`store`: checkpoints to and from a disk and an object store: the raw medium, torch.distributed.checkpoint (DCP) and Fleet, in turn.

Accounting: a state of float32 tensors of 8 MiB is shared out among 1, 2 or 4 processes. A save begins when all are told to save, and ends
when the whole checkpoint is durable. `raw` is durable when every process has written its bytes (8 MiB writes and fsync; or a multipart
upload by several threads). `dcp` is durable when `dcp.save` with its fsspec writer has returned everywhere, `fleet` when every part is
written and the manifest is put. A restore begins with cold caches of files (a store keeps its own memory), and ends with the bytes in
memory. `raw` reads into a buffer that is used again and again, `dcp` and `fleet` into tensors. Raw and DCP restore by as many processes as
there were writers, each its share. Fleet restores as in a restart: by one process with several threads, and with every digest compared.

`fleet_peer_restore_over_tcp_ratio` compares two copies of a part (one of four ranks): verified, from another process's memory, over plain,
over loopback TCP (`benchmarks/store_peers.py`).

Headline figures are each system's median at the number of processes that suits it best; the ratios take Fleet at its worst number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import harness, store_peers
from benchmarks.harness import Form, left_out, on_the_way
from tests.support.seaweed import SeaweedServer, s3_client, serving

RANKS, SMOKE_RANKS = (1, 2, 4), (2,)
SYSTEMS = ("raw", "dcp", "fleet")
MEDIA = ("local", "s3")
TENSOR_BYTES = 8 << 20
STATE_BYTES, QUICK_STATE_BYTES, SMOKE_STATE_BYTES = 512 << 20, 128 << 20, 32 << 20
REPETITIONS, QUICK_REPETITIONS, SMOKE_REPETITIONS, PEER_REPETITIONS = 5, 2, 1, 7
RAW_BLOCK_BYTES, RAW_PART_BYTES, RAW_THREADS = 8 << 20, 16 << 20, 4
BOUND_S = 300.0
CHECKPOINT = "000000-000000000001-g00000001"

Samples = dict[tuple[str, str, str, int], list[float]]


@dataclass(frozen=True)
class Job:
    """A job of the first ``ranks`` processes: to ``save`` or ``restore`` a state with ``system``, at ``place``."""

    what: str
    system: str
    medium: str
    ranks: int
    place: str


# ---- in a process ------------------------------------------------------------------------------------------------------------------------


class Rank:
    """One process. Its share of the state, by the number of ranks, is made outside of the measured time."""

    def __init__(self, rank: int, store: str, state_bytes: int, server: SeaweedServer, numbers: tuple[int, ...]) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.rank, self.tensors, self._server, self._ranks = rank, state_bytes // TENSOR_BYTES, server, 0
        self.state: dict[int, torch.Tensor] = {}
        os.environ.update(server.environment)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=max(numbers))
        self.groups = {ranks: dist.new_group(list(range(ranks))) for ranks in numbers}

    def prepare(self, job: Job) -> None:
        import torch

        if self._ranks != job.ranks:
            self._ranks = job.ranks
            mine = range(self.rank, self.tensors, job.ranks)
            self.state = {index: torch.empty(TENSOR_BYTES // 8, dtype=torch.int64).random_().view(torch.float32) for index in mine}
        if job.what == "restore" and job.system == "dcp":
            self.into = {f"tensor.{index}": torch.empty_like(tensor) for index, tensor in self.state.items()}

    def do(self, job: Job) -> Any:
        return getattr(self, f"{job.what}_{job.system}")(job)

    def save_fleet(self, job: Job) -> Any:
        from storage.checkpoint.store import write_part

        return write_part(job.place, CHECKPOINT, self.rank, job.ranks, list(self.state.items()))

    def restore_fleet(self, job: Job) -> None:
        from storage.checkpoint.store import CheckpointStore

        if self.rank == 0:
            _, tensors = CheckpointStore(job.place).load(CHECKPOINT)
            if len(tensors) != self.tensors:
                raise RuntimeError(f"{len(tensors)} tensors came back of {self.tensors}")

    def save_dcp(self, job: Job) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        state = {f"tensor.{index}": tensor for index, tensor in self.state.items()}
        # To S3 its sync is os.sync(), which waits for all disks of the machine, and not for the upload.
        dcp.save(state, storage_writer=FsspecWriter(job.place, sync_files=job.medium == "local"), process_group=self.groups[job.ranks])

    def restore_dcp(self, job: Job) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        dcp.load(self.into, storage_reader=FsspecReader(job.place), process_group=self.groups[job.ranks])

    def save_raw(self, job: Job) -> None:
        views = [memoryview(tensor.numpy()).cast("B") for tensor in self.state.values()]
        self._upload(job, views) if job.medium == "s3" else self._write(Path(job.place) / str(self.rank), views)

    def restore_raw(self, job: Job) -> None:
        size = len(self.state) * TENSOR_BYTES
        self._download(job, size) if job.medium == "s3" else self._read(Path(job.place) / str(self.rank))

    def _write(self, path: Path, views: list[memoryview]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb", buffering=0) as file:
            for view in views:
                for at in range(0, len(view), RAW_BLOCK_BYTES):
                    file.write(view[at : at + RAW_BLOCK_BYTES])
            os.fsync(file.fileno())

    def _read(self, path: Path) -> None:
        buffer = bytearray(RAW_BLOCK_BYTES)
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                continue

    def _target(self, job: Job) -> dict[str, str]:
        return {"Bucket": self._server.bucket, "Key": f"{job.place.split('/', 3)[3]}/{self.rank}"}

    def _upload(self, job: Job, views: list[memoryview]) -> None:
        client, target = s3_client(self._server), self._target(job)
        upload = {**target, "UploadId": client.create_multipart_upload(**target)["UploadId"]}
        per_part = RAW_PART_BYTES // TENSOR_BYTES
        bodies = [b"".join(views[at : at + per_part]) for at in range(0, len(views), per_part)]
        with ThreadPoolExecutor(RAW_THREADS) as pool:
            tags = list(pool.map(lambda item: client.upload_part(**upload, PartNumber=item[0], Body=item[1])["ETag"], enumerate(bodies, 1)))
        client.complete_multipart_upload(
            **upload, MultipartUpload={"Parts": [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]}
        )  # fmt: skip

    def _download(self, job: Job, size: int) -> None:
        client, target = s3_client(self._server), self._target(job)

        def fetch(start: int) -> int:
            stop = min(size, start + RAW_PART_BYTES)
            return len(client.get_object(**target, Range=f"bytes={start}-{stop - 1}")["Body"].read())

        with ThreadPoolExecutor(RAW_THREADS) as pool:
            if sum(pool.map(fetch, range(0, size, RAW_PART_BYTES))) != size:
                raise RuntimeError("the raw download came back short")


def _rank(rank: int, store: str, state_bytes: int, server: SeaweedServer, numbers: tuple[int, ...], parent: Connection) -> None:
    me = Rank(rank, store, state_bytes, server, numbers)
    parent.send(("ready", None))
    while (order := parent.recv()) is not None:
        step, job = order
        try:
            parent.send(("done", me.prepare(job) if step == "prepare" else me.do(job)))
        except Exception:  # noqa: BLE001 - told to the parent, which ends the benchmark
            parent.send(("failed", traceback.format_exc()))


# ---- in the parent -----------------------------------------------------------------------------------------------------------------------


class Fleet:
    """The processes, and the parent's side of their jobs. ``numbers``: how many of them save and restore, by turns."""

    def __init__(self, folder: Path, state_bytes: int, server: SeaweedServer, numbers: tuple[int, ...]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.checkpoint", "s3fs", "storage.checkpoint.restore"])  # imported once
        self.state_bytes, self.numbers, self._pipes, self._processes = state_bytes, numbers, list[Connection](), list[Any]()
        plain = dataclasses.replace(server)  # without its process, which no pickle takes
        for rank in range(max(numbers)):
            mine, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(rank, str(folder / "group"), state_bytes, plain, numbers, theirs))
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        for pipe in self._pipes:
            self._answer(pipe)

    def _answer(self, pipe: Connection) -> Any:
        if not pipe.poll(BOUND_S):
            raise TimeoutError(f"a rank has not answered within {BOUND_S:g} s")
        word, value = pipe.recv()
        if word == "failed":
            raise RuntimeError(value)
        return value

    def _all(self, step: str, job: Job) -> list[Any]:
        for pipe in self._pipes[: job.ranks]:
            pipe.send((step, job))
        return [self._answer(pipe) for pipe in self._pipes[: job.ranks]]

    def run(self, job: Job) -> float:
        """Do a job; returns bytes per second."""
        self._all("prepare", job)
        begun_s = time.perf_counter()
        parts = self._all("do", job)
        if (job.what, job.system) == ("save", "fleet"):
            _commit(job.place, parts)
        elif job.what == "save" and job.medium == "local":
            _sync(Path(job.place))
        return self.state_bytes / (time.perf_counter() - begun_s)

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            with contextlib.suppress(OSError):
                pipe.send(None)
            process.join(20)
            process.kill()


def _commit(place: str, parts: list[Any]) -> None:
    from fleet.protocol.instructions import CommitCheckpoint
    from fleet.protocol.types import StateId
    from storage.checkpoint.store import CheckpointStore

    CheckpointStore(place).commit(CommitCheckpoint(CHECKPOINT, StateId(0, 1), tuple(parts), "", 0.0, 0.0))


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(descriptor)
    os.close(descriptor)


def chill(folder: Path) -> None:
    """Let the kernel forget the files in ``folder``, and write the object store's data: then no write is under way on the disk."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


@contextlib.contextmanager
def place(medium: str, name: str, folder: Path, server: SeaweedServer) -> Iterator[str]:
    """Room for one checkpoint, emptied afterwards."""
    if medium == "local":
        (folder / name).mkdir()
        yield str(folder / name)
        shutil.rmtree(folder / name)
        return
    yield server.url(name)
    client = s3_client(server)
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=server.bucket, Prefix=f"{name}/"):
        for entry in page.get("Contents", ()):
            client.delete_object(Bucket=server.bucket, Key=entry["Key"])


def collect(fleet: Fleet, warm_ups: int, repetitions: int, folder: Path, server: SeaweedServer) -> Samples:
    """Measure one system after the other, in an order that turns with the repetition."""
    samples: Samples = defaultdict(list)
    turns = [
        (repetition, medium, ranks, SYSTEMS[(repetition + turn) % len(SYSTEMS)])
        for repetition in range(-warm_ups, repetitions)  # the first one, which loads all modules and opens connections, is not kept
        for medium in MEDIA
        for ranks in (fleet.numbers if repetition >= 0 else fleet.numbers[-1:])
        for turn in range(len(SYSTEMS))
    ]
    for repetition, medium, ranks, system in on_the_way("store", turns, lambda turn: f"{turn[3]} on {turn[1]}, {turn[2]} ranks"):
        with place(medium, f"{system}-{ranks}-{repetition}", folder, server) as where:
            for what in ("save", "restore"):
                chill(folder)
                rate = fleet.run(Job(what, system, medium, ranks, where))
                if repetition >= 0:
                    samples[system, medium, what, ranks].append(rate)
    return samples


def figures(samples: Samples) -> dict[str, float]:
    """Headlines, ratios, and one figure for every number of ranks."""
    medians = {key: statistics.median(values) for key, values in samples.items()}
    numbers = {ranks for *_, ranks in samples}
    best: Callable[[str, str, str], float] = lambda *key: max(medians[*key, ranks] for ranks in numbers)  # noqa: E731
    found = {f"{s}_{m}_{w}_bytes_per_s": best(s, m, w) for m in MEDIA for w in ("save", "restore") for s in SYSTEMS}
    for medium in MEDIA:
        for what in ("save", "restore"):
            worst = min(medians["fleet", medium, what, ranks] for ranks in numbers)
            found[f"fleet_over_raw_{medium}_{what}_ratio_min"] = worst / best("raw", medium, what)
            found[f"fleet_over_dcp_{medium}_{what}_ratio_min"] = worst / best("dcp", medium, what)
    return found | {f"{s}_{m}_{w}_{ranks}_ranks_bytes_per_s": value for (s, m, w, ranks), value in medians.items()}


def measure(form: Form) -> dict[str, Any]:
    """Measure saves and restores of a checkpoint on a disk and on SeaweedFS, against the raw medium and torch.distributed.checkpoint."""
    state_bytes = form.of(STATE_BYTES, QUICK_STATE_BYTES, SMOKE_STATE_BYTES)
    repetitions = form.of(REPETITIONS, QUICK_REPETITIONS, SMOKE_REPETITIONS)
    numbers = form.of(RANKS, RANKS, SMOKE_RANKS)
    folder = Path(tempfile.mkdtemp(prefix="fleet-store-"))
    try:
        with serving(folder / "seaweed") as server:
            os.environ.update(server.environment)
            fleet = Fleet(folder, state_bytes, server, numbers)
            try:
                (folder / "disk").mkdir()
                samples = collect(fleet, form.of(1, 1, 0), repetitions, folder / "disk", server)
            finally:
                fleet.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    peers = store_peers.collect(state_bytes // max(RANKS), form.of(PEER_REPETITIONS, PEER_REPETITIONS, 1))
    named = {f"{s}_{m}_{w}_{ranks}_ranks_bytes_per_s": values for (s, m, w, ranks), values in samples.items()} | peers
    settings = {
        "state_bytes": state_bytes, "tensor_bytes": TENSOR_BYTES, "repetitions": repetitions, "ranks": numbers,
        "raw_threads_s3": RAW_THREADS, "raw_part_bytes": RAW_PART_BYTES,
    }  # fmt: skip
    notes = [
        "headlines: each system at its best number of ranks; ratios: Fleet at its worst over the other at its best",
        "files are read from a cold cache; the object store, one SeaweedFS server, shares processor, memory and disk with its clients",
        *(left_out(f"_{ranks}_ranks", f"not a number of the {form} form") for ranks in RANKS if ranks not in numbers),
    ]
    ratio = statistics.median(peers["fleet_peer_restore_s"]) / statistics.median(peers["tcp_copy_s"])
    found = figures(samples) | {"fleet_peer_restore_over_tcp_ratio": ratio}
    return {"settings": settings, "figures": found, "samples": named, "notes": notes}


if __name__ == "__main__":
    harness.run("store", measure)
