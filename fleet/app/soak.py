"""A soak: one run after the other through faults of all kinds, until the time is over, or a round is wrong.

Every run does the same work from the same seed, so its bits must be those of a first run without faults. A round is wrong when its run does
not complete, when a check of its record is violated, or when its bits differ. Then one file gets all that is needed to look into it.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from actors.rank import script_loading
from chaos.arrivals import as_trace
from chaos.soak import kinds_for, round_of
from fleet.app import launching, plans
from fleet.app.configuration import configured
from fleet.app.result import Result
from fleet.errors import ConfigError, RunFailed
from fleet.ledger.checkers import VIOLATED
from fleet.settings.run import RunSettings
from storage.checkpoint.store import CheckpointStore

DURATION_S = 3600.0
"""Seconds of training for which faults are planned; a shorter run meets fewer."""


@dataclass(frozen=True, kw_only=True)
class Soak:
    """A request for ``soak``.

    Attributes:
        script: a Python file with a function ``train(run)``.
        seed: of the faults.
        mtbf_s: mean time between two faults of a run.
        kinds: of faults; None: all that are possible there.
        address: of a Ray cluster to join; empty: a local one for each run. Faults may strike there.
        settings: of the runs, as ``fleet.launch`` takes them.
        folder: where the file about a wrong round is written.
    """

    script: str
    seed: int = 0
    mtbf_s: float = 10.0
    kinds: tuple[str, ...] | None = None
    address: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = Path("runs")

    def __post_init__(self) -> None:
        if not self.mtbf_s > 0:
            raise ConfigError("--mtbf", self.mtbf_s, "must be greater than 0 s")


@dataclass(frozen=True, slots=True)
class Round:
    """The outcome of a round. ``wrong``: why the round is wrong; empty: it is not. ``kept``: the file about a wrong round."""

    number: int
    run: str
    executed: int
    goodput: float
    wrong: str = ""
    kept: str = ""


def soak(asked: Soak, goes_on: Callable[[], bool], report_to: Callable[[Round], object]) -> tuple[Round, ...]:
    """Run rounds until one is wrong, or ``goes_on`` says no; at least one. Raises ConfigError, and RunFailed where the first run fails."""
    calm = _run(asked, "off")
    if not calm.completed:
        raise RunFailed(f"the run without faults has not completed: {calm.reason}")
    _forget(calm)
    rounds = list[Round]()
    while not rounds or (goes_on() and not rounds[-1].wrong):
        rounds.append(one_round(asked, len(rounds), calm.digest))
        report_to(rounds[-1])
    return tuple(rounds)


def one_round(asked: Soak, number: int, digest: str) -> Round:
    """A run through the faults of round ``number``; its bits should have the ``digest``."""
    run = configured(*launching.layers_of(dict(asked.settings))).run
    kinds = kinds_for(asked.kinds, hosts=bool(asked.address), verified=run.verify.compute > 0)
    faults = round_of(asked.seed, number, kinds, mtbf_s=asked.mtbf_s, duration_s=DURATION_S, world=run.slots, nodes=run.nodes)
    name, trace = plans.new_name(f"soak-{asked.seed}-{number}.py"), as_trace(faults)
    try:
        result = _run(asked, {"trace": trace}, name)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - the faults have caused the error, of any kind
        wrong = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        folder = plans.root_of(RunSettings().storage if asked.address else run.storage) / name
        return Round(number, name, 0, 0.0, wrong, str(_keep(asked, number, folder, trace, wrong)))
    wrong = _wrong(result, digest)
    kept = str(_keep(asked, number, result.folder, trace, wrong)) if wrong else ""
    if not wrong:
        _forget(result)
    return Round(number, result.name, result.faults, result.report["training_goodput"] or 0.0, wrong, kept)


def _run(asked: Soak, chaos: Any, name: str = "") -> Result:
    train = script_loading.load_train(asked.script)
    return launching.launch(
        train, chaos=chaos, address=asked.address or None, allow_chaos=bool(asked.address), name=name, check=False, **asked.settings
    )


def _wrong(result: Result, digest: str) -> str:
    """Why a round is wrong; empty when it is not."""
    reasons = [] if result.completed else [f"the run has ended as {result.status}: {result.reason}"]
    reasons += [f"check {name} is violated" for name, verdict in result.checks.items() if verdict == VIOLATED]
    if result.completed and result.digest != digest:
        reasons.append("its bits are not those of the run without faults")
    return "; ".join(reasons)


def _keep(asked: Soak, number: int, folder: Path, trace: str, wrong: str) -> Path:
    """Write the file about a wrong round: the run's folder (journal, output, stacks), its faults, and the request to repeat it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "faults.csv").write_text(trace)
    facts = {"round": number, "wrong": wrong, "run": folder.name, **asdict(asked)}
    (folder / "soak.json").write_text(json.dumps(facts, indent=1, default=str) + "\n")
    asked.folder.mkdir(parents=True, exist_ok=True)
    path = asked.folder / f"soak-{asked.seed}-{number}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, arcname=path.name.removesuffix(".tar.gz"), filter=_small)
    return path


def _small(item: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """A file of the archive, which has all but checkpoints."""
    return None if "checkpoints" in Path(item.name).parts[1:2] else item


def _forget(result: Result) -> None:
    """Remove a run without faults in its bits and checks; only its journal in a store stays."""
    if not result.store.startswith("file://"):
        store = CheckpointStore(result.store)
        for checkpoint in store.list():
            store.delete(checkpoint)
    shutil.rmtree(result.folder, ignore_errors=True)
