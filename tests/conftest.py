"""Fixtures for all tests. What needs Ray is imported where it is used: most tests run without it."""

from __future__ import annotations

import gc
import itertools
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from fleet.app.cluster.local import LocalCluster
from tests import tiers
from tests.support.processes import end_all
from tests.support.programs import LeftOut
from tests.support.seaweed import SeaweedServer, serving
from tests.support.trackers import MlflowServer, mlflow_serving
from tests.support.undisturbed import Undisturbed
from tests.support.waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.support.watching import Watched


FILES = 16
"""So many files are told with their times."""

hypothesis.settings.register_profile("fleet", deadline=None)  # how long an example takes says how busy the machine is
hypothesis.settings.load_profile("fleet")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=tiers.names(), help="run the tests of this tier, or part of `make nightly`, alone (tests/tiers.py)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other tiers. A line of the list that names a test which is not there is an error."""
    tier = config.getoption("--tier")
    if tier is None:
        return
    if unknown := tiers.unknown([item.nodeid for item in items], whole=not any("::" in argument for argument in config.args)):
        raise pytest.UsageError(f"tests/tiers.py names tests that are not there: {', '.join(unknown)}")
    chosen = [item for item in items if tiers.tier_of(item.nodeid) == tier]
    config.hook.pytest_deselected(items=[item for item in items if tiers.tier_of(item.nodeid) != tier])
    items[:] = chosen


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Tell which files of a tier take longest. The times of workers that run beside each other are added up."""
    if config.getoption("--tier") is None:
        return
    took_s = Counter[str]()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        took_s[getattr(report, "nodeid", "").partition("::")[0]] += getattr(report, "duration", 0.0)
    if not (total_s := took_s.total()):
        return
    terminalreporter.section(f"longest files, of {total_s:.0f} s")
    for file, seconds in took_s.most_common(FILES):
        terminalreporter.line(f"{seconds:7.1f} s {seconds / total_s:5.1%} {file}")


def pytest_collection_finish() -> None:
    """The garbage collector looks no more at the 700,000 objects of modules and tests, which stay."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Workers of pytest-xdist report to the process that started them, and it tells what was left out."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(LeftOut())


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What ranks keep between runs does not lie in the user's own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    """What the test began and did not wait for."""
    yield
    end_all()


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """One local cluster for the session, connected: at least two worker nodes with two slots each. Who loses a node adds one."""
    from actors.hosts import start_zygote  # it imports Ray, and most sessions start no cluster

    with LocalCluster(nodes=3, slots_per_node=2, zygote=start_zygote) as running:
        running.connect()
        yield running


@pytest.fixture(autouse=True)
def no_lost_node_is_taken_for_alive(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ray learns of a lost node some seconds later. Until then it may place an actor of the next test there."""
    running = request.getfixturevalue("cluster") if "cluster" in request.fixturenames else None
    yield
    if not isinstance(running, LocalCluster):
        return
    import ray

    if ray.is_initialized():
        alive = len(running.alive()) + 1  # its head is no worker node
        until(lambda: sum(bool(node["Alive"]) for node in ray.nodes()) <= alive, "Ray knows which nodes are lost")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Digests of runs without faults, which all processes of this session share."""
    own = tmp_path_factory.getbasetemp()
    return Undisturbed((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "undisturbed")


@pytest.fixture(scope="module")
def unconnected() -> Iterator[None]:
    """Tests of other files may have left this process in the cluster of the session; it is there again afterwards."""
    import ray  # who starts no cluster does without

    from fleet.app.cluster.quiet import connect

    before = ray.get_runtime_context().gcs_address if ray.is_initialized() else ""
    ray.shutdown()
    yield
    if before:
        connect(before)


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """An object store of this session's own. Who stops or kills one starts one."""
    with serving(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from tests.support.browser import chromium

    with chromium() as found:
        yield found


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Watched]:
    """The pages of the runs in the test's folder."""
    from tests.support.watching import watched

    with watched(tmp_path) as server:
        yield server


@pytest.fixture(scope="session")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """A tracking server of this session's own. Who stops one starts it again."""
    with mlflow_serving(tmp_path_factory.mktemp("mlflow")) as server:
        yield server
