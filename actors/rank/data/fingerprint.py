"""Digests that identify a data set without reading it whole. A run's record says with them on which data it trained."""

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
    """SHA-256 over type, length, and first, middle and last sample of a map-style dataset; empty when a sample cannot be read or digested.

    A Hugging Face dataset has a fingerprint of its own, over all operations that made it, which is included. Without ``named`` neither that
    nor the type counts: a script's samples are the same when its file has another name.

    It never raises, as training is worth more than the record. Random generators are afterwards as before, even if samples draw numbers.
    """
    try:
        with generators_at(0):
            return _fingerprint(dataset, named)
    except Exception as error:  # noqa: BLE001 - the step that needs the sample will raise the data set's error
        log.info("the data set has no fingerprint: %r", error)
        return ""


def samples_fingerprint(dataset: Any) -> str:
    """Digest of the samples alone, to compare with another process's; empty also where a second reading gives other samples."""
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
    """Context in which the host's generators begin at this seed, so samples that draw numbers are the same each time. Then all are as
    before."""
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
    """Add kind and count of the next values. Without them ``[[1], 2]`` and ``[[1, 2]]`` would have one digest."""
    found.update(f"{kind} {count}\n".encode())


def _add(found: _Hash, value: Any) -> None:
    """Add one value of a sample, at any depth. Raises the errors of pickling."""
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
