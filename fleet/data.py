"""Training data for a run: ``from fleet.data import ShardedDataset, Tokens``. This module loads torch; ``import fleet`` does not."""

from __future__ import annotations

from actors.rank.data.catalogue import Located, Place
from actors.rank.data.feeds import ShardedDataset
from actors.rank.data.images import Images
from actors.rank.data.parquet import Parquet
from actors.rank.data.readers import File, Fixed, Grouped, JsonLines, Lines, Reader, Records, Tokens, Whole
from actors.rank.data.streams import Streams

__all__ = [
    "File",
    "Fixed",
    "Grouped",
    "Images",
    "JsonLines",
    "Lines",
    "Located",
    "Parquet",
    "Place",
    "Reader",
    "Records",
    "ShardedDataset",
    "Streams",
    "Tokens",
    "Whole",
]
