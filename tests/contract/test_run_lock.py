"""The lock of a run on real stores: what is created once, racers for one run, and a holder that was followed."""

from __future__ import annotations

import contextlib
import functools
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from actors.rank.state.tracked import TrackedState
from fleet.protocol.holding import Holder, RunHeld, SeenClaim, Stamp, TakenOver, Tenure
from fleet.protocol.instructions import CommitCheckpoint
from fleet.protocol.types import StateId
from storage.backends.files import creates_once, open_files
from storage.backends.s3 import S3Files
from storage.backends.trial import IMPATIENT
from storage.checkpoint.manifest import MANIFEST
from storage.checkpoint.parts import Parts, RetainingStore, newest_checkpoint
from storage.checkpoint.store import CheckpointStore, checkpoint_files
from storage.lock import RunLock
from storage.mirror import JOURNAL, JournalMirror
from tests.support.seaweed import SeaweedServer

PLACES = ["file", "memory", "s3"]
META = TrackedState(model=torch.nn.Linear(1, 1)).flatten()[0]


@pytest.fixture(params=PLACES)
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = uuid.uuid4().hex
    if request.param == "s3":
        server: SeaweedServer = request.getfixturevalue("s3")
        for variable, value in server.environment.items():
            monkeypatch.setenv(variable, value)
        yield server.url(name)
    else:
        yield {"file": f"file://{tmp_path}/{name}", "memory": f"memory://{name}"}[request.param]
    if request.param == "memory" and fsspec.filesystem("memory").exists(f"/{name}"):
        fsspec.filesystem("memory").rm(f"/{name}", recursive=True)


def holder(pid: int) -> Holder:
    return Holder(f"host-{pid}", pid, 1, "boot", "space", "10.0.0.1:6379", "2026-01-01 00:00:00 UTC", str(pid))


def tensors(step: int) -> list[tuple[int, torch.Tensor]]:
    """Those of a linear layer."""
    return [(0, torch.full((1, 1), float(step))), (1, torch.zeros(1))]


def saved(url: str, tenure: Tenure | None, step: int, store: RetainingStore | None = None) -> str:
    """A rank writes its part, and the coordinator puts the manifest."""
    name, part = Parts(url, "run", tenure).write(StateId(0, step), 1, 0, 1, tensors(step))
    (store or RetainingStore(url, 3, "run", tenure)).commit(CommitCheckpoint(name, StateId(0, step), (part,), META, 0.0, 0.0))
    return name


def everything(url: str) -> dict[str, bytes]:
    """All that lies in a run's store, but for stamps."""
    files, found = open_files(url), {}
    for folder in ("lock", "", *(f"checkpoints/{name}" for name in checkpoint_files(url).directories())):
        names = [JOURNAL] * (files.size(JOURNAL) is not None) if not folder else files.sizes(folder)
        found |= {f"{folder}/{name}": files.read(f"{folder}/{name}".lstrip("/")) for name in names if not name.endswith(".stamp")}
    return found


def at_once(*calls: Callable[[], object]) -> list[object]:
    """The results of calls that begin together, each in a thread: a value, or the exception."""
    results: list[object] = [None] * len(calls)
    barrier = threading.Barrier(len(calls))

    def call(index: int) -> None:
        barrier.wait()
        try:
            results[index] = calls[index]()
        except Exception as error:  # noqa: BLE001 - it is what is asked for
            results[index] = error

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_a_name_is_created_once_by_one_of_many(url: str) -> None:
    files = open_files(url)
    for name in ("a/1", "a/2", "a/3"):
        results = at_once(*(functools.partial(files.create, name, str(each).encode()) for each in range(4)))
        assert sorted(results) == [False, False, False, True]
        assert files.read(name) == str(results.index(True)).encode()
        assert files.create(name, files.read(name)), "the same bytes: an answer was lost, and it was this writer"
    assert creates_once(files, "a") and RunLock(url).creates_once()
    assert files.sizes("lock-trial") == {}


