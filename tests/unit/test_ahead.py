"""The next unit is asked for while a unit computes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.rank.fsdp.ahead import AheadFetch, FlatGathering, GatherOrder, Wanted
from actors.rank.fsdp.layout import FsdpLayout
from actors.rank.fsdp.serving import FetchRequest
from actors.rank.membership.process_group import Group
from tests.unit.test_fsdp_engine import close, make
from tests.unit.test_reduction import with_groups
from tests.unit.test_sharded_engine import STEPS, join, take_all

LIMIT_S = 20.0


def expected(order: GatherOrder[str], shard: str) -> list[str | None]:
    """The unit that is expected behind each gathering of a shard."""
    order.begin()
    found = []
    for unit in shard:
        order.came(unit)
        found.append(order.next)
    order.end()
    return found


@given(st.text("abcd", min_size=1, max_size=12))
def test_a_shard_is_expected_to_do_as_the_last_one_did(shard: str) -> None:
    order = GatherOrder[str]()
    assert expected(order, shard) == [None] * len(shard)
    for _ in range(2):
        assert expected(order, shard) == [*shard[1:], None]


def test_what_is_left_out_or_comes_anew_costs_one_guess() -> None:
    order = GatherOrder[str]()
    expected(order, "abcdcba")
    assert expected(order, "abdcba") == ["b", "c", "c", "b", "a", None]
    assert expected(order, "axbdcba") == ["b", "b", "d", "c", "b", "a", None]


def test_a_shard_that_came_to_no_end_is_no_example() -> None:
    order = GatherOrder[str]()
    expected(order, "abc")
    order.begin()
    order.came("a")
    assert expected(order, "abc") == ["b", "c", None]


def gathering(flat: int, *keepers: tuple[int, ...]) -> FlatGathering:
    memory = torch.zeros(len(keepers))
    wanted = [(ranks, FetchRequest(flat, lo, lo + 1, memory[lo : lo + 1])) for lo, ranks in enumerate(keepers)]
    return FlatGathering(flat, [request for _, request in wanted], wanted)


def test_a_stretch_that_the_first_server_does_not_give_is_left_for_the_next_one() -> None:
    asked = list[list[Wanted]]()

    def fetch(wanted: Sequence[Wanted]) -> list[int]:
        asked.append(list(wanted))
        return [1, 2]

    ahead, one, two = AheadFetch(fetch), gathering(5, (1, 2), (2, 3)), gathering(6, (3,), (1,))
    ahead.ask([one, two])
    first, second = ahead.take(5), ahead.take(6)
    assert first is not None and second is not None
    assert first.wanted == [((3,), one.wanted[1][1])] and second.wanted == [((), two.wanted[0][1])]
    assert asked == [[*one.wanted, *two.wanted]]
    assert ahead.take(5) is None, "it is taken once"
    ahead.close()


def test_memory_is_free_only_when_nothing_is_on_its_way_into_it() -> None:
    began, ended = threading.Event(), threading.Event()

    def fetch(wanted: Sequence[Wanted]) -> list[int]:
        began.set()
        while not ahead.dropped:
            threading.Event().wait(0.001)
        ended.set()
        return []

    ahead = AheadFetch(fetch)
    ahead.ask([gathering(5, (1,))])
    assert began.wait(LIMIT_S)
    ahead.drop()
    assert ended.is_set() and ahead.take(5) is None and not ahead.dropped
    ahead.close()


@pytest.mark.parametrize("size", [2, 3])
def test_all_units_of_a_shard_but_the_first_are_asked_for_ahead(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each shard but the first one of a rank. No more than one unit is here beside the outermost one when the next is asked for."""
    counts, lock, take = {True: 0, False: 0}, threading.Lock(), AheadFetch.take

    def counted(ahead: AheadFetch, flat: int) -> FlatGathering | None:
        found = take(ahead, flat)
        with lock:
            counts[found is not None] += 1
        return found

    monkeypatch.setattr(AheadFetch, "take", counted)

    def rank(group: Group) -> str:
        train, state = make("fsdp", size, tmp_path / f"{group.rank}")
        assert isinstance(train.layout, FsdpLayout)
        join(train, group)
        assert take_all(train, state) == list(range(STEPS))
        found = train.layout.digest(STEPS)
        group.all_gather(torch.empty(group.size, 1), torch.zeros(1))
        close(train)
        return found

    assert len(set(with_groups(size, rank))) == 1
    assert counts[True] > 2 * counts[False], counts
