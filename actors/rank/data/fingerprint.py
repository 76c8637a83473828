"""What tells one data set from another without reading it whole, so that a run's record can say on what it was trained."""

from __future__ import annotations

import hashlib
import logging
import pickle
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from actors.rank.data.sampling import generators_kept

if TYPE_CHECKING:
    from hashlib import _Hash

log = logging.getLogger("fleet.data")


def fingerprint(dataset: Any, *, named: bool = True) -> str:
    """SHA-256 over type, length, and first, middle and last sample of a map-style dataset; empty when one cannot be read or digested.

    A Hugging Face dataset has a fingerprint of its own, over all that it was made by, which is part of it. Without ``named`` neither that
    nor the type counts: the samples of a script are the same under another name of its file.

    Never raises, as a record is worth no training. Random generators are as before, whatever the samples draw.
    """
    try:
        with generators_at(0):
            return _fingerprint(dataset, named)
    except Exception as error:  # noqa: BLE001 - whatever a user's data set raises, the step that needs the sample will raise it
        log.info("the data set has no fingerprint: %r", error)
        return ""


def samples_fingerprint(dataset: Any) -> str:
    """That of the samples alone, to be compared with another process's; empty also where they are others when they are read again."""
    first, again = (fingerprint(dataset, named=False) for _ in range(2))
    return first if first == again else ""


def digest_of(value: Any) -> str:
    """SHA-256 of a sample, or of several; empty when it cannot be digested."""
    try:
        return _alone(value).hex()
    except Exception as error:  # noqa: BLE001 - pickling runs the user's code, and a sample need not be made for it
        log.info("a sample cannot be digested: %r", error)
        return ""


def _fingerprint(dataset: Any, named: bool) -> str:
    found, length = hashlib.sha256(), len(dataset)
    _head(found, f"{type(dataset).__module__}.{type(dataset).__qualname__}" if named else "samples", length)
    own = getattr(dataset, "_fingerprint", None)
    if named and isinstance(own, str):
        _add(found, own)
    for index in sorted({0, length // 2, length - 1}):
        _add(found, dataset[index])
    return found.hexdigest()


@contextmanager
def generators_at(seed: int) -> Iterator[None]:
    """Within, the host's generators begin at this seed, so that samples that draw are the same each time; then all are as before."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    with generators_kept():
        try:
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            yield
        finally:
            torch.cuda.set_rng_state_all(devices)


def _head(found: _Hash, kind: str, count: int) -> None:
    """What comes next, and how much of it: else ``[[1], 2]`` would be as ``[[1, 2]]``."""
    found.update(f"{kind} {count}\n".encode())


def _add(found: _Hash, value: Any) -> None:
    """One value of a sample, whatever it is nested in. Raises what pickling raises."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        _bytes(found, f"tensor {value.dtype} {list(value.shape)}", value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        _bytes(found, f"array {value.dtype.str} {list(value.shape)}", value.tobytes())
    elif isinstance(value, Mapping):
        _many(found, "mapping", [part for item in value.items() for part in item])
    elif isinstance(value, (tuple, list)):
        _many(found, "sequence", value)
    elif isinstance(value, (set, frozenset)):
        _many(found, "set", sorted(_alone(part) for part in value))  # its order is another in each process
    else:
        _bytes(found, "pickled", pickle.dumps(value, protocol=5))


def _many(found: _Hash, kind: str, parts: list[Any] | tuple[Any, ...]) -> None:
    _head(found, kind, len(parts))
    for part in parts:
        _add(found, part)


def _alone(value: Any) -> bytes:
    found = hashlib.sha256()
    _add(found, value)
    return found.digest()


def _bytes(found: _Hash, kind: str, data: bytes) -> None:
    _head(found, kind, len(data))
    found.update(data)
