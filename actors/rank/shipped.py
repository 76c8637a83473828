"""A train function as bytes, from which each rank makes the function. So it need not be in a file that ranks can find."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shipped:
    """``pickled``: the function with all objects of its module that it needs. Each call makes new objects, so no calls share any."""

    name: str
    pickled: bytes

    def __call__(self, run: Any) -> None:
        pickle.loads(self.pickled)(run)
