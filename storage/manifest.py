"""What a durable checkpoint is, without any I/O: its id and its manifest.

Ids sort by (lineage, step, generation) as plain text, so that the newest of a listing is its last.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fleet.errors import FleetError
from fleet.types import Part, StateId

VERSION = 1
MANIFEST = "manifest.json"

_ID = re.compile(r"(\d{6})-(\d{12})-g(\d{8})")
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class CheckpointDamaged(FleetError, OSError):
    """A checkpoint cannot be used: the message names it, the part or manifest at fault, and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A committed checkpoint: its state, its parts, and ``meta``, which is opaque here."""

    checkpoint: str
    state: StateId
    parts: tuple[Part, ...]
    meta: str

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


def checkpoint_id(state: StateId, generation: int) -> str:
    """``lineage-step-gGENERATION``, zero padded. The generation keeps a stale view's writers out of a newer view's files.

    Raises:
        ValueError: a number is negative or too large to keep the order.
    """
    text = f"{state.lineage:06d}-{state.step:012d}-g{generation:08d}"
    if not _ID.fullmatch(text):
        raise ValueError(f"lineage {state.lineage}, step {state.step}, generation {generation}: negative, or too large for a checkpoint id")
    return text


def parse_checkpoint_id(checkpoint: str) -> tuple[StateId, int]:
    """(state, generation) of an id. Raises ValueError for a text that is none."""
    match = _ID.fullmatch(checkpoint)
    if match is None:
        raise ValueError(f"{checkpoint!r} is not a checkpoint id (lineage-step-gGENERATION)")
    lineage, step, generation = map(int, match.groups())
    return StateId(lineage, step), generation


def safe_name(name: str) -> str:
    """``name``, which is safe as one component of a path. Raises ValueError for one that is not."""
    if not _SAFE.fullmatch(name):
        raise ValueError(f"{name!r} cannot be a file name: letters, digits, dot, dash and underscore only")
    return name


def part_name(index: int, count: int) -> str:
    """File name of part ``index`` of ``count``."""
    return f"part-{index:05d}-of-{count:05d}.pt"


def check_parts(checkpoint: str, parts: Sequence[Part]) -> None:
    """Raises CheckpointDamaged when there are no parts, or two hold the same file or tensor."""
    files = Counter(safe_name(part.name) for part in parts)
    tensors = Counter(str(index) for part in parts for index in part.tensors)
    if not parts:
        raise CheckpointDamaged(f"checkpoint {checkpoint} has no parts")
    for what, found in (("file", files), ("tensor", tensors)):
        doubled = [item for item, count in found.items() if count > 1]
        if doubled:
            raise CheckpointDamaged(f"checkpoint {checkpoint}: {what} {', '.join(doubled)} is in two parts")


def encode_manifest(manifest: Manifest) -> bytes:
    """JSON, with a SHA-256 over the rest of it."""
    body = {
        "version": VERSION,
        "checkpoint": manifest.checkpoint,
        "lineage": manifest.state.lineage,
        "step": manifest.state.step,
        "meta": manifest.meta,
        "parts": [{"name": p.name, "bytes": p.bytes, "sha256": p.sha256, "tensors": list(p.tensors)} for p in manifest.parts],
    }
    return json.dumps(body | {"sha256": _digest(body)}, indent=1, sort_keys=True).encode()


def decode_manifest(checkpoint: str, data: bytes) -> Manifest:
    """Inverse of :func:`encode_manifest`. Raises CheckpointDamaged when it is damaged, of another version or of another checkpoint."""
    try:
        body = json.loads(data)
        digest = body.pop("sha256")
        if body["version"] != VERSION:
            raise CheckpointDamaged(f"checkpoint {checkpoint}: the manifest has version {body['version']}, this is version {VERSION}")
        parts = tuple(Part(p["name"], p["bytes"], p["sha256"], tuple(p["tensors"])) for p in body["parts"])
        manifest = Manifest(body["checkpoint"], StateId(body["lineage"], body["step"]), parts, body["meta"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointDamaged(f"checkpoint {checkpoint}: the manifest cannot be read: {error}") from error
    if digest != _digest(body):
        raise CheckpointDamaged(f"checkpoint {checkpoint}: the manifest does not match its SHA-256")
    if manifest.checkpoint != checkpoint:
        raise CheckpointDamaged(f"checkpoint {checkpoint}: the manifest is that of {manifest.checkpoint}")
    check_parts(checkpoint, parts)
    return manifest


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
