"""A train function on its way to ranks: as bytes, which each rank makes a function of. So it need not be in a file that ranks find."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shipped:
    """``pickled`` is the function with all that it needs of its module. Each call makes it anew: no two processes share what it holds."""

    name: str
    pickled: bytes

    def __call__(self, run: Any) -> None:
        pickle.loads(self.pickled)(run)
