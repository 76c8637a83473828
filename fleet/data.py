"""Training data for a run: ``from fleet.data import ShardedDataset, Tokens``. This module loads torch; ``import fleet`` does not."""

from __future__ import annotations

from actors.rank.data import ShardedDataset
from actors.rank.images import Images
from actors.rank.parquet import Parquet
from actors.rank.readers import File, Fixed, Grouped, JsonLines, Lines, Reader, Records, Tokens, Whole
from actors.rank.streams import Streams

__all__ = [
    "File",
    "Fixed",
    "Grouped",
    "Images",
    "JsonLines",
    "Lines",
    "Parquet",
    "Reader",
    "Records",
    "ShardedDataset",
    "Streams",
    "Tokens",
    "Whole",
]
