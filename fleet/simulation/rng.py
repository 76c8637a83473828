"""Seeds as pure functions. Every random stream of a run is named, so that adding one never shifts another."""

from __future__ import annotations

import hashlib
import random


def derive_seed(seed: int, *path: object) -> int:
    """A 63-bit seed for the stream named by ``path`` under ``seed``; equal inputs give equal seeds on every machine and version."""
    text = ":".join(map(str, (seed, *path)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def stream(seed: int, *path: object) -> random.Random:
    """A private generator for the stream named by ``path``."""
    return random.Random(derive_seed(seed, *path))
