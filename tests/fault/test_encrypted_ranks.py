"""Ranks of two hosts encrypt their messages, and end with the same bits. Each host is an address of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.host import tls
from fleet.protocol.records import ViewPublished
from tests.fault.test_bad_luck import after, of, settings, survived
from tests.fault.test_fsdp import cut
from tests.support import trains
from tests.support.certificates import Authority
from tests.support.plain import PlainFleet

HOSTS = ("127.0.0.11", "127.0.0.12")
"""A connection to one of them has 127.0.0.1 at its other end: for Fleet it is between hosts."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    """The coordinator and the agents, which live in this process, have certificates from it."""
    made = Authority().folder(tmp_path / "tls")
    tls.hold(made)
    yield made
    tls.hold("")


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_a_killed_rank_is_replaced_and_changes_no_bit(sharding: str, folder: str, tmp_path: Path) -> None:
    chosen, digests = settings if sharding == "none" else cut, list[str]()
    for encrypt in ("", folder):
        home = tmp_path / f"run{len(digests)}"
        home.mkdir()
        with PlainFleet(trains.plain, chosen(home, world=2, spares=1, tls=encrypt), home, hosts=HOSTS if encrypt else HOSTS[:1]) as fleet:
            if encrypt:
                after(8)(fleet)
                fleet.kill(1)
            outcome = fleet.wait()
            digests.append(fleet.coordinator.machine.state.ending.record.digest)
            records = fleet.records()
    survived(outcome, records, digests[1], digests[0], other_ratio=1.0)
    assert len(of(ViewPublished, records)) >= 2
    assert len({view.view.store.rpartition(":")[0] for view in of(ViewPublished, records)} | set(HOSTS)) == 2
