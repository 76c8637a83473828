"""Hosts that the tests of this folder share. Who needs a cluster that is set up otherwise starts one on hosts of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.host_runs import ON_THE_HEAD, Seen, Shell
from tests.support.host_store import HostStore
from tests.support.hosts import Hosts
from tests.support.ray_hosts import RayHosts


@pytest.fixture(scope="session")
def four() -> Iterator[Hosts]:
    """The hosts of the session's cluster."""
    with Hosts(4) as hosts:
        yield hosts


@pytest.fixture(scope="session")
def store(four: Hosts) -> HostStore:
    """An object store on the head's host; each host of the cluster has credentials for it when Ray starts there."""
    return HostStore(four[0])


@pytest.fixture(scope="session")
def shared(four: Hosts, store: HostStore) -> RayHosts:
    """One Ray cluster of a head and three workers, each on a host, for the session. It takes submitted jobs, too."""
    return RayHosts(four, prepare=store.admit, dashboard=True)


@pytest.fixture(scope="session")
def undisturbed(shared: RayHosts, store: HostStore, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """A run in the foreground, with two ranks, to which nothing happens."""
    shell = Shell(shared, store, tmp_path_factory.mktemp("undisturbed"))
    done = shell.run("undisturbed", world=2, spares=0)
    assert done.returncode == 0, done.stderr[-3000:]
    return shell.seen(f"{ON_THE_HEAD}/undisturbed")


@pytest.fixture
def ray_hosts(shared: RayHosts) -> Iterator[RayHosts]:
    """The cluster of the session: whole when the test begins, and made whole again after it."""
    yield shared
    shared.restore()


@pytest.fixture
def pair() -> Iterator[Hosts]:
    """Two hosts of the test's own, without Ray."""
    with Hosts(2) as hosts:
        yield hosts
