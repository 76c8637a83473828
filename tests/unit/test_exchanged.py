"""How much of an exchange was there before a rank was done, and what that has spared it."""

from __future__ import annotations

import pytest
import torch

from actors.rank.membership.process_group import Group
from actors.rank.step.landed import MARK, MOST, Landing
from actors.rank.step.reduction import Reducer
from actors.rank.telemetry.exchanged import Before, Exchanged, hidden_us
from actors.rank.telemetry.usage import RECEIVED
from tests.support.waiting import until
from tests.unit.test_reduction import SHARDS, Buffers, summed, with_groups


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_a_message_is_here_once_its_end_is(dtype: torch.dtype) -> None:
    messages = [torch.zeros(64, dtype=dtype) for _ in range(3)]
    landing = Landing(messages)
    assert (landing.asked_bytes, landing.landed_bytes) == (3 * messages[0].nbytes, 0)
    messages[1][:-8].fill_(1)
    assert landing.landed_bytes == 0, "a part of it is not all"
    messages[1].fill_(1)
    assert landing.landed_bytes == messages[1].nbytes


def test_the_mark_is_no_number_in_any_width() -> None:
    mark = torch.tensor([MARK])
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert bool(torch.isnan(mark.view(dtype)[-1])), dtype


def test_of_many_messages_a_few_speak_for_all() -> None:
    messages = [torch.zeros(8) for _ in range(4 * MOST)]
    landing = Landing(messages)
    for message in messages[: 2 * MOST]:
        message.fill_(1)
    assert landing.landed_bytes == landing.asked_bytes // 2
    assert Landing([]).landed_bytes == Landing([torch.zeros(1)]).landed_bytes == 0


def test_hidden_time_is_that_of_the_bytes_and_never_more_than_they_had() -> None:
    assert hidden_us(0, 100, 5_000, 1_000) == 0
    assert hidden_us(50, 100, 5_000, 1_000) == 500
    assert hidden_us(50, 100, 300, 1_000) == 300
    assert hidden_us(50, 0, 300, 1_000) == 300
    assert hidden_us(50, 100, -20, 1_000) == 0, "by clocks that are not quite aligned"


def test_totals_are_of_all_that_was_received() -> None:
    totals, before = Exchanged(), Before(100, 60, RECEIVED.total)
    RECEIVED.count(260)
    totals.note(before, 10_000, 3_000)
    assert totals.counts == (1, 600, 360, 60)
    totals.note(Before(0, 0, RECEIVED.total), 0, 3_000)
    assert totals.counts == (2, 600, 360, 60)


def test_what_came_while_a_rank_computed_is_seen_before_it_waits() -> None:
    """The others have given all that they bring to rank 0 before it is done; it has asked for nothing in the second reduction."""
    expected = Buffers(30_001)

    def rank(group: Group) -> list[tuple[int, int] | None]:
        reducer, mean = Reducer(SHARDS, "ordered", 1 << 20), Buffers(30_001)
        sums = summed(group, 30_001, reducer)
        reducer.expect(mean.flats)
        if group.rank == 0:
            until(lambda: _all_here(reducer), "what the others bring")
        seen = [reducer.ahead()]
        reducer.reduce(sums, mean)
        return [*seen, reducer.ahead()]

    for size in (3, 4):
        first, after = with_groups(size, rank)[0]  # type: ignore[misc]
        assert first is not None and first[0] == first[1] > expected.flats[0].nbytes / 2
        assert after == (0, 0), "nothing is asked for ahead, so nothing hides"


def _all_here(reducer: Reducer) -> bool:
    ahead = reducer.ahead()
    return ahead is not None and ahead[0] == ahead[1]


def test_two_that_swap_hide_nothing() -> None:
    def rank(group: Group) -> tuple[int, int] | None:
        reducer = Reducer(SHARDS, "ordered", 1 << 20)
        sums, mean = summed(group, 5_000, reducer), Buffers(5_000)
        reducer.expect(mean.flats)
        counts = reducer.ahead()
        reducer.reduce(sums, mean)
        return counts

    assert with_groups(2, rank) == [(0, 0)] * 2
