"""``fleet checkpoint``: stored checkpoints, their soundness, and plain files of them. Storage is imported when a command runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleet.app.cli.config import RUNS, Storage
from fleet.errors import ConfigError
from fleet.protocol.exit_codes import Exit

if TYPE_CHECKING:
    from storage.checkpoint.store import CheckpointStore

Where = Annotated[str, typer.Argument(metavar="WHERE", help="A run's folder, its name under --storage, or the URL of its store.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


class ExportAs(StrEnum):
    """Form of an exported checkpoint."""

    PT = "pt"
    SAFETENSORS = "safetensors"


def list_(where: Where, json_: Json = False, storage: Storage = RUNS) -> None:
    """List committed checkpoints, oldest first. Only manifests are read."""
    with _store(where, storage) as store:
        rows = [_row(store, checkpoint) for checkpoint in store.list()]
    if json_:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(_line(row))
    if not rows:
        print(f"no checkpoint in {store.url}")


def verify(
    where: Where, checkpoint: Annotated[str, typer.Argument(metavar="[ID]", help="Which one; all when none is named.")] = "",
    json_: Json = False, storage: Storage = RUNS,
) -> None:  # fmt: skip
    """Read every byte and compare it with the written digests. Exit code 1: a checkpoint is damaged; 2: there is none."""
    with _store(where, storage) as store:
        rows = [_verified(store, name) for name in ([_known(store, checkpoint)] if checkpoint else store.list())]
    if not rows:
        raise ConfigError("WHERE", where, "there is no checkpoint", "Name the folder of a run, its name, or the URL of its store.")
    print(json.dumps(rows, indent=1)) if json_ else [print(f"{row['id']}  {row['error'] or 'sound'}") for row in rows]
    raise typer.Exit(Exit.FAILED if any(row["error"] for row in rows) else Exit.DONE)


def export(
    where: Where, checkpoint: Annotated[str, typer.Argument(metavar="[ID]", help="Which one; the newest sound one if none is named.")] = "",
    output: Annotated[str, typer.Option(help="File to write, or with --format safetensors a folder; ID.pt or ID when none is named.")] = "",
    format_: Annotated[ExportAs, typer.Option("--format", help="pt: all of the state. safetensors: the weights alone.")] = ExportAs.PT,
    module: Annotated[str, typer.Option(help="With --format safetensors: which of several tracked modules; all when none is named.")] = "",
    storage: Storage = RUNS,
) -> None:  # fmt: skip
    """Write a checkpoint as one file for torch.load(FILE, weights_only=True), or its weights as a folder for from_pretrained(FOLDER)."""
    from storage.checkpoint.manifest import CheckpointDamaged, parse_checkpoint_id

    with _store(where, storage) as store:
        name = _known(store, checkpoint) if checkpoint else store.newest_valid()
        if name is None:
            raise ConfigError("WHERE", where, "there is no sound checkpoint", "See `fleet checkpoint verify` for what is there.")
        step = parse_checkpoint_id(name)[0].step
        try:
            _export_weights(store, name, step, output, module) if format_ is ExportAs.SAFETENSORS else _export_state(
                store, name, step, output
            )
        except CheckpointDamaged as error:
            raise ConfigError("ID", name, str(error), "Name none, and the newest sound one is exported.") from error


def delete(where: Where, checkpoint: Annotated[str, typer.Argument(metavar="ID", help="Which one.")], storage: Storage = RUNS) -> None:
    """Delete one checkpoint for good."""
    with _store(where, storage) as store:
        store.delete(_known(store, checkpoint))
    print(f"deleted {checkpoint}")


# ---- inside ------------------------------------------------------------------------------------------------------------------------------


def _export_state(store: CheckpointStore, name: str, step: int, output: str) -> None:
    from storage.checkpoint.export import export_state

    target = Path(output or f"{name}.pt")
    if not target.parent.is_dir():
        raise ConfigError("--output", output, f"there is no folder {target.parent}", "Create it first.")
    size, dropped = export_state(store, name, target)
    print(f"{target}: step {step}, {size} bytes, from {name}")
    print(f'load it with torch.load("{target}", weights_only=True)')
    for kind in dropped:
        print(f"left out: objects of class {kind}, which torch.load(weights_only=True) would refuse")


def _export_weights(store: CheckpointStore, name: str, step: int, output: str, module: str) -> None:
    from storage.checkpoint.export import export_weights

    folder = Path(output or name)
    try:
        files = export_weights(store, name, folder, module)
    except LookupError as error:
        raise ConfigError("--module", module, str(error), "Name one that is tracked, or none.") from error
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError("--output", str(folder), str(error), "Name a folder that is not there yet.") from error
    print(f"{folder}: step {step}, {sum(file.stat().st_size for file in files)} bytes in {len(files)} files, from {name}")
    print(f'put config.json beside them, model.config.save_pretrained("{folder}"), and load them with from_pretrained("{folder}")')
    print(f'or with safetensors.torch.load_file("{files[0]}"), and go on from them with run.track(weights="{folder}")')


@contextmanager
def _store(where: str, root: str) -> Iterator[CheckpointStore]:
    """The store of a run or URL. A failure of it becomes one message."""
    from storage.backends.causes import WAYS_OUT
    from storage.backends.urls import redact
    from storage.checkpoint.store import CheckpointStore

    try:
        yield CheckpointStore(_url(where, Path(root)))
    except (OSError, ValueError) as error:
        way_out = WAYS_OUT.get(
            getattr(error, "cause", ""), "Name a run's folder, a run under --storage, or a URL such as s3://bucket/runs/NAME."
        )
        raise ConfigError("WHERE", redact(where), redact(error), way_out) from error


def _url(where: str, root: Path) -> str:
    """A run's store: beside its journal, or where its settings say."""
    from fleet.app.plans import find_run, stored_at

    if "://" in where:
        return where
    if (Path(where) / "checkpoints").is_dir():
        return str(Path(where))
    return stored_at(find_run(where, root))


def _known(store: CheckpointStore, checkpoint: str) -> str:
    names = store.list()
    if checkpoint not in names:
        there = ", ".join(names[-3:]) or "none"
        raise ConfigError(
            "ID", checkpoint, "no committed checkpoint has this id", f"`fleet checkpoint list` shows all; the newest: {there}."
        )
    return checkpoint


def _row(store: CheckpointStore, checkpoint: str) -> dict[str, Any]:
    from storage.checkpoint.manifest import CheckpointDamaged

    try:
        manifest = store.manifest(checkpoint)
    except CheckpointDamaged as error:
        return {"id": checkpoint, "run": "", "history": 0, "step": 0, "bytes": 0, "parts": 0, "error": str(error)}
    state = manifest.state
    return {
        "id": checkpoint, "run": manifest.run, "history": state.history, "step": state.step, "bytes": manifest.bytes,
        "parts": len(manifest.parts), "error": "",
    }  # fmt: skip


def _verified(store: CheckpointStore, checkpoint: str) -> dict[str, Any]:
    from storage.checkpoint.manifest import CheckpointDamaged

    try:
        store.verify(checkpoint)
    except CheckpointDamaged as error:
        return {"id": checkpoint, "error": str(error)}
    return {"id": checkpoint, "error": ""}


def _line(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"{row['id']}  {row['error']}"
    run = f"  run {row['run']}" if row["run"] else ""
    return f"{row['id']}  step {row['step']}  {row['parts']} parts  {row['bytes']} bytes{run}"
