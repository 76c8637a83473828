"""The local cluster leaves nothing behind: not when a node is lost, not when its launcher is killed, not when it cannot start."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.app.cluster.local import LocalCluster
from fleet.app.cluster.ray_internals import answers
from fleet.errors import ConfigError, RunFailed
from fleet.host import processes
from tests.support.waiting import until

LAUNCHER = """
import sys
from fleet.app.cluster.local import LocalCluster
cluster = LocalCluster(nodes=1)
print(cluster.id, flush=True)
cluster.start()
print(cluster.directory, flush=True)
sys.stdin.read()
"""


def _name_of(pid: int) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def test_a_node_is_lost_whole_and_its_replacement_has_a_new_index(cluster: LocalCluster) -> None:
    lost, others = cluster.alive()[0], {pid for pid in cluster.pids() if _name_of(pid) in ("raylet", "gcs_server")}  # workers come and go
    victims = set(cluster.pids(lost))
    assert len(victims) >= 4  # host, raylet, two agents
    assert cluster.lose(lost) is None
    assert cluster.pids(lost) == [] and not victims & set(cluster.pids())
    assert others - victims <= set(cluster.pids())
    assert lost not in cluster.alive()
    assert "is not up" in str(cluster.lose(lost))
    added = cluster.add()
    assert added > lost and added in cluster.alive()


def test_the_control_store_answers_unless_it_is_stopped(cluster: LocalCluster) -> None:
    [store] = [pid for pid in cluster.pids() if _name_of(pid) == "gcs_server"]
    assert answers(cluster.address, 5.0)
    with held(store):
        assert not answers(cluster.address, 0.5)
    assert answers(cluster.address, 5.0)


@contextlib.contextmanager
def held(pid: int) -> Iterator[None]:
    """Stopped: each of its threads is, which on a busy machine takes a moment."""
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: {_state_of(thread) for thread in Path(f"/proc/{pid}/task").iterdir()} == {"T"}, "all threads have stopped")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _state_of(thread: Path) -> str:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


def test_without_a_dashboard_no_agent_has_a_part_that_would_serve_it(cluster: LocalCluster) -> None:
    raylets = [pid for pid in cluster.pids() if Path(f"/proc/{pid}/comm").read_text().strip() == "raylet"]
    assert len(raylets) == len(cluster.alive()) + 1

    def said() -> str:
        return "".join(log.read_text() for log in cluster.directory.glob("session_latest/logs/dashboard_agent*.log"))

    # Each agent names its raylet once it has loaded. A node that was lost early leaves a log in which nothing is ever said.
    until(lambda: all(f"raylet pid is {pid}\n" in said() for pid in raylets), "every agent has started")
    assert re.findall(r"Loaded (\d+) modules", said()) and set(re.findall(r"Loaded (\d+) modules", said())) == {"0"}


def test_a_killed_launcher_takes_the_cluster_with_it() -> None:
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", LAUNCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as launcher:
        assert launcher.stdout is not None
        name = launcher.stdout.readline().strip()
        directory = launcher.stdout.readline().strip()
        assert Path(directory).is_dir()
        assert len(processes.find(name)) >= 7
        launcher.send_signal(signal.SIGKILL)
    until(lambda: processes.find(name) == [], "all processes of the cluster are gone", limit_s=20)
    assert not Path(directory).exists()


def test_a_start_that_fails_leaves_nothing() -> None:
    cluster = LocalCluster(nodes=1, start_limit_s=0.01)
    with pytest.raises(RunFailed, match="did not come up"):
        cluster.start()
    assert processes.find(cluster.id) == []
    assert not cluster.directory.exists()
    cluster.stop()


@pytest.mark.parametrize("settings", [{"nodes": 0}, {"nodes": 1, "slots_per_node": 0}])
def test_impossible_sizes_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        LocalCluster(**settings)
