"""With one shard and one rank a loop has the bits of the plain loop beside it. With sixteen shards it differs by rounding alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zoo.harness import all_of, alone, differences, plain
from tests.zoo.loops import LOOPS


@pytest.mark.parametrize("name", LOOPS)
def test_one_rank_trains_what_is_written(name: str, tmp_path: Path) -> None:
    for shards in (1, 16):
        (found, _), right = alone(name, shards, tmp_path), plain(name, shards)
        assert not differences(all_of(found), all_of(right), exact=shards == 1)