def test_a_store_that_takes_the_second_write_of_a_name_is_found(s3: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real store, which never hears of the condition: so does one that does not know it."""
    for variable, value in s3.environment.items():
        monkeypatch.setenv(variable, value)
    client = S3Files(s3.url("x"), **IMPATIENT)._client
    with unconditional(client):
        assert not RunLock(s3.url(uuid.uuid4().hex)).creates_once()
    assert RunLock(s3.url(uuid.uuid4().hex)).creates_once()


@contextlib.contextmanager
def unconditional(client: Any) -> Iterator[None]:
    def drop(params: dict[str, Any], **_: Any) -> None:
        params.pop("IfNoneMatch", None)

    client.meta.events.register("before-parameter-build.s3.PutObject", drop)
    yield
    client.meta.events.unregister("before-parameter-build.s3.PutObject", drop)


def test_of_three_that_race_for_a_run_one_holds_it(url: str) -> None:
    """The first holder is known to be gone; each of the three sees the others' processes live."""
    first = RunLock(url).claim(holder(0))
    saved(url, first, 1)
    claims = [lambda pid=pid: RunLock(url, lambda who: who.pid != 0).claim(holder(pid)) for pid in (1, 2, 3)]
    results = at_once(*claims)
    held = [result for result in results if isinstance(result, Tenure)]
    assert [tenure.epoch for tenure in held] == [1]
    assert len([result for result in results if isinstance(result, RunHeld)]) == 2
    winner = 1 + results.index(held[0])
    words = f"the run is held by process {winner} of host-{winner} for the cluster 10.0.0.1:6379, since 2026-01-01 00:00:00 UTC"
    assert {str(result) for result in results if isinstance(result, RunHeld)} == {words}
    saved(url, held[0], 2)
    assert CheckpointStore(url).manifest(CheckpointStore(url).list()[-1]).epoch == 1


def test_a_holder_that_was_followed_writes_nothing(url: str, tmp_path: Path) -> None:
    """Neither a part, nor a manifest, nor the journal's copy, nor a stamp; its coordinator had all of it at hand before."""
    lock = RunLock(url)
    first = lock.claim(holder(0))
    store, mirror, journal = RetainingStore(url, 3, "run", first), JournalMirror(url, first), tmp_path / "journal"
    journal.write_bytes(b"one")
    assert saved(url, first, 1, store) and mirror.copy(journal)
    _, part = Parts(url, "run", first).write(StateId(0, 2), 1, 0, 1, tensors(0))
    second = RunLock(url).claim(holder(1), SeenClaim(first.number))
    before = everything(url)
    journal.write_bytes(b"one and more")
    order = CommitCheckpoint("000000-000000000002-g00000001", StateId(0, 2), (part,), META, 0.0, 0.0)
    for attempt in (
        lambda: store.commit(order),
        lambda: RetainingStore(url, 3, "run", first).commit(order),
        lambda: Parts(url, "run", first).write(StateId(0, 3), 1, 0, 1, tensors(0)),
        lambda: mirror.copy(journal),
        lambda: lock.renew(first, Stamp(7)),
    ):
        with pytest.raises(TakenOver, match="taken over by process 1 of host-1"):
            attempt()
    assert everything(url) == before
    newest = saved(url, second, 2)
    assert CheckpointStore(url).verify(newest).parts[0].name == "__0_1.distcp", "and it shares no file with the one before"


def test_a_manifest_on_its_way_when_the_run_is_taken_does_not_arrive(url: str) -> None:
    """It was announced. Then it counts, or it is refused: whatever comes first."""
    first = RunLock(url).claim(holder(0))
    done = saved(url, first, 1)
    store = CheckpointStore(url, run="run", tenure=first)
    name, part = Parts(url, "run", first).write(StateId(0, 2), 1, 0, 1, tensors(0))
    right = store._saves.save

    def late(checkpoint: str, put: Callable[[], bool]) -> bool:
        def put_late() -> bool:
            RunLock(url).claim(holder(1), SeenClaim(first.number))
            return put()

        return right(checkpoint, put_late)

    store._saves.save = late  # type: ignore[method-assign]
    with pytest.raises(TakenOver):
        store.commit(CommitCheckpoint(name, StateId(0, 2), (part,), META, 0.0, 0.0))
    assert CheckpointStore(url).list() == (done,) and checkpoint_files(url).size(f"{name}/{MANIFEST}") == 0
    newest = newest_checkpoint(url, "run")
    assert newest is not None and newest[0] == done


def test_a_coordinator_that_is_started_again_goes_on_with_the_same_right(url: str) -> None:
    tenure = RunLock(url).claim(holder(0))
    store = RetainingStore(url, 2, "run", tenure)
    for step in range(1, 6):
        saved(url, tenure, step, store)
    for step in range(6, 8):
        saved(url, tenure, step, RetainingStore(url, 2, "run", tenure))
    assert [int(name[7:19]) for name in CheckpointStore(url).list()] == [6, 7]
    numbers = [int(name) for name in open_files(url).sizes("lock") if name.isdecimal()]
    assert sorted(numbers) == [0, 2, 3, 4, 5, 6, 7], "what is done is forgotten, but for the last few"
    RunLock(url).check(tenure)


def test_a_run_that_ended_in_order_is_taken_without_a_wait(url: str) -> None:
    lock = RunLock(url, wait=lambda who, wait_s: pytest.fail("it waits"))
    first = lock.claim(holder(0))
    lock.renew(first, Stamp(3, over=True))
    assert lock.claim(holder(1)).epoch == 1
