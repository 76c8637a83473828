"""How long corruption stays unseen, as probabilities: what trials and the mean time to detection are held against."""

from __future__ import annotations


def undetected_ratio(steps: int, every: int, hit: float) -> float:
    """Probability that a corruption which has lasted for ``steps`` steps is not found yet: (1 - p)^j, averaged over where it began.

    With k = ``every``, ``steps`` = q k + r and 0 <= r < k there were q + 1 verifications for r of the k beginnings, and q for the others.
    """
    _check_hit(hit)
    if every == 0:
        return 1.0
    whole, rest = divmod(steps, every)
    miss = 1 - hit
    return float((rest * miss ** (whole + 1) + (every - rest) * miss**whole) / every)


def hit_probability(corrupt_shards_ratio: float, ranks_corrupt: int = 1) -> float:
    """p of one verification in which each rank has one of its shards checked: 1 - (1 - q)^c, q the share of shards that come out wrong."""
    _check_hit(corrupt_shards_ratio)
    return float(1 - (1 - corrupt_shards_ratio) ** ranks_corrupt)


def _check_hit(hit: float) -> None:
    if not 0 <= hit <= 1:
        raise ValueError(f"{hit} is no probability")
