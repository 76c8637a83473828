"""Ray Train under the shield: whatever is lost, the survivors go on, the lost are replaced in place, and ``fit`` returns."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.trainer import FitOutcome, fit
from fleet.app.cluster.local import RANK_RESOURCE, LocalCluster
from tests.support.waiting import Seen, started, until, wait_until_done

SLOTS = 4


class Run:
    """``fit`` in a thread, and its ranks as their files show them."""

    def __init__(self, folder: Path, slots: int = SLOTS, **options: Any) -> None:
        self.folder, self.slots = folder, slots
        self.outcome: FitOutcome | None = None
        config = {"folder": str(folder), **{name: options.pop(name) for name in ("stays", "raises") if name in options}}
        arguments: dict[str, Any] = {
            "slots": slots,
            "resources_per_slot": {RANK_RESOURCE: 1},
            "selector": {},
            "storage_path": str(folder / "ray"),
            "name": "shield",
        }
        self._call = lambda: fit(wait_until_done, config, **arguments, done=self.done.exists, **options)
        self.done = folder / "done"
        self._thread = threading.Thread(target=self._fit, daemon=True)
        self._thread.start()

    def _fit(self) -> None:
        self.outcome = self._call()

    def ranks(self) -> dict[int, Seen]:
        """The last start of each rank."""
        return {seen.rank: seen for seen in started(self.folder)}

    def whole(self) -> dict[int, Seen]:
        """Wait until every slot is filled by a live process."""
        until(lambda: len(self.ranks()) == self.slots and all(_lives(seen.pid) for seen in self.ranks().values()), "the run is whole")
        return self.ranks()

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.ranks()[rank].pid, number)

    def on(self, node: int) -> set[int]:
        return {seen.rank for seen in self.ranks().values() if seen.node == node}

    def renewed(self, before: dict[int, Seen], ranks: set[int]) -> dict[int, Seen]:
        """Wait until the ranks have new processes; the run then has no other change."""
        until(lambda: all(self.ranks()[rank].pid != before[rank].pid for rank in ranks), f"ranks {ranks} are replaced")
        after = self.whole()
        assert {rank for rank in after if after[rank].pid != before[rank].pid} == ranks
        return after

    def finish(self) -> FitOutcome:
        self.done.touch()
        return self.returned()

    def returned(self) -> FitOutcome:
        until(lambda: self.outcome is not None, "fit() returns")
        assert self.outcome is not None
        return self.outcome


def _lives(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def _logged(cluster: LocalCluster, text: str) -> Callable[[], bool]:
    """Whether the controller has logged a text since now."""

    def count() -> int:
        logs = cluster.directory.glob("session_latest/logs/train/*controller*")
        return sum(log.read_text(errors="replace").count(text) for log in logs)

    before = count()
    return lambda: count() > before


def _named(cluster: LocalCluster, title: str) -> list[int]:
    """Processes of the cluster by the title that Ray gives them."""
    return [pid for pid in cluster.pids() if title.encode() in _command(pid)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""  # it has ended


def _newcomers(cluster: LocalCluster, known: set[int]) -> list[int]:
    """New worker processes that have no name from Ray yet."""
    return [pid for pid in _named(cluster, "default_worker.py") if pid not in known]


@pytest.fixture(scope="module")
def run(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """One run for the losses that it must survive one after the other; in the end ``fit`` returns by itself."""
    running = Run(tmp_path_factory.mktemp("shield"))
    yield running
    outcome = running.finish()
    assert (outcome.status, outcome.error, outcome.forced) == ("finished", None, False)


def test_a_killed_rank_is_replaced_in_place(run: Run) -> None:
    before = run.whole()
    run.kill(1)
    after = run.renewed(before, {1})
    assert after[1].node == before[1].node


def test_no_process_waits_for_what_no_run_asks(run: Run, cluster: LocalCluster) -> None:
    """Ray Train's own scaling policy starts an actor that shares a cluster between training and data."""
    run.whole()
    assert _named(cluster, "ray::RayTrainWorker")
    assert not _named(cluster, "ray::_AutoscalingCoordinatorActor")


def test_two_ranks_lost_in_one_poll(run: Run) -> None:
    before = run.whole()
    run.kill(0)
    run.kill(2)
    run.renewed(before, {0, 2})


def test_a_rank_stopped_while_another_dies(run: Run, cluster: LocalCluster) -> None:
    before = run.whole()
    noticed = _logged(cluster, "to answer or to be lost")
    run.kill(3, signal.SIGSTOP)
    run.kill(1)
    until(noticed, "the controller sees the death and waits for the stopped rank")
    run.kill(3)
    run.renewed(before, {1, 3})


