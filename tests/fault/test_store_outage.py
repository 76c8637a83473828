"""The store goes away in the middle of a run: what would be lost is told, and the run goes on until it is back, or stops in order."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet.protocol.records import DecisionMade, RunEnded
from fleet.settings.run import CheckpointSettings, RunSettings
from storage.checkpoint.store import CheckpointStore
from tests.fault.test_bad_luck import of, settings
from tests.support import trains
from tests.support.disks import small_disk
from tests.support.plain import PlainFleet
from tests.support.seaweed import SeaweedServer, serving
from tests.support.waiting import until

LIMIT_S = 120.0


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """A server to be killed and started again."""
    with serving(tmp_path_factory.mktemp("own")) as server:
        yield server


@pytest.fixture
def server(own: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> SeaweedServer:
    for variable, value in own.environment.items():
        monkeypatch.setenv(variable, value)
    if own.process.poll() is not None:
        own.start()
    return own


def chosen(folder: Path, server: SeaweedServer, on_store_failure: str) -> RunSettings:
    environment = " ".join(f"{name}={value}" for name, value in server.environment.items())
    checkpoint = CheckpointSettings(policy="fixed", interval_s=0.5, on_store_failure=on_store_failure)
    options = {"steps": "1000000", "environment": environment}
    found = settings(folder, checkpoint=checkpoint, peer_copies=0, options=options)
    return dataclasses.replace(found, timeouts=dataclasses.replace(found.timeouts, store_s=1.0))


def reported(fleet: PlainFleet) -> list[Any]:
    return [record for record in of(DecisionMade, fleet.records()) if record.policy == "store"]


def actions(fleet: PlainFleet) -> list[str]:
    return [record.action for record in reported(fleet)]


def lose_the_store(fleet: PlainFleet, server: SeaweedServer) -> None:
    fleet.wait_for(lambda: fleet.coordinator.machine.state.checkpoints.store.newest_id is not None)
    server.kill()


def outlive(fleet: PlainFleet, restore: Callable[[], object]) -> None:
    """The outage is told, the run goes on, and when the store is back that is told, too; then the run is stopped."""
    until(lambda: "warn" in actions(fleet), "the outage is told", LIMIT_S)
    before = fleet.step
    fleet.wait_for(lambda: fleet.step > before)
    restore()
    until(lambda: "recovered" in actions(fleet), "the store is back", LIMIT_S)
    fleet.loop.call_soon_threadsafe(fleet.coordinator.stop_run, "enough")
    assert fleet.wait().status == "stopped"


def test_a_run_outlives_its_store_says_what_it_would_lose_and_that_the_store_is_back(server: SeaweedServer, tmp_path: Path) -> None:
    url = server.url("outlives")
    with PlainFleet(trains.with_environment, chosen(tmp_path, server, "go-on"), tmp_path, url=url) as fleet:
        lose_the_store(fleet, server)
        outlive(fleet, server.start)
        warning = reported(fleet)[0]
        assert actions(fleet)[-1] == "recovered" and set(actions(fleet)[:-1]) == {"warn"}
        assert "steps would be lost; the store says: " in warning.reason and "unreachable" in warning.reason
        assert warning.fields["steps"] > 0 and server.secret not in warning.reason
        assert CheckpointStore(url).newest_valid() == fleet.coordinator.machine.state.checkpoints.store.newest_id


def test_a_run_that_is_to_stop_without_its_store_stops_in_order(server: SeaweedServer, tmp_path: Path) -> None:
    with PlainFleet(trains.with_environment, chosen(tmp_path, server, "stop"), tmp_path, url=server.url("stops")) as fleet:
        lose_the_store(fleet, server)
        outcome = fleet.wait(LIMIT_S)
        assert outcome.status == "stopped"
        assert "(checkpoint.on_store_failure=stop)" in outcome.reason and "unreachable" in outcome.reason
        assert actions(fleet) == ["stop"]
        [ended] = of(RunEnded, fleet.records())
        assert ended.reason == outcome.reason == reported(fleet)[0].reason
        until(lambda: all(process.exitcode == 0 for process in fleet.processes.values()), "all ranks have left in order", LIMIT_S)


class Disk:
    """A small filesystem of its own on this machine, which can be filled up, made read-only, and put right."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._ballast = folder, folder / "ballast"

    def fill(self) -> None:
        with open(self._ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    def protect(self) -> None:
        subprocess.run(["mount", "-o", "remount,ro", self.folder], check=True, timeout=60)

    def restore(self) -> None:
        subprocess.run(["mount", "-o", "remount,rw", self.folder], check=True, timeout=60)
        self._ballast.unlink(missing_ok=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path / "disk", 8) as folder:
        yield Disk(folder)


@pytest.mark.parametrize(("break_it", "words"), [(Disk.fill, "No space left"), (Disk.protect, "Read-only file system")], ids=["full", "ro"])
def test_a_run_outlives_a_disk_that_is_full_or_read_only_and_no_checkpoint_is_wrong(
    disk: Disk, tmp_path: Path, break_it: Callable[[Disk], None], words: str
) -> None:
    checkpoint = CheckpointSettings(policy="fixed", interval_s=0.5, on_store_failure="go-on")
    run = settings(tmp_path, checkpoint=checkpoint, peer_copies=0, options={"steps": "1000000"})
    run = dataclasses.replace(run, timeouts=dataclasses.replace(run.timeouts, store_s=1.0))
    with PlainFleet(trains.plain, run, tmp_path, url=f"file://{disk.folder}") as fleet:
        fleet.wait_for(lambda: fleet.coordinator.machine.state.checkpoints.store.newest_id is not None)
        break_it(disk)
        outlive(fleet, disk.restore)
        assert words in reported(fleet)[0].reason and "steps would be lost" in reported(fleet)[0].reason
        store = CheckpointStore(fleet.url)
        names = store.list()
        assert fleet.coordinator.machine.state.checkpoints.store.newest_id in names
        for name in names:
            store.verify(name)
