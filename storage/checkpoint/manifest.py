"""A durable checkpoint's id and manifest, without any I/O.

Ids sort by (history, step, generation) as plain text, so that the newest of a listing is its last.
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
from fleet.protocol.types import Part, StateId

FORMAT = "fleet-checkpoint"
VERSION = 2
MANIFEST = "manifest.json"
METADATA = ".metadata"
"""The first file that ``torch.distributed.checkpoint`` reads."""

_ID = re.compile(r"(\d{6})-(\d{12})-g(\d{8})")
_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class CheckpointDamaged(FleetError, OSError):
    """A checkpoint cannot be used: the message names it, its bad part or manifest, and the fault."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A committed checkpoint: its state, its parts, and ``meta``, which is opaque here.

    ``run`` is the run that wrote it, or "" without a name. ``files`` are those beside the ranks' parts, without tensors. ``epoch``
    counts the holders of the run.
    """

    checkpoint: str
    state: StateId
    parts: tuple[Part, ...]
    meta: str
    run: str = ""
    files: tuple[Part, ...] = ()
    epoch: int = 0

    @property
    def all_files(self) -> tuple[Part, ...]:
        return (*self.parts, *self.files)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.all_files)


def checkpoint_id(state: StateId, generation: int) -> str:
    """``history-step-gGENERATION``, zero padded. The generation keeps a stale view's writers out of a newer view's files.

    Raises:
        ValueError: a number is negative or too large to keep the order.
    """
    text = f"{state.history:06d}-{state.step:012d}-g{generation:08d}"
    if not _ID.fullmatch(text):
        raise ValueError(f"history {state.history}, step {state.step}, generation {generation}: negative, or too large for a checkpoint id")
    return text


def parse_checkpoint_id(checkpoint: str) -> tuple[StateId, int]:
    """(state, generation) of an id. Raises ValueError for a text that is no id."""
    match = _ID.fullmatch(checkpoint)
    if match is None:
        raise ValueError(f"{checkpoint!r} is not a checkpoint id (history-step-gGENERATION)")
    history, step, generation = map(int, match.groups())
    return StateId(history, step), generation


def safe_name(name: str) -> str:
    """``name``, if it is safe as one component of a path. Raises ValueError if it is not."""
    if not _SAFE.fullmatch(name) and name != METADATA:
        raise ValueError(f"{name!r} cannot be a file name: letters, digits, dot, dash and underscore only")
    return name


def check_parts(checkpoint: str, parts: Sequence[Part]) -> None:
    """Raises CheckpointDamaged when there are no parts, two parts are the same file, or a tensor is in no part."""
    if not parts:
        raise CheckpointDamaged(f"checkpoint {checkpoint} has no parts")
    doubled = [name for name, count in Counter(safe_name(part.name) for part in parts).items() if count > 1]
    if doubled:
        raise CheckpointDamaged(f"checkpoint {checkpoint}: file {', '.join(doubled)} is in two parts")
    held = {index for part in parts for index in part.tensors}
    missing = sorted(set(range(max(held, default=-1) + 1)) - held)
    if missing:
        raise CheckpointDamaged(f"checkpoint {checkpoint}: tensor {', '.join(map(str, missing))} is in no part")


def encode_manifest(manifest: Manifest) -> bytes:
    """JSON, with a SHA-256 over the rest of it."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "run": manifest.run,
        "checkpoint": manifest.checkpoint,
        "history": manifest.state.history,
        "step": manifest.state.step,
        "meta": manifest.meta,
        "parts": [_file(part) | {"tensors": list(part.tensors), "layout": part.layout} for part in manifest.parts],
        "files": [_file(part) for part in manifest.files],
        "epoch": manifest.epoch,
    }
    return json.dumps(body | {"sha256": _digest(body)}, indent=1, sort_keys=True).encode()


def _file(part: Part) -> dict[str, Any]:
    return {"name": part.name, "bytes": part.bytes, "sha256": part.sha256}


def decode_manifest(checkpoint: str, data: bytes, run: str = "") -> Manifest:
    """Inverse of :func:`encode_manifest`.

    Raises:
        CheckpointDamaged: it is damaged, or of another format version, checkpoint or run (if ``run`` is given).
    """
    try:
        body = json.loads(data)
        digest = body.pop("sha256")
        if body["version"] != VERSION:
            reason = f"has format version {body['version']}, this Fleet reads {VERSION}: use the Fleet that wrote it"
            raise CheckpointDamaged(f"checkpoint {checkpoint}: the manifest {reason}")
        parts = tuple(Part(p["name"], p["bytes"], p["sha256"], tuple(p["tensors"]), p["layout"]) for p in body["parts"])
        files = tuple(Part(p["name"], p["bytes"], p["sha256"], ()) for p in body["files"])
        manifest = Manifest(
            body["checkpoint"], StateId(body["history"], body["step"]), parts, body["meta"], body["run"], files, body.get("epoch", 0)
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(f"checkpoint {checkpoint}: the manifest cannot be read: {error}") from error
    if digest != _digest(body):
        raise CheckpointDamaged(f"checkpoint {checkpoint}: the manifest does not match its SHA-256")
    if manifest.checkpoint != checkpoint:
        raise CheckpointDamaged(f"checkpoint {checkpoint}: the manifest is that of {manifest.checkpoint}")
    if run and manifest.run != run:
        raise CheckpointDamaged(f"checkpoint {checkpoint}: the manifest is that of run {manifest.run!r}, not of {run!r}")
    check_parts(checkpoint, parts)
    return manifest


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
