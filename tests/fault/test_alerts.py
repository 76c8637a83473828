"""Every alert is fired on purpose, by a real fault in a real run that a real Prometheus scrapes, and goes back to normal when it is healed.

The rules' times are less than a hundredth of what they are in use, and more than the retries of a failing store take. One run serves all:
its tests stand in the order in which its past allows them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dashboards.metrics.rules import ALERTS, rules
from fleet.protocol import records as r
from fleet.protocol.operations import HEAL, START, Operation
from fleet.protocol.types import Member, Process, StateId
from fleet.settings.run import Budgets, CheckpointSettings, RunSettings, StragglerSettings
from tests.fault.test_bad_luck import FAST, settings
from tests.golden.journals import Story
from tests.support import trains
from tests.support.plain import PlainFleet
from tests.support.programs import program
from tests.support.prometheus import Server, quick, scraping
from tests.support.waiting import until
from tests.support.watching import Watched, watched

SCALE = 0.008
LIMIT_S = 90.0
ENDLESS = {"steps": "1000000", "pause_s": "0.01", "shard_s": "0.008"}


@dataclass
class Scene:
    """A run that goes on, and who watches it."""

    fleet: PlainFleet
    store: Path
    prometheus: Server
    begun_s: float

    def fires(self, alert: str) -> None:
        until(lambda: alert in self.prometheus.firing(), f"{alert} fires", LIMIT_S)

    def is_silent(self, alert: str) -> None:
        until(lambda: alert not in self.prometheus.firing(), f"{alert} is back to normal", LIMIT_S)

    def kill_view(self) -> None:
        for _, process in self.ranks():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def ranks(self) -> list[tuple[Member, Process]]:
        """Of the view."""
        return [(member, process) for member, process, in_view in self.fleet.census() if in_view]

    def trains(self) -> None:
        """Everybody is there, and steps are committed."""
        machine = self.fleet.coordinator.machine
        until(
            lambda: machine.state.view is not None and len(machine.state.view.members) == self.fleet.settings.world,
            "the world is full",
            LIMIT_S,
        )
        step = self.fleet.step
        until(lambda: self.fleet.step > step + 5, "steps are committed", LIMIT_S)


def watched_settings(folder: Path) -> RunSettings:
    return settings(
        folder, spares=1, options=ENDLESS, straggler=StragglerSettings(enabled=False),
        checkpoint=CheckpointSettings(policy="fixed", interval_s=0.5),
        budgets=Budgets(slot=100_000, total=10_000),
    )  # fmt: skip


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Scene]:
    program("prometheus")
    patient = dataclasses.replace(FAST, heartbeat_s=20.0, node_s=25.0, quiesce_s=30.0, form_s=40.0, progress_s=60.0)
    chosen = dataclasses.replace(watched_settings(folder / "run"), timeouts=patient)
    store, begun_s = folder / "store", time.monotonic()
    with (
        PlainFleet(trains.with_waits, chosen, folder / "run", url=f"file://{store}") as fleet,
        watched(folder) as served,
        scraping(folder / "prometheus", [served.url.removeprefix("http://")], quick(rules(), SCALE), 0.25) as prometheus,
    ):
        made = Scene(fleet, store, prometheus, begun_s)
        made.trains()
        yield made


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with staged(tmp_path_factory.mktemp("alerts")) as made:
        yield made


def test_nobody_is_alarmed_by_a_run_that_trains(scene: Scene) -> None:
    scene.prometheus.until("fleet:goodput:ratio_rate5m > 0.9")
    until(lambda: not scene.prometheus.firing(), "no alert fires", LIMIT_S)


def test_processes_that_die_again_and_again(scene: Scene) -> None:
    def killed_and_reported() -> bool:
        scene.kill_view()
        return "FleetCrashLoop" in scene.prometheus.firing()

    until(killed_and_reported, "FleetCrashLoop fires", LIMIT_S)
    scene.is_silent("FleetCrashLoop")


def test_a_loss_that_costs_more_than_it_should(tmp_path: Path) -> None:
    """In a run of its own: of one that has lost much before, not enough is left to be missed."""
    with staged(tmp_path) as scene:
        threading.Event().wait(10.0)
        scene.fleet.respawn = False
        for slot in list(scene.fleet.processes):  # with a spare that goes on alone the run would be something
            with contextlib.suppress(ProcessLookupError):
                scene.fleet.kill(slot)
        threading.Event().wait(time.monotonic() - scene.begun_s)  # for half of its life the run has been nothing
        scene.fleet.respawn = True
        scene.fires("FleetPredictionError")
        scene.is_silent("FleetPredictionError")


def test_losses_that_nobody_replaces(scene: Scene) -> None:
    """The goal is missed while it lasts, and not only once somebody has come back to tell of it."""
    scene.fleet.respawn = False
    scene.kill_view()
    scene.fires("FleetGoodputBurnsFast")
    scene.fires("FleetGoodputBurnsSlowly")
    scene.fleet.respawn = True
    scene.is_silent("FleetGoodputBurnsFast")
    scene.is_silent("FleetGoodputBurnsSlowly")


def test_all_ranks_stand_still(scene: Scene) -> None:
    stopped = [process for _, process in scene.ranks()]
    for process in stopped:
        os.kill(process.pid, signal.SIGSTOP)
    scene.fires("FleetNoProgress")
    for process in stopped:
        os.kill(process.pid, signal.SIGCONT)
    scene.is_silent("FleetNoProgress")


def test_a_spare_that_is_not_replaced(scene: Scene) -> None:
    scene.fleet.respawn = False
    in_view = {member.slot for member, _ in scene.ranks()}
    scene.fleet.kill(next(slot for slot in scene.fleet.processes if slot not in in_view))
    scene.fires("FleetSparesExhausted")
    scene.fleet.respawn = True
    scene.is_silent("FleetSparesExhausted")


def replace(store: Path, place: Callable[[], object]) -> None:
    """``place`` something where the store is now. Whoever writes a checkpoint makes its folder anew, also in between."""

    def placed() -> bool:
        if store.is_dir():
            shutil.rmtree(store, ignore_errors=True)
        else:
            store.unlink(missing_ok=True)
        try:
            place()
        except OSError:
            return False
        return True

    until(placed, "what is where the store was")


def test_a_store_that_takes_nothing(scene: Scene) -> None:
    away = scene.store.with_name("aside")
    scene.store.rename(away)
    replace(scene.store, lambda: scene.store.write_text("no folder"))
    scene.fires("FleetCheckpointOverdue")
    scene.fires("FleetStoreFailing")
    replace(scene.store, lambda: away.rename(scene.store))
    scene.is_silent("FleetCheckpointOverdue")
    scene.is_silent("FleetStoreFailing")


def test_a_bit_that_flips(scene: Scene) -> None:
    scene.trains()
    _, process = scene.ranks()[-1]
    answer = scene.fleet.call(scene.fleet.coordinator.operate(Operation("f", "flip_weight", START, process)))
    assert not answer.refused
    scene.fires("FleetCorruption")
    scene.is_silent("FleetCorruption")


def test_a_rank_that_is_slow(scene: Scene) -> None:
    scene.trains()
    _, process = scene.ranks()[-1]
    answer = scene.fleet.call(scene.fleet.coordinator.operate(Operation("s", "slow", START, process, duration_s=3600.0, severity=4.0)))
    assert not answer.refused
    scene.fires("FleetStragglerPersists")
    scene.fleet.call(scene.fleet.coordinator.operate(Operation("s", "slow", HEAL, process)))
    scene.is_silent("FleetStragglerPersists")


# ---- runs that are written by hand, on a real page ---------------------------------------------------------------------------------------


def hour_old() -> Story:
    """Two ranks have made 60 steps, of which step 50 is durable."""
    story = Story(world=2)
    story.records[0] = dataclasses.replace(story.records[0], unix_time_s=time.time() - 3600.0)  # type: ignore[call-arg]
    story.view(1, [(0, 0), (1, 0)], 0)
    for step in range(1, 61):
        for slot in (0, 1):
            story.spans(slot, 0, "c600 x400 K", step=step - 1)
        story.committed(step, 1000.0 * step)
    story.durable(50, 50_000)
    return story


@contextlib.contextmanager
def scraped(folder: Path, served: Watched) -> Iterator[Server]:
    program("prometheus")
    with scraping(folder, [served.url.removeprefix("http://")], quick(rules(), SCALE), 1.0) as prometheus:
        prometheus.until('fleet_run_info{status="running"}')
        yield prometheus


def test_a_page_that_is_gone(tmp_path: Path) -> None:
    with watched(tmp_path) as served:
        served.write("run", hour_old().records)
        port = served.server.port
        with scraped(tmp_path / "prometheus", served) as prometheus:
            until(lambda: "FleetTargetVanished" not in prometheus.firing(), "the page answers in time", LIMIT_S)
            served.server.__exit__(None, None, None)
            until(lambda: "FleetTargetVanished" in prometheus.firing(), "it fires", LIMIT_S)
            with watched(tmp_path, port=port):
                until(lambda: "FleetTargetVanished" not in prometheus.firing(), "it is back to normal", LIMIT_S)
                shutil.rmtree(tmp_path / "run")
                until(lambda: "FleetTargetVanished" in prometheus.firing(), "it fires for a run whose folder is gone", LIMIT_S)


def test_a_checkpoint_that_does_not_move(tmp_path: Path) -> None:
    story = hour_old()
    with watched(tmp_path) as served:
        asked = r.CheckpointRecord("step-60", "requested", StateId(0, 60), 60.0)
        served.write("run", [*story.records, asked])
        with scraped(tmp_path / "prometheus", served) as prometheus:
            until(lambda: "FleetCheckpointStuck" in prometheus.firing(), "it fires", LIMIT_S)
            served.write("run", [dataclasses.replace(asked, phase="failed", at_s=3600.0)])
            until(lambda: "FleetCheckpointStuck" not in prometheus.firing(), "it is back to normal", LIMIT_S)


def test_restarts_that_lead_no_further(tmp_path: Path) -> None:
    story, begins_s = hour_old(), time.time() - 3600.0
    before = len(story.records)
    with watched(tmp_path) as served:
        served.write("run", story.records)
        with scraped(tmp_path / "prometheus", served) as prometheus:
            prometheus.until(f"fleet_step offset {round(1000 * SCALE * 900)}ms == 60")
            for generation in range(2, 8):
                story.view(generation, [(0, 0), (1, 0)], 1000.0 * (time.time() - begins_s), 60)
                served.write("run", story.records[before:])
                before = len(story.records)
                prometheus.until(f"fleet_view_generation == {generation}")
            until(lambda: "FleetRestartsInVain" in prometheus.firing(), "it fires", LIMIT_S)
            story.committed(61, 1000.0 * (time.time() - begins_s))
            served.write("run", story.records[before:])
            until(lambda: "FleetRestartsInVain" not in prometheus.firing(), "it is back to normal", LIMIT_S)


def test_each_alert_is_fired_here() -> None:
    text = Path(__file__).read_text()
    assert [alert.name for alert in ALERTS if f'"{alert.name}"' not in text] == []
