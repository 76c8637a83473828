"""Which samples a step takes where those of some steps are left out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rank.data.feeds import Feed, ShardedDataset
from actors.rank.data.sampling import sample_indices
from fleet.errors import ConfigError
from fleet.protocol.draws import draw_of, in_texts, left_out_of, range_of, step_of, without
from fleet.settings.run import RunSettings

RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)).map(lambda at: (at[0], at[0] + at[1])), max_size=4)


def test_later_steps_take_what_would_have_come_next() -> None:
    left_out = left_out_of(["1200:1260"])
    assert [draw_of(left_out, step) for step in (0, 1199, 1200, 1201, 5000)] == [0, 1199, 1260, 1261, 5060]
    assert [step_of(left_out, draw) for draw in (1199, 1200, 1259, 1260)] == [1199, None, None, 1200]


def test_what_is_left_out_later_is_named_by_the_steps_that_the_run_has_then() -> None:
    once = left_out_of(["1200:1260"])
    assert without(once, [(1200, 1202)]) == ((1200, 1262),), "these steps take draws 1260 and 1261 by now"
    assert without(once, [(1190, 1205)]) == ((1190, 1265),)
    assert without(once, [(1000, 1001), (1300, 1301)]) == ((1000, 1001), (1200, 1260), (1360, 1361))


@given(RANGES, RANGES)
def test_steps_take_in_order_what_is_not_left_out(first: list[tuple[int, int]], then: list[tuple[int, int]]) -> None:
    left_out = without(without((), first), then)
    once = [draw for draw in range(400) if not any(lo <= draw < hi for lo, hi in first)]
    right = [draw for step, draw in enumerate(once) if not any(lo <= step < hi for lo, hi in then)]
    assert [draw_of(left_out, step) for step in range(200)] == right[:200]
    assert [step_of(left_out, draw) for draw in right[:200]] == list(range(200))
    assert left_out_of(in_texts(left_out)) == left_out


@pytest.mark.parametrize("text", ["1200", "1200-1260", "1260:1200", "5:5", "-1:4", "a:b", ""])
def test_what_is_no_range_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--skip-steps = .*FIRST:END.*say --skip-steps 1200:1260"):
        range_of("--skip-steps", text)
    with pytest.raises(ConfigError, match="left_out = "):
        RunSettings(left_out=(text,))


def test_a_step_draws_other_samples_and_has_its_own_random_numbers() -> None:
    data = ShardedDataset(list(range(1000)), workers=0)
    usual = Feed(data, 7, 4, 8, list)
    feed = Feed(data, 7, 4, 8, list, left_out=((3, 5),))
    assert feed.get(2, 1) == usual.get(2, 1)
    assert feed.get(3, 1) == usual.get(5, 1) == sample_indices(7, 5, 1, 4, 8, 1000)
