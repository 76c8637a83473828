"""A checkpoint or a model as one plain file, which other programs can read without Fleet."""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleet.host.journal import sync_directory
from storage.backends.files import TEMPORARY, copy_in, open_files
from storage.checkpoint.names import TensorRef, plain, read_skeleton, weights_of
from storage.checkpoint.store import CheckpointStore

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Names that ``from_pretrained`` looks for."""

FILE_BYTES = 5_000_000_000


def export_state(store: CheckpointStore, checkpoint: str, target: Path) -> tuple[int, list[str]]:
    """Write {tracked name: its state dict} to ``target``, whole or not at all.

    Returns (bytes written, classes of the objects that were left out because they are not plain data). A state whose skeleton cannot be
    read is ``{"tensors": [...]}``.

    Raises:
        CheckpointDamaged: names the part that is missing, cut short or altered.
        OSError: the store failed, or ``target`` cannot be written.
    """
    import torch

    state, dropped = load_state(store, checkpoint)
    with _whole(target) as beside, beside.open("xb") as file:
        torch.save(state, file)
    return target.stat().st_size, dropped


def export_weights(store: CheckpointStore, checkpoint: str, folder: Path, module: str = "", file_bytes: int = FILE_BYTES) -> list[Path]:
    """Write the tracked modules' weights to ``folder`` as safetensors for ``from_pretrained``. Returns the files.

    One file, or several and an index, of at most ``file_bytes`` each but for a single tensor. It takes no memory for the optimizer's state.
    Tied weights are written under each of their names.

    Raises:
        LookupError: the checkpoint has no such module.
        FileExistsError: the folder has weights already, which might be taken for these.
        CheckpointDamaged: names the part that is missing, cut short or altered.
        OSError: the store failed, or ``folder`` cannot be written.
    """
    if there := sorted(folder.glob("*.safetensors*")):
        raise FileExistsError(f"{there[0]} exists already")
    meta, tensors = store.load(checkpoint, lambda meta: {ref.index for ref in weights_of(meta, module).values()})
    weights = {name: tensors[ref.index] for name, ref in weights_of(meta, module).items()}
    folder.mkdir(parents=True, exist_ok=True)
    files = _assigned(weights, file_bytes)
    for name, names in files.items():
        with _whole(folder / name) as beside:
            _write_safetensors(beside, {key: weights[key] for key in names})
    if len(files) > 1:
        _write_index(folder / INDEX, files, weights)
    return [folder / name for name in files]


def _assigned(weights: Mapping[str, Tensor], file_bytes: int) -> dict[str, list[str]]:
    """The names of tensors by file, in order."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, tensor in weights.items():
        if groups[-1] and filled + tensor.nbytes > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += tensor.nbytes
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {f"model-{number:05d}-of-{len(groups):05d}.safetensors": names for number, names in enumerate(groups, 1)}


def _write_index(path: Path, files: Mapping[str, Sequence[str]], weights: Mapping[str, Tensor]) -> None:
    places = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in weights.values())}, "weight_map": places}
    with _whole(path) as beside:
        beside.write_text(json.dumps(index, indent=2))


def load_state(store: CheckpointStore, checkpoint: str, device: Any = "cpu") -> tuple[dict[str, Any], list[str]]:
    """({tracked name: its state dict} in memory, with tensors on ``device``; the classes left out). See :func:`export_state`."""
    from torch.utils._pytree import tree_map_only

    meta, tensors = store.load(checkpoint)
    dropped: list[str] = []
    skeleton = read_skeleton(meta)
    state = {"tensors": [TensorRef(index) for index in sorted(tensors)]} if skeleton is None else plain(skeleton, dropped.append)
    there = {index: tensor.to(device) for index, tensor in tensors.items()}
    return tree_map_only(TensorRef, lambda ref: there[ref.index], state), sorted(set(dropped))


def export_model(target: str, model: Mapping[str, Any]) -> str:
    """Write names to tensors to the path or URL ``target``, whole or not at all. Returns its place: an absolute path, or the URL.

    ``.safetensors``: one flat file of that format; mappings within ``model`` give names with a dot, and tensors that share memory are
    written each. Any other name: a file for ``torch.load(FILE, weights_only=True)``. The same tensors give the same bytes.

    Raises:
        OSError: the folder cannot be made, or the file cannot be written.
    """
    if "://" not in target:
        path = Path(target).absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        with _whole(path) as beside:
            _write_model(beside, path.suffix, model)
        return str(path)
    folder, _, name = target.rpartition("/")
    with tempfile.TemporaryDirectory(prefix="fleet-save-") as beside:
        _write_model(Path(beside, "model"), Path(name).suffix, model)
        copy_in(open_files(folder), name, Path(beside, "model"))
    return target


def _write_model(path: Path, suffix: str, model: Mapping[str, Any]) -> None:
    import torch

    if suffix == ".safetensors":
        _write_safetensors(path, dict(_flat(model)))
    else:
        with path.open("xb") as file:
            torch.save(dict(model), file)


def _write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Tensors that share memory are written each: a reader without tied weights finds them under any of their names."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode  # as any new file; with the library's own mode no other user could read it
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    path.chmod(mode)


def _flat(model: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in model.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """A file beside ``target`` that takes its place once the block ends, durably; it is removed when the block raises."""
    beside = target.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
    try:
        yield beside
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(target)
        sync_directory(target.parent)
    finally:
        beside.unlink(missing_ok=True)
