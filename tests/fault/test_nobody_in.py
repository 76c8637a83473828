"""The secret of a real run: it is where it has to be and nowhere else, outlives the processes that hold it, and goes with the run."""

from __future__ import annotations

import base64
import dataclasses
import os
import re
import signal
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray

from actors.asking import ask
from actors.messages import SettingWanted
from fleet.app.cluster.local import LocalCluster
from fleet.app.plans import RunResult, final_digest
from fleet.app.recipes import LiveRun
from fleet.errors import FleetError
from fleet.host import secret
from fleet.protocol.records import RefusedLines, Resumed
from fleet.settings.live import ADDRESS_FILE
from tests.fault.test_bad_luck import settings
from tests.fault.test_ray_runs import OPTIONS, command_of, plan
from tests.support.journals import records, wait_for_checkpoint
from tests.support.undisturbed import Undisturbed
from tests.support.waiting import until

BOUND_S = 180.0


@pytest.fixture(scope="module")
def truth(undisturbed: Undisturbed) -> str:
    return undisturbed(lambda folder: settings(folder, world=1, options=OPTIONS))


def forms(held: bytes) -> list[bytes]:
    """How it might be written down."""
    return [held, held.hex().encode(), base64.b64encode(held)[:40], base64.urlsafe_b64encode(held)[:40], repr(held).encode()[2:-1]]


def process_of(cluster: LocalCluster, name: bytes) -> int:
    return next(pid for pid in cluster.pids() if name in command_of(pid))


def files_with(held: bytes, folder: Path) -> list[str]:
    """Files that hold it, but for the one that is for it."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.name != secret.FILE:
            data = path.read_bytes()
            found += [str(path)] if any(form in data for form in forms(held)) else []
    return found


def reported_processes(cluster: LocalCluster) -> Iterator[tuple[str, bytes]]:
    """What anybody may read of the processes of a cluster, and what their user may."""
    for pid in [*cluster.pids(), os.getpid()]:
        for name in ("cmdline", "environ"):
            try:
                yield f"{pid}/{name}", Path(f"/proc/{pid}/{name}").read_bytes()
            except OSError:  # it has just ended
                continue


def memory_holds(pid: int, held: bytes) -> bool:
    """Whether it is anywhere in the writable memory of a process."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            begin, end, rights = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line).groups()  # type: ignore[union-attr]
            if not rights.startswith("rw") or "/dev/" in line:
                continue
            try:
                memory.seek(int(begin, 16))
                data = memory.read(int(end, 16) - int(begin, 16))
            except OSError:  # guard pages, and what was just given back
                continue
            if held in data:
                return True
    return False


@dataclass
class Going:
    """A run under way, in a thread of its own."""

    live: LiveRun
    thread: threading.Thread
    results: list[RunResult]
    folder: Path

    def finish(self) -> RunResult:
        self.thread.join(2 * BOUND_S)
        assert not self.thread.is_alive(), "the run did not end"
        return self.results[0]


def begin(cluster: LocalCluster, folder: Path) -> Going:
    results = list[RunResult]()
    chosen = plan(folder, f"nobody-{folder.name}")
    lasts = chosen.settings.options | {"pause_s": "0.4"}
    live = LiveRun(dataclasses.replace(chosen, settings=dataclasses.replace(chosen.settings, options=lasts)), cluster)
    thread = threading.Thread(target=lambda: results.append(live.execute()))
    thread.start()
    wait_for_checkpoint(live.plan.folder, BOUND_S)
    return Going(live, thread, results, live.plan.folder)


def test_the_secret_is_where_it_has_to_be_and_nowhere_else(cluster: LocalCluster, tmp_path: Path) -> None:
    going = begin(cluster, tmp_path)
    held = secret.read(going.folder)
    try:
        assert len(held) == 32
        for folder in (going.folder, going.live.shm):
            found = (folder / secret.FILE).stat()
            assert (stat.S_IMODE(found.st_mode), found.st_uid) == (0o600, os.geteuid())
            assert secret.read(folder) == held
        assert stat.S_IMODE(going.live.shm.stat().st_mode) == 0o700
        assert [name for name, data in reported_processes(cluster) if any(form in data for form in forms(held))] == []
        assert files_with(held, going.folder) == []
        assert files_with(held, cluster.directory) == [], "in a log of Ray's"
        actors = repr(ray._private.state.actors()).encode()
        assert b"CoordinatorHost" in actors
        assert not any(form in actors for form in forms(held))
        assert memory_holds(process_of(cluster, b"CoordinatorHost"), held), "the search finds it where it is"
        assert not memory_holds(process_of(cluster, b"gcs_server"), held), "it went through Ray's control plane"
    finally:
        result = going.finish()
    assert result.status == "completed"
    assert files_with(held, going.folder) == []
    assert not (going.folder / secret.FILE).exists()
    assert not going.live.shm.exists()


def test_coordinator_and_agent_are_killed_and_find_the_secret_again(cluster: LocalCluster, tmp_path: Path, truth: str) -> None:
    going = begin(cluster, tmp_path)
    held = secret.read(going.folder)
    os.kill(process_of(cluster, b"CoordinatorHost"), signal.SIGKILL)
    until(lambda: any(isinstance(record, Resumed) for record in records(going.folder)), "the coordinator is back", 60)
    until(lambda: _answers(going.folder), "it listens to who has the secret", 60)
    assert secret.read(going.folder) == held
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ADDRESS_FILE).write_text((going.folder / ADDRESS_FILE).read_text())
    secret.keep(elsewhere, secret.fresh())
    with pytest.raises(FleetError, match="does not hold this run's secret"):
        ask(elsewhere, SettingWanted("straggler.gain", "0.2"))
    until(lambda: _refused(going.folder) == [("coordinator", "secret")], "the journal tells who was refused", 60)
    os.kill(process_of(cluster, b"AgentHost"), signal.SIGKILL)
    assert going.finish().status == "completed"
    assert final_digest(going.folder) == truth


def _refused(folder: Path) -> list[tuple[str, str]]:
    reported = [record for record in records(folder) if isinstance(record, RefusedLines) and record.listener == "setting"]
    return [(record.where, record.reason) for record in reported]


def _answers(folder: Path) -> bool:
    try:
        return not ask(folder, SettingWanted("straggler.gain", "0.2")).refused
    except FleetError:
        return False
