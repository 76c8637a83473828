"""With one shard and one rank a loop has the bits of the plain loop beside it. With sixteen shards it differs by rounding alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zoo.feed import Done, Feed
from tests.zoo.harness import all_of, alone, by_one_rank, differences, one_thread, plain
from tests.zoo.loops import LOOPS


@pytest.mark.parametrize("name", LOOPS)
def test_one_rank_trains_what_is_written(name: str, tmp_path: Path) -> None:
    for shards in (1, 16):
        (found, _), right = alone(name, shards, tmp_path), plain(name, shards)
        assert not differences(all_of(found), all_of(right), exact=shards == 1)


def test_one_rank_leaves_out_what_a_plain_loop_leaves_out(tmp_path: Path) -> None:
    order = [step for step in range(1000) if not (8 <= step < 10 or step == 15)]
    for shards in (1, 16):
        run = by_one_rank(LOOPS["classifier"].train, shards, tmp_path, left_out=("8:10", "15:16"))
        with one_thread():
            right = LOOPS["classifier"].plain(Feed(shards, order=order.__getitem__))
        found = all_of(Done(run._trained.state.objects, run.losses, run.figures))
        assert not differences(found, all_of(right), exact=shards == 1)
        assert differences(found, all_of(plain("classifier", shards)), exact=True)
