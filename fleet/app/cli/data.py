"""``fleet runs data``: which samples went into a step of a run, and which steps used a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleet.app.cli import prints as cli_print
from fleet.app.cli.config import RUNS, Storage
from fleet.errors import ConfigError

if TYPE_CHECKING:
    from actors.rank.data.lineage import Lineage, Took, Use
    from fleet.ledger.lineage import DataHistory, FilesOf, ReadStretch

MOST = 40
"""Lines of a list on the terminal; JSON has all."""


def data(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name under --storage.")],
    step: Annotated[int, typer.Option(help="Which samples went into this step, by its number, 0 the first.")] = -1,
    shard: Annotated[int, typer.Option(help="Of this shard of the step alone.")] = -1,
    file: Annotated[str, typer.Option(metavar="PATH", help="Which steps used this file: its path, or the end of it.")] = "",
    data_: Annotated[
        str,
        typer.Option("--data", metavar="SCRIPT:NAME", help="The data set, or a function that makes it, where the journal says too little."),
    ] = "",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    storage: Storage = RUNS,
) -> None:
    """Show the samples of RUN, or those of one step, or the steps that used a file."""
    from fleet.app.plans import find_run

    if step >= 0 and file:
        raise ConfigError("--file", file, "a step and a file are two questions", "Ask one of them.")
    if shard >= 0 and step < 0:
        raise ConfigError("--shard", shard, "it is a part of a step", "Give --step, too.")
    history = _history(find_run(run, Path(storage)))
    answer = _lineage(history, data_)
    if step >= 0:
        _report_step(answer, history, step, shard, json_)
    elif file:
        _report_file(answer, file, json_)
    else:
        _report_all(history, json_)


def _history(folder: Path) -> DataHistory:
    from fleet.host.journal import read_journal
    from fleet.ledger.lineage import DataHistory

    history = DataHistory().apply_all(read_journal(folder / "journal.jsonl", spans=False))
    if history.is_plain:
        raise ConfigError(
            "RUN", folder.name, "its script is run as it is: what it reads, Fleet does not see", "Ask for a run of fleet.Run."
        )
    if not history.reads:
        raise ConfigError("RUN", folder.name, "no step was read by step.batches() so far", "Ask again once it trains.")
    return history


def _lineage(history: DataHistory, data_: str) -> Lineage:
    from actors.rank.data.lineage import Lineage

    if not data_:
        return Lineage(history)
    from actors.rank.script_loading import load_named

    script, _, name = data_.partition(":")
    found = load_named(script, name or "data")
    return Lineage(history, found() if callable(found) else found)


# ---- a step ------------------------------------------------------------------------------------------------------------------------------


def _report_step(answer: Lineage, history: DataHistory, step: int, shard: int, json_: bool) -> None:
    shards = range(history.shards) if shard < 0 else (shard,)
    found = [took for one in shards for took in answer.took(step, one)]
    if json_:
        cli_print.write(json.dumps([_plain_took(took) for took in found], indent=1))
        return
    for took in found:
        cli_print.write(*_took_lines(took))


def _plain_took(took: Took) -> dict[str, Any]:
    places = [asdict(place) if place is not None else None for place in took.places]
    samples = [{"index": index, "place": place} for index, place in zip(took.indices, places, strict=True)]
    facts = {"step": took.step, "shard": took.shard, "history": took.stretch.history, "counts": took.stretch.counts}
    return {**facts, "data_sha256": _sha(took.stretch), "samples": samples, "unknown": took.unknown}


def _took_lines(took: Took) -> Iterator[str]:
    rolled = "" if took.stretch.counts else ", rolled back later"
    which = f"step {took.step}, shard {took.shard}, history {took.stretch.history}{rolled}"
    yield f"{which}: {len(took.indices)} samples of {_named(took.stretch)}"
    if took.unknown:
        yield f"  {took.unknown}"
    for index, place in zip(took.indices, took.places, strict=True):
        yield f"  {index:>12}  {place if place is not None else 'in no file that is known'}"


def _sha(stretch: ReadStretch) -> str:
    return stretch.read.data_sha256 if stretch.read is not None else ""


def _named(stretch: ReadStretch) -> str:
    if stretch.read is None:
        return "data that is not known"
    return f"data {stretch.read.data_sha256[:12]}" if stretch.read.data_sha256 else "data without a digest"


# ---- a file ------------------------------------------------------------------------------------------------------------------------------


def _report_file(answer: Lineage, file: str, json_: bool) -> None:
    uses = answer.uses(file)
    blank = [f"steps {one.first} to {one.end - 1} of history {one.history}" for one in answer.unanswerable()]
    if json_:
        rows = [{"history": use.history, "step": use.step, "counts": use.counts, "samples_by_shard": dict(use.shards)} for use in uses]
        cli_print.write(json.dumps({"uses": rows, "unknown": blank}, indent=1))
        return
    cells: list[tuple[str, ...]] = []
    steps = samples = 0
    for use in uses:
        steps, samples = steps + 1, samples + sum(use.shards.values())
        if len(cells) < MOST:
            cells.append(_use_cells(use))
    cli_print.write(*cli_print.table(("step", "history", "samples", "shards"), cells))
    cli_print.write(*_more(steps - len(cells), "steps"), f"{samples} samples of it in {steps} steps")
    cli_print.write(*(f"of {one} this is not known: their data has no files that are known" for one in blank))


def _use_cells(use: Use) -> tuple[str, ...]:
    history = f"{use.history}" if use.counts else f"{use.history}, rolled back"
    return str(use.step), history, str(sum(use.shards.values())), ", ".join(map(str, sorted(use.shards)))


def _more(count: int, of: str) -> Iterator[str]:
    if count > 0:
        yield f"and {count} more {of}: --json has all"


# ---- all that is known -------------------------------------------------------------------------------------------------------------------


def _report_all(history: DataHistory, json_: bool) -> None:
    if json_:
        cli_print.write(json.dumps(_plain(history), indent=1))
        return
    cli_print.write(f"run {history.run}: seed {history.seed}, {history.shards} shards a step", "")
    heads = ("steps", "history", "samples", "a step", "epochs", "order", "data")
    cli_print.write(*cli_print.table(heads, map(_stretch_cells, history.stretches())))
    if history.left_out:
        stretches = ", ".join(f"{first} to {end - 1}" for first, end in history.left_out)
        cli_print.write(f"Left out now: the samples that steps {stretches} would take if nothing were left out. Later steps take the next.")
    if history.origin:
        cli_print.write(f"What came before is in the run that this one went on from: {history.origin}")
    for sha256, known in history.files.items():
        cli_print.write("", *_files_lines(sha256, known))
    without = {read.data_sha256 for read in history.reads} - history.files.keys()
    cli_print.write(*(f"of the files of data {sha256[:12] or 'without a digest'} the journal says nothing" for sha256 in sorted(without)))


def _plain(history: DataHistory) -> dict[str, Any]:
    steps = [
        {
            "history": one.history,
            "first": one.first,
            "end": one.end,
            "counts": one.counts,
            "left_out": one.left_out,
            "read": asdict(one.read) if one.read else None,
        }
        for one in history.stretches()
    ]
    files = {sha256: {**asdict(known), "files": [asdict(file) for file in known.in_order]} for sha256, known in history.files.items()}
    return {"run": history.run, "seed": history.seed, "shards": history.shards, "origin": history.origin, "steps": steps, "files": files}


def _stretch_cells(one: ReadStretch) -> tuple[str, ...]:
    steps = f"{one.first} to {one.end - 1}"
    history = f"{one.history}" if one.counts else f"{one.history}, rolled back"
    if one.read is None:
        return steps, history, "?", "?", "?", "not known", "not known"
    read = one.read
    epochs = f"{(one.end - one.first) * read.batch_size / read.steps_each / read.samples:.3f}" if read.samples else "-"
    return steps, history, str(read.samples or "-"), str(read.batch_size), epochs, read.order or "not known", read.data_sha256[:12] or "-"


def _files_lines(sha256: str, known: FilesOf) -> Iterator[str]:
    files = known.in_order
    digested = sum(bool(file.digest) for file in files)
    size = sum(file.size_bytes for file in files)
    yield f"data {sha256[:12]}, by {known.reader}: {len(files)} of {known.total} files, {size} bytes, {digested} with a digest"
    cells = [(file.path, str(file.size_bytes), str(file.samples), file.digest[:19] or "not known") for file in islice(files, MOST)]
    yield from cli_print.table(("file", "bytes", "samples", "digest"), cells)
    yield from _more(len(files) - MOST, "files")