def test_a_node_with_two_ranks_is_lost(run: Run, cluster: LocalCluster) -> None:
    """First with room for both elsewhere, then without, until a node is added."""
    before = run.whole()
    node = next(seen.node for seen in before.values() if len(run.on(seen.node)) == 2)
    lost = run.on(node)
    assert cluster.lose(node) is None
    before = run.renewed(before, lost)

    node = cluster.alive()[0]
    lost = run.on(node)
    assert len(lost) == 2
    noticed = _logged(cluster, "waits for a node with room")
    assert cluster.lose(node) is None
    until(noticed, "the controller sees that there is no room")
    cluster.add()
    run.renewed(before, lost)
    cluster.add()


def _stop_newcomer(run: Run, cluster: LocalCluster, rank: int, given_up: Callable[[], bool]) -> bool:
    """Kill a rank and stop whoever may take its place before Ray knows it. False when the one that took it had its name already."""
    before, known = run.whole(), set(cluster.pids())
    stopped: set[int] = set()

    def replaced() -> bool:
        return run.ranks()[rank].pid != before[rank].pid

    def stop() -> bool:
        for pid in set(_newcomers(cluster, known)) - stopped:
            stopped.add(pid)
            _signal(pid, signal.SIGSTOP)
        return bool(stopped) or replaced()

    run.kill(rank)
    until(stop, "a newcomer starts")
    until(lambda: given_up() or replaced(), "the newcomer is given up")
    for pid in stopped:
        _signal(pid, signal.SIGCONT)
    return given_up()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def test_what_hangs_and_is_not_killed_by_others(cluster: LocalCluster, tmp_path: Path) -> None:
    """A newcomer that hangs before Ray knows it, then a rank that answers no more: the shield ends both, in time.

    Of the new processes any may become the newcomer, and it may have its name before it is looked at: then there is another try.
    """
    run = Run(tmp_path, slots=2, replace_limit_s=8.0, hang_s=4.0)
    before = run.whole()
    given_up = _logged(cluster, "hangs while a worker is being started; it was killed")
    assert any(_stop_newcomer(run, cluster, 1, given_up) for _ in range(5)), "each newcomer had its name before it was stopped"
    before = run.renewed(before, {1})
    run.kill(0, signal.SIGSTOP)
    run.renewed(before, {0})
    assert run.finish().status == "finished"


def test_a_killed_controller_ends_fit_with_an_error(cluster: LocalCluster, tmp_path: Path) -> None:
    from ray.util import placement_group_table

    before = set(_named(cluster, "ShieldedController"))
    run = Run(tmp_path, slots=1)
    ranks = run.whole()
    [controller] = set(_named(cluster, "ShieldedController")) - before
    held = {key for key, group in placement_group_table().items() if group["state"] != "REMOVED"}
    os.kill(controller, signal.SIGKILL)
    outcome = run.returned()
    assert outcome.status == "failed"
    assert "ActorDiedError" in str(outcome.error)
    until(lambda: not any(_lives(seen.pid) for seen in ranks.values()), "the ranks are gone")
    left = {key for key, group in placement_group_table().items() if group["state"] != "REMOVED"}
    assert len(held - left) == 1


def test_fit_returns_when_a_rank_never_does(cluster: LocalCluster, tmp_path: Path) -> None:
    run = Run(tmp_path, slots=1, stays=True, backstop_s=lambda: 0.5)
    run.whole()
    outcome = run.finish()
    assert (outcome.status, outcome.forced) == ("finished", True)


def test_fit_returns_early_on_request(cluster: LocalCluster, tmp_path: Path) -> None:
    stop = threading.Event()
    run = Run(tmp_path, slots=1, stop=stop.is_set)
    ranks = run.whole()
    stop.set()
    assert run.returned().status == "stopped"
    until(lambda: not _lives(ranks[0].pid), "the rank is gone")


def test_whoever_forsakes_a_cluster_has_no_thread_left_in_ray(cluster: LocalCluster, tmp_path: Path) -> None:
    """Ray ends a process, with code 1, that leaves a cluster while a thread of it frees what it held there."""
    forsaken, before = threading.Event(), set(threading.enumerate())
    run = Run(tmp_path, slots=1, forsaken=forsaken.is_set)
    [rank] = run.whole().values()
    in_ray = [thread for thread in threading.enumerate() if thread.name == "fleet-ray-train" and thread not in before]
    assert len(in_ray) == 1
    forsaken.set()
    assert run.returned().status == "stopped"
    assert not in_ray[0].is_alive()
    assert _lives(rank.pid), "all of it is left as it is"
    run.finish()
    until(lambda: not _lives(rank.pid), "the rank is gone")
