"""Fixtures for all tests. What needs Ray is imported where it is used: most tests run without it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fleet.cluster.local import LocalCluster
from tests.support.programs import LeftOut
from tests.support.seaweed import SeaweedServer, serving


def pytest_configure(config: pytest.Config) -> None:
    """Workers of pytest-xdist report to the process that started them, and it tells what was left out."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(LeftOut())


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """One local cluster for the session, connected: at least two worker nodes with two slots each. Who loses a node adds one."""
    with LocalCluster(nodes=3, slots_per_node=2) as running:
        running.connect()
        yield running


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """An object store of this session's own. Who stops or kills one starts one."""
    with serving(tmp_path_factory.mktemp("seaweed")) as server:
        yield server
