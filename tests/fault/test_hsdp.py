"""Groups of ranks as replicas of a model that ``fully_shard`` has cut, on real processes: a member is lost, with a spare and without; a
whole group is lost at once. The bits stay those of whole replicas, and of worlds of any other size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleet.protocol.records import HistoryBegun, ProcessLost, ViewPublished
from fleet.protocol.types import View
from fleet.settings.run import RunSettings
from tests.fault.test_bad_luck import of, survived, train_through
from tests.fault.test_fsdp import cut
from tests.support import trains
from tests.support.plain import PlainFleet
from tests.support.undisturbed import Undisturbed

INJECTED_AT = 10


def grouped(folder: Path, **changes: Any) -> RunSettings:
    """Two groups of two ranks; each is on a node of its own."""
    return cut(folder, **{"replica_size": 2, **changes})


@pytest.fixture(scope="module")
def other(undisturbed: Undisturbed) -> str:
    """The digest of an undisturbed run of three ranks, without groups."""
    return undisturbed(lambda folder: cut(folder, world=3))


class Injection:
    """Kills the ranks at some places of a view with all ranks and spares, once it has trained for a while, and remembers that view."""

    def __init__(self, *places: int) -> None:
        self.places = places
        self.view: View | None = None

    def __call__(self, fleet: PlainFleet) -> None:
        def whole() -> list[View]:
            return [one.view for one in of(ViewPublished, fleet.records()) if len(one.view.members) == fleet.settings.slots]

        fleet.wait_for(lambda: fleet.step >= INJECTED_AT and bool(whole()))
        self.view = whole()[-1]
        for place in self.places:
            fleet.kill(self.view.members[place].slot)


def after(records: list[Any], view: View | None) -> list[View]:
    assert view is not None
    return [one.view for one in of(ViewPublished, records) if one.view.generation > view.generation]


@pytest.mark.parametrize("place", [0, 3])
def test_a_spare_takes_the_place_of_a_member_that_is_lost(place: int, tmp_path: Path, other: str) -> None:
    """All others stay where they are, and the spare has the chunks of the one at the same place of the other group."""
    inject = Injection(place)
    outcome, records, digest = train_through(trains.plain, grouped(tmp_path, spares=1), tmp_path, inject)
    survived(outcome, records, digest, other)
    assert not of(HistoryBegun, records)
    assert inject.view is not None
    [lost] = [one.member for one in of(ProcessLost, records)][:1]
    assert lost == inject.view.members[place]
    first = after(records, inject.view)[0]
    [spare] = inject.view.spares
    assert first.members == tuple(spare if at == place else inject.view.members[at] for at in range(4))
    assert not first.spares


def test_without_a_spare_who_is_left_of_a_group_computes_beside_the_full_one(tmp_path: Path, other: str) -> None:
    inject = Injection(0)
    outcome, records, digest = train_through(trains.plain, grouped(tmp_path), tmp_path, inject)
    survived(outcome, records, digest, other)
    assert not of(HistoryBegun, records)
    assert inject.view is not None
    first = after(records, inject.view)[0]
    assert first.members[:3] == (inject.view.members[2], inject.view.members[3], inject.view.members[1]), "the full group comes first"
    assert all(lo < hi for lo, hi in first.ranges)


def test_a_member_lost_in_a_forward_is_stood_in_for_by_its_sibling(tmp_path: Path, other: str) -> None:
    """``optimizer_copies`` asks for none: it is the other group that has what is asked for then."""
    outcome, records, digest = train_through(trains.dies_in_forward, grouped(tmp_path, optimizer_copies=0), tmp_path)
    survived(outcome, records, digest, other)
    assert len(of(ViewPublished, records)) >= 2
    assert not of(HistoryBegun, records)


@pytest.mark.parametrize("places", [(0, 1), (2, 3)])
def test_a_whole_group_may_be_lost_at_once(places: tuple[int, int], tmp_path: Path, other: str) -> None:
    inject = Injection(*places)
    outcome, records, digest = train_through(trains.plain, grouped(tmp_path, spares=1), tmp_path, inject)
    survived(outcome, records, digest, other)
    assert not of(HistoryBegun, records), "the other group holds all"


def test_one_of_each_group_may_be_lost_unless_they_are_at_one_place(tmp_path: Path, other: str) -> None:
    """No full group is left, and yet a keeper of each chunk."""
    inject = Injection(0, 3)
    outcome, records, digest = train_through(trains.plain, grouped(tmp_path), tmp_path, inject)
    survived(outcome, records, digest, other)
    assert not of(HistoryBegun, records)
