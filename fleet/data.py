"""Training data for a run: ``from fleet.data import ShardedDataset, Tokens``. This module loads torch; ``import fleet`` does not."""

from __future__ import annotations

from actors.rank.data import ShardedDataset
from actors.rank.readers import File, Fixed, JsonLines, Lines, Reader, Records, Tokens, Whole

__all__ = ["File", "Fixed", "JsonLines", "Lines", "Reader", "Records", "ShardedDataset", "Tokens", "Whole"]
