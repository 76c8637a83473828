"""What ranks send beside their gradients comes out as it went in, however many shards each brings."""

from __future__ import annotations

import functools
import itertools
import operator

from hypothesis import given
from hypothesis import strategies as st

from actors.rank.step.rows import COLLECTS, LOGS, OFFER, RowFormat, Rows

WIDTHS = st.lists(st.integers(0, 3), min_size=1, max_size=5)


@given(data=st.data(), widths=WIDTHS, parameters=st.integers(0, 200), counts=st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_all_is_read_as_it_was_said(data: st.DataObject, widths: list[int], parameters: int, counts: list[int]) -> None:
    form = RowFormat(widths, parameters, max(counts))
    numbers, shards = st.integers(-(2**50), 2**50).map(float), itertools.count()
    contributed = [[next(shards) for _ in range(count)] for count in counts]
    offers = data.draw(st.lists(st.tuples(*[st.integers(-1, 99)] * OFFER), min_size=len(counts), max_size=len(counts)))
    checks = [[data.draw(st.lists(numbers, min_size=width, max_size=width)) for _ in counts] for width in widths]
    present = [data.draw(st.integers(0, 2**parameters - 1)) for _ in counts]
    flags = data.draw(st.lists(st.integers(0, LOGS + COLLECTS), min_size=len(counts), max_size=len(counts)))
    carried = [[(float(shard), data.draw(numbers)) for shard in mine] for mine in contributed]
    rows = [
        form.pack(offers[rank], 7 * rank, [each for check in checks for each in check[rank]], flags[rank], present[rank], carried[rank])
        for rank in range(len(counts))
    ]
    assert {len(row) for row in rows} == {form.width}
    said = Rows(form, rows, contributed)
    assert said.offers == offers
    assert said.arrivals_us == [7 * rank for rank in range(len(counts))]
    assert said.checks == checks
    assert said.flags == functools.reduce(operator.or_, flags)
    every = 0
    for each in present:
        every |= each
    assert said.present == every
    losses, weights = said.by_shard(sum(counts))
    assert losses == [float(shard) for shard in range(sum(counts))]
    assert weights == [weight for mine in carried for _, weight in mine]
